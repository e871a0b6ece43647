"""Casting and rounding to float32 arrays by compiled kernels, or by NumPy without numba.

The kernels read any strides and round as :mod:`lowprec.backends.cpu.rounding` does.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lowprec.arrays.namespaces import numpy_name as name_of
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import buffers, numba_import, team, threads
from lowprec.backends.cpu.rounding import round_all
from lowprec.backends.cpu.scaling import FLOAT16_DIGITS, extrema_of, merged, needs_scaling
from lowprec.formats import NumberFormat, dtype_from_name
from lowprec.planning.bounds import holds

_KERNELS = "lowprec.backends.cpu.casting_kernels"

#: Elements per piece, the unit of work of a thread.
_PIECE = 1 << 17

#: Elements from which several threads are faster.
_PAYS_TO_SHARE = 1 << 19

#: Elements from which a kernel is faster than NumPy's own cast.
_PAYS_TO_CALL = 1 << 12

#: Scratch memory of a kernel call.
SCRATCH_BYTES = 512

Kernel = Callable[..., int]


@functools.cache
def has_kernels() -> bool:
    """Whether numba is installed and not disabled, without importing it."""
    return not numba_import.missing()


def can_compile() -> bool:
    """Whether the kernels can be compiled; imports numba."""
    if not has_kernels():
        return False
    if numba_import.fails():
        has_kernels.cache_clear()
        return False
    return True


@functools.cache
def kernels() -> Any:
    """Return the module of native kernels."""
    return importlib.import_module(_KERNELS)


@functools.cache
def cast_index(dtype: str, to: NumberFormat | None) -> int | None:
    """Return the index of the kernel that rounds this dtype to a format; None if there is none."""
    stored = dtype_from_name(dtype).format
    casts: tuple[tuple[str, str | None], ...] = kernels().CASTS
    name = None if to is None else to.name
    if to is not None and (dtype, name) not in casts and stored and holds(to, stored):
        name = None
    return casts.index((dtype, name)) if (dtype, name) in casts else None


@functools.cache
def _cast_kernel(dtype: str, to: NumberFormat | None) -> Kernel | None:
    index = cast_index(dtype, to)
    return None if index is None else kernels().cast_kernel(index)


def cast(pairs: Sequence[tuple[Any, Any]], to: NumberFormat | None) -> list[bool]:
    """Write arrays as float32, rounded to TF32, bfloat16, float16 or float16's digits; None only widens.

    ``pairs`` are sources and targets of the same shape, identical or not overlapping. A target or its transpose is
    C-contiguous. Complex numbers are rounded by component. Returns for each pair whether rounding to float16's digits
    is not sufficient because its numbers must be scaled.
    """
    elements = 0
    for _, out in pairs:
        elements += out.size
    pays = _pays(elements, to)
    pieces: list[tuple[Any, ...]] = []
    by_numpy: list[tuple[Any, Any]] = []
    extrema = [0] * len(pairs)
    for number, (source, out) in enumerate(pairs):
        if not out.flags.c_contiguous:
            source, out = source.swapaxes(-1, -2), out.swapaxes(-1, -2)
        kernel = None
        if pays:
            source, out = _as_real(source, out)
            if out.dtype == np.float32:
                kernel = _cast_kernel(name_of(source.dtype), to)
        if kernel is None:
            own = None if to is FLOAT16_DIGITS and source.dtype == np.float16 else to
            flat = _for_numpy(source, out, own)
            if own is not None:
                by_numpy.append(flat)
            if own is FLOAT16_DIGITS:
                extrema[number] = extrema_of(flat[0])
        elif out.size:
            pieces += [(number, kernel, *piece) for piece in _pieces(source, out)]
    if to is not None and by_numpy:
        round_all(by_numpy, to)
    if pieces:
        for number, found in _run(pieces, elements):
            extrema[number] = merged(extrema[number], found)
    return [needs_scaling(found) for found in extrema] if to is FLOAT16_DIGITS else [False] * len(pairs)


def need_scaling(arrays: Sequence[Any]) -> bool:
    """Whether the range of float32 or bfloat16 arrays exceeds float16's, so that they must be scaled."""
    pieces, extrema = [], 0
    # A list, which keeps widened copies alive.
    arrays = [x.astype(np.float32, copy=False) for x in arrays]
    for x in arrays:
        if not _pays(x.size, FLOAT16_DIGITS):
            extrema = merged(extrema, extrema_of(np.ascontiguousarray(x)))
            continue
        if abs(x.strides[-2]) < abs(x.strides[-1]):
            x = x.swapaxes(-1, -2)
        kernel = kernels().extrema_kernel()
        pieces += [(None, kernel, *piece) for piece in _pieces(x, x)]
    for _, found in _run(pieces, sum([x.size for x in arrays])):
        extrema = merged(extrema, found)
    return bool(needs_scaling(extrema))


def narrow(source: Any, out: Any) -> None:
    """Write a C-contiguous array to ``out``, rounded to nearest even if that is 16-bit; they do not overlap."""
    is_narrow = name_of(out.dtype) in ("float16", "bfloat16") and source.dtype == np.float32
    if not (is_narrow and source.flags.c_contiguous and _pays(out.size, None)):
        out[...] = source
        return
    kernel = kernels().narrow_kernel(name_of(out.dtype))
    _run([(0, kernel, *piece) for piece in _pieces(out, source)], out.size)


def is_ready() -> bool:
    """Whether numba has been imported and compiles the kernels."""
    return numba_import.is_ready() and has_kernels()


def _pays(elements: int, to: NumberFormat | None) -> bool:
    return (to is not None or elements >= _PAYS_TO_CALL) and numba_import.is_ready() and has_kernels()


def _as_real(source: Any, out: Any) -> tuple[Any, Any]:
    """Return complex arrays as arrays of their components if strides allow it; others unchanged."""
    if out.dtype.kind != "c" or source.dtype != out.dtype or source.strides[-1] != source.itemsize:
        return source, out
    real = np.dtype(f"f{out.itemsize // 2}")
    return source.view(real), out.view(real)


def _for_numpy(source: Any, out: Any, to: NumberFormat | None) -> tuple[Any, Any]:
    """Return arrays as contiguous 1-D float32; a source of another layout or dtype is first copied to ``out``."""
    if to is None or source.dtype != out.dtype or not source.flags.c_contiguous:
        with np.errstate(all="ignore"):  # a signalling NaN becomes quiet
            out[...] = source
        source = out
    if to is None:
        return source, out
    # Flat, because only a contiguous last dimension can be viewed as twice as many real numbers.
    return (source.reshape(-1, copy=False).view(np.float32), out.reshape(-1, copy=False).view(np.float32))


def _pieces(source: Any, out: Any) -> Iterator[tuple[int, ...]]:
    """Yield the arguments of kernel calls, without scratch memory."""
    item = source.itemsize
    if source.flags.c_contiguous:
        start, target = data_pointer(source), data_pointer(out)
        for first in range(0, out.size, _PIECE):
            count = min(_PIECE, out.size - first)
            yield start + first * item, 0, item, 1, count, target + 4 * first
        return
    cols = out.shape[-1]
    rows = max(1, _PIECE // cols)
    for matrix, result in matrices_of(source, out):
        row_stride, col_stride = matrix.strides
        start, target = data_pointer(matrix), data_pointer(result)
        for first in range(0, len(result), rows):
            count = min(rows, len(result) - first)
            at = start + first * row_stride
            yield at, row_stride, col_stride, count, cols, target + first * cols * 4


def matrices_of(*arrays: Any) -> list[tuple[Any, ...]]:
    """Return the matrices of arrays of one shape, or None; a single one if the leading dimensions can be coalesced."""
    shape = arrays[0].shape
    try:
        return [tuple(x if x is None else x.reshape(-1, shape[-1], copy=False) for x in arrays)]
    except ValueError:
        return [tuple(x if x is None else x[i] for x in arrays) for i in np.ndindex(shape[:-2])]


def _run(pieces: list[tuple[Any, ...]], elements: int) -> list[tuple[Any, int]]:
    workers = min(threads.num_threads(), len(pieces)) if elements >= _PAYS_TO_SHARE else 1
    if workers == 1:
        memory = np.empty(SCRATCH_BYTES, np.uint8)
        own = data_pointer(memory)
        return [(number, kernel(*arguments, own)) for number, kernel, *arguments in pieces]
    rows = [(team.address_of(kernel), *arguments, 0) for _, kernel, *arguments in pieces]
    results = np.empty(len(rows), np.int64)
    with buffers.borrow(workers * SCRATCH_BYTES) as scratch:
        team.run_rows(
            "lllllls", np.array(rows, np.int64), workers,
            results=data_pointer(results), scratch=scratch, scratch_bytes=SCRATCH_BYTES,
        )  # fmt: skip
    return list(zip([piece[0] for piece in pieces], results.tolist(), strict=True))
