"""Operands rounded and split for the modes, in operations that XLA does not optimise away.

Rounding is integer arithmetic on the bits of float32. XLA may remove a cast to a narrow type and back;
``lax.reduce_precision`` flushes the subnormal numbers of float16, and rounds the ties of TF32 to even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from lowprec import formats
from lowprec.formats import NumberFormat
from lowprec.modes import ModeRow

#: The largest magnitude of a scaled row is in [2^14, 2^15), the second highest binade of float16.
_TOP_EXPONENT = 14

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


def _bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Any) -> Any:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _unless_nan(rounded: Any, bits: Any) -> Any:
    """Return the rounded numbers, but keep NaN: a carry from its payload changes exponent or sign."""
    return _float(jnp.where((bits & _MAGNITUDE) > _INFINITY, 0x7FC00000, rounded))


def _to_tf32(x: Any) -> Any:
    bits = _bits(x)
    return _unless_nan((bits + 0x1000) & ~0x1FFF, bits)


def _to_bfloat16(x: Any) -> Any:
    bits = _bits(x)
    return _unless_nan((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF, bits)


def _to_float16(x: Any) -> Any:
    bits = _bits(x)
    size = bits & _MAGNITUDE
    normal = (bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF
    # 65520 is halfway between the largest float16 and 2^16.
    overflows = size >= 0x477FF000
    normal = jnp.where(overflows, (bits & ~_MAGNITUDE) | _INFINITY, normal)
    # Below 2^-14 float16 has the multiples of 2^-24.
    steps = lax.round(x * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN)
    small = _bits(steps * 2.0**-24)
    return _unless_nan(jnp.where(size < 0x38800000, small, normal), bits)


_ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    formats.TF32.name: _to_tf32,
    formats.BFLOAT16.name: _to_bfloat16,
    formats.FLOAT16.name: _to_float16,
}


def round_to(x: Any, to: NumberFormat) -> Any:
    """Round float32 or complex64 to the values of TF32 (ties away from zero), bfloat16 or float16 (ties to even)."""
    return each_component(_ROUNDINGS[to.name], x)


def each_component(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to a real array, or to both parts of a complex one."""
    if jnp.iscomplexobj(x):
        return lax.complex(function(x.real), function(x.imag))
    return function(x)


def split(x: Any, row: ModeRow) -> list[Any]:
    """Return the parts of an operand, then their sum if the mode multiplies it; NaN is the rest of Inf and NaN."""
    parts = [round_to(x, row.operand_format)]
    rest = x
    for _ in range(row.parts - 1):
        rest = (rest - parts[-1]) * 2.0**row.part_exponent
        parts.append(round_to(rest, row.operand_format))
    if row.sums_parts:
        parts.append(round_to(parts[0] + parts[1], row.operand_format))
    return parts


def times_power_of_two(x: Any, exponent: Any, steps: int) -> Any:
    """Return ``x * 2**exponent``, computed in ``steps`` factors within float32's range."""

    def multiplied(real: Any) -> Any:
        done = jnp.int32(0)
        for step in range(1, steps + 1):
            upto = exponent * step // steps
            real = real * _float((upto - done + 127) << 23)
            done = upto
        return real

    return each_component(multiplied, x)


def scaled(x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Return ``x * 2**e``, exact, and the exponents e, shared along ``axes``; non-finite elements are ignored."""

    def size(part: Any) -> Any:
        magnitude = _bits(part) & _MAGNITUDE
        return jnp.where(magnitude >= _INFINITY, 0, magnitude)

    largest = size(x.real)
    if jnp.iscomplexobj(x):
        largest = jnp.maximum(largest, size(x.imag))
    binade = jnp.max(largest, axis=axes, keepdims=True, initial=0) >> 23
    exponent = jnp.where(binade == 0, 0, _TOP_EXPONENT + 127 - binade)
    return times_power_of_two(x, exponent, 2), exponent
