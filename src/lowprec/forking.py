"""Locks that a fork waits for, so that a child never finds one of them held by a thread that it lacks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class _Lock(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> object: ...


class _OfThread(threading.local):
    def __init__(self) -> None:
        #: Of each fork that this thread is in the middle of, a signal handler's last: what gives back its locks.
        self.forks: list[list[Callable[[], object]]] = []


_locks: list[_Lock] = []
_thread = _OfThread()


def hold(lock: _Lock) -> None:
    """Acquire a re-entrant lock before each fork, and release it afterwards in both processes."""
    _locks.append(lock)


def _begin() -> None:
    held: list[Callable[[], object]] = []
    _thread.forks.append(held)
    for lock in _locks:
        held.append(lock.release)  # first, so that an interrupt between the two leaks no lock
        lock.acquire()


def _end() -> None:
    if _thread.forks:
        held = _thread.forks.pop()
        while held:
            with suppress(RuntimeError):  # not acquired, after an interrupt
                held.pop()()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_end)
