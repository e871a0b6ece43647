"""Arithmetic of narrow formats: numbers to codes or to rounded numbers, with the functions of any array library.

Numbers are rounded by their bits, because libraries differ in their functions for exponents, and divisors are arrays,
because division by a Python number may be a multiplication by its reciprocal. Arrays in host memory are converted with
NumPy, which keeps subnormal numbers; JAX flushes them to zero. Integers have 32 bits and wrap around.
"""

from __future__ import annotations

from dataclasses import replace
from math import isnan, prod
from typing import Any

from lowprec.arrays.block_layout import padded
from lowprec.arrays.block_scales import (
    BlockScales,
    best_of,
    block_scales,
    float_scale,
    power_of_two,
    unfolded,
)
from lowprec.arrays.namespaces import cast, converted
from lowprec.arrays.narrow_numbers import (
    INFINITY,
    magnitudes,
    nearest_codes,
    numbers_of,
    of_each,
    rounded_to_odd,
)
from lowprec.arrays.random_words import transformed, words_of
from lowprec.errors import ArrayError
from lowprec.formats import (
    FLOAT8_E4M3FN,
    FLOAT8_E8M0FNU,
    FLOAT8_UE5M3,
    FLOAT32,
    UINT4_CODES,
    BlockFormat,
    NumberFormat,
    number_format,
    numbers_of_codes,
)
from lowprec.recipes import Rule
from lowprec.util.strides import Shape


def rounded(
    x: Any, axis: int, rule: Rule, xp: Any, step: Any = None, row: BlockFormat | None = None
) -> tuple[Any, Any, Any]:
    """Round a float32 array along an axis (-1 or -2), that of k; ``step``, an int32 array, is part of the stream.

    With the format ``row`` of the codes, the values and scales are those of :func:`encode`, k and its blocks last, and
    a format with two scales for each vector has the further ones as ``scale``.

    Returns
    -------
    values : array of bfloat16 or int8, of the shape of ``x``
        Rounded numbers, with scales of blocks that are powers of two or E4M3 numbers, without float32 scales.
    scales : array of float32 or None
        Of vectors, the shape of ``x`` without the axis; of blocks, (..., blocks along k, blocks of vectors).
    scale : array of float32 of shape ()
        Scale of the tensor, 1 without one.
    """
    to = number_format(rule.elements)
    x = xp.moveaxis(converted(x, xp.float32), axis, -1)
    shape = x.shape
    vectors = shape[-2] if len(shape) > 1 else 1
    batches = prod(shape[:-2])
    x = x.reshape((batches, vectors, shape[-1]))
    if 0 in shape:
        return _of_nothing(x, shape, axis, rule, xp)
    if rule.hadamard:
        x = transformed(x, rule.seed, xp)
    bits = x.view(xp.int32)
    magnitude = bits & 0x7FFFFFFF
    whole, found, spread = _scales_by_rule(magnitude, rule, to, xp)
    random = None
    if rule.is_stochastic:
        random = words_of(x, rule, xp, step)
    quotients = spread.quotients(magnitude.view(xp.float32), spread.divisors)
    codes = nearest_codes(quotients, to, xp, random)
    if row:
        codes = xp.where(spread.usable, _signed(codes, bits, rule, xp), 0)
        codes, scales = _in_blocks(codes, found, rule, row, xp)
        along_k = (*shape[:-1], -1)
        if scales is not None:
            scales = scales[:, :vectors].reshape(along_k)
        if rule.has_row_scales and rule.scaling == "block":
            whole = whole.reshape(shape[:-1])
        return codes.reshape(along_k), scales, whole
    if rule.elements == "int8":
        values = _integers(codes, bits, spread.usable, xp)
    else:
        values = numbers_of(codes, to, 31, xp) * spread.multipliers
        is_negative = (bits < 0) & spread.usable
        values = xp.where(is_negative, -values, values)
        if rule.marks_elements:
            values = xp.where(magnitude < INFINITY, values, float("nan"))
        if not rule.is_wide:
            values = cast(values, "bfloat16")
    values = xp.moveaxis(values.reshape(shape), -1, axis)
    if rule.has_row_scales and rule.scaling == "block":
        each = xp.repeat(whole, rule.block[0], 1)[:, :vectors]
        return values, each.reshape(shape[:-1]), xp.ones_like(whole[0, 0, 0])
    return values, _stored_scales(found, rule, shape, xp), whole


def rounded_numbers(x: Any, axis: int, rule: Rule, xp: Any, step: Any = None) -> Any:
    """Return the float32 numbers, scales included, to which :func:`rounded` rounds an array."""
    values, scales, scale = rounded(x, axis, rule, xp, step)
    values = xp.moveaxis(converted(values, xp.float32), axis, -1) * scale
    if scales is not None and rule.scaling == "block" and rule.block_scale == "float32":
        high, wide = rule.block
        scales = xp.repeat(xp.repeat(xp.moveaxis(scales, -1, -2), high, -2), wide, -1)
        values = values * scales[..., : values.shape[-2], : values.shape[-1]]
    elif scales is not None:
        values = values * scales[..., None]
    return xp.moveaxis(values, -1, axis)


def _stored_scales(found: BlockScales, rule: Rule, shape: Shape, xp: Any) -> Any:
    """Return the float32 scales of vectors or blocks; None without these."""
    if rule.scaling == "vector":
        return found.stored.reshape(shape[:-1])
    if rule.block_scale != "float32":
        return None
    blocks = found.stored.shape[1:]
    scales = found.stored.reshape((*shape[:-2], *blocks))
    return xp.moveaxis(scales, -1, -2)


def _in_blocks(
    codes: Any, found: BlockScales, rule: Rule, row: BlockFormat, xp: Any
) -> tuple[Any, Any]:
    """Return the bytes of codes with signs, and the scales of each vector's blocks, of one tensor None."""
    high, wide = rule.block
    wide = wide or codes.shape[-1]
    blocks = _blocks_of(codes, 1, wide, xp).reshape((-1, wide))
    stored = found.stored
    if stored is None or row.has_float_scales:
        return _in_bytes(blocks, row, xp), stored
    not_finite = 0xFF
    if rule.block_scale == "e4m3":
        not_finite = 0x7F
    is_nan = found.multipliers != found.multipliers
    stored = xp.where(is_nan, not_finite, stored)
    stored = converted(stored, xp.uint8)
    if high > 1:
        stored = xp.repeat(stored, high, 1)
    return _in_bytes(blocks, row, xp), stored


def _signed(codes: Any, bits: Any, rule: Rule, xp: Any) -> Any:
    """Return codes with the signs of float32 numbers of these bits, or NaN; raise ArrayError if there is no NaN."""
    numbers = numbers_of_codes(rule.elements)
    sign = len(numbers) // 2
    not_a_number = next((i for i, x in enumerate(numbers) if isnan(x)), None)
    is_negative = bits < 0
    if not_a_number == sign:  # instead of -0
        is_negative = is_negative & (codes > 0)
    codes = xp.where(is_negative, codes | sign, codes)
    if not rule.marks_elements:
        return codes
    finite = (bits & 0x7FFFFFFF) < INFINITY
    if not_a_number is not None:
        return xp.where(finite, codes, not_a_number)
    if not xp.all(finite):
        raise ArrayError(
            f"x has an Inf or NaN, but {rule.elements} has no NaN and its scales are float32; replace it, or pass a "
            "format with specials or 8-bit scales"
        )
    return codes


def _integers(codes: Any, bits: Any, usable: Any, xp: Any) -> Any:
    """Return int8 codes with the signs of numbers, 0 where a block has no scale."""
    codes = xp.where(bits < 0, -codes, codes)
    return converted(xp.where(usable, codes, 0), xp.int8)


def _scales_by_rule(
    magnitude: Any, rule: Rule, to: NumberFormat, xp: Any
) -> tuple[Any, BlockScales, BlockScales]:
    """Return the scale of the tensor, those of blocks, and these for each number, of which only the stored are left."""
    high = 1
    wide = magnitude.shape[-1]
    if rule.scaling == "block":
        high, wide = rule.block
    blocks = _blocks_of(magnitude, high, wide, xp)
    counted = blocks
    if rule.marks_elements or rule.scales:
        counted = xp.where(blocks < INFINITY, blocks, 0)
    whole = _tensor_scale(rule, counted, to, xp)
    if rule.scaling == "tensor":
        found = BlockScales(None, whole, xp.ones_like(whole), magnitude >= 0)
        return whole, found, found
    kind = "float32"
    if rule.scaling == "block":
        kind = rule.block_scale
    if rule.marks_elements:
        blocks = counted
    peak = xp.amax(blocks, (-3, -1))
    powers = rule.power_scales
    found = block_scales(peak, kind, to, whole, xp, powers)
    if rule.peaks:
        targets = [replace(to, largest=each) for each in rule.peaks]
        scaled = [block_scales(peak, kind, each, whole, xp, powers) for each in targets]
        found = best_of(scaled, blocks, to, xp)
    spread = {}
    for name in ("divisors", "multipliers", "usable"):
        spread[name] = _spread(getattr(found, name), high, wide, magnitude.shape, xp)
    return whole, found, found._replace(**spread)


def _of_nothing(x: Any, shape: Shape, axis: int, rule: Rule, xp: Any) -> tuple[Any, Any, Any]:
    """Return the results of :func:`rounded` for an array without elements."""
    if rule.elements == "int8":
        values = converted(x, xp.int8)
    elif rule.is_wide:
        values = x
    else:
        values = cast(x, "bfloat16")
    scales = None
    one = xp.sum(x) + 1
    if rule.has_row_scales:
        scales = xp.broadcast_to(one, shape[:-1])
    elif rule.block_scale == "float32":
        along_k = -(-shape[-1] // rule.block[1])
        of_vectors = -(-shape[-2] // rule.block[0])
        scales = xp.broadcast_to(one, (*shape[:-2], along_k, of_vectors))
    values = xp.moveaxis(values.reshape(shape), -1, axis)
    return values, scales, one


def _tensor_scale(rule: Rule, counted: Any, to: NumberFormat, xp: Any) -> Any:
    """Return the scale of a tensor, shape (), from its magnitudes' bits; or of rows of blocks, (batch, row, 1)."""
    largest = to.largest
    if rule.scales:
        largest = max(rule.peaks, default=largest) * rule.largest_scale
    if rule.has_tensor_scale:
        return float_scale(xp.amax(counted), largest, xp, rule.power_scales)
    if rule.scales:
        peaks = xp.amax(counted, (2, 3, 4))
        return float_scale(peaks, largest, xp)[:, :, None]
    first = counted[0, 0, 0, 0, 0]
    return xp.ones_like(first.view(xp.float32))


def _blocks_of(x: Any, high: int, wide: int, xp: Any) -> Any:
    """Return matrices padded with zeros in shape (batch, vector block, vectors, block along k, elements)."""
    x = padded(x, 1, high, xp)
    x = padded(x, 2, max(wide, 1), xp)
    batches, vectors, k = x.shape
    of_vectors = vectors // high
    along_k = k // max(wide, 1)
    return x.reshape((batches, of_vectors, high, along_k, wide))


def _spread(x: Any, high: int, wide: int, shape: Shape, xp: Any) -> Any:
    """Repeat the numbers of blocks for their elements; the inverse of :func:`_blocks_of`."""
    batches, of_vectors, along_k = x.shape
    _, vectors, k = shape
    blocks = (batches, of_vectors, high, along_k, wide)
    x = xp.broadcast_to(x[:, :, None, :, None], blocks)
    x = x.reshape((batches, of_vectors * high, along_k * wide))
    return x[:, :vectors, :k]


def encode(
    blocks: Any, row: BlockFormat, scale: float, xp: Any, rule: str = "floor"
) -> tuple[Any, ...]:
    """Return the codes of blocks, shape (blocks, elements), as uint8, their scales and zeros if the format has them.

    Scales are codes as uint8, or float32. ``rule`` is that of powers of two. float64 is divided as float64 and rounded
    once.
    """
    x = blocks
    if blocks.dtype != xp.float64:
        x = converted(blocks, xp.float32)
    if row.has_float_scales:
        return _encode_with_float_scales(x, row, xp)
    magnitude, limit = magnitudes(x, xp)
    absolute = magnitude.view(x.dtype)
    below = 8 * magnitude.itemsize - row.bits
    sign = x.view(magnitude.dtype) >> below
    sign = sign & (1 << (row.bits - 1))
    if row.scales is None:
        divisor = xp.full_like(x[:1], scale)
        codes = nearest_codes(absolute / divisor, row.elements, xp)
        codes = xp.where(magnitude < limit, codes, 0x7F)
        return (converted(codes | sign, xp.uint8),)
    peak = xp.amax(magnitude, -1)
    finite = peak < limit
    kind = "e4m3"
    not_a_number = 0x7F
    if row.scales is FLOAT8_E8M0FNU:
        kind = rule
        not_a_number = 0xFF
        peak = xp.where(finite, peak, 0).view(x.dtype)
        peak = rounded_to_odd(peak, xp).view(xp.int32)
    whole = xp.full_like(x[:1, 0], scale)
    found = block_scales(peak, kind, row.elements, whole, xp)
    usable = finite & found.usable
    divisors = xp.where(usable, found.divisors, 1.0)
    quotients = found.quotients(absolute, of_each(divisors, absolute, xp))
    codes = nearest_codes(quotients, row.elements, xp) | sign
    codes = xp.where(usable[:, None], codes, 0)
    scales = xp.where(finite, found.stored, not_a_number)
    return _in_bytes(codes, row, xp), converted(scales, xp.uint8)


def _in_bytes(codes: Any, row: BlockFormat, xp: Any) -> Any:
    if row.bits == 4:  # two codes in a byte, the first in its low half
        low = codes[:, ::2]
        high = codes[:, 1::2]
        codes = low | (high << 4)
    return converted(codes, xp.uint8)


def _encode_with_float_scales(x: Any, row: BlockFormat, xp: Any) -> tuple[Any, ...]:
    """Return codes, float32 scales and, of int4 with zeros, these."""
    magnitude, limit = magnitudes(x, xp)
    bits = x.view(magnitude.dtype)
    absolute = magnitude.view(x.dtype)
    finite = magnitude < limit
    is_float = row.elements is FLOAT8_E4M3FN
    if row.has_zeros:
        return _encode_with_zeros(x, absolute, xp.all(finite, -1), row, xp)
    counted = magnitude
    if is_float:
        counted = xp.where(finite, magnitude, 0)
    peak = xp.amax(counted, -1)
    reach = replace(row.elements, largest=row.reach)
    found = block_scales(peak, "float32", reach, None, xp)
    divisors = xp.where(found.usable, found.divisors, 1.0)
    codes = nearest_codes(absolute / of_each(divisors, absolute, xp), row.elements, xp)
    if is_float:
        sign = (bits >> (8 * bits.itemsize - 8)) & 0x80
        codes = xp.where(finite, codes, 0x7F) | sign
    else:
        codes = xp.where(bits < 0, -codes, xp.clip(codes, 0, (1 << (row.bits - 1)) - 1))
        codes = xp.where(found.usable[:, None], codes, 0)
        codes = codes & ((1 << row.bits) - 1)
    return _in_bytes(codes, row, xp), found.stored


def _encode_with_zeros(
    x: Any, absolute: Any, finite: Any, row: BlockFormat, xp: Any
) -> tuple[Any, ...]:
    """Return codes, scales and zeros of blocks; 0 is a number of each block, so that padding with it is exact."""
    x = xp.where(finite[:, None], x, 0.0)
    low = xp.amin(x, -1)
    high = xp.amax(x, -1)
    low = xp.where(low < 0, -low, 0.0)
    high = xp.where(high > 0, high, 0.0)
    largest = unfolded(UINT4_CODES.largest, finite, xp)
    size = converted(high / largest + low / largest, xp.float32)
    scales = xp.where(size < FLOAT32.smallest_normal, FLOAT32.smallest_normal, size)
    has_numbers = (low > 0) | (high > 0)
    scales = converted(xp.where(has_numbers, scales, 1.0), xp.float32)
    zeros = nearest_codes(low / scales, row.elements, xp)
    codes = nearest_codes(absolute / of_each(scales, absolute, xp), row.elements, xp)
    signed = xp.where(x < 0, -codes, codes)
    codes = signed + zeros[:, None]
    codes = xp.clip(codes, 0, int(row.elements.largest))
    codes = xp.where(finite[:, None], codes, 0)
    scales = xp.where(finite, scales, float("nan"))
    return _in_bytes(codes, row, xp), scales, converted(zeros, xp.uint8)


def decode(
    codes: Any, scales: Any, zeros: Any, row: BlockFormat, scale: Any, xp: Any, numbers: Any = None
) -> Any:
    """Return the float32 values of codes: the arguments are those that :func:`encode` returned, or None.

    ``scale`` is that of all blocks or an array of theirs; ``numbers`` are those of all codes, if these are looked up.
    """
    codes = converted(codes, xp.int32)
    if row.bits == 4:
        low = codes & 15
        high = codes >> 4
        pairs = xp.stack((low, high), -1)
        codes = pairs.reshape((len(codes), row.block))
    if numbers is not None:
        values = numbers[codes & (len(numbers) - 1)]
    elif row.has_float_scales:
        values = _with_float_scales(codes, zeros, row, xp)
    else:
        values = numbers_of(codes, row.elements, row.bits, xp)
    if row.scales is not None:
        values = values * _factors(scales, row, xp)[:, None]
    if isinstance(scale, float):
        return values if scale == 1.0 else values * scale
    return values * scale[:, None]


def _factors(scales: Any, row: BlockFormat, xp: Any) -> Any:
    """Return the numbers of the scales of blocks."""
    if row.has_float_scales:
        return scales
    assert row.scales is not None
    scales = converted(scales, xp.int32)
    if row.scales is FLOAT8_E8M0FNU:
        return xp.where(scales < 255, power_of_two(scales, xp), float("nan"))
    if row.scales is FLOAT8_UE5M3:
        return xp.where(scales < 255, numbers_of(scales, row.scales, 31, xp), float("nan"))
    return numbers_of(scales, row.scales, 8, xp)


def _with_float_scales(codes: Any, zeros: Any, row: BlockFormat, xp: Any) -> Any:
    """Return the numbers of codes of a format with float32 scales, before these are multiplied in."""
    if row.elements is FLOAT8_E4M3FN:
        return numbers_of(codes, row.elements, 8, xp)
    if row.has_zeros:
        zeros = converted(zeros, xp.int32)
        codes = codes - zeros[:, None]
    else:
        sign = (codes << 1) & (1 << row.bits)
        codes = codes - sign
    return converted(codes, xp.float32)
