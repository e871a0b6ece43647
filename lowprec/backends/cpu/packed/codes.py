"""Decoding of 8- and 4-bit codes to bfloat16, which represents every number, or to float32, by tables in registers.

A prepared operand B of these formats is kept as codes in the order of its tiles, and decoded each time it is packed. A
block, 32 columns of 32 elements of k, is a record::

    tile (columns 0 to 15, 16 to 31) -> row (pair of elements of k) -> column -> pair of codes, 2 bytes or 1
    tile -> block of elements of k -> column -> code of the scale

A code of 4 bits with an even index along k is in the low half of its byte.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from lowprec.backends.cpu.packed.compilation import compile_kernel
from lowprec.backends.cpu.packed.native import I8, I16, I32, I64, emitted, inline_asm, pointer, shuffle, vector
from lowprec.backends.cpu.packed.vector_arithmetic import bits_of, floats_of, splat, widened_bfloat16
from lowprec.formats import BLOCK_FORMATS, FLOAT8_E8M0FNU

_WORDS, _BYTES = ir.VectorType(I16, 32), ir.VectorType(I8, 32)

#: Prefetch distance in bytes, for the records that are decoded after the product with these: 8 rows times 4096 x 4096
#: take 0.7 of the time on a Zen 5.
_AHEAD = 4096


@cache
def _table(dtype: str) -> tuple[Any, ...]:
    """Return the bits of the 128 non-negative numbers of an 8-bit format as bfloat16, in four vectors."""
    numbers = np.arange(128, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    with np.errstate(invalid="ignore"):  # signalling NaN
        words = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    return tuple(vector(I16, row) for row in words.reshape(4, 32).tolist())


def _instruction(builder: Any, name: str, *operands: Any) -> Any:
    """Return the result, of the first operand's type, of an instruction of AVX-512."""
    signature = ir.FunctionType(operands[0].type, [x.type for x in operands])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.avx512.{name}")
    return builder.call(function, operands)


def widened_float8(builder: Any, dtype: str, codes: Any) -> Any:
    """Return 32 numbers of an 8-bit format as the bits of bfloat16."""

    def splat(value: int) -> Any:
        return vector(I16, [value] * 32)

    table, words = _table(dtype), builder.zext(codes, _WORDS)
    # VPERMI2W reads the low six bits of an index, for a table of two vectors.
    small = _instruction(builder, "vpermi2var.hi.512", table[0], words, table[1])
    large = _instruction(builder, "vpermi2var.hi.512", table[2], words, table[3])
    is_large = builder.icmp_signed("!=", builder.and_(words, splat(64)), splat(0))
    magnitude = builder.select(is_large, large, small)
    return builder.or_(magnitude, builder.and_(builder.shl(words, splat(8)), splat(0x8000)))


#: Formats of prepared operands that are kept as codes; a kernel is named by its index here.
CODED = ("float8_e4m3fn", "float8_e5m2", *(name for name, row in BLOCK_FORMATS.items() if row.scales))


def code_bits(name: str) -> int:
    """Return the bits of a code of one of `CODED`."""
    return BLOCK_FORMATS[name].bits if name in BLOCK_FORMATS else 8


def blocks_per_step(name: str) -> int:
    """Return the number of scales per column in 32 elements of k."""
    return 32 // BLOCK_FORMATS[name].block if name in BLOCK_FORMATS else 0


def records_of(name: str, codes: Any, scales: Any) -> Any:
    """Return the records of a matrix (k, n), shape (strips, steps).

    ``codes`` has shape (n, bytes along k) and ``scales`` shape (n, blocks along k), both uint8; it is None for formats
    without blocks.
    """
    pair, blocks = np.dtype(f"u{code_bits(name) // 4}"), blocks_per_step(name)
    n, nbytes = codes.shape
    strips, steps = -(-n // 32), -(-nbytes // (16 * pair.itemsize))
    fields: list[Any] = [("codes", pair, (2, 16, 16)), ("scales", np.uint8, (2, blocks, 16))]
    records = np.empty((strips, steps), np.dtype(fields))
    for field, x, each in (("codes", codes, 16), ("scales", scales, blocks)):
        if each:
            columns = steps * each * records[field].itemsize
            whole = np.ascontiguousarray(np.pad(x, [(0, 32 * strips - n), (0, columns - x.shape[1])]))
            parts = whole.view(records[field].dtype).reshape(strips, 2, 16, steps, each)
            records[field] = parts.transpose(0, 3, 1, 4, 2)
    return records


def _scales(builder: Any, name: str, address: Any) -> Any:
    """Return 16 scales as float32."""
    codes = builder.load(pointer(builder, address, ir.VectorType(I8, 16)), align=1)
    if BLOCK_FORMATS[name].scales is not FLOAT8_E8M0FNU:
        words = widened_float8(builder, "float8_e4m3fn", shuffle(builder, codes, codes, range(32)))
        return floats_of(builder, widened_bfloat16(builder, shuffle(builder, words, words, range(16))))
    exponents = builder.zext(codes, ir.VectorType(I32, 16))
    bits = builder.shl(exponents, splat(23))
    smallest = builder.icmp_unsigned("==", exponents, splat(0))  # 2^-127 is a subnormal float32
    bits = builder.select(smallest, splat(1 << 22), bits)
    is_nan = builder.icmp_unsigned("==", exponents, splat(255))
    return floats_of(builder, builder.select(is_nan, splat(0x7FC00000), bits))


def _words(builder: Any, name: str, address: Any) -> Any:
    """Return 32 numbers of 8 bits, without their scales, as the bits of bfloat16."""
    dtype = "float8_e4m3fn" if name in BLOCK_FORMATS else name
    return widened_float8(builder, dtype, builder.load(pointer(builder, address, _BYTES), align=1))


def _pairs(builder: Any, name: str, address: Any, scale: Any) -> list[Any]:
    """Return the even and the odd elements of k of 16 columns as the bits of float32."""
    if code_bits(name) == 8:
        both = builder.bitcast(_words(builder, name, address), ir.VectorType(I32, 16))
        halves = [builder.shl(both, splat(16)), builder.and_(both, splat(0xFFFF0000))]
    else:
        codes = builder.load(pointer(builder, address, ir.VectorType(I8, 16)), align=1)
        codes = builder.zext(codes, ir.VectorType(I32, 16))
        numbers = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        table = vector(I32, numbers.view(np.uint32).tolist())
        # VPERMD reads the low four bits of an index.
        halves = [_instruction(builder, "permvar.si.512", table, x) for x in (codes, builder.lshr(codes, splat(4)))]
    if scale is None:
        return halves
    return [bits_of(builder, builder.fmul(floats_of(builder, x), scale)) for x in halves]


def _store(builder: Any, address: Any, offset: int, row: Any) -> None:
    builder.store(row, pointer(builder, builder.add(address, I64(offset)), row.type), align=64)


@emitted(literals=("index", "is_wide"))
def _unpack_tile(builder, index, is_wide, codes, scales, target):
    """Decode a tile of 16 rows: of pairs of bfloat16, or of one float32 from half a record."""
    name, scale = CODED[index], None
    blocks, row_bytes = blocks_per_step(name), 4 * code_bits(name)
    for row in range(8 if is_wide else 16):
        source = builder.add(codes, I64(row * row_bytes))
        if row * row_bytes % 64 == 0:
            inline_asm(builder, "prefetcht0 ($0)", "r", ir.VoidType(), [builder.add(source, I64(_AHEAD))])
        if blocks and row % (16 // blocks) == 0:
            scale = _scales(builder, name, builder.add(scales, I64(row * blocks)))
        if not (blocks or is_wide):
            _store(builder, target, 64 * row, _words(builder, name, source))
            continue
        even, odd = _pairs(builder, name, source, scale)
        if is_wide:
            _store(builder, target, 128 * row, even)
            _store(builder, target, 128 * row + 64, odd)
            continue
        # Products have six significant bits. Low bits of subnormal ones are cut off; the units flush them to zero.
        both = builder.or_(builder.lshr(even, splat(16)), builder.and_(odd, splat(0xFFFF0000)))
        _store(builder, target, 64 * row, both)


def _unpack_function(index: int, is_wide: int) -> Any:
    name = CODED[index]
    tile_bytes, scale_bytes = 64 * code_bits(name), 16 * blocks_per_step(name)
    # A record has two steps of float32.
    half_bytes, half_scales = tile_bytes // 2, scale_bytes // 2 if scale_bytes == 32 else 0

    # fmt: off
    def unpack(
        source, strip_stride, step_stride, lanes, k,
        first_strip, end_strip, first_step, end_step,
        target, strip_bytes, is_b, scratch,
    ):
    # fmt: on
        for strip in range(first_strip, end_strip):
            to = target + (strip - first_strip) * strip_bytes
            for step in range(first_step, end_step):
                half = step & is_wide
                from_ = source + strip * strip_stride + (step >> is_wide) * step_stride
                for tile in range(2):
                    codes = from_ + tile * tile_bytes + half * half_bytes
                    scales = from_ + 2 * tile_bytes + tile * scale_bytes + half * half_scales
                    _unpack_tile(index, is_wide, codes, scales, to + tile * 1024)
                to += 2048
        return 0

    return unpack


@cache
def unpack_kernel(name: str, *, is_wide: bool) -> int:
    """Return the address of the kernel that decodes a format, with the arguments of `packing.pack_kernel`.

    The strides are those between strips and between steps of the records. With ``is_wide`` it decodes to float32.
    """
    return compile_kernel(_unpack_function(CODED.index(name), int(is_wide)))
