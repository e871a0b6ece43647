"""Packing of an operand of any layout into the tiles of a micro-kernel.

An operand has *lanes* (rows of A, columns of B) and *k*. A strip has 32 lanes; a step along k fills a tile row of 64
bytes: 32 elements of 16 bits, or 64 of 8 bits. A block, 32 lanes of one step, is packed into two tiles per part (lanes
0 to 15 and 16 to 31), each of 16 rows of 64 bytes::

    strip -> step -> part -> tile -> 16 rows x 64 bytes

A row of a tile of A is one lane. A row of a tile of B is one dword of k (two values of 16 bits, or four of 8 bits) for
each of 16 lanes. As 16 x 16 matrices of dwords, the two layouts are transposes of each other. An operand is read
*along* k or *across* lanes, whichever is contiguous, and transposed in registers if the other layout is needed. Blocks
at the edge, and operands that are contiguous in neither direction, are first copied to a zero-padded block.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from lowprec.backends.cpu.cpuinfo import cpu_flags
from lowprec.backends.cpu.packed.compilation import compile_kernel, inlined
from lowprec.backends.cpu.packed.native import I8, I32, I64, emitted, lesser, load, pointer, prefetch_line, store
from lowprec.backends.cpu.packed.tile_rows import Scheme, pack_row, transpose

#: Scratch memory of a packing kernel: a padded block, and the tiles to be transposed.
SCRATCH_BYTES = 16 << 10
_TILES_AT = 8 << 10

#: Prefetch distance in steps, for reading along k: hardware prefetchers do not follow 32 streams.
_AHEAD = 4


def _pad_function(scheme: Scheme) -> Any:
    item, step = scheme.item_bytes, scheme.step
    kind = {1: "i8", 2: "u16", 4: "u32"}[item]

    @inlined(types.void)
    def pad(source, lane_stride, k_stride, lanes, steps, target):
        """Copy lanes and steps to a block of 32 x step, contiguous along k, padded with zeros."""
        for lane in range(lanes):
            from_, to = source + lane * lane_stride, target + lane * step * item
            for i in range(steps):
                store(to + i * item, load(from_ + i * k_stride, kind), kind)

    return pad


@emitted()
def _copy_line(builder, source, target, count):
    """Copy ``count`` bytes, at most 64, and pad them with zeros to 64, without reading beyond them."""
    line, bits = ir.VectorType(I8, 64), ir.VectorType(ir.IntType(1), 64)
    from_, to = (pointer(builder, address, line) for address in (source, target))
    ones, whole = ir.Constant(I64, -1), ir.Constant(I64, 64)
    mask = builder.lshr(ones, builder.sub(whole, count))
    some = builder.bitcast(mask, bits)
    operands = [from_, ir.Constant(I32, 1), some, ir.Constant(line, None)]
    signature = ir.FunctionType(line, [x.type for x in operands])
    name = "llvm.masked.load.v64i8.p0v64i8"
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    builder.store(builder.call(function, operands), to, align=1)


@inlined(types.void)
def _pad_rows(source, stride, rows, row_bytes, target, target_stride):
    """Copy rows of contiguous bytes to rows padded with zeros."""
    for row in range(rows):
        from_, to = source + row * stride, target + row * target_stride
        for at in range(0, row_bytes, 64):
            _copy_line(from_ + at, to + at, lesser(64, row_bytes - at))


@emitted()
def _clear_line(builder, target):
    line = ir.VectorType(I8, 64)
    builder.store(ir.Constant(line, None), pointer(builder, target, line), align=64)


@inlined(types.void)
def _clear(target, count):
    for offset in range(0, count, 64):
        _clear_line(target + offset)


def _block_function(scheme: Scheme, across: int) -> Any:
    index, parts, per_dword = scheme.index, scheme.parts, scheme.per_dword
    run = 16 * scheme.item_bytes
    ahead = _AHEAD * scheme.step * scheme.item_bytes

    @inlined(types.intp)
    def pack_block(source, stride, target, is_b, tiles):
        """Pack a whole block that is contiguous along k or, if `across`, along the lanes."""
        row_stride, tile_stride, run_stride = stride, 16 * stride, run
        if across:
            row_stride, tile_stride, run_stride = per_dword * stride, run, stride
        flags = 0
        for tile in range(2):
            to, part_stride = target + tile * 1024, 2048
            if is_b != across:
                to, part_stride = tiles, 1024
            for row in range(16):
                from_ = source + tile * tile_stride + row * row_stride
                if not across:
                    prefetch_line(from_ + ahead)
                flags |= pack_row(index, across, from_, run_stride, to + row * 64, part_stride)
            if is_b != across:
                for part in range(parts):
                    transpose(tiles + part * 1024, target + part * 2048 + tile * 1024)
        return flags

    return pack_block


def _rows_function(scheme: Scheme) -> Any:
    index, per_dword, run = scheme.index, scheme.per_dword, 16 * scheme.item_bytes

    @inlined(types.intp)
    def pack_rows(source, stride, target, strips, strip_bytes):
        """Pack a step of whole strips of B, contiguous across the lanes, row by row: the strips share cache lines."""
        flags = 0
        for row in range(16):
            for tile in range(2 * strips):
                from_ = source + row * per_dword * stride + tile * run
                to = target + (tile >> 1) * strip_bytes + (tile & 1) * 1024 + row * 64
                flags |= pack_row(index, 1, from_, stride, to, 2048)
        return flags

    return pack_rows


def _pack_function(scheme: Scheme) -> Any:
    pad, rows = _pad_function(scheme), _rows_function(scheme)
    along, across = (_block_function(scheme, way) for way in (0, 1))
    item, step, block_bytes = scheme.item_bytes, scheme.step, 2048 * scheme.parts
    has_masks = "avx512bw" in cpu_flags()

    # fmt: off
    def pack(
        source, lane_stride, k_stride, lanes, k,
        first_strip, end_strip, first_step, end_step,
        target, strip_bytes, is_b, scratch,
    ):
    # fmt: on
        flags = 0
        tiles = scratch + _TILES_AT
        # In memory order: strip by strip if k is contiguous, otherwise step by step.
        steps_inner = end_step - first_step if k_stride == item else 1
        for outer in range(first_step, end_step, steps_inner):
            strip = first_strip
            while strip < end_strip:
                strips = 1
                for s in range(outer, outer + steps_inner):
                    lane0, k0 = strip * 32, s * step
                    from_ = source + lane0 * lane_stride + k0 * k_stride
                    to = target + (strip - first_strip) * strip_bytes
                    to += (s - first_step) * block_bytes
                    whole = lane0 + 32 <= lanes and k0 + step <= k
                    if whole and k_stride == item:
                        flags |= along(from_, lane_stride, to, is_b, tiles)
                    elif whole and lane_stride == item and is_b != 0:
                        strips = lesser(end_strip, lanes // 32) - strip
                        flags |= rows(from_, k_stride, to, strips, strip_bytes)
                    elif whole and lane_stride == item:
                        flags |= across(from_, k_stride, to, is_b, tiles)
                    else:
                        end, k_here = lesser(32, lanes - lane0), lesser(step, k - k0)
                        _clear(scratch, 32 * step * item)
                        if has_masks and k_stride == item:
                            _pad_rows(from_, lane_stride, end, k_here * item, scratch, step * item)
                        elif has_masks and lane_stride == item:
                            _pad_rows(from_, k_stride, k_here, end * item, scratch, 32 * item)
                        else:
                            pad(from_, lane_stride, k_stride, end, k_here, scratch)
                        if has_masks and k_stride != item and lane_stride == item:
                            flags |= across(scratch, 32 * item, to, is_b, tiles)
                        else:
                            flags |= along(scratch, step * item, to, is_b, tiles)
                strip += strips
        return flags

    return pack


@cache
def pack_kernel(scheme: Scheme) -> int:
    """Return the address of the packing kernel of a scheme.

    It takes 13 integers: address, lane stride and k stride in bytes, lanes, k; strips and steps to pack
    (first, end); target and its strip stride in bytes; 1 for the layout of B, 0 for that of A; address of
    `SCRATCH_BYTES` of scratch. For operands in two parts it returns nonzero if a rounded value is not finite.
    """
    return compile_kernel(_pack_function(scheme))
