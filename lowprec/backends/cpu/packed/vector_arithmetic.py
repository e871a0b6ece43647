"""Rounding, widening and narrowing of 16 float32, given by their bits, for any vector units."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowprec.backends.cpu.packed.native import F32, I16, I32, vector

LANES = 16
INFINITY, SIGN = 0x7F800000, 0x80000000


def splat(value: int) -> Any:
    """Return a constant in each lane."""
    return vector(I32, [value] * LANES)


def floats_of(builder: Any, bits: Any) -> Any:
    """Return 16 float32 by their bits."""
    return builder.bitcast(bits, ir.VectorType(F32, LANES))


def bits_of(builder: Any, floats: Any) -> Any:
    """Return the bits of 16 float32."""
    return builder.bitcast(floats, ir.VectorType(I32, LANES))


def magnitude_of(builder: Any, bits: Any) -> Any:
    """Return the bits without the sign, which are ordered like the magnitudes."""
    return builder.and_(bits, splat(SIGN - 1))


def widened_bfloat16(builder: Any, words: Any) -> Any:
    """Return the bits of 16 bfloat16 as float32."""
    return builder.shl(builder.zext(words, ir.VectorType(I32, LANES)), splat(16))


def nearest(builder: Any, bits: Any, dropped: int, *, ties_away: bool = False) -> Any:
    """Round off the ``dropped`` low bits; a carry may increment the exponent, and NaN gives an arbitrary number."""
    half = splat(1 << dropped - 1)  # ties away from zero, as cvt.rna.tf32.f32
    if not ties_away:
        odd = builder.and_(builder.lshr(bits, splat(dropped)), splat(1))
        half = builder.add(odd, splat((1 << dropped - 1) - 1))
    return builder.and_(builder.add(bits, half), splat((1 << 32) - (1 << dropped)))


def unless_nan(builder: Any, bits: Any, result: Any, of_nan: Any) -> Any:
    """Return ``result``, or ``of_nan`` where the bits are NaN."""
    floats = floats_of(builder, bits)
    return builder.select(builder.fcmp_unordered("uno", floats, floats), of_nan, result)


def rounded(builder: Any, bits: Any, dropped: int, *, ties_away: bool = False) -> Any:
    """Round as :func:`nearest`; NaN is unchanged."""
    return unless_nan(builder, bits, nearest(builder, bits, dropped, ties_away=ties_away), bits)


def narrowed_bfloat16(builder: Any, bits: Any) -> Any:
    """Round to 16 bfloat16, ties to even; subnormals are kept, unlike by the AVX-512 instruction."""
    quiet = builder.or_(bits, splat(0x00400000))
    result = unless_nan(builder, bits, nearest(builder, bits, 16), quiet)
    return builder.trunc(builder.lshr(result, splat(16)), ir.VectorType(I16, LANES))
