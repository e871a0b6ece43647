"""Sums of observed products, which the compiled library adds up: their norms, errors and sketches."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lowprec.backends.cpu import library
from lowprec.errors import UnsupportedError

#: Numbers of a sketch, ``LP_SUMS``.
_SUMS = 1021
_I32 = ctypes.c_int32
_I64 = ctypes.c_int64
_POINTER = ctypes.c_void_p
#: Of :meth:`Site.add`: the product is the first one of a record; its result may be the first that is not finite.
BEGINS = 1
IS_FAULTY = 2


class _Record(ctypes.Structure):
    """``lp_observed``."""

    _fields_ = (
        ("next", _POINTER),
        *((name, _I64) for name in ("calls", "multiplications", "begin", "end")),
        *((name, ctypes.c_double) for name in ("square", "error", "reference")),
        ("fault_at", _I64), ("sampled", _POINTER), ("is_compared", _I32), ("faults", _I32 * 4),
        ("vectors", _I32 * 2), ("length", _I32 * 2), ("pad", _I32), ("sketch", ctypes.c_double * _SUMS),
    )  # fmt: skip


class Sums(NamedTuple):
    """Sums of 1, 2, 4, 8... following products of a site."""

    calls: int
    multiplications: int
    begin: int  # numbers of the first product in the run, and of that after the last one
    end: int
    square: float  # of the results
    error: float  # sum of squares
    reference: float  # sum of squares of the reference's results
    is_compared: bool
    sketch: Any
    fault_at: int  # number of the first product with a fault; -1: none
    faults: tuple[str, ...]  # of its result, both operands, and the reference's result
    sampled: list[Any]  # vectors along k of both operands


#: By the bits of ``lp_observed``.
_FAULTS = ("", "NaN", "Inf", "NaN")


def require() -> None:
    """Raise UnsupportedError where there is no compiled library."""
    if library.library() is None:
        raise UnsupportedError(
            "comparisons, and statistics of JAX and NumPy, need the compiled kernels: "
            f"{library.unavailable_reason()}"
        )


# with the interpreter's lock, so that no other thread forks while a site is locked
function = functools.partial(library.function, ctypes.PyDLL)


def taken(first: int | None) -> list[Sums]:
    """Return the records at an address, and free them."""
    found = []
    try:
        address = first
        while address:
            record = _Record.from_address(address)
            found.append(_copied(record))
            address = record.next
    finally:
        function("free_observed", None, _POINTER)(first)
    return found


def _copied(x: _Record) -> Sums:
    return Sums(
        x.calls, x.multiplications, x.begin, x.end, x.square, x.error, x.reference, bool(x.is_compared),
        np.array(x.sketch), x.fault_at, tuple(_FAULTS[each] for each in x.faults), list(_vectors(x)),
    )  # fmt: skip


def _vectors(x: _Record) -> Iterator[Any]:
    address = x.sampled
    if address is None:
        return
    for shape in zip(x.vectors, x.length, strict=True):
        size = 4 * math.prod(shape)
        yield np.frombuffer(ctypes.string_at(address, size), np.float32).reshape(shape)
        address += size


class Site:
    """The products of one place of a program in one mode."""

    handle: int | None = None

    def __init__(self) -> None:
        self.handle = function("site_create", _POINTER)()
        if self.handle is None:
            raise MemoryError("there is no memory for records")
        self._add = function("site_add", _I32, _POINTER, _POINTER, _POINTER, _I64, _I32, _I64, _I64)

    def add(
        self, numbers: int, again: int | None, count: int, is_wide: bool, multiplications: int,
        index: int,
    ) -> int:  # fmt: skip
        """Add a product by the address of its numbers, contiguous float32 or float64, and that of the reference's.

        ``index`` is its number in the run, -1 for that at the site.
        """
        flags: int = self._add(self.handle, numbers, again, count, is_wide, multiplications, index)
        return flags

    def take(self) -> list[Sums]:
        """Return the records since the last call."""
        return taken(function("site_take", _POINTER, _POINTER)(self.handle))

    def __del__(self) -> None:
        if self.handle is not None:
            function("site_free", None, _POINTER)(self.handle)


#: Returns an ``lp_numbers``: address, count, whether they have 64 bits, and padding.
_numbers = struct.Struct("@Pq2i").pack


def observe(
    site: Site, multiplications: int, is_compared: int, words: Sequence[int], *operands: Any
) -> None:
    """Add a product by arrays of its result, the reference's result and both operands, as ``lp_site_observe``."""
    arrays = [np.ascontiguousarray(x) for x in operands]
    table = b""
    for x in arrays:
        size = x.real.dtype.itemsize
        table += _numbers(x.ctypes.data, x.nbytes // size, size == 8, 0)
    described = (_I64 * len(words))(*words) if words else None
    arguments = (_POINTER, ctypes.c_char_p, _I64, _I32, _POINTER)
    function("site_observe", None, *arguments)(
        site.handle, table, multiplications, is_compared, described
    )


def xla_handler() -> Any:
    """Return the function that XLA calls for the products of compiled functions on the CPU."""
    return ctypes.CDLL(library.path()).lp_jax_observe
