"""Native kernels that multiply a matrix with a vector as they cast it.

Importing this module imports numba.
"""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lowprec.backends.cpu import casting_kernels
from lowprec.backends.cpu.casting_kernels import (
    CASTS,
    DIGITS,
    ELEMENTS,
    KINDS,
    LANES,
    Extrema,
    cast_vector,
    clear_extrema,
    clear_run,
    extrema_in,
    float_splat,
    floats_of,
)
from lowprec.backends.cpu.packed import native
from lowprec.backends.cpu.packed.native import (
    F32,
    I8,
    I16,
    I32,
    compile_kernel,
    load,
    pointer,
    store,
)

# The cache on disk knows a kernel by its name and by what it closes over.
FINGERPRINT = zlib.crc32(Path(__file__).read_bytes()) ^ casting_kernels.FINGERPRINT
#: Bytes from what a loop reads to what it asks for. The arithmetic on the way fills the processor's window, so that it
#: does not look far enough ahead by itself: on a Zen 5, 2 KiB make the loops that round 1.2 to 1.4 times as fast.
_AHEAD = 2048


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, in one operation where there is one: products of two rounded numbers are exact anyway."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for what the loop reads some steps later, more than the processor looks ahead by itself."""
    place = pointer(builder, builder.add(address, address.type(_AHEAD)), I8)
    kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [place, I32(0), I32(3), I32(1)])


@intrinsic(prefer_literal=True)
def _dots(typing_context, index, count, source, steps, x, sums, scratch):
    """Add to 16 sums the products of a row with x, ``count`` times 16 numbers at each step."""
    number, vectors = index.literal_value, count.literal_value
    item = {I32: 4, I16: 2, I8: 1}[ELEMENTS[CASTS[number][0]]]

    def generate(context, builder, signature, args):
        _, _, source, steps, x, sums, scratch = args
        extrema = Extrema(builder, number, scratch)
        vector, word = ir.VectorType(F32, LANES), source.type
        place = pointer(builder, sums, vector)
        # One sum would wait for itself at each step.
        totals = [cgutils.alloca_once(builder, vector) for _ in range(vectors)]
        for total in totals:
            builder.store(float_splat(0.0), total)
        with cgutils.for_range(builder, steps, intp=word) as loop:
            for i, total in enumerate(totals):
                number_at = builder.add(
                    builder.mul(loop.index, word(LANES * vectors)), word(LANES * i)
                )
                at = builder.add(x, builder.mul(number_at, word(4)))
                factors = builder.load(pointer(builder, at, vector), align=1)
                from_ = builder.add(source, builder.mul(number_at, word(item)))
                if i * LANES * item % 64 == 0:
                    _prefetch(builder, from_)
                value = floats_of(builder, cast_vector(builder, number, from_, extrema))
                builder.store(_multiply_add(builder, value, factors, builder.load(total)), total)
        extrema.write()
        result = builder.load(place, align=1)
        for total in totals:
            result = builder.fadd(result, builder.load(total))
        builder.store(result, place, align=1)
        return context.get_dummy_value()

    return types.void(index, count, *[types.intp] * 5), generate


@intrinsic(prefer_literal=True)
def _axpys(typing_context, index, cols, source, col_stride, steps, x, y, scratch):
    """Add to y the products of ``cols`` columns with as many numbers at x, 16 rows at each step."""
    number, count = index.literal_value, cols.literal_value
    item = {I32: 4, I16: 2, I8: 1}[ELEMENTS[CASTS[number][0]]]

    def generate(context, builder, signature, args):
        _, _, source, col_stride, steps, x, y, scratch = args
        extrema = Extrema(builder, number, scratch)
        vector, word = ir.VectorType(F32, LANES), source.type
        factors = []
        for col in range(count):
            factor = builder.load(pointer(builder, builder.add(x, word(4 * col)), F32), align=1)
            first = builder.insert_element(ir.Constant(vector, ir.Undefined), factor, I32(0))
            factors.append(native.shuffle(builder, first, first, [0] * LANES))
        with cgutils.for_range(builder, steps, intp=word) as loop:
            place = pointer(builder, builder.add(y, builder.mul(loop.index, word(64))), vector)
            total = builder.load(place, align=1)
            for col, factor in enumerate(factors):
                from_ = builder.add(source, builder.mul(col_stride, word(col)))
                from_ = builder.add(from_, builder.mul(loop.index, word(LANES * item)))
                _prefetch(builder, from_)
                value = floats_of(builder, cast_vector(builder, number, from_, extrema))
                total = _multiply_add(builder, value, factor, total)
            builder.store(total, place, align=1)
        extrema.write()
        return context.get_dummy_value()

    return types.void(index, cols, *[types.intp] * 6), generate


def _gemv_function(index: int) -> Any:
    storage, rounding = CASTS[index]
    kind, is_scaled = KINDS[storage], rounding == DIGITS
    item = {"u32": 4, "u16": 2, "i8": 1}[kind]
    fingerprint = FINGERPRINT

    def gemv(source, row_stride, col_stride, rows, cols, x, y, y_stride, scratch):
        if is_scaled:
            clear_extrema(scratch)
        if col_stride == item:
            longs, rest = cols // 128, cols % 16
            shorts, at = (cols - longs * 128) // 16, longs * 128
            for row in range(rows):
                from_ = source + row * row_stride
                for i in range(0, 64, 4):
                    store(scratch + i, 0, "u32")
                _dots(index, 8, from_, longs, x, scratch, scratch)
                _dots(index, 1, from_ + at * item, shorts, x + at * 4, scratch, scratch)
                if rest:
                    # The numbers that a whole step lacks are zeros, as those behind x are.
                    for i in range(64, 128, 4):
                        store(scratch + i, 0, "u32")
                    for i in range(rest):
                        number = load(from_ + (cols - rest + i) * item, kind)
                        store(scratch + 64 + i * item, number, kind)
                    _dots(index, 1, scratch + 64, 1, x + (cols - rest) * 4, scratch, scratch)
                total = load(scratch, "f32")
                for i in range(4, 64, 4):
                    total += load(scratch + i, "f32")
                store(y + row * y_stride, total, "f32")
            return (fingerprint & 0) + (extrema_in(scratch) if is_scaled else 0)
        steps, rest = rows // 16, rows % 16
        for i in range(0, 4 * rows, 4):
            store(y + i, 0, "u32")
        col = 0
        while col < cols:
            count = 4 if col + 4 <= cols else 1
            from_, tail = source + col * col_stride, steps * 16
            if count == 4:
                _axpys(index, 4, from_, col_stride, steps, x + col * 4, y, scratch)
            else:
                _axpys(index, 1, from_, col_stride, steps, x + col * 4, y, scratch)
            if rest:
                for i in range(rest):
                    store(scratch + 256 + 4 * i, load(y + 4 * (tail + i), "u32"), "u32")
                for c in range(count):
                    at = from_ + c * col_stride + tail * item
                    clear_run(scratch)
                    for i in range(rest):
                        store(scratch + i * item, load(at + i * item, kind), kind)
                    _axpys(index, 1, scratch, 0, 1, x + (col + c) * 4, scratch + 256, scratch)
                for i in range(rest):
                    store(y + 4 * (tail + i), load(scratch + 256 + 4 * i, "u32"), "u32")
            col += count
        return (fingerprint & 0) + (extrema_in(scratch) if is_scaled else 0)

    return gemv


@cache
def gemv_kernel(index: int) -> Any:
    """Return the kernel of one of `CASTS` that multiplies a matrix with a vector, to be called with nine integers.

    Address, row stride and column stride of the matrix, in bytes, one of the two being the size of an element; its
    rows and columns; the address of a float32 vector that zeros fill up to a multiple of 16; address and stride in
    bytes of a float32 result, without gaps where the matrix has contiguous columns; the address of 512 bytes of
    scratch memory. It returns what a cast does.
    """
    return native.callable_at(compile_kernel(_gemv_function(index), 9), 9)
