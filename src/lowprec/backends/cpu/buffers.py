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

import threading
import weakref

import numpy as np

from lowprec.arrays.view import data_pointer

#: Upper bound on the free buffers of all threads together.
RETAINED_LIMIT_BYTES = 512 << 20

_PAGE = 4096
_SMALLEST = 64 << 10


#: The free list of each thread, by its id.
_lists: dict[int, weakref.ref[_FreeList]] = {}

#: Bytes in the free list of each thread, by the list's id. Without a lock, which a fork or a signal handler could find
#: taken: a thread writes its own entry, as a whole, and what an interrupt leaves wrong the next change puts right.
_retained: dict[int, int] = {}


class _FreeList:
    """The free buffers of one thread; its bytes leave the account when the thread ends."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        _lists[id(self)] = weakref.ref(self)
        # Its own reference: when the interpreter ends, this module may be cleared before the list.
        self._retained, self._lists = _retained, _lists

    def take(self, nbytes: int) -> np.ndarray | None:
        """The smallest free buffer that holds `nbytes`, unless it is wastefully large."""
        best, smallest = None, max(4 * nbytes, 4 * _SMALLEST) + 1
        for index, array in enumerate(self.arrays):
            if nbytes <= array.nbytes < smallest:
                best, smallest = index, array.nbytes
        if best is None:
            return None
        try:
            array = self.arrays.pop(best)
        except IndexError:
            return None
        self._account()
        # A signal handler that multiplied may have changed the list after it was looked through.
        return array if array.nbytes >= nbytes else None

    def give(self, array: np.ndarray) -> None:
        self.arrays.append(array)
        self._account()
        # The oldest buffers make room: what was returned last is what is asked for next.
        while self.arrays and retained_bytes() > RETAINED_LIMIT_BYTES:
            del self.arrays[:1]
            self._account()

    def clear(self) -> None:
        self.arrays.clear()
        self._account()

    def _account(self) -> None:
        self._retained[id(self)] = sum([array.nbytes for array in self.arrays])

    def __del__(self) -> None:
        self._retained.pop(id(self), None)
        self._lists.pop(id(self), None)


class _Local(threading.local):
    def __init__(self) -> None:
        self.free = _FreeList()


_local = _Local()


def _rounded(nbytes: int) -> int:
    """`nbytes` rounded up to an eighth of its power of two, so that similar sizes share a buffer."""
    nbytes = max(nbytes, _SMALLEST)
    step = max(_PAGE, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class borrow:
    """Lend scratch memory for the length of a `with` block.

    Where an exception strikes while it is being taken or given back, the buffer is lost to the garbage collector; it is
    never lent twice.

    Parameters
    ----------
    nbytes : int
        Size wanted. The contents are undefined. The block gets the address of the memory, aligned to 4096 bytes.
    """

    __slots__ = ("_array", "_free", "_nbytes")

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes + _PAGE

    def __enter__(self) -> int:
        self._free = _local.free
        array = self._free.take(self._nbytes)
        if array is None:
            try:
                array = np.empty(_rounded(self._nbytes), np.uint8)
            except MemoryError:
                release_all()
                array = np.empty(_rounded(self._nbytes), np.uint8)
        self._array = array
        return -(-data_pointer(array) // _PAGE) * _PAGE

    def __exit__(self, *_: object) -> None:
        self._free.give(self._array)


def retained_bytes() -> int:
    """Bytes held in free buffers by all threads."""
    return sum(_retained.copy().values())


def release_all() -> None:
    """Give the free buffers of all threads back to the system; their owners notice that a buffer is gone."""
    for reference in list(_lists.values()):
        found = reference()
        if found is not None:
            found.clear()
