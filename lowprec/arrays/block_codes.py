"""Arithmetic of quantised arrays: numbers to codes and back, with the functions of any array library.

Numbers are rounded by their bits, because libraries differ in their functions for exponents, and divisors are arrays,
because division by a Python number may be a multiplication by its reciprocal. Arrays in host memory are converted with
NumPy, which keeps subnormal numbers; JAX flushes them to zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from lowprec.formats import FLOAT8_E8M0FNU, FLOAT32, BlockFormat, NumberFormat

#: Bits of float32's infinity, the smallest that are not a number's.
_INFINITY = 0x7F800000
_HIDDEN = 1 << 23


def array_scale(blocks: Iterable[Any], row: BlockFormat, xp: Any) -> float:
    """Return the scale of an array, given in parts, by its largest finite magnitude."""
    peak = np.float32(0)
    for x in blocks if row.has_scale else ():
        if 0 not in x.shape:
            magnitude = converted(x, xp.float32).view(xp.int32) & 0x7FFFFFFF
            bits = int(xp.amax(xp.where(magnitude < _INFINITY, magnitude, 0)))
            peak = max(peak, np.int32(bits).view(np.float32))
    largest = row.elements.largest * (row.scales.largest if row.scales else 1.0)
    return max(float(peak / np.float32(largest)), FLOAT32.smallest_normal) if peak else 1.0


def encode(blocks: Any, row: BlockFormat, scale: float, xp: Any) -> tuple[Any, ...]:
    """Return the codes of blocks, shape (blocks, elements), and of their scales if the format has them, as uint8."""
    x = converted(blocks, xp.float32)
    bits = x.view(xp.int32)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> (32 - row.bits)) & (1 << (row.bits - 1))
    absolute = magnitude.view(xp.float32)
    if row.scales is None:
        codes = _nearest(absolute / xp.full_like(x[:1], scale), row.elements, xp)
        return (converted(xp.where(magnitude < _INFINITY, codes, 0x7F) | sign, xp.uint8),)
    peak = xp.amax(magnitude, -1)
    finite = usable = peak < _INFINITY
    if row.scales is FLOAT8_E8M0FNU:
        scales, nan = xp.clip((peak >> 23) - row.elements.emax, 0, 254), 0xFF
        reciprocals = ((254 - scales) << 23).view(xp.float32)  # 2^127 to 2^-119 of a block of finite numbers
        quotients = absolute * reciprocals[:, None]
    else:
        whole, largest = (xp.full_like(x[:1, 0], value) for value in (scale, row.elements.largest))
        scales, nan = _nearest(peak.view(xp.float32) / largest / whole, row.scales, xp), 0x7F
        usable = finite & (scales > 0)
        quotients = absolute / xp.where(usable, _values(scales, row.scales, 8, xp) * whole, 1.0)[:, None]
    codes = xp.where(usable[:, None], _nearest(quotients, row.elements, xp) | sign, 0)
    if row.bits == 4:  # two codes in a byte, the first in its low half
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    return converted(codes, xp.uint8), converted(xp.where(finite, scales, nan), xp.uint8)


def decode(codes: Any, scales: Any, row: BlockFormat, scale: float, xp: Any) -> Any:
    """Return the float32 values of codes: the arguments are those that :func:`encode` returned."""
    codes = converted(codes, xp.int32)
    if row.bits == 4:
        codes = xp.stack((codes & 15, codes >> 4), -1).reshape((len(codes), row.block))
    values = _values(codes, row.elements, row.bits, xp)
    if row.scales is FLOAT8_E8M0FNU:
        scales = converted(scales, xp.int32)
        powers = xp.where(scales > 0, scales << 23, 1 << 22).view(xp.float32)  # 2^-127 is subnormal
        values = values * xp.where(scales < 255, powers, float("nan"))[:, None]
    elif row.scales is not None:
        values = values * _values(converted(scales, xp.int32), row.scales, 8, xp)[:, None]
    return values if scale == 1.0 else values * scale


def converted(x: Any, dtype: Any) -> Any:
    """Return an array in another element type of its library."""
    return x.to(dtype) if hasattr(x, "to") else x.astype(dtype)


def _nearest(x: Any, to: NumberFormat, xp: Any) -> Any:
    """Return the codes of the nearest numbers, ties to even, of float32 numbers that are not negative."""
    stored = to.precision - 1  # bits of the significand
    bits = x.view(xp.int32)
    exponent = (bits >> 23) - 127
    significand = (bits & (_HIDDEN - 1)) | _HIDDEN
    dropped = xp.clip(to.emin - exponent, 0, 5) + (23 - stored)  # further bits below emin; with 5 the result is 0
    rounded = (significand + ((1 << (dropped - 1)) - 1) + ((significand >> dropped) & 1)) >> dropped
    codes = rounded + (xp.clip(exponent - to.emin, 0, 255) << stored)
    fraction = to.largest / 2.0**to.emax - 1
    return xp.clip(codes, 0, ((to.emax - to.emin + 1) << stored) + int(fraction * (1 << stored)))


def _values(codes: Any, of: NumberFormat, bits: int, xp: Any) -> Any:
    stored, sign = of.precision - 1, 1 << (bits - 1)
    magnitude = codes & (sign - 1)
    aligned = (magnitude << (23 - stored)) + ((126 + of.emin) << 23)
    subnormal = (aligned + _HIDDEN).view(xp.float32) - of.smallest_normal
    values = xp.where(magnitude < (1 << stored), subnormal, aligned.view(xp.float32))
    if bits == 8:
        values = xp.where(magnitude < sign - 1, values, float("nan"))
    return xp.where(codes < sign, values, -values)
