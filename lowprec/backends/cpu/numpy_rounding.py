"""Rounding and splitting of operands by NumPy."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from lowprec.formats import FLOAT32, TF32, NumberFormat
from lowprec.modes import ModeRow

#: Elements per block, which fits the cache.
BLOCK = 1 << 16

#: The rounded parts of an operand, and the exponents by which rows of ``a`` or columns of ``b`` were scaled, or None.
Split: TypeAlias = tuple[list[Any], Any]


def split(
    x: Any,
    dtype: np.dtype[Any],
    mode: ModeRow,
    fmt: NumberFormat | None,
    count: int,
    scaled_over: int | None = None,
) -> Split:
    """Split an operand, whose rows (-1) or columns (-2) may be scaled, into parts; one may be ``x`` itself."""
    exponents = None
    if scaled_over is not None:
        x, exponents = _scaled(x.astype(dtype), scaled_over)
    rest = x
    parts = [rounded(x, dtype, fmt)]
    factor = dtype.type(2.0**mode.part_exponent)
    while len(parts) < min(count, mode.parts):
        rest = (rest - parts[-1]).astype(dtype, copy=False) * factor
        parts.append(rounded(rest, dtype, fmt))
    if count > mode.parts:  # mode ``fp16_karatsuba``
        parts.append(rounded(parts[0] + parts[1], dtype, fmt))
    return parts, exponents


def components(x: Any) -> tuple[Any, ...]:
    """Return the real and imaginary parts of a complex array; a real one."""
    if x.dtype.kind == "c":
        return x.real, x.imag
    return (x,)


def _scaled(x: Any, axis: int) -> tuple[Any, Any]:
    """Multiply rows (``axis`` -1) or columns (-2) by 2^e, in place; return ``x`` and e, which is 0 for rows of zeros.

    The largest finite magnitude is then in [2^14, 2^15), the second highest binade of float16.
    """
    magnitudes = [np.where(np.isfinite(part), np.abs(part), 0) for part in components(x)]
    largest = functools.reduce(np.maximum, magnitudes).max(axis, keepdims=True, initial=0)
    exponents = np.where(largest, 15 - np.frexp(largest)[1], 0)
    for part in components(x):
        np.ldexp(part, exponents, out=part)
    return x, exponents


def rounded(x: Any, dtype: np.dtype[Any], fmt: NumberFormat | None) -> Any:
    """Return ``x`` in this dtype, rounded to a format; a copy, unless there is nothing to do.

    TF32 is rounded to nearest with ties away from zero, as the PTX instruction ``cvt.rna.tf32.f32`` does (PTX ISA,
    "cvt"); bfloat16 and float16 with ties to even (IEEE 754-2019, section 4.3.1). NaN and infinities are unchanged,
    finite numbers beyond the largest of the format overflow to infinity, subnormal numbers are kept.
    """
    if fmt is None:
        return x.astype(dtype, copy=False)
    out = x.astype(dtype, "K" if is_expressible(x) else "C")
    flat = out.ravel("K").view(np.float32)
    for first in range(0, flat.size, BLOCK):
        _round_block(flat[first : first + BLOCK], fmt)
    return out


def _round_block(x: Any, fmt: NumberFormat) -> None:
    if fmt.emin > FLOAT32.emin:  # float16, float8
        x[...] = x.astype(getattr(ml_dtypes, fmt.name, fmt.name))
        return
    bits = x.view(np.uint32)
    one = np.uint32(1)
    dropped = np.uint32(24 - fmt.precision)
    up = one << dropped - one
    if fmt is not TF32:
        up = (bits >> dropped & one) + (up - one)
    # Except NaN, whose payloads could carry into the exponent.
    np.copyto(bits, (bits + up) >> dropped << dropped, where=x == x)


def is_expressible(x: Any) -> bool:
    """Whether BLAS reads the matrices of ``x`` in place; if not, NumPy multiplies by a slow loop of its own."""
    rows, cols = x.shape[-2:]
    row_step, col_step = x.strides[-2:]
    item = x.itemsize
    in_rows = col_step == item and row_step >= cols * item and row_step % item == 0
    in_columns = row_step == item and col_step >= rows * item and col_step % item == 0
    return bool(in_rows or in_columns or x.flags.c_contiguous)
