"""Locks that a fork waits for, so that a child never finds one of them held by a thread that it lacks."""

from __future__ import annotations

import logging  # noqa: F401 - see below
import os
import threading
from contextlib import suppress
from typing import Protocol


class _Lock(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> object: ...


#: Held while an executor is made, which may import modules and compile kernels: Python would leave the locks of these
#: modules taken in a child. First, since it is held while others are acquired.
making = threading.RLock()

_locks: list[_Lock] = [making]


def hold(lock: _Lock) -> None:
    """Acquire a re-entrant lock before each fork, and release it afterwards in both processes."""
    _locks.append(lock)


def _begin() -> None:
    for lock in _locks:
        lock.acquire()


def _end() -> None:
    for lock in _locks:
        with suppress(RuntimeError):  # not acquired, after an exception of a signal handler
            lock.release()


if hasattr(os, "register_at_fork"):
    # Hooks run in reverse order. That of logging, whose lock imports and numba take, must come after this one.
    os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_end)
