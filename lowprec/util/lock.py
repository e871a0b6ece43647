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
lock = threading.RLock()

if hasattr(os, "register_at_fork"):
    # Functions of C, which no signal handler interrupts. "before" hooks run in reverse order: logging, imported above,
    # must register first, because imports take its lock.
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )


def locked(function: Callable[..., T], *args: Any) -> T:
    """Call a function while no other thread has the lock, and no fork happens."""
    with lock:
        return function(*args)
