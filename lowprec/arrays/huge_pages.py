"""Huge pages for large results in host memory.

The system zeroes fresh memory page by page on the first write. With pages of 4 KiB that takes longer than a product of
small inner dimension. NumPy requests huge pages (2 MiB) for large arrays; lowprec does so for other libraries.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

#: Bytes from which on NumPy asks, too.
LARGE_BYTES = 4 << 20


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system's call, None where it has no huge pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def request(address: int, nbytes: int) -> None:
    """Ask for huge pages for memory that is about to be written whole; only whole pages inside of it are touched."""
    madvise = _madvise()
    if madvise is None:
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # Advice that is not taken costs speed alone.
    madvise(first, last - first, mmap.MADV_HUGEPAGE)
