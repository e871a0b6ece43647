"""Arithmetic of narrow formats: numbers to codes or to rounded numbers, with the functions of any array library.

Numbers are rounded by their bits, because libraries differ in their functions for exponents, and divisors are arrays,
because division by a Python number may be a multiplication by its reciprocal. Arrays in host memory are converted with
NumPy, which keeps subnormal numbers; JAX flushes them to zero. Integers have 32 bits and wrap around.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays.namespaces import cast
from lowprec.formats import ELEMENTS, FLOAT8_E4M3FN, FLOAT8_E8M0FNU, FLOAT32, UINT4_CODES, BlockFormat, NumberFormat
from lowprec.recipes import STEP_BIT, Rule

#: Bits of float32's infinity, the smallest that are not a number's, and of the least float64 that rounds to it.
_INFINITY, _OVERFLOW = 0x7F800000, 0x47EFFFFFF0000000
_HIDDEN = 1 << 23


class _Scales(NamedTuple):
    """Scales of blocks: codes or float32 numbers, and the factors before and after rounding."""

    stored: Any
    divisors: Any  # or reciprocals, which are normal numbers, of powers of two
    multipliers: Any
    usable: Any  # whether the codes of the block are not all 0
    inverted: bool = False

    def quotients(self, x: Any, divisors: Any) -> Any:
        return x * divisors if self.inverted else x / divisors


def rounded(x: Any, axis: int, rule: Rule, xp: Any, step: Any = None) -> tuple[Any, Any, Any]:
    """Round a float32 array along an axis (-1 or -2), that of k; ``step``, an int32 array, is part of the stream.

    Returns
    -------
    values : array of bfloat16 or int8, of the shape of ``x``
        Rounded numbers, with scales of blocks that are powers of two or E4M3 numbers, without float32 scales.
    scales : array of float32 or None
        Of vectors, the shape of ``x`` without the axis; of blocks, (..., blocks along k, blocks of vectors).
    scale : array of float32 of shape ()
        Scale of the tensor, 1 without one.
    """
    to, x = ELEMENTS[rule.elements], xp.moveaxis(converted(x, xp.float32), axis, -1)
    shape = x.shape
    x = x.reshape((prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1, shape[-1]))
    if 0 in shape:
        return _of_nothing(x, shape, axis, rule, xp)
    if rule.hadamard:
        x = _transformed(x, rule.seed, xp)
    bits = x.view(xp.int32)
    magnitude = bits & 0x7FFFFFFF
    high, wide = rule.block if rule.scaling == "block" else (1, x.shape[-1])
    blocks = _blocks_of(magnitude, high, wide, xp)
    counted = xp.where(blocks < _INFINITY, blocks, 0) if rule.marks_elements or rule.block_scale == "e4m3" else blocks
    whole = _tensor_scale(rule, counted, to, xp)
    if rule.scaling == "tensor":
        found = _Scales(None, whole, xp.ones_like(whole), magnitude >= 0)
    else:
        kind = rule.block_scale if rule.scaling == "block" else "float32"
        peaks = xp.amax(counted if rule.marks_elements else blocks, (-3, -1))
        found = _scales(peaks, kind, to, whole, xp)
    divisors, multipliers, usable = (
        y if rule.scaling == "tensor" else _spread(y, high, wide, x.shape, xp) for y in found[1:4]
    )
    random = _words(x, rule, xp, step) if rule.is_stochastic else None
    codes = _nearest(found.quotients(magnitude.view(xp.float32), divisors), to, xp, random)
    if rule.elements == "int8":
        values = converted(xp.where(usable, xp.where(bits < 0, -codes, codes), 0), xp.int8)
    else:
        values = _values(codes, to, 31, xp) * multipliers
        values = xp.where((bits < 0) & usable, -values, values)
        if rule.marks_elements:
            values = xp.where(magnitude < _INFINITY, values, float("nan"))
        values = cast(values, "bfloat16")
    scales = None
    if rule.scaling == "vector":
        scales = found.stored.reshape(shape[:-1])
    elif rule.block_scale == "float32":
        scales = xp.moveaxis(found.stored.reshape((*shape[:-2], *found.stored.shape[1:])), -1, -2)
    return xp.moveaxis(values.reshape(shape), -1, axis), scales, whole


def _of_nothing(x: Any, shape: tuple[int, ...], axis: int, rule: Rule, xp: Any) -> tuple[Any, Any, Any]:
    """Return the results of :func:`rounded` for an array without elements."""
    values = converted(x, xp.int8) if rule.elements == "int8" else cast(x, "bfloat16")
    scales, one = None, xp.sum(x) + 1
    if rule.scaling == "vector":
        scales = xp.broadcast_to(one, shape[:-1])
    elif rule.block_scale == "float32":
        scales = xp.broadcast_to(one, (*shape[:-2], -(-shape[-1] // rule.block[1]), -(-shape[-2] // rule.block[0])))
    return xp.moveaxis(values.reshape(shape), -1, axis), scales, one


def _tensor_scale(rule: Rule, counted: Any, to: NumberFormat, xp: Any) -> Any:
    """Return the scale of a tensor, shape (), from its magnitudes' bits."""
    one = xp.ones_like(counted[0, 0, 0, 0, 0].view(xp.float32))
    if rule.scaling == "tensor" or rule.block_scale == "e4m3":
        largest = to.largest * (FLOAT8_E4M3FN.largest if rule.scaling == "block" else 1.0)
        return _float_scale(xp.amax(counted), largest, xp)
    return one


def _blocks_of(x: Any, high: int, wide: int, xp: Any) -> Any:
    """Return matrices padded with zeros in shape (batch, vector block, vectors, block along k, elements)."""
    for axis, size in ((1, high), (2, wide)):
        if missing := -x.shape[axis] % max(size, 1):
            zeros = xp.zeros_like(x[:, :1, :] if axis == 1 else x[:, :, :1])
            padding = [x.shape[0], x.shape[1], x.shape[2]]
            padding[axis] = missing
            x = xp.concatenate((x, xp.broadcast_to(zeros, tuple(padding))), axis)
    return x.reshape((x.shape[0], x.shape[1] // high, high, x.shape[2] // max(wide, 1), wide))


def _spread(x: Any, high: int, wide: int, shape: tuple[int, ...], xp: Any) -> Any:
    """Repeat the numbers of blocks for their elements; the inverse of :func:`_blocks_of`."""
    x = xp.broadcast_to(x[:, :, None, :, None], (x.shape[0], x.shape[1], high, x.shape[2], wide))
    x = x.reshape((x.shape[0], x.shape[1] * high, x.shape[3] * wide))
    return x[:, : shape[1], : shape[2]]


def array_scale(blocks: Iterable[Any], row: BlockFormat, xp: Any) -> float:
    """Return the scale of an array, given in parts, by its largest finite magnitude."""
    peak = 0.0
    for x in blocks if row.has_scale else ():
        if 0 not in x.shape:
            magnitude, limit = _magnitudes(x, xp)
            bits = int(xp.amax(xp.where(magnitude < limit, magnitude, 0)))
            wide = x.dtype == xp.float64
            peak = max(peak, float(np.int64(bits).view(np.float64) if wide else np.int32(bits).view(np.float32)))
    largest = row.elements.largest * (row.scales.largest if row.scales else 1.0)
    # Of float32 numbers, the quotient in float64 rounds to the same float32 number.
    return max(float(np.float32(peak / largest)), FLOAT32.smallest_normal) if peak else 1.0


def encode(blocks: Any, row: BlockFormat, scale: float, xp: Any, rule: str = "floor") -> tuple[Any, ...]:
    """Return the codes of blocks, shape (blocks, elements), as uint8, their scales and zeros if the format has them.

    Scales are codes as uint8, or float32. ``rule`` is that of powers of two. float64 is divided as float64 and rounded
    once.
    """
    x = blocks if blocks.dtype == xp.float64 else converted(blocks, xp.float32)
    if row.has_float_scales:
        return _encode_with_float_scales(x, row, xp)
    magnitude, limit = _magnitudes(x, xp)
    absolute = magnitude.view(x.dtype)
    sign = (x.view(magnitude.dtype) >> (8 * magnitude.itemsize - row.bits)) & (1 << (row.bits - 1))
    if row.scales is None:
        codes = _nearest(absolute / xp.full_like(x[:1], scale), row.elements, xp)
        return (converted(xp.where(magnitude < limit, codes, 0x7F) | sign, xp.uint8),)
    peak = xp.amax(magnitude, -1)
    finite = peak < limit
    powers = row.scales is FLOAT8_E8M0FNU
    if powers:
        peak = _single(xp.where(finite, peak, 0).view(x.dtype), xp).view(xp.int32)
    found = _scales(peak, rule if powers else "e4m3", row.elements, xp.full_like(x[:1, 0], scale), xp)
    usable = finite & found.usable
    quotients = found.quotients(absolute, xp.where(usable, found.divisors, 1.0)[:, None])
    codes = xp.where(usable[:, None], _nearest(quotients, row.elements, xp) | sign, 0)
    return _in_bytes(codes, row, xp), converted(xp.where(finite, found.stored, 0xFF if powers else 0x7F), xp.uint8)


def _in_bytes(codes: Any, row: BlockFormat, xp: Any) -> Any:
    if row.bits == 4:  # two codes in a byte, the first in its low half
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    return converted(codes, xp.uint8)


def _encode_with_float_scales(x: Any, row: BlockFormat, xp: Any) -> tuple[Any, ...]:
    """Return codes, float32 scales and, of int4 with zeros, these."""
    bits, (magnitude, limit) = x.view(xp.int64 if x.dtype == xp.float64 else xp.int32), _magnitudes(x, xp)
    absolute, finite, is_float = magnitude.view(x.dtype), magnitude < limit, row.elements is FLOAT8_E4M3FN
    if row.has_zeros:
        return _encode_with_zeros(x, absolute, xp.all(finite, -1), row, xp)
    peak = xp.amax(xp.where(finite, magnitude, 0) if is_float else magnitude, -1)
    found = _scales(peak, "float32", row.elements, None, xp)
    codes = _nearest(absolute / xp.where(found.usable, found.divisors, 1.0)[:, None], row.elements, xp)
    if is_float:
        codes = xp.where(finite, codes, 0x7F) | ((bits >> (8 * bits.itemsize - 8)) & 0x80)
    else:
        codes = xp.where(found.usable[:, None], xp.where(bits < 0, -codes, codes), 0) & ((1 << row.bits) - 1)
    return _in_bytes(codes, row, xp), found.stored


def _encode_with_zeros(x: Any, absolute: Any, finite: Any, row: BlockFormat, xp: Any) -> tuple[Any, ...]:
    """Return codes, scales and zeros of blocks; 0 is a number of each block, so that padding with it is exact."""
    x = xp.where(finite[:, None], x, 0.0)
    low, high = xp.amin(x, -1), xp.amax(x, -1)
    low, high = xp.where(low < 0, -low, 0.0), xp.where(high > 0, high, 0.0)
    largest = _unfolded(UINT4_CODES.largest, finite, xp)
    size = converted(high / largest + low / largest, xp.float32)
    scales = xp.where(size < FLOAT32.smallest_normal, FLOAT32.smallest_normal, size)
    scales = converted(xp.where((low > 0) | (high > 0), scales, 1.0), xp.float32)
    zeros = _nearest(low / scales, row.elements, xp)
    codes = _nearest(absolute / scales[:, None], row.elements, xp)
    codes = xp.clip(xp.where(x < 0, -codes, codes) + zeros[:, None], 0, int(row.elements.largest))
    codes, zeros = xp.where(finite[:, None], codes, 0), converted(zeros, xp.uint8)
    return _in_bytes(codes, row, xp), xp.where(finite, scales, float("nan")), zeros


def _scales(peak: Any, kind: str, to: NumberFormat, whole: Any, xp: Any) -> _Scales:
    """Return the scales of blocks by the bits of their largest magnitudes."""
    finite = peak < (_INFINITY if peak.dtype == xp.int32 else _OVERFLOW)
    if kind in ("floor", "rceil"):
        scales = (peak >> 23) - to.emax
        if kind == "rceil":
            fraction = int((to.largest / 2.0**to.emax - 1) * _HIDDEN)
            scales = scales + converted((peak & (_HIDDEN - 1)) > fraction, xp.int32)
        scales = xp.where(finite, xp.clip(scales, 0, 254), 255)
        powers = xp.where(scales > 0, scales << 23, 1 << 22).view(xp.float32)  # 2^-127 is subnormal
        reciprocals = (xp.where(finite, 254 - scales, 127) << 23).view(xp.float32)
        return _Scales(scales, reciprocals, xp.where(finite, powers, float("nan")), finite, inverted=True)
    if kind == "e4m3":
        values = peak.view(whole.dtype)
        scales = _nearest(values / converted(_unfolded(to.largest, peak, xp), whole.dtype) / whole, FLOAT8_E4M3FN, xp)
        numbers = _values(scales, FLOAT8_E4M3FN, 31, xp)
        divisors = xp.where(scales > 0, numbers * whole, 1.0)
        return _Scales(scales, divisors, xp.where(finite, numbers, float("nan")), finite & (scales > 0))
    scales = xp.where(finite, _float_scale(xp.where(finite, peak, 0), to.largest, xp), float("nan"))
    return _Scales(scales, scales, xp.ones_like(scales), finite)


def _float_scale(peak: Any, largest: float, xp: Any) -> Any:
    """Return the float32 scales of blocks by the bits of their largest magnitudes."""
    scale = peak.view(xp.float32 if peak.dtype == xp.int32 else xp.float64) / _unfolded(largest, peak, xp)
    scale = xp.where(scale < FLOAT32.smallest_normal, FLOAT32.smallest_normal, scale)
    return converted(xp.where(peak > 0, scale, 1.0), xp.float32)


def _unfolded(number: float, like: Any, xp: Any) -> Any:
    """Return an array of a number that XLA's compiler does not know, which multiplies by reciprocals of constants."""
    return converted(xp.where(like >= 0, number, 1.0), xp.float32)


def decode(codes: Any, scales: Any, zeros: Any, row: BlockFormat, scale: float, xp: Any) -> Any:
    """Return the float32 values of codes: the arguments are those that :func:`encode` returned, or None."""
    codes = converted(codes, xp.int32)
    if row.bits == 4:
        codes = xp.stack((codes & 15, codes >> 4), -1).reshape((len(codes), row.block))
    if row.has_float_scales:
        if row.has_zeros:
            codes = codes - converted(zeros, xp.int32)[:, None]
        elif row.elements is not FLOAT8_E4M3FN:
            codes = codes - ((codes << 1) & (1 << row.bits))
        is_float = row.elements is FLOAT8_E4M3FN
        return (_values(codes, row.elements, 8, xp) if is_float else converted(codes, xp.float32)) * scales[:, None]
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


def _magnitudes(x: Any, xp: Any) -> tuple[Any, int]:
    """Return the bits of magnitudes, and those from which they are infinite in float32."""
    if x.dtype == xp.float64:
        return x.view(xp.int64) & 0x7FFFFFFFFFFFFFFF, _OVERFLOW
    return converted(x, xp.float32).view(xp.int32) & 0x7FFFFFFF, _INFINITY


def _single(x: Any, xp: Any) -> Any:
    """Return float64 numbers that are not negative as float32, truncated, with the last bit set if that is inexact.

    Numbers of fewer bits that are rounded from these are those that are rounded from float64.
    """
    if x.dtype == xp.float32:
        return x
    near = converted(x, xp.float32)
    wide = converted(near, xp.float64)
    bits = near.view(xp.int32) - converted(wide > x, xp.int32)
    return (bits | converted(wide != x, xp.int32)).view(xp.float32)


def _nearest(x: Any, to: NumberFormat, xp: Any, random: Any = None) -> Any:
    """Return the codes of the nearest numbers, ties to even, of numbers that are not negative.

    With 32 random bits for each, return one of the two codes around it: at most 30 random bits are added to the bits
    of the significand that are dropped.
    """
    stored = to.precision - 1  # bits of the significand
    bits = _single(x, xp).view(xp.int32)
    exponent = (bits >> 23) - 127
    significand = (bits & (_HIDDEN - 1)) | (xp.clip(bits >> 23, 0, 1) << 23)
    below = xp.clip(to.emin - exponent, 0, 300)  # bits of the significand below the smallest number
    if random is None:
        dropped = xp.clip(below, 0, stored + 2) + (23 - stored)  # with stored + 2 the result is 0
        rounded = (significand + ((1 << (dropped - 1)) - 1) + ((significand >> dropped) & 1)) >> dropped
    else:
        dropped = below + (23 - stored)
        used = xp.clip(dropped, 0, 30)
        noise = ((random >> 2) & 0x3FFFFFFF) >> (30 - used)
        rounded = ((significand >> xp.clip(dropped - used, 0, 31)) + noise) >> used
    codes = rounded + (xp.clip(exponent - to.emin, 0, 255) << stored)
    top = max(to.emax, to.emin)
    return xp.clip(codes, 0, ((top - to.emin) << stored) + int(to.largest / 2.0 ** (top - stored)))


def _values(codes: Any, of: NumberFormat, bits: int, xp: Any) -> Any:
    stored, sign = of.precision - 1, 1 << (bits - 1)
    magnitude = codes & (sign - 1)
    aligned = (magnitude << (23 - stored)) + ((126 + of.emin) << 23)
    subnormal = (aligned + _HIDDEN).view(xp.float32) - of.smallest_normal
    values = xp.where(magnitude < (1 << stored), subnormal, aligned.view(xp.float32))
    if bits == 8:
        values = xp.where(magnitude < sign - 1, values, float("nan"))
    return xp.where(codes < sign, values, -values)


# -- random numbers and the Hadamard transform ------------------------------------------------------


def _multiplied(x: Any, factor: int) -> tuple[Any, Any]:
    """Return the high and low halves of the products of int32 numbers, taken as unsigned, and a factor."""
    low, high = x & 0xFFFF, (x >> 16) & 0xFFFF
    first, second = factor & 0xFFFF, factor >> 16
    carry = high * first + (((low * first) >> 16) & 0xFFFF)
    middle = low * second + (carry & 0xFFFF)
    signed = factor - (1 << 32)
    return high * second + ((carry >> 16) & 0xFFFF) + ((middle >> 16) & 0xFFFF), x * signed


def _signed(x: int) -> int:
    return (x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Any, ...]:
    """Return four words of Philox4x32-10 (Salmon and others, 2011) for counters of four int32 arrays."""
    c0, c1, c2, c3 = counter
    for i in range(10):
        key = [_signed((seed >> shift) + i * step) for shift, step in ((0, 0x9E3779B9), (32, 0xBB67AE85))]
        (high0, low0), (high1, low1) = _multiplied(c0, 0xD2511F53), _multiplied(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0
    return c0, c1, c2, c3


def _words(x: Any, rule: Rule, xp: Any, step: Any) -> Any:
    """Return a word for each number: the counter is its k / 4, its vector in the batch and the stream."""
    batches, vectors, k = x.shape
    whole, like = (batches * vectors, -(-k // 4)), {"device": x.device} if hasattr(x, "to") else {}
    quarters = xp.broadcast_to(xp.arange(whole[1], dtype=xp.int32, **like), whole)
    vector = xp.broadcast_to(xp.arange(whole[0], dtype=xp.int32, **like)[:, None], whole)
    stream = [xp.full_like(quarters, _signed(rule.stream >> shift)) for shift in (0, 32)]
    if step is not None:
        stream = [stream[0] | (step << STEP_BIT), stream[1] | ((step >> (32 - STEP_BIT)) & ((1 << STEP_BIT) - 1))]
    words = xp.stack(philox((quarters, vector, *stream), rule.seed), -1)
    return words.reshape((batches, vectors, 4 * quarters.shape[1]))[..., :k]


def _transformed(x: Any, seed: int, xp: Any) -> Any:
    """Transform whole groups of 16 along the last axis: random signs, then the Hadamard matrix, times 1/4."""
    with np.errstate(over="ignore"):
        signs = int(philox((*(np.full(1, -1, np.int32),) * 2, *(np.zeros(1, np.int32),) * 2), seed)[0][0])
    factors = np.array([-0.25 if signs >> i & 1 else 0.25 for i in range(16)], np.float32)
    groups = x.shape[-1] // 16
    part = x[..., : 16 * groups].reshape((*x.shape[:-1], groups, 16)) * converted(
        xp.asarray(factors), x.device if hasattr(x, "to") else np.float32
    )
    for half in (1, 2, 4, 8):
        pairs = part.reshape((*part.shape[:-1], 16 // (2 * half), 2, half))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        part = xp.stack((low + high, low - high), -2).reshape(part.shape)
    return xp.concatenate((part.reshape((*x.shape[:-1], 16 * groups)), x[..., 16 * groups :]), -1)
