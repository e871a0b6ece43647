"""Rounding of float32 arrays to the formats of the math modes with NumPy, in blocks that fit the cache.

TF32 is rounded to nearest with ties away from zero, as the PTX instruction ``cvt.rna.tf32.f32`` does (PTX ISA,
"cvt"); bfloat16 and float16 with ties to even (IEEE 754-2019, section 4.3.1). NaN and infinities are unchanged, finite
numbers beyond the largest of the format overflow to infinity, subnormal numbers are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from lowprec import formats
from lowprec.backends.cpu.scaling import FLOAT16_DIGITS
from lowprec.formats import NumberFormat

#: Elements per block, whose source and result fit the L2 cache.
_BLOCK = 1 << 17


def rounded_to_odd(x: Any) -> Any:
    """Round float64 to float32 to odd, so that a further rounding to fewer digits equals a single rounding of ``x``.

    An inexact number is rounded to the neighbour with an odd last digit, on the same side of every tie as ``x``.

    Examples
    --------
    >>> rounded_to_odd(np.float64([1.0, 1 + 2.0**-30])) - 1 == [0, 2.0**-23]
    array([ True,  True])
    """
    nearest = np.asarray(x, np.float32)
    bits = nearest.view(np.uint32)
    inexact = np.isfinite(x) & (nearest != x)
    beyond = inexact & (np.abs(nearest) > np.abs(x))
    return ((bits - beyond) | inexact).view(np.float32)


def _round_tf32_block(source: Any, out: Any) -> None:
    bits = out.view(np.uint32)
    np.add(source.view(np.uint32), np.uint32(0x1000), out=bits)
    np.bitwise_and(bits, np.uint32(0xFFFFE000), out=bits)


def _round_even_block(dropped: int, source: Any, out: Any) -> None:
    """Round off the ``dropped`` low bits, ties to even."""
    bits, result = source.view(np.uint32), out.view(np.uint32)
    even = np.right_shift(bits, np.uint32(dropped))
    np.bitwise_and(even, np.uint32(1), out=even)
    np.add(even, np.uint32((1 << dropped - 1) - 1), out=even)
    np.add(bits, even, out=result)
    np.bitwise_and(result, np.uint32(-(1 << dropped) & 0xFFFFFFFF), out=result)


def _round_fp16_block(source: Any, out: Any) -> None:
    out[...] = source.astype(np.float16)


_BLOCK_ROUNDINGS: dict[str, Callable[[Any, Any], None]] = {
    formats.TF32.name: _round_tf32_block,
    formats.BFLOAT16.name: partial(_round_even_block, 16),
    formats.FLOAT16.name: _round_fp16_block,
    FLOAT16_DIGITS.name: partial(_round_even_block, 13),
}


def round_float32(source: Any, to: NumberFormat, out: Any) -> None:
    """Round a float32 array to TF32, bfloat16, float16 or its digits; the values stay float32.

    ``out`` is float32 and C-contiguous, of the shape of ``source``; it is ``source`` or does not overlap it.
    """
    if not source.flags.c_contiguous:
        with np.errstate(all="ignore"):
            out[...] = source
        source = out
    round_all([(source.reshape(-1, copy=False), out.reshape(-1, copy=False))], to)


def round_all(pairs: Sequence[tuple[Any, Any]], to: NumberFormat) -> None:
    """Round contiguous 1-D float32 arrays into others, in this thread."""
    round_block = _BLOCK_ROUNDINGS[to.name]
    with np.errstate(all="ignore"):
        for source, out in pairs:
            for first in range(0, source.size, _BLOCK):
                src, dst = source[first : first + _BLOCK], out[first : first + _BLOCK]
                # Integer arithmetic may carry a NaN's payload into exponent or sign. NaN are found before writing,
                # because ``out`` may be ``source``.
                nan = np.isnan(src)
                round_block(src, dst)
                if np.logical_or.reduce(nan):
                    dst[nan] = np.nan
