"""Reusable, page-aligned scratch memory.

A fresh large allocation costs more than the work done in it (the kernel zeroes every page on the
first touch: about 50 ms for 32 MiB on a small virtual machine), so packed operands and
intermediate blocks live in buffers that are handed back and used again.

Every thread keeps its own free buffers, so that a worker finds its scratch in its own cache. All
threads together retain at most `RETAINED_LIMIT_BYTES`; a buffer that would exceed it is given back
to the system when it is returned, and so is a buffer that is borrowed by no one for the sake of a
larger one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

__all__ = ["RETAINED_LIMIT_BYTES", "borrow", "release_all", "retained_bytes"]

#: Upper bound on the free buffers of all threads together.
RETAINED_LIMIT_BYTES = 512 << 20

_PAGE = 4096
_SMALLEST = 64 << 10


class _Retained:
    """Bytes in the free lists of all threads; `lock` guards `total`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total = 0

    def try_add(self, nbytes: int) -> bool:
        with self.lock:
            if self.total + nbytes > RETAINED_LIMIT_BYTES:
                return False
            self.total += nbytes
            return True

    def remove(self, nbytes: int) -> None:
        with self.lock:
            self.total -= nbytes


_retained = _Retained()

if hasattr(os, "register_at_fork"):
    # Another thread may hold the lock at the moment of a fork.
    os.register_at_fork(after_in_child=lambda: setattr(_retained, "lock", threading.Lock()))


class _FreeList:
    """The free buffers of one thread; its bytes leave the account when the thread ends."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        # Its own reference: when the interpreter ends, this module may be cleared before the list.
        self._account = _retained

    def take(self, nbytes: int) -> np.ndarray | None:
        """The smallest free buffer that holds `nbytes`, unless it is wastefully large."""
        best = None
        for index, array in enumerate(self.arrays):
            fits = nbytes <= array.nbytes <= max(4 * nbytes, 4 * _SMALLEST)
            if fits and (best is None or array.nbytes < self.arrays[best].nbytes):
                best = index
        if best is None:
            return None
        array = self.arrays.pop(best)
        self._account.remove(array.nbytes)
        return array

    def give(self, array: np.ndarray) -> None:
        # The oldest buffers make room: what was returned last is what is asked for next.
        while not self._account.try_add(array.nbytes):
            if not self.arrays:
                return
            self._account.remove(self.arrays.pop(0).nbytes)
        self.arrays.append(array)

    def clear(self) -> None:
        while self.arrays:
            self._account.remove(self.arrays.pop().nbytes)

    def __del__(self) -> None:
        self.clear()


class _Local(threading.local):
    def __init__(self) -> None:
        self.free = _FreeList()


_local = _Local()


def _rounded(nbytes: int) -> int:
    """`nbytes` rounded up to an eighth of its power of two, so that similar sizes share a buffer."""
    nbytes = max(nbytes, _SMALLEST)
    step = max(_PAGE, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


@contextmanager
def borrow(nbytes: int) -> Iterator[int]:
    """Lend scratch memory for the length of a `with` block.

    Parameters
    ----------
    nbytes : int
        Size wanted. The contents are undefined.

    Yields
    ------
    int
        Address of the memory, aligned to 4096 bytes.
    """
    free = _local.free
    array = free.take(nbytes + _PAGE)
    if array is None:
        array = np.empty(_rounded(nbytes + _PAGE), np.uint8)
    try:
        yield -(-int(array.ctypes.data) // _PAGE) * _PAGE
    finally:
        free.give(array)


def retained_bytes() -> int:
    """Bytes held in free buffers by all threads."""
    return _retained.total


def release_all() -> None:
    """Give the calling thread's free buffers back to the system."""
    _local.free.clear()
