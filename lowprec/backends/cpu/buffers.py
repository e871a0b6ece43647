"""Reusable, page-aligned scratch memory.

The operating system zeroes every page of a new allocation, which takes longer than packing into it. So each thread
keeps the buffers that it returned, up to a total of `RETAINED_LIMIT_BYTES` for all threads.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays.view import data_pointer

#: Upper bound on the free buffers of all threads together.
RETAINED_LIMIT_BYTES = 512 << 20

_PAGE = 4096
#: Bytes of the smallest buffer. A smaller allocation comes from the allocator's pools and is faster than a buffer.
SMALLEST_BYTES = 64 << 10
#: Smaller buffers do not trigger a check of the memory that all threads retain.
_LARGE = 1 << 20


class _Buffer(NamedTuple):
    nbytes: int
    address: int  # page-aligned
    memory: np.ndarray


class _Buffers(list[_Buffer]):
    """A list that can be referenced weakly."""


class _FreeList(threading.local):
    """The free buffers of one thread; no lock, because a fork or a signal handler could find it held."""

    def __init__(self) -> None:
        self.buffers = _Buffers()
        _all[id(self.buffers)] = self.buffers


#: The free list of each thread, by its id.
_all: weakref.WeakValueDictionary[int, _Buffers] = weakref.WeakValueDictionary()
_free = _FreeList()


def _new(nbytes: int) -> _Buffer:
    """Return a buffer of at least `nbytes`, rounded up to an eighth of a power of two for reuse by similar sizes."""
    nbytes = max(nbytes, SMALLEST_BYTES)
    step = max(_PAGE, 1 << (nbytes.bit_length() - 4))
    nbytes = -(-nbytes // step) * step
    memory = np.empty(nbytes + _PAGE, np.uint8)
    return _Buffer(nbytes, -(-data_pointer(memory) // _PAGE) * _PAGE, memory)


def _take(nbytes: int) -> _Buffer:
    buffers = _free.buffers
    best, smallest = None, 4 * max(nbytes, SMALLEST_BYTES) + 1  # no buffer of more than four times the size
    for index, buffer in enumerate(buffers):
        if nbytes <= buffer.nbytes < smallest:
            best, smallest = index, buffer.nbytes
    if best is not None and best < len(buffers):
        found = buffers.pop(best)
        # A product in a signal handler may have changed the list since the search.
        if found.nbytes >= nbytes:
            return found
    try:
        return _new(nbytes)
    except MemoryError:
        release_all()
        return _new(nbytes)


def _give(*returned: _Buffer) -> None:
    buffers = _free.buffers
    buffers += returned
    if returned and returned[-1].nbytes >= _LARGE:
        # The last buffer returned is reused first.
        while buffers and retained_bytes() > RETAINED_LIMIT_BYTES:
            del buffers[:1]


class borrow:
    """Context manager for ``nbytes`` of uninitialised memory; returns its address, aligned to 4096 bytes.

    After an exception on entry or exit the buffer is freed by the garbage collector, not reused.
    """

    __slots__ = ("_buffer", "_nbytes")

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __enter__(self) -> int:
        self._buffer = _take(self._nbytes)
        return self._buffer.address

    def __exit__(self, *_: object) -> None:
        _give(self._buffer)


class Workspace:
    """Context manager for temporary arrays, valid until the end of the `with` block."""

    __slots__ = ("_buffers",)

    def __enter__(self) -> Workspace:
        self._buffers: list[_Buffer] = []
        return self

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised C-contiguous array."""
        count = math.prod(shape)
        if count * dtype.itemsize < SMALLEST_BYTES:
            return np.empty(shape, dtype)
        buffer = _take(count * dtype.itemsize)
        self._buffers.append(buffer)
        first = buffer.address - data_pointer(buffer.memory)
        return np.ndarray(shape, dtype, buffer.memory, first)

    def __exit__(self, *_: object) -> None:
        _give(*self._buffers)
        self._buffers.clear()


def retained_bytes() -> int:
    """Bytes held in free buffers by all threads."""
    return sum([buffer.nbytes for reference in _all.valuerefs() for buffer in list(reference() or ())])


def release_all() -> None:
    """Return the free buffers of all threads to the system."""
    for reference in _all.valuerefs():
        found = reference()
        if found is not None:
            found.clear()
