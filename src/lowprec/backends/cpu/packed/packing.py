"""From an operand in any layout to the tiles that a micro-kernel multiplies.

An operand is seen as *lanes* (rows of A, columns of B) times *k*. It is cut into strips of 32 lanes
and steps along k that fill one 64-byte tile row: 32 elements of 16 bits, or 64 of 8 bits. A block,
32 lanes of one step, becomes two tiles (lanes 0 to 15 and 16 to 31) of 16 rows of 64 bytes for each
part::

    strip -> step -> part -> tile -> 16 rows x 64 bytes

A tile of A has a lane in each row. A tile of B has a *dword* of k in each row, that is two (16 bits)
or four (8 bits) neighbouring values of k for each of the 16 lanes. The one is the transpose of the
other as a 16 x 16 matrix of dwords, so two ways of reading serve all layouts:

- `along`: k is contiguous; one tile row of A from 32 (or 64) elements in sequence;
- `across`: lanes are contiguous; one tile row of B from two (or four) runs of 16 elements;

and a transposition in registers turns the result of either into what the other operand needs.
Blocks at the edge, and operands contiguous in neither direction, are first copied to a block padded
with zeros.

What happens to the numbers on the way (`SCHEMES`):

=================  =====  ====================================================================
storage, rounding  parts  conversion
=================  =====  ====================================================================
bfloat16           1      none
float16            2      x = high + low, both bfloat16, exact: 11 bits are 8 and 3
float32, bf16      1      round to nearest even (``VCVTNE2PS2BF16``, which flushes subnormals)
float32, tf32      2      round to a 10-bit fraction, ties away from zero, then as float16
float32, fp16      2      round to float16, subnormals and overflow included, then as float16
int8               1      none
int8, offset       1      x + 128 as an unsigned number, for instructions that want A so
=================  =====  ====================================================================

The high part of a pair is the value *truncated* to bfloat16: rounding it could carry into an
infinity. Each part of an infinity or a NaN would be multiplied with each part of the other operand,
and Inf * 0 is NaN, so packing in two parts reports any value that is not finite after rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from lowprec.backends.cpu.cpuinfo import cpu_flags
from lowprec.backends.cpu.packed.native import (
    F16,
    F32,
    FINGERPRINT,
    I8,
    I16,
    I32,
    I64,
    compile_kernel,
    inline_asm,
    load,
    pointer,
    shuffle,
    store,
    vector,
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one kind of operand is packed."""

    index: int
    storage: str
    rounding: str
    item_bytes: int
    parts: int
    step: int  # elements of k in a block

    @property
    def per_dword(self) -> int:
        """Elements of k in four bytes of a tile."""
        return self.step // 16


SCHEMES: dict[tuple[str, str], Scheme] = {
    (scheme.storage, scheme.rounding): scheme
    for scheme in (
        Scheme(0, "bfloat16", "exact", 2, 1, 32),
        Scheme(1, "float16", "exact", 2, 2, 32),
        Scheme(2, "float32", "bf16", 4, 1, 32),
        Scheme(3, "float32", "tf32", 4, 2, 32),
        Scheme(4, "float32", "fp16", 4, 2, 32),
        Scheme(5, "int8", "exact", 1, 1, 64),
        Scheme(6, "int8", "offset", 1, 1, 64),
    )
}
_BY_INDEX = {scheme.index: scheme for scheme in SCHEMES.values()}

#: Bytes of scratch that a packing kernel needs: a padded block and the tiles to be transposed.
SCRATCH_BYTES = 16 << 10
_TILES_AT = 8 << 10

PACK_ARITY = 14

_EXPONENT = 0x7F800000
# The least float32 that rounds to an infinity in TF32; every NaN compares above it as an integer.
_TF32_OVERFLOW = 0x7F7FF000

# --- one tile row -----------------------------------------------------------------------------


def _splat(value: int) -> Any:
    return vector(I32, [value] * 16)


def _rounded_tf32(builder: Any, x: Any) -> tuple[Any, Any]:
    """Bits of 16 float32 rounded to TF32, and a mask of those that are not finite."""
    rounded = builder.add(x, _splat(0x1000))  # half a unit: ties away, as cvt.rna.tf32.f32
    magnitude = builder.and_(x, _splat(0x7FFFFFFF))
    bad = builder.icmp_unsigned(">=", magnitude, _splat(_TF32_OVERFLOW))
    return builder.and_(rounded, _splat(0xFFFFE000)), bad


def _widened_float16(builder: Any, halves: Any) -> tuple[Any, Any]:
    """Bits of 16 float16 as float32, and a mask of those that are not finite."""
    bits = builder.bitcast(builder.fpext(halves, ir.VectorType(F32, 16)), ir.VectorType(I32, 16))
    exponent = builder.and_(bits, _splat(_EXPONENT))
    return bits, builder.icmp_unsigned("==", exponent, _splat(_EXPONENT))


def _low_part(builder: Any, bits: Any) -> Any:
    """What truncation to bfloat16 cuts off, as bits of a float32 that is itself a bfloat16."""
    floats = ir.VectorType(F32, 16)
    high = builder.and_(bits, _splat(0xFFFF0000))
    low = builder.fsub(builder.bitcast(bits, floats), builder.bitcast(high, floats))
    return builder.bitcast(low, ir.VectorType(I32, 16))


def _load_run(builder: Any, address: Any, element: Any, count: int) -> Any:
    return builder.load(pointer(builder, address, ir.VectorType(element, count)), align=1)


def _words(interleave: bool, odd: bool) -> list[int]:
    """Which 16-bit words of two vectors, counted through both, make a tile row.

    With `odd` the vectors hold 16 float32 and only the high words count; else 16 words each.
    """
    stride, first, second = (2, 1, 33) if odd else (1, 0, 16)
    a = [first + stride * i for i in range(16)]
    b = [second + stride * i for i in range(16)]
    return [word for pair in zip(a, b, strict=True) for word in pair] if interleave else a + b


def _two_part_rows(
    builder: Any, scheme: Scheme, runs: list[Any], interleave: bool
) -> tuple[Any, Any]:
    wide, bad = [], []
    for run in runs:
        if scheme.rounding == "tf32":
            bits, mask = _rounded_tf32(builder, run)
        else:
            if scheme.storage == "float32":
                floats = builder.bitcast(run, ir.VectorType(F32, 16))
                run = builder.fptrunc(floats, ir.VectorType(F16, 16))
            bits, mask = _widened_float16(builder, run)
        wide.append(bits)
        bad.append(mask)
    words, mask = ir.VectorType(I16, 32), _words(interleave, odd=True)
    rows = []
    for pair in (wide, [_low_part(builder, bits) for bits in wide]):
        a, b = (builder.bitcast(bits, words) for bits in pair)
        rows.append(shuffle(builder, a, b, mask))
    flags = builder.bitcast(builder.or_(*bad), I16)
    return rows, flags


def _tile_rows(builder: Any, scheme: Scheme, runs: list[Any], interleave: bool) -> tuple[Any, Any]:
    """One tile row for each part from `per_dword` runs of 16 elements; and flags of non-finites."""
    none = ir.Constant(I16, 0)
    if scheme.parts == 2:
        return _two_part_rows(builder, scheme, runs, interleave)
    if scheme.storage == "bfloat16":
        return [shuffle(builder, runs[0], runs[1], _words(interleave, odd=False))], none
    if scheme.storage == "float32":
        # The instruction puts the conversion of its last operand into the low half.
        text, words = "vcvtne2ps2bf16 $1, $2, $0", ir.VectorType(I16, 32)
        row = inline_asm(builder, text, "=v,v,v", words, runs)
        return [shuffle(builder, row, row, _words(interleave, odd=False))], none
    a = shuffle(builder, runs[0], runs[1], range(32))
    b = shuffle(builder, runs[2], runs[3], range(32))
    order = [16 * (i % 4) + i // 4 for i in range(64)] if interleave else list(range(64))
    row = shuffle(builder, a, b, order)
    if scheme.rounding == "offset":
        # Adding 128 modulo 2^8 is turning the sign over.
        row = builder.xor(row, vector(I8, [-128] * 64))
    return [row], none


_ELEMENT = {"bfloat16": I16, "float16": F16, "int8": I8}


@intrinsic(prefer_literal=True)
def _row(typing_context, index, interleave, source, run_stride, target, part_stride):
    """Read runs of 16 elements `run_stride` bytes apart, write a tile row per part; flags."""
    scheme = _BY_INDEX[index.literal_value]
    woven = bool(interleave.literal_value)

    def generate(context, builder, signature, args):
        _, _, source, run_stride, target, part_stride = args
        # TF32 rounds bits; bfloat16 and float16 conversions want floats of the same 16 lanes.
        element = _ELEMENT.get(scheme.storage, I32 if scheme.parts == 2 else F32)
        runs = []
        for _ in range(scheme.per_dword):
            runs.append(_load_run(builder, source, element, 16))
            source = builder.add(source, run_stride)
        rows, flags = _tile_rows(builder, scheme, runs, woven)
        for row in rows:
            builder.store(row, pointer(builder, target, row.type), align=64)
            target = builder.add(target, part_stride)
        return builder.zext(flags, ir.IntType(64))

    return types.intp(index, interleave, *[types.intp] * 4), generate


@intrinsic
def _transpose(typing_context, source, target):
    """Transpose a tile as a 16 x 16 matrix of dwords."""

    def generate(context, builder, signature, args):
        row_type = ir.VectorType(I32, 16)
        offsets = [ir.Constant(ir.IntType(64), 64 * i) for i in range(16)]
        rows = []
        for offset in offsets:
            address = builder.add(args[0], offset)
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
            address = builder.add(args[1], offset)
            builder.store(row, pointer(builder, address, row_type), align=64)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


# --- blocks and operands ----------------------------------------------------------------------


# The functions that depend on the scheme are overloads on its index, a literal. As closures of the
# kernel they would be part of the name under which numba's disk cache files it, and that name would
# be another in every process.


def _pad(index, source, lane_stride, k_stride, first_lane, end_lane, steps, target):
    """Copy some lanes of some steps to a block of 32 x step, contiguous along k and zero elsewhere."""


@overload(_pad, prefer_literal=True)
def _pad_overload(index, source, lane_stride, k_stride, first_lane, end_lane, steps, target):
    scheme = _BY_INDEX[index.literal_value]
    item, step = scheme.item_bytes, scheme.step
    kind = {1: "i8", 2: "u16", 4: "u32"}[item]

    def pad(index, source, lane_stride, k_stride, first_lane, end_lane, steps, target):
        for lane in range(first_lane, end_lane):
            from_, to = source + lane * lane_stride, target + lane * step * item
            for i in range(steps):
                store(to + i * item, load(from_ + i * k_stride, kind), kind)

    return pad


@intrinsic
def _copy_line(typing_context, source, target, count):
    """Copy so many bytes, 64 at most, and fill up to 64 with zeros; nothing else is read."""

    def generate(context, builder, signature, args):
        line, bits = ir.VectorType(I8, 64), ir.VectorType(ir.IntType(1), 64)
        from_, to = (pointer(builder, address, line) for address in args[:2])
        ones, whole = ir.Constant(I64, -1), ir.Constant(I64, 64)
        mask = builder.lshr(ones, builder.sub(whole, args[2]))
        operands = [
            from_,
            ir.Constant(I32, 1),
            builder.bitcast(mask, bits),
            ir.Constant(line, None),
        ]
        signature = ir.FunctionType(line, [x.type for x in operands])
        name = "llvm.masked.load.v64i8.p0v64i8"
        function = cgutils.get_or_insert_function(builder.module, signature, name)
        builder.store(builder.call(function, operands), to, align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@njit
def _pad_rows(source, stride, rows, row_bytes, target, target_stride):
    """Copy rows of contiguous bytes; what is between them in the target becomes zero, or is zero already."""
    for row in range(rows):
        from_, to = source + row * stride, target + row * target_stride
        for at in range(0, row_bytes, 64):
            _copy_line(from_ + at, to + at, min(64, row_bytes - at))


@intrinsic
def _clear_line(typing_context, target):
    def generate(context, builder, signature, args):
        line = ir.VectorType(I8, 64)
        builder.store(ir.Constant(line, None), pointer(builder, args[0], line), align=64)
        return context.get_dummy_value()

    return types.void(types.intp), generate


@njit
def _clear(target, count):
    for offset in range(0, count, 64):
        _clear_line(target + offset)


def _along(index, source, lane_stride, target, is_b, tiles):
    """Pack a whole block that is contiguous along k."""


@overload(_along, prefer_literal=True)
def _along_overload(index, source, lane_stride, target, is_b, tiles):
    number = index.literal_value
    parts, run = _BY_INDEX[number].parts, 16 * _BY_INDEX[number].item_bytes

    def along(index, source, lane_stride, target, is_b, tiles):
        flags = 0
        for tile in range(2):
            to, part_stride = target + tile * 1024, 2048
            if is_b:
                to, part_stride = tiles, 1024
            for lane in range(16):
                from_ = source + (tile * 16 + lane) * lane_stride
                flags |= _row(number, 0, from_, run, to + lane * 64, part_stride)
            if is_b:
                for part in range(parts):
                    _transpose(tiles + part * 1024, target + part * 2048 + tile * 1024)
        return flags

    return along


def _across(index, source, k_stride, target, is_b, tiles):
    """Pack a whole block that is contiguous along the lanes."""


@overload(_across, prefer_literal=True)
def _across_overload(index, source, k_stride, target, is_b, tiles):
    number = index.literal_value
    parts, run = _BY_INDEX[number].parts, 16 * _BY_INDEX[number].item_bytes
    per_dword = _BY_INDEX[number].per_dword

    def across(index, source, k_stride, target, is_b, tiles):
        flags = 0
        for tile in range(2):
            to, part_stride = target + tile * 1024, 2048
            if not is_b:
                to, part_stride = tiles, 1024
            for dword in range(16):
                from_ = source + dword * per_dword * k_stride + tile * run
                flags |= _row(number, 1, from_, k_stride, to + dword * 64, part_stride)
            if not is_b:
                for part in range(parts):
                    _transpose(tiles + part * 1024, target + part * 2048 + tile * 1024)
        return flags

    return across


def _pack_function(index: int) -> Any:
    scheme = _BY_INDEX[index]
    item, step, block_bytes = scheme.item_bytes, scheme.step, 2048 * scheme.parts
    fingerprint, has_masks = FINGERPRINT, "avx512bw" in cpu_flags()

    # fmt: off
    def pack(
        source, lane_stride, k_stride, lanes, k,
        first_strip, end_strip, first_step, end_step,
        target, strip_bytes, is_b, scratch, shift,
    ):
    # fmt: on
        flags = fingerprint & 0
        tiles = scratch + _TILES_AT
        # Along the lanes memory order is step by step, along k it is strip by strip.
        steps_inner = end_step - first_step if k_stride == item else 1
        for outer in range(first_step, end_step, steps_inner):
            for strip in range(first_strip, end_strip):
                for s in range(outer, outer + steps_inner):
                    lane0, k0 = strip * 32 - shift, s * step
                    from_ = source + lane0 * lane_stride + k0 * k_stride
                    to = target + (strip - first_strip) * strip_bytes
                    to += (s - first_step) * block_bytes
                    whole = lane0 >= 0 and lane0 + 32 <= lanes and k0 + step <= k
                    if whole and k_stride == item:
                        flags |= _along(index, from_, lane_stride, to, is_b, tiles)
                    elif whole and lane_stride == item:
                        flags |= _across(index, from_, k_stride, to, is_b, tiles)
                    else:
                        first, end, k_here = max(0, -lane0), min(32, lanes - lane0), min(step, k - k0)
                        _clear(scratch, 32 * step * item)
                        if has_masks and k_stride == item:
                            _pad_rows(
                                from_ + first * lane_stride, lane_stride, end - first, k_here * item,
                                scratch + first * step * item, step * item,
                            )
                        elif has_masks and lane_stride == item:
                            _pad_rows(
                                from_ + first * item, k_stride, k_here, (end - first) * item,
                                scratch + first * item, 32 * item,
                            )
                        else:
                            _pad(index, from_, lane_stride, k_stride, first, end, k_here, scratch)
                        if has_masks and k_stride != item and lane_stride == item:
                            flags |= _across(index, scratch, 32 * item, to, is_b, tiles)
                        else:
                            flags |= _along(index, scratch, step * item, to, is_b, tiles)
        return flags

    return pack


@cache
def pack_kernel(scheme: Scheme) -> int:
    """Address of the packing kernel of a scheme.

    Its arguments, `PACK_ARITY` integers: address, lane stride and k stride in bytes, number of
    lanes, k; strips and steps to pack (first, end); target and its strip stride in bytes; 1 for the
    layout of B, 0 for that of A; address of `SCRATCH_BYTES` of scratch; how many lanes of the first
    strip lie before lane 0 and are zero. It returns 0, or in two parts something else if a rounded
    value was not finite.
    """
    return compile_kernel(_pack_function(scheme.index), PACK_ARITY)
