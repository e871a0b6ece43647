"""Compiled kernels that cast a matrix and multiply it with a few vectors in one pass. Importing it imports numba."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from lowprec.backends.cpu import scaling
from lowprec.backends.cpu.casting import SCRATCH_BYTES
from lowprec.backends.cpu.casting_kernels import (
    CASTS,
    DIGITS,
    KINDS,
    Extrema,
    clear_extrema,
    clear_run,
    extrema_in,
    item_bytes,
)
from lowprec.backends.cpu.gemv_arithmetic import (
    INTEGERS,
    added,
    arithmetic,
    column_factors,
    columns_of,
    multiply_add,
    numbers_of,
)
from lowprec.backends.cpu.packed.compilation import inlined
from lowprec.backends.cpu.packed.native import I8, I32, call, compiled, emitted, load, pointer, store
from lowprec.backends.cpu.packed.vector_arithmetic import LANES

#: Numbers of vectors for which there are kernels; other numbers are padded with arbitrary memory.
WIDTHS = (1, 2, 4, 8)

#: Scratch memory: that of a cast, then 16 sums per vector.
SUMS = SCRATCH_BYTES
GEMV_SCRATCH_BYTES = SUMS + 64 * WIDTHS[-1]

#: Prefetch distance in bytes. Rounding fills the processor's out-of-order window, which then does not reach far enough
#: ahead: on a Zen 5, 2 KiB make the rounding loops 1.2 to 1.4 times as fast.
_AHEAD = 2048


def _prefetch(builder: Any, address: Any) -> None:
    """Prefetch data of a later step, further ahead than the hardware prefetcher."""
    place = pointer(builder, builder.add(address, address.type(_AHEAD)), I8)
    kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [place, I32(0), I32(3), I32(1)])


@emitted(literals=("index", "count", "width"))
def _dots(builder, index, count, width, source, steps, x, x_stride, sums, scratch):
    """Add the products of a row with each vector to that vector's 16 sums, ``count`` groups of them per step."""
    numbers, item = arithmetic(index), item_bytes(index)
    extrema = Extrema(builder, index, scratch)
    vector, word = ir.VectorType(numbers.total, LANES), source.type
    multipliers = ir.VectorType(numbers.factor, numbers.step)
    # Several sums, because additions to a single one would wait for each other.
    totals = [[cgutils.alloca_once(builder, vector) for _ in range(count)] for _ in range(width)]
    for total in (total for each in totals for total in each):
        builder.store(ir.Constant(vector, None), total)
    with cgutils.for_range(builder, steps, intp=word) as loop:
        for i in range(count):
            first = builder.add(builder.mul(loop.index, word(numbers.step * count)), word(numbers.step * i))
            from_ = builder.add(source, builder.mul(first, word(item)))
            if i * numbers.step * item % 64 == 0:
                _prefetch(builder, from_)
            value = numbers_of(builder, index, from_, extrema)
            at = builder.add(x, builder.mul(first, word(numbers.factor_bytes)))
            for j, each in enumerate(totals):
                place = builder.add(at, builder.mul(x_stride, word(j)))
                factors = builder.load(pointer(builder, place, multipliers), align=1)
                total = multiply_add(builder, value, factors, builder.load(each[i]))
                builder.store(total, each[i])
    extrema.write()
    for j, each in enumerate(totals):
        place = pointer(builder, builder.add(sums, word(64 * j)), vector)
        result = builder.load(place, align=1)
        for total in each:
            result = added(builder, result, builder.load(total))
        builder.store(result, place, align=1)


@emitted(literals=("index", "cols", "width"))
def _axpys(builder, index, cols, width, source, col_stride, steps, x, x_stride, y, y_stride, scratch):
    """Add the products of ``cols`` columns with the numbers of each vector to y, 16 rows per step."""
    item, extrema = item_bytes(index), Extrema(builder, index, scratch)
    vector, word = ir.VectorType(arithmetic(index).total, LANES), source.type
    starts = [builder.add(x, builder.mul(x_stride, word(j))) for j in range(width)]
    factors = [column_factors(builder, index, start, cols) for start in starts]
    with cgutils.for_range(builder, steps, intp=word) as loop:
        addresses = []
        for col in range(cols):
            from_ = builder.add(source, builder.mul(col_stride, word(col)))
            addresses.append(builder.add(from_, builder.mul(loop.index, word(LANES * item))))
            if LANES * item >= 32:  # for fewer bytes the hardware prefetcher suffices
                _prefetch(builder, addresses[-1])
        values = columns_of(builder, index, addresses, extrema)
        row = builder.add(y, builder.mul(loop.index, word(64)))
        for j, each in enumerate(factors):
            place = pointer(builder, builder.add(row, builder.mul(y_stride, word(j))), vector)
            total = builder.load(place, align=1)
            for value, factor_ in zip(values, each, strict=True):
                total = multiply_add(builder, value, factor_, total)
            builder.store(total, place, align=1)
    extrema.write()


@njit(inline="always")
def _copy_rest(source, source_stride, target, target_stride, width, count):
    for j in range(width):
        for i in range(0, 4 * count, 4):
            store(target + j * target_stride + i, load(source + j * source_stride + i, "u32"), "u32")


def _store_total_function(kind: str) -> Any:
    @inlined(types.void)
    def store_total(sums, target):
        total = load(sums, kind)
        for i in range(4, 64, 4):
            total += load(sums + i, kind)
        store(target, total, kind)

    return store_total


def _rows_function(index: int, width: int) -> Any:
    storage, rounding = CASTS[index]
    kind, item, is_scaled = KINDS[storage], item_bytes(index), rounding == DIGITS
    runs = max(2, 8 // width)  # so many that the sums fit the registers
    numbers = arithmetic(index)
    step, factor_bytes = numbers.step, numbers.factor_bytes
    store_total = _store_total_function("i32" if numbers is INTEGERS else "f32")

    def gemv(source, row_stride, col_stride, rows, cols, x, x_stride, y, y_stride, y_step, count, scratch):
        sums = scratch + SUMS
        if is_scaled:
            clear_extrema(scratch)
        longs, rest = cols // (step * runs), cols % step
        shorts, at = cols // step - longs * runs, longs * step * runs
        for row in range(rows):
            from_ = source + row * row_stride
            for i in range(0, 64 * width, 4):
                store(sums + i, 0, "u32")
            _dots(index, runs, width, from_, longs, x, x_stride, sums, scratch)
            short = x + at * factor_bytes
            _dots(index, 1, width, from_ + at * item, shorts, short, x_stride, sums, scratch)
            if rest:
                # The last step is padded with zeros, as x is.
                clear_run(scratch)
                for i in range(rest):
                    number = load(from_ + (cols - rest + i) * item, kind)
                    store(scratch + i * item, number, kind)
                last = x + (cols - rest) * factor_bytes
                _dots(index, 1, width, scratch, 1, last, x_stride, sums, scratch)
            for j in range(count):
                store_total(sums + 64 * j, y + j * y_stride + row * y_step)
        return extrema_in(scratch) if is_scaled else 0

    return gemv


def _columns_function(index: int, width: int) -> Any:
    storage, rounding = CASTS[index]
    kind, item, is_scaled = KINDS[storage], item_bytes(index), rounding == DIGITS
    factor_bytes, pair = arithmetic(index).factor_bytes, arithmetic(index).pair
    group = max(2, min(4 * pair, 16 // width))  # so many that the factors fit the registers

    def gemv(source, row_stride, col_stride, rows, cols, x, x_stride, y, y_stride, y_step, count, scratch):
        if is_scaled:
            clear_extrema(scratch)
        steps, rest = rows // 16, rows % 16
        for j in range(width):
            for i in range(0, 4 * rows, 4):
                store(y + j * y_stride + i, 0, "u32")
        col, end, sums = 0, y + steps * 64, scratch + SUMS
        while col < cols:
            taken = group if col + group <= cols else 1
            from_, at = source + col * col_stride, x + col * factor_bytes
            if taken == group:
                _axpys(index, group, width, from_, col_stride, steps, at, x_stride, y, y_stride, scratch)
            else:
                _axpys(index, 1, width, from_, col_stride, steps, at, x_stride, y, y_stride, scratch)
            if rest:
                _copy_rest(end, y_stride, sums, 64, width, rest)
                for c in range(taken):
                    last = from_ + c * col_stride + steps * 16 * item
                    clear_run(scratch)
                    for i in range(rest):
                        store(scratch + i * item, load(last + i * item, kind), kind)
                    one = at + c * factor_bytes
                    _axpys(index, 1, width, scratch, 0, 1, one, x_stride, sums, 64, scratch)
                _copy_rest(sums, 64, end, y_stride, width, rest)
            col += taken
        return extrema_in(scratch) if is_scaled else 0

    return gemv


@cache
def gemv_kernel(index: int, width: int, by_rows: bool) -> Any:
    """Return the kernel of one of `CASTS` that multiplies a matrix with `width` vectors, a function of 12 integers.

    Matrix: address, row and column stride in bytes (one is the element size), rows, columns. Vectors (float32, padded
    with zeros to a multiple of 16; for int8: int16, 32): address, stride between vectors. Results: address, strides
    between vectors and between elements, number of vectors to write. Address of `GEMV_SCRATCH_BYTES` of scratch memory.
    Returns the same as a cast.
    """
    function = _rows_function(index, width) if by_rows else _columns_function(index, width)
    return compiled(function)


_merged = njit(scaling.merged)


def _read(cast, source, stride, step, count, k, x, x_stride, scratch):
    extrema = 0
    for j in range(count):
        target = x + j * x_stride
        found = call(cast, (source + j * stride, 0, step, 1, k, target, scratch))
        extrema = _merged(extrema, found)
        for i in range(4 * k, x_stride, 4):
            store(target + i, 0, "u32")
    return extrema


def _read_integers(cast, source, stride, step, count, k, x, x_stride, scratch):
    for j in range(count):
        from_, target = source + j * stride, x + j * x_stride
        for i in range(k):
            store(target + 2 * i, load(from_ + i * step, "i8"), "u16")
        for i in range(2 * k, x_stride, 2):
            store(target + i, 0, "u16")
    return 0


@cache
def vectors_kernel(is_integer: bool) -> Any:
    """Return the kernel that casts vectors for :func:`gemv_kernel`, int8 to int16; a function of nine integers.

    Address of the casting kernel; vectors: address, strides between vectors and between numbers, both counts; address
    and stride of the cast vectors; address of scratch memory. Returns the same as a cast.
    """
    return compiled(_read_integers if is_integer else _read)
