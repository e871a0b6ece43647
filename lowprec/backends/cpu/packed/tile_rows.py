"""Packing of one tile row: runs of 16 elements, rounded, split and interleaved.

The high one of two bfloat16 parts is the value *truncated*, because rounding could overflow to infinity. Inf and NaN
times a zero part of the other operand would give NaN, so packing in two parts reports non-finite rounded values. The
parts of a mode such as ``bf16x3`` give NaN in the affected elements of the result instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from lowprec.backends.cpu.packed.codes import widened_float8
from lowprec.backends.cpu.packed.native import F16, F32, I8, I16, I32, emitted, inline_asm, pointer, shuffle, vector
from lowprec.backends.cpu.packed.vector_arithmetic import (
    INFINITY,
    bits_of,
    floats_of,
    magnitude_of,
    nearest,
    rounded,
    splat,
    widened_bfloat16,
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Packing scheme for a storage type and a rounding."""

    index: int
    storage: str
    rounding: str
    item_bytes: int
    parts: int
    step: int  # elements of k in a block

    @property
    def per_dword(self) -> int:
        """Elements of k per dword of a tile."""
        return self.step // 16

    @property
    def is_wide(self) -> bool:
        """Whether numbers are multiplied as float32."""
        return self.per_dword == 1

    @property
    def is_float8(self) -> bool:
        """Whether the stored type is an 8-bit floating-point type."""
        return self.storage.startswith("float8")

    @property
    def is_split(self) -> bool:
        """Whether an operand is split into parts, each the rounded rest of the previous ones."""
        return self.rounding in ("bf16x3", "bf16x6", "tf32x3")


def _by_kind(*schemes: Scheme) -> dict[tuple[str, str], Scheme]:
    return {(scheme.storage, scheme.rounding): scheme for scheme in schemes}


#: Schemes for bfloat16 and int8 units. A float16 or TF32 number is the sum of two bfloat16 (11 bits as 8 and 3).
SCHEMES = _by_kind(
    Scheme(0, "bfloat16", "exact", 2, 1, 32),
    Scheme(1, "float16", "exact", 2, 2, 32),
    Scheme(2, "float32", "bf16", 4, 1, 32),  # by VCVTNE2PS2BF16, which flushes subnormals
    Scheme(3, "float32", "tf32", 4, 2, 32),  # rounded to a 10-bit fraction, ties away from zero
    Scheme(4, "float32", "fp16", 4, 2, 32),  # rounded to a 10-bit fraction, ties to even
    Scheme(5, "int8", "exact", 1, 1, 64),
    Scheme(6, "int8", "offset", 1, 1, 64),  # x + 128, for instructions with an unsigned operand
    Scheme(7, "float32", "bf16x3", 4, 2, 32),  # two bfloat16 parts
    Scheme(8, "float32", "bf16x6", 4, 3, 32),  # three bfloat16 parts, exact
    Scheme(9, "float32", "tf32x3", 4, 4, 32),  # two TF32 parts, each a sum of two bfloat16
    Scheme(10, "float16", "tf32x3", 2, 2, 32),
    Scheme(17, "float8_e4m3fn", "exact", 1, 1, 32),
    Scheme(18, "float8_e5m2", "exact", 1, 1, 32),
)
#: Schemes for FP32 units: widened, or rounded with subnormals kept.
FP32_SCHEMES = _by_kind(
    Scheme(11, "float32", "exact", 4, 1, 16),
    Scheme(12, "bfloat16", "exact", 2, 1, 16),
    Scheme(13, "float16", "exact", 2, 1, 16),
    Scheme(14, "float32", "bf16", 4, 1, 16),
    Scheme(15, "float32", "tf32", 4, 1, 16),
    Scheme(16, "float32", "fp16", 4, 1, 16),
    Scheme(19, "float8_e4m3fn", "exact", 1, 1, 16),
    Scheme(20, "float8_e5m2", "exact", 1, 1, 16),
)
#: Schemes by their index in kernels.
BY_INDEX = {scheme.index: scheme for scheme in (*SCHEMES.values(), *FP32_SCHEMES.values())}

# Bits of the least float32 that rounds to infinity with 11 digits; those of every NaN are larger.
_OVERFLOW = 0x7F7FF000


def _rounded(builder: Any, x: Any, *, ties_away: bool) -> tuple[Any, Any]:
    """Round 16 float32, given by their bits, to a 10-bit fraction; return the bits and a mask of non-finite ones."""
    bad = builder.icmp_unsigned(">=", magnitude_of(builder, x), splat(_OVERFLOW))
    return nearest(builder, x, 13, ties_away=ties_away), bad


def _widened_float16(builder: Any, halves: Any) -> tuple[Any, Any]:
    bits = bits_of(builder, builder.fpext(halves, ir.VectorType(F32, 16)))
    return bits, builder.icmp_unsigned(">=", magnitude_of(builder, bits), splat(INFINITY))


def _low_part(builder: Any, bits: Any) -> Any:
    """Return the remainder of truncation to bfloat16, itself a bfloat16, as bits of a float32."""
    return _rest(builder, bits, builder.and_(bits, splat(0xFFFF0000)))


def _rest(builder: Any, bits: Any, part: Any) -> Any:
    left = builder.fsub(floats_of(builder, bits), floats_of(builder, part))
    return bits_of(builder, left)


def _words(interleave: bool, odd: bool) -> list[int]:
    """Return the indices of the 16-bit words of two vectors that form a tile row.

    With `odd` the vectors are 16 float32, of which the high words are used; otherwise 16 words each.
    """
    stride, first, second = (2, 1, 33) if odd else (1, 0, 16)
    a = [first + stride * i for i in range(16)]
    b = [second + stride * i for i in range(16)]
    return [word for pair in zip(a, b, strict=True) for word in pair] if interleave else a + b


def _odd_words(builder: Any, runs: list[Any], interleave: bool) -> Any:
    a, b = (builder.bitcast(bits, ir.VectorType(I16, 32)) for bits in runs)
    return shuffle(builder, a, b, _words(interleave, odd=True))


def _bfloat16_words(builder: Any, runs: list[Any]) -> Any:
    """Return two runs of 16 float32 as bfloat16; the instruction takes its operands in reverse order."""
    text, words = "vcvtne2ps2bf16 $1, $2, $0", ir.VectorType(I16, 32)
    return inline_asm(builder, text, "=v,v,v", words, runs)


def _bfloat16_split_rows(builder: Any, parts: int, runs: list[Any], interleave: bool) -> list[Any]:
    order, rows = _words(interleave, odd=False), []
    for _ in range(parts):
        words = _bfloat16_words(builder, runs)
        rows.append(shuffle(builder, words, words, order))
        halves = [shuffle(builder, words, words, range(at, at + 16)) for at in (0, 16)]
        wide = [floats_of(builder, widened_bfloat16(builder, half)) for half in halves]
        runs = [builder.fsub(*pair) for pair in zip(runs, wide, strict=True)]
    return rows


def _tf32_split_rows(builder: Any, runs: list[Any], interleave: bool) -> list[Any]:
    rows = []
    for _ in range(2):
        wide = [rounded(builder, run, 13, ties_away=True) for run in runs]
        rows.append(_odd_words(builder, wide, interleave))
        rows.append(_odd_words(builder, [_low_part(builder, x) for x in wide], interleave))
        runs = [_rest(builder, *pair) for pair in zip(runs, wide, strict=True)]
    return rows


def _two_part_rows(builder: Any, scheme: Scheme, runs: list[Any], interleave: bool) -> tuple[Any, Any]:
    wide, bad = [], []
    for run in runs:
        if scheme.storage == "float32":
            bits, mask = _rounded(builder, run, ties_away=scheme.rounding == "tf32")
        else:
            bits, mask = _widened_float16(builder, run)
        wide.append(bits)
        bad.append(mask)
    low = [_low_part(builder, bits) for bits in wide]
    rows = [_odd_words(builder, bits, interleave) for bits in (wide, low)]
    if scheme.is_split:
        return rows, ir.Constant(I16, 0)
    return rows, builder.bitcast(builder.or_(*bad), I16)


def _wide_row(builder: Any, scheme: Scheme, run: Any) -> Any:
    if scheme.storage == "float16":
        return builder.fpext(run, ir.VectorType(F32, 16))
    if scheme.storage == "bfloat16":
        return widened_bfloat16(builder, run)
    if scheme.is_float8:
        words = widened_float8(builder, scheme.storage, shuffle(builder, run, run, range(32)))
        return widened_bfloat16(builder, shuffle(builder, words, words, range(16)))
    if scheme.rounding == "exact":
        return run
    dropped = 16 if scheme.rounding == "bf16" else 13
    return rounded(builder, run, dropped, ties_away=scheme.rounding == "tf32")


def _tile_rows(builder: Any, scheme: Scheme, runs: list[Any], interleave: bool) -> tuple[Any, Any]:
    """Return one tile row per part from `per_dword` runs of 16 elements, and flags of non-finite values."""
    none = ir.Constant(I16, 0)
    if scheme.is_wide:
        return [_wide_row(builder, scheme, runs[0])], none
    if scheme.storage == "float32" and scheme.is_split:
        if scheme.rounding == "tf32x3":
            return _tf32_split_rows(builder, runs, interleave), none
        return _bfloat16_split_rows(builder, scheme.parts, runs, interleave), none
    if scheme.parts == 2:
        return _two_part_rows(builder, scheme, runs, interleave)
    if scheme.storage == "bfloat16" or scheme.is_float8:
        row = shuffle(builder, runs[0], runs[1], _words(interleave, odd=False))
        return [widened_float8(builder, scheme.storage, row) if scheme.is_float8 else row], none
    if scheme.storage == "float32":
        row = _bfloat16_words(builder, runs)
        return [shuffle(builder, row, row, _words(interleave, odd=False))], none
    a = shuffle(builder, runs[0], runs[1], range(32))
    b = shuffle(builder, runs[2], runs[3], range(32))
    order = [16 * (i % 4) + i // 4 for i in range(64)] if interleave else list(range(64))
    row = shuffle(builder, a, b, order)
    if scheme.rounding == "offset":
        # Adding 128 modulo 2^8 flips the sign bit.
        row = builder.xor(row, vector(I8, [-128] * 64))
    return [row], none


_ELEMENT = {"bfloat16": I16, "float16": F16, "int8": I8, "float8_e4m3fn": I8, "float8_e5m2": I8}


@emitted(types.intp, literals=("index", "interleave"))
def pack_row(builder, index, interleave, source, run_stride, target, part_stride):
    """Read runs of 16 elements `run_stride` bytes apart, write a tile row per part, and return flags."""
    scheme = BY_INDEX[index]
    # TF32 is rounded on bits; the conversion to bfloat16 takes floats.
    by_bits = scheme.is_wide or scheme.rounding in ("tf32", "fp16", "tf32x3")
    run = ir.VectorType(_ELEMENT.get(scheme.storage, I32 if by_bits else F32), 16)
    runs = []
    for _ in range(scheme.per_dword):
        runs.append(builder.load(pointer(builder, source, run), align=1))
        source = builder.add(source, run_stride)
    rows, flags = _tile_rows(builder, scheme, runs, bool(interleave))
    for row in rows:
        builder.store(row, pointer(builder, target, row.type), align=64)
        target = builder.add(target, part_stride)
    return builder.zext(flags, ir.IntType(64))


@emitted()
def transpose(builder, source, target):
    """Transpose a tile as a 16 x 16 matrix of dwords."""
    row_type = ir.VectorType(I32, 16)
    offsets = [ir.Constant(ir.IntType(64), 64 * i) for i in range(16)]
    rows = []
    for offset in offsets:
        address = builder.add(source, offset)
        rows.append(builder.load(pointer(builder, address, row_type), align=64))
    # Swap the off-diagonal blocks of size 1, 2, 4, 8.
    for size in (1, 2, 4, 8):
        low = [j if not j & size else 16 + j - size for j in range(16)]
        high = [j + size if not j & size else 16 + j for j in range(16)]
        for i in range(16):
            if not i & size:
                a, b = rows[i], rows[i + size]
                rows[i] = shuffle(builder, a, b, low)
                rows[i + size] = shuffle(builder, a, b, high)
    for row, offset in zip(rows, offsets, strict=True):
        address = builder.add(target, offset)
        builder.store(row, pointer(builder, address, row_type), align=64)
