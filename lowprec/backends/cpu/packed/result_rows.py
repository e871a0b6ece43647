"""Rounding and writing of the rows of a block; large results with non-temporal stores.

A non-temporal store of a whole cache line saves reading the line, half of the traffic, and does not evict packed
operands. If the rows of a block do not begin at a cache line, the incomplete line at their end waits for the block to
the right, which the same task computes later. Without AVX-512 such rows are written with ordinary stores.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from lowprec.backends.cpu.cpuinfo import cpu_flags
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.compilation import inlined
from lowprec.backends.cpu.packed.native import F16, I16, I32, I64, emitted, field, load, pointer, shuffle, store, vector
from lowprec.backends.cpu.packed.vector_arithmetic import floats_of, narrowed_bfloat16

#: Memory for the last vector of each row of a strip, for non-temporal stores.
KEPT_BYTES = 32 * 64
#: Bits for the position of a block in its task.
LAST, FIRST = 1, 2

FLOAT32, BFLOAT16, FLOAT16, INT32 = (J.KINDS[name] for name in ("float32", "bfloat16", "float16", "int32"))
ITEM_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, INT32: 4}


def _converted(builder: Any, address: Any, kind: int) -> Any:
    bits = builder.load(pointer(builder, address, ir.VectorType(I32, 16)), align=64)
    if kind == BFLOAT16:
        return narrowed_bfloat16(builder, bits)
    if kind == FLOAT16:
        halves = builder.fptrunc(floats_of(builder, bits), ir.VectorType(F16, 16))
        return builder.bitcast(halves, ir.VectorType(I16, 16))
    return bits


def _converted_row(builder: Any, address: Any, kind: int) -> list[Any]:
    next_tile = builder.add(address, ir.Constant(I64, 1024))
    values = [_converted(builder, half, kind) for half in (address, next_tile)]
    if ITEM_BYTES[kind] == 2:
        return [shuffle(builder, values[0], values[1], range(32))]
    return values


def _stream(builder: Any, line: Any, address: Any) -> None:
    stored = builder.store(line, pointer(builder, address, line.type), align=64)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))


@emitted(literals=("kind", "stream"))
def _put_row(builder, source, target, kind, stream):
    """Write a row of a block, 32 contiguous elements; with `stream` by non-temporal stores, aligned to a cache line."""
    for i, value in enumerate(_converted_row(builder, source, kind)):
        address = builder.add(target, ir.Constant(I64, 64 * i))
        if stream:
            _stream(builder, value, address)
        else:
            builder.store(value, pointer(builder, address, value.type), align=1)


@emitted(literals=("kind",))
def _put_across(builder, source, target, kind, behind, kept):
    """Write whole cache lines by non-temporal stores: elements `kept` from the block before, then those of this row.

    The line begins `behind` elements before the target. The row's last vector is kept for the next block.
    """
    values = _converted_row(builder, source, kind)
    line, item = values[0].type, ITEM_BYTES[kind]
    before = builder.load(pointer(builder, kept, line), align=64)
    first = builder.sub(ir.Constant(I64, line.count), behind)
    order = builder.insert_element(
        ir.Constant(line, ir.Undefined), builder.trunc(first, line.element), ir.Constant(I32, 0)
    )
    order = shuffle(builder, order, order, [0] * line.count)
    order = builder.add(order, vector(line.element, range(line.count)))
    name = f"llvm.x86.avx512.vpermi2var.{'hi' if item == 2 else 'd'}.512"
    two = cgutils.get_or_insert_function(builder.module, ir.FunctionType(line, [line] * 3), name)
    target = builder.sub(target, builder.mul(behind, ir.Constant(I64, item)))
    for i, value in enumerate(values):
        whole = builder.call(two, [before, order, value])
        _stream(builder, whole, builder.add(target, ir.Constant(I64, 64 * i)))
        before = value
    builder.store(before, pointer(builder, kept, line), align=64)


@emitted(literals=("kind",))
def _keep(builder, source, kind, kept):
    last = _converted_row(builder, source, kind)[-1]
    builder.store(last, pointer(builder, kept, last.type), align=64)


@emitted(literals=("kind",))
def _put_some(builder, source, target, kind, mask):
    """Write those of 16 contiguous elements whose bit in `mask` is set."""
    value, some = _converted(builder, source, kind), ir.VectorType(ir.IntType(1), 16)
    at, width = pointer(builder, target, value.type), value.type.element.width
    signature = ir.FunctionType(ir.VoidType(), [value.type, at.type, I32, some])
    name = f"llvm.masked.store.v16i{width}.p0v16i{width}"
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    selected = builder.bitcast(builder.trunc(mask, I16), some)
    builder.call(function, [value, at, ir.Constant(I32, 1), selected])


@inlined(types.intp)
def at(acc, i, j):
    """Address of the accumulator of row i, column j."""
    return acc + (i >> 4) * 2048 + (j >> 4) * 1024 + (i & 15) * 64 + (j & 15) * 4


def _put_lines_function(kind: int, put_some: Any) -> Any:
    item, crosses = ITEM_BYTES[kind], "avx512bw" in cpu_flags()
    element = "u16" if item == 2 else "u32"

    @inlined(types.void)
    def put_lines(acc, target, row_stride, rows, end, kept, place):
        """Write the rows of a block by non-temporal stores of whole cache lines."""
        for i in range(rows):
            source, to, from_ = at(acc, i, 0), target + i * row_stride, kept + 64 * i
            # Elements since the start of a cache line; mask of the elements for ordinary stores.
            behind, rest = (to & 63) // item, (1 << end) - 1
            if end == 32 and behind == 0:
                _put_row(source, to, kind, 1)
                rest = 0
            elif end == 32 and not crosses:
                _put_row(source, to, kind, 0)
                rest = 0
            elif crosses and place & FIRST == 0:
                if end == 32:
                    _put_across(source, to, kind, behind, from_)
                    rest = (((1 << behind) - 1) << (32 - behind)) * (place & LAST)
                else:
                    for j in range(-behind, 0):
                        store(to + j * item, load(from_ + 64 + j * item, element), element)
            elif crosses and place & LAST == 0:
                _keep(source, kind, from_)
                rest = (1 << (32 - behind)) - 1
            if rest != 0:
                put_some(source, to, rest)

    return put_lines


def writer(kind: int) -> Any:
    """Return the function that writes a block to a result of this kind.

    It takes the accumulators, the job, the address of the first row, numbers of rows and columns, the addresses of 256
    bytes of scratch and of the rows' `KEPT_BYTES`, and whether the block is the `FIRST` or the `LAST` of these rows in
    its task.
    """
    item = ITEM_BYTES[kind]
    element = "u16" if item == 2 else "u32"

    @inlined(types.void)
    def put_some(source, to, mask):
        _put_some(source, to, kind, mask & 0xFFFF)
        _put_some(source + 1024, to + 16 * item, kind, mask >> 16)

    put_lines = _put_lines_function(kind, put_some)

    @inlined(types.void)
    def write(acc, job, target, rows, end, scratch, kept, place):
        row_stride, col_stride = field(job, J.OUT_ROW_STRIDE), field(job, J.OUT_COL_STRIDE)
        if col_stride == item and field(job, J.STREAM) != 0:
            put_lines(acc, target, row_stride, rows, end, kept, place)
        elif col_stride == item and end == 32:
            for i in range(rows):
                _put_row(at(acc, i, 0), target + i * row_stride, kind, 0)
        elif col_stride == item:
            for i in range(rows):
                put_some(at(acc, i, 0), target + i * row_stride, (1 << end) - 1)
        else:
            for i in range(rows):
                _put_row(at(acc, i, 0), scratch, kind, 0)
                to = target + i * row_stride
                for j in range(end):
                    store(to + j * col_stride, load(scratch + j * item, element), element)

    return write
