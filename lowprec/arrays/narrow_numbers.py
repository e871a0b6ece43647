"""Numbers of narrow formats and their codes, element by element, with the functions of any array library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from lowprec.arrays.namespaces import converted
from lowprec.formats import FLOAT32, BlockFormat, NumberFormat

#: Bits of float32's infinity, the smallest that are not a number's, and of the least float64 that rounds to it.
INFINITY = 0x7F800000
OVERFLOW = 0x47EFFFFFF0000000
HIDDEN = 1 << 23


def magnitudes(x: Any, xp: Any) -> tuple[Any, int]:
    """Return the bits of magnitudes, and those from which they are infinite in float32."""
    if x.dtype == xp.float64:
        return x.view(xp.int64) & 0x7FFFFFFFFFFFFFFF, OVERFLOW
    return converted(x, xp.float32).view(xp.int32) & 0x7FFFFFFF, INFINITY


def rounded_to_odd(x: Any, xp: Any) -> Any:
    """Return float64 numbers as float32, truncated, with the last bit set if that is inexact.

    Numbers of fewer bits that are rounded from these are those that are rounded from float64 (S. Boldo and
    G. Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    if x.dtype == xp.float32:
        return x
    near = converted(x, xp.float32)
    wide = converted(near, xp.float64)
    is_above = converted(abs(wide) > abs(x), xp.int32)
    is_inexact = converted(wide != x, xp.int32)
    truncated = near.view(xp.int32) - is_above
    return (truncated | is_inexact).view(xp.float32)


def rounded_sum(x: Any, y: Any, xp: Any) -> Any:
    """Return float64 numbers plus float32 ones, rounded once to float32: the float64 sum is rounded to odd."""
    y = converted(y, xp.float64)
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)
    bits = total.view(xp.int64)
    inexact = (error != 0) & xp.isfinite(total) & (bits & 1 == 0)
    away = xp.where((error > 0) == (total > 0), 1, -1)
    return converted((bits + xp.where(inexact, away, 0)).view(xp.float64), xp.float32)


def nearest_codes(x: Any, to: NumberFormat, xp: Any, random: Any = None) -> Any:
    """Return the codes of the nearest numbers, ties to even, of numbers that are not negative.

    With 32 random bits for each, return one of the two codes around it: at most 30 random bits are added to the bits
    of the significand that are dropped.
    """
    stored = to.precision - 1  # bits of the significand
    bits = rounded_to_odd(x, xp).view(xp.int32)
    exponent = (bits >> 23) - 127
    hidden = xp.clip(bits >> 23, 0, 1) << 23
    significand = (bits & (HIDDEN - 1)) | hidden
    below = xp.clip(to.emin - exponent, 0, 300)  # bits of the significand below the smallest number
    scaled = xp.clip(exponent - to.emin, 0, 255) << stored
    if random is None:
        below = xp.clip(below, 0, stored + 2)  # with stored + 2 the result is 0
        dropped = below + (23 - stored)
        # Of the code; without stored bits it is the exponent's.
        is_odd = ((significand >> dropped) + scaled) & 1
        half = (1 << (dropped - 1)) - 1
        rounded = (significand + half + is_odd) >> dropped
    else:
        dropped = below + (23 - stored)
        used = xp.clip(dropped, 0, 30)
        noise = ((random >> 2) & 0x3FFFFFFF) >> (30 - used)
        kept = significand >> xp.clip(dropped - used, 0, 31)
        rounded = (kept + noise) >> used
    top = max(to.emax, to.emin)
    largest = int(to.largest / 2.0 ** (top - stored))
    largest += (top - to.emin) << stored
    return xp.clip(rounded + scaled, 0, largest)


def numbers_of(codes: Any, of: NumberFormat, bits: int, xp: Any) -> Any:
    stored = of.precision - 1
    sign = 1 << (bits - 1)
    magnitude = codes & (sign - 1)
    bias = (126 + of.emin) << 23
    aligned = (magnitude << (23 - stored)) + bias
    subnormal = (aligned + HIDDEN).view(xp.float32) - of.smallest_normal
    normal = aligned.view(xp.float32)
    values = xp.where(magnitude < (1 << stored), subnormal, normal)
    if bits == 8:
        values = xp.where(magnitude < sign - 1, values, float("nan"))
    return xp.where(codes < sign, values, -values)


def of_each(of_blocks: Any, x: Any, xp: Any) -> Any:
    """Return the divisor of each number of ``x``, shape (blocks, numbers), from those of the blocks.

    XLA multiplies by the reciprocal of a divisor that the division itself broadcasts, which changes codes.
    """
    return xp.broadcast_to(of_blocks[:, None], x.shape)


def array_scale(blocks: Iterable[Any], row: BlockFormat, xp: Any) -> float:
    """Return the scale of an array, given in parts, by its largest finite magnitude."""
    if not row.has_scale:
        return 1.0
    peaks = [_largest(x, xp) for x in blocks if 0 not in x.shape]
    peak = max(peaks, default=0.0)
    if not peak:
        return 1.0
    largest = row.elements.largest
    if row.scales:
        largest *= row.scales.largest
    # Of float32 numbers, the quotient in float64 rounds to the same float32 number.
    return max(float(np.float32(peak / largest)), FLOAT32.smallest_normal)


def _largest(x: Any, xp: Any) -> float:
    """Return the largest finite magnitude."""
    magnitude, limit = magnitudes(x, xp)
    finite = xp.where(magnitude < limit, magnitude, 0)
    bits = int(xp.amax(finite))
    if x.dtype == xp.float64:
        return float(np.int64(bits).view(np.float64))
    return float(np.int32(bits).view(np.float32))
