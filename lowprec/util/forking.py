"""Locks that are acquired before a fork, so that a child never inherits one held by a thread of its parent."""

from __future__ import annotations

import logging  # noqa: F401 - see below
import os
import threading
from contextlib import suppress
from typing import Protocol


class _Lock(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> object: ...


#: Held while an executor is created, which may import modules. Otherwise a child could inherit the import locks of
#: these modules while they are held. First in the list, because other locks are acquired under it.
creation_lock = threading.RLock()

_locks: list[_Lock] = [creation_lock]


def register_lock(lock: _Lock) -> None:
    """Acquire a re-entrant lock before each fork, and release it afterwards in both processes."""
    _locks.append(lock)


def _begin() -> None:
    for lock in _locks:
        lock.acquire()


def _end() -> None:
    for lock in _locks:
        with suppress(RuntimeError):  # not held, after an exception of a signal handler in _begin
            lock.release()


if hasattr(os, "register_at_fork"):
    # Hooks run in reverse order. Logging, imported above, must register first: imports take its lock.
    os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_end)
