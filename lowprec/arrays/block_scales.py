"""Scales of blocks of narrow formats, by the bits of their largest magnitudes, with the functions of any library.

Divisors are arrays, because division by a Python number may be a multiplication by its reciprocal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lowprec.arrays.namespaces import converted
from lowprec.arrays.narrow_numbers import HIDDEN, INFINITY, OVERFLOW, nearest_codes, numbers_of
from lowprec.formats import FLOAT32, NumberFormat
from lowprec.rounding_rules import SCALES


class BlockScales(NamedTuple):
    """Scales of blocks: codes or float32 numbers, and the factors before and after rounding."""

    stored: Any
    divisors: Any  # or reciprocals, which are normal numbers, of powers of two
    multipliers: Any
    usable: Any  # whether the codes of the block are not all 0
    inverted: bool = False

    def quotients(self, x: Any, divisors: Any) -> Any:
        if self.inverted:
            return x * divisors
        return x / divisors


def block_scales(
    peak: Any, kind: str, to: NumberFormat, whole: Any, xp: Any, powers: bool = False
) -> BlockScales:
    """Return the scales of blocks by the bits of their largest magnitudes."""
    limit = INFINITY if peak.dtype == xp.int32 else OVERFLOW
    finite = peak < limit
    if kind in SCALES:
        return _byte_scales(peak, finite, SCALES[kind], to, whole, xp)
    if kind != "float32":
        return _power_scales(peak, finite, kind, to, xp)
    counted = xp.where(finite, peak, 0)
    scales = float_scale(counted, to.largest, xp, powers)
    scales = xp.where(finite, scales, float("nan"))
    return BlockScales(scales, scales, xp.ones_like(scales), finite)


def _power_scales(peak: Any, finite: Any, kind: str, to: NumberFormat, xp: Any) -> BlockScales:
    scales = (peak >> 23) - to.emax
    if kind != "floor":
        # of the fraction of a peak; above it the scale doubles
        limit = to.largest / 2.0**to.emax - 1
        if kind == "even":
            limit = 1 - 2.0**-to.precision - 1 / HIDDEN
        doubles = (peak & (HIDDEN - 1)) > int(limit * HIDDEN)
        scales = scales + converted(doubles, xp.int32)
    scales = xp.clip(scales, 0, 254)
    scales = xp.where(finite, scales, 255)
    exponents = xp.where(finite, 254 - scales, 127)
    reciprocals = (exponents << 23).view(xp.float32)
    powers = xp.where(finite, power_of_two(scales, xp), float("nan"))
    return BlockScales(scales, reciprocals, powers, finite, inverted=True)


def power_of_two(scales: Any, xp: Any) -> Any:
    """Return the powers of two of E8M0 codes, of which 2^-127 is subnormal."""
    bits = xp.where(scales > 0, scales << 23, 1 << 22)
    return bits.view(xp.float32)


def _byte_scales(
    peak: Any, finite: Any, of: NumberFormat, to: NumberFormat, whole: Any, xp: Any
) -> BlockScales:
    whole = xp.broadcast_to(whole, peak.shape)
    largest = converted(unfolded(to.largest, peak, xp), whole.dtype)
    quotients = peak.view(whole.dtype) / largest / whole
    scales = nearest_codes(quotients, of, xp)
    numbers = numbers_of(scales, of, 31, xp)
    usable = scales > 0
    divisors = xp.where(usable, numbers * whole, 1.0)
    multipliers = xp.where(finite, numbers, float("nan"))
    return BlockScales(scales, divisors, multipliers, finite & usable)


def float_scale(peak: Any, largest: float, xp: Any, powers: bool = False) -> Any:
    """Return the float32 scales of blocks by the bits of their largest magnitudes; ``powers`` rounds them up."""
    dtype = xp.float32 if peak.dtype == xp.int32 else xp.float64
    scale = peak.view(dtype) / unfolded(largest, peak, xp)
    scale = xp.where(scale < FLOAT32.smallest_normal, FLOAT32.smallest_normal, scale)
    scale = converted(xp.where(peak > 0, scale, 1.0), xp.float32)
    if not powers:
        return scale
    bits = scale.view(xp.int32) + (HIDDEN - 1)
    return (bits & ~(HIDDEN - 1)).view(xp.float32)


def unfolded(number: float, like: Any, xp: Any) -> Any:
    """Return a number as an array, hidden from XLA's constant folding, which multiplies by reciprocals of constants."""
    numbers = xp.where(like >= 0, number, 1.0)
    return converted(numbers, xp.float32)


def best_of(found: list[BlockScales], blocks: Any, to: NumberFormat, xp: Any) -> BlockScales:
    """Return the scales by which blocks have the least sum of squared errors, of equal ones the first.

    Each error, in units of a scale, has 12 bits. Its square is exact then, and the sum in pairs is that of any library.
    """
    best, *others = found
    first = xp.where(best.usable, best.divisors, 1.0)
    least = _squared_errors(best, first, blocks, to, xp)
    for each in others:
        error = _squared_errors(each, first, blocks, to, xp)
        is_less = error < least
        least = xp.where(is_less, error, least)
        chosen = [xp.where(is_less, x, y) for x, y in zip(each[:4], best[:4], strict=True)]
        best = BlockScales(*chosen)
    return best


def _squared_errors(found: BlockScales, unit: Any, blocks: Any, to: NumberFormat, xp: Any) -> Any:
    """Return the sum of the squared errors of each block, in squares of a unit; infinite if its scale is 0."""
    divisors = xp.where(found.usable, found.divisors, 1.0)
    divisors_of_each = xp.broadcast_to(divisors[:, :, None, :, None], blocks.shape)
    quotients = blocks.view(xp.float32) / divisors_of_each
    errors = abs(quotients - numbers_of(nearest_codes(quotients, to, xp), to, 31, xp))
    errors = (errors.view(xp.int32) & ~0xFFF).view(xp.float32)
    errors = xp.where(errors > 2.0**-50, errors, 0.0)  # other squares may be subnormal numbers
    squares = xp.moveaxis(errors * errors, 2, 3)
    batches, of_vectors, along_k, high, wide = squares.shape
    squares = squares.reshape((batches, of_vectors, along_k, high * wide))
    while squares.shape[-1] > 1:
        squares = squares[..., ::2] + squares[..., 1::2]
    ratio = divisors / unit
    return xp.where(found.usable, squares[..., 0] * ratio * ratio, float("inf"))
