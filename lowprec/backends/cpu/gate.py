"""A native reader-writer lock, used as a gate: threads enter while it is open, and closing it waits for those inside.

Python's own locks look for signals while they wait, and leave with whatever a handler raises. Closing a gate is a
single call of C that does not, so in a ``finally`` it waits whatever has happened.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

#: Bytes of the largest lock that is known (macOS: 200), with room to grow.
_LOCK_BYTES = 512


def _function(name: str, restype: Any, *argtypes: Any, waits: bool = False) -> Any:
    """Return a function of the system's; it releases the GIL where it may wait."""
    if sys.platform == "win32":
        library: ctypes.CDLL = ctypes.WinDLL("kernel32") if waits else ctypes.PyDLL("kernel32")
    else:
        library = ctypes.CDLL(None) if waits else ctypes.PyDLL(None)
    found = getattr(library, name)
    found.restype, found.argtypes = restype, [ctypes.c_void_p, *argtypes]
    return found


if sys.platform == "win32":
    _try_shared, _SUCCESS = _function("TryAcquireSRWLockShared", ctypes.c_ubyte), 1
    _unlock_shared = _function("ReleaseSRWLockShared", None)
    _unlock_exclusive = _function("ReleaseSRWLockExclusive", None)
    close = _function("AcquireSRWLockExclusive", None, waits=True)
else:
    _initialise = _function("pthread_rwlock_init", ctypes.c_int, ctypes.c_void_p)
    _try_shared, _SUCCESS = _function("pthread_rwlock_tryrdlock", ctypes.c_int), 0
    _unlock_shared = _unlock_exclusive = _function("pthread_rwlock_unlock", ctypes.c_int)
    #: ``close(gate.address)`` lets nobody in any more and waits until all who are inside have left. A thread must not
    #: close a gate twice, nor one that it is in.
    close = _function("pthread_rwlock_wrlock", ctypes.c_int, waits=True)


class Gate:
    """Open when it is made. Its memory lives as long as this object, which all who may enter must hold."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = (ctypes.c_uint64 * (_LOCK_BYTES // 8))()
        self.address = ctypes.addressof(self._memory)
        if sys.platform != "win32":  # where a lock of zeros is an open one
            _initialise(self.address, None)

    def enter(self) -> bool:
        """Enter, unless the gate is closed."""
        return bool(_try_shared(self.address) == _SUCCESS)

    def leave(self) -> None:
        """Leave, in the thread that entered."""
        _unlock_shared(self.address)

    def reopen(self) -> None:
        """Open the gate that this thread has closed."""
        _unlock_exclusive(self.address)
