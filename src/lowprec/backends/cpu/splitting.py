"""Operands split into the parts that a mode multiplies, rows and columns scaled first where it says so.

Each part is what the parts before it leave, rounded; every difference is exact. Infinities, NaN and what overflows in
the format leave NaN in the second part, so that every sum they enter is NaN.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np

from lowprec.backends.cpu import casting
from lowprec.backends.cpu.stacks import scratch
from lowprec.formats import NumberFormat
from lowprec.modes import ModeRow

#: The largest magnitude of a scaled row lies in [2^14, 2^15): in the top binade but one of float16.
_TOP_EXPONENT = 14


class Split(NamedTuple):
    """An operand as it is multiplied: its parts, and the exponents by which its rows (columns of ``b``) were scaled."""

    parts: list[Any]
    exponents: Any | None = None


def split(
    x: Any,
    dtype: np.dtype[Any],
    row: ModeRow,
    fmt: NumberFormat | None,
    count: int,
    scaled_over: int | None,
    stack: contextlib.ExitStack,
) -> Split:
    """Return an operand, shape (..., rows, cols), in ``count`` parts, the sum of all included where the mode has it.

    ``dtype`` is float32 or complex64 where there is more than one part. Parts are rounded to ``fmt``, if there is one.
    ``scaled_over`` is the axis over which a power of two is shared: -1 for rows, -2 for columns; None where nothing is
    scaled. ``stack`` gives the memory back when it is closed.
    """
    exponents = None
    if scaled_over is not None:
        x, exponents = _scaled(x, dtype, scaled_over, stack)
    parts = rounded((x,), dtype, fmt, stack)
    if count == 1:
        return Split(parts, exponents)
    rest = stack.enter_context(scratch(x.shape, dtype))
    rest[...] = x
    factor = dtype.type(2.0**row.part_exponent)
    with np.errstate(all="ignore"):
        while len(parts) < min(count, row.parts):
            rest -= parts[-1]
            if row.part_exponent:
                rest *= factor
            parts += rounded((rest,), dtype, fmt, stack)
        if count > row.parts:
            np.add(parts[0], parts[1], out=rest)
            parts += rounded((rest,), dtype, fmt, stack)
    return Split(parts, exponents)


def rounded(
    arrays: tuple[Any, ...],
    dtype: np.dtype[Any],
    fmt: NumberFormat | None,
    stack: contextlib.ExitStack,
) -> list[Any]:
    """Return arrays in ``dtype``, their components rounded to ``fmt``; those in which nothing changes themselves."""
    results, pairs = [], []
    for x in arrays:
        if x.dtype == dtype and fmt is None:
            results.append(x)
            continue
        # In the order in which the source lies, so that both are passed through in sequence.
        turned = abs(x.strides[-2]) < abs(x.strides[-1])
        shape = x.swapaxes(-1, -2).shape if turned else x.shape
        out = stack.enter_context(scratch(shape, dtype))
        results.append(out.swapaxes(-1, -2) if turned else out)
        pairs.append((x, results[-1]))
    casting.cast(pairs, fmt)
    return results


def _components(x: Any) -> Any:
    """Return the real numbers of a contiguous array, flat: only a last dimension can be taken for twice as many."""
    return x.reshape(-1, copy=False).view(np.float32)


def _scaled(
    x: Any, dtype: np.dtype[Any], axis: int, stack: contextlib.ExitStack
) -> tuple[Any, Any]:
    """Return ``x`` with each row or column multiplied by 2^e, exactly, and the exponents e; 0 for one of zeros.

    ``axis`` is that of the sum over k. What is not finite has no say in the exponent.
    """
    out = stack.enter_context(scratch(x.shape, dtype))
    out[...] = x
    components = _components(out).reshape(*x.shape, dtype.itemsize // 4)
    magnitudes = np.abs(components)
    magnitudes[~np.isfinite(magnitudes)] = 0
    largest = magnitudes.max(axis=-1).max(axis=axis, keepdims=True)
    exponents = np.where(largest, _TOP_EXPONENT + 1 - np.frexp(largest)[1], 0).astype(np.int32)
    with np.errstate(all="ignore"):
        np.ldexp(components, exponents[..., None], out=components)
    return out, exponents


def unscale(out: Any, a: Split, b: Split) -> None:
    """Take back what the operands were scaled by, in a contiguous product or any other."""
    if a.exponents is None and b.exponents is None:
        return
    exponents = np.int32(0)
    for x in (a, b):
        if x.exponents is not None:
            exponents = exponents - x.exponents
    with np.errstate(all="ignore"):
        if out.dtype.kind == "c":
            out.real, out.imag = (np.ldexp(part, exponents) for part in (out.real, out.imag))
        else:
            np.ldexp(out, exponents, out=out)
