"""Locks that a fork waits for, and imports, which no thread of the child would complete."""

from __future__ import annotations

import _imp
import importlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

#: Packages whose modules products import.
_PACKAGES = frozenset(
    ["lowprec", "llvmlite", "ml_dtypes", "numba", "opt_einsum", "platformdirs", "scipy_openblas64"]
)

_bootstrap: Any = getattr(importlib, "_bootstrap", None)
#: The lock of each module that is being imported, by name; Python does not reset them in a child.
_module_locks: dict[str, Callable[[], Any]] = getattr(_bootstrap, "_module_locks", {})
_wait_for: Callable[[str], None] | None = getattr(_bootstrap, "_lock_unlock_module", None)


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
    """Wait until no other thread imports a module of a product; then prevent imports until the fork is done.

    No lock is held while an import is waited for, since it may need any of them. The import system's own comes last,
    since a thread may import while it holds another.
    """
    held: list[Callable[[], object]] = []
    _thread.forks.append(held)
    waited: set[str] = set()
    while True:
        for lock in _locks:
            held.append(lock.release)  # first, so that an interrupt between the two leaks no lock
            lock.acquire()
        held.append(_imp.release_lock)
        _imp.acquire_lock()
        names = _imported_by_others() - waited
        if not names or _wait_for is None:
            return
        _release(held)
        for name in names:
            _wait_for(name)
        waited |= names


def _imported_by_others() -> set[str]:
    found = {name: lock() for name, lock in list(_module_locks.items())}
    others = {
        name for name, lock in found.items() if _owner(lock) not in (None, threading.get_ident())
    }
    return {name for name in others if name.partition(".")[0] in _PACKAGES}


def _owner(module_lock: Any) -> int | None:
    owner: int | None = getattr(module_lock, "owner", None)
    return owner


def _end() -> None:
    if _thread.forks:
        _release(_thread.forks.pop())


def _release(held: list[Callable[[], object]]) -> None:
    while held:
        with suppress(RuntimeError):  # not acquired, after an interrupt
            held.pop()()


if hasattr(os, "register_at_fork"):
    # Hooks run in reverse order: that of logging, whose lock imports take, must be registered first.
    importlib.import_module("logging")
    os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_end)
