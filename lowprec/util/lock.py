"""The package's one lock: held while modules are imported, kernels compiled or other libraries' switches changed.

A fork waits for it, so that no child inherits it from another thread, nor the import locks of these modules.
"""

from __future__ import annotations

import logging  # noqa: F401 - see below
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# Re-entrant, because a finalizer or a signal handler may run in the thread that holds it.
_lock = threading.RLock()

if hasattr(os, "register_at_fork"):
    # Functions of C, which no signal handler interrupts. "before" hooks run in reverse order: logging, imported above,
    # must register first, because imports take its lock.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def locked(function: Callable[..., T], *args: Any) -> T:
    """Call a function while no other thread is in such a call, and no fork happens.

    Not by ``with``, because Python 3.14 may run a signal handler after ``__enter__`` and before the block.
    """
    held: list[bool] = []
    try:
        held.extend(map(_lock.acquire, (True,)))  # one call of C, after which the lock is both acquired and recorded
        return function(*args)
    finally:
        if held:
            _lock.release()
