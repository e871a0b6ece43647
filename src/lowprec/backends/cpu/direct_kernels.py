"""Native kernels for small products: operands are cast as they are read, and nothing is packed into strips.

A product is cast to rows of float32 (float64 for accumulators of float64), multiplied in blocks of 8 rows and 16
columns, and written with its epilogue. Every product of two numbers is rounded, and added to the sum of its element, in
the order of k: NumPy's multiplications and additions give the same bits.

Importing this module imports numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from lowprec.backends.cpu import direct_job as D
from lowprec.backends.cpu import scaling
from lowprec.backends.cpu.cpuinfo import cpu_flags
from lowprec.backends.cpu.direct_blocks import LANES, finish_row, multiply_block
from lowprec.backends.cpu.packed.native import (
    F32,
    F64,
    atomic_add,
    call,
    compile_kernel,
    field,
    load,
    pointer,
    store,
)

PRODUCT_ARITY, BATCH_ARITY = 10, 2

WORDS = {2: "u16", 4: "u32", 8: "i64"}

# The cache on disk knows a kernel by its name and by what it closes over.


# --- operands ---------------------------------------------------------------------------------


@intrinsic
def _widen_16(typing_context, source, target):
    """Write 16 float32 in sequence as float64."""

    def generate(context, builder, signature, args):
        floats = builder.load(pointer(builder, args[0], ir.VectorType(F32, LANES)), align=1)
        wide = builder.fpext(floats, ir.VectorType(F64, LANES))
        builder.store(wide, pointer(builder, args[1], wide.type), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@njit
def cast(job, first, source, target, scratch, item):
    """Write a matrix, whose words begin at `first`, as rows without gaps; return whether it must be scaled."""
    rows, cols = field(job, first + D.ROWS), field(job, first + D.COLS)
    row_stride = field(job, first + D.ROW_STRIDE)
    col_stride = field(job, first + D.COL_STRIDE)
    kernel = field(job, first + D.CAST)
    if kernel == 0:  # float64 as it is
        for i in range(rows):
            for j in range(cols):
                word = load(source + i * row_stride + j * col_stride, "i64")
                store(target + (i * cols + j) * 8, word, "i64")
        return False
    floats = target if item == 4 else scratch + D.CAST_SCRATCH
    extrema = call(kernel, (source, row_stride, col_stride, rows, cols, floats, scratch))
    if item == 8:
        # All are read and written in whole vectors, for which there is room.
        for i in range(0, rows * cols, 16):
            _widen_16(floats + 4 * i, target + 8 * i)
    return extrema != 0 and _lies_apart(extrema)


# --- scaling, where numbers lie far apart -------------------------------------------------------

_lies_apart = njit(scaling.lies_apart)


@njit
def _power_of_two(exponent, scratch):
    store(scratch, (exponent + 1023) << 52, "i64")
    return load(scratch, "f64")


@njit
def scale(target, lanes, k, lane_step, k_step, exponents, scratch):
    """Scale each row of A or column of B of float32 numbers by a power of two; write the exponents."""
    for lane in range(lanes):
        at, largest = target + lane * lane_step, 0.0
        for i in range(k):
            magnitude = abs(types.float64(load(at + i * k_step, "f32")))
            if magnitude < np.inf:
                largest = max(largest, magnitude)
        exponent = 0
        if largest > 0:
            store(scratch, largest, "f64")
            exponent = scaling.TOP_EXPONENT + 1023 - (load(scratch, "i64") >> 52)
        store(exponents + 8 * lane, exponent, "i64")
        factor = _power_of_two(exponent, scratch)
        for i in range(k):
            # What is no float32 any more is far below float16's smallest number.
            x = types.float32(load(at + i * k_step, "f32") * factor)
            store(at + i * k_step, x, "f32")


@njit
def _cast_scaled(job, first, source, target, lanes, k, lane_step, k_step, exponents, scratch):
    """Write a matrix anew, each row of A or column of B scaled and rounded to float16, and the exponents."""
    rows, cols = field(job, first + D.ROWS), field(job, first + D.COLS)
    row_stride = field(job, first + D.ROW_STRIDE)
    col_stride = field(job, first + D.COL_STRIDE)
    widen = field(job, first + D.WIDEN)
    call(widen, (source, row_stride, col_stride, rows, cols, target, scratch))
    scale(target, lanes, k, lane_step, k_step, exponents, scratch)
    call(field(job, D.TO_FLOAT16), (target, 0, 4, 1, lanes * k, target, scratch))


@njit
def _cast_b(job, source, target, exponents, scratch, item):
    """Cast B, scaled if it must be, which a word before the exponents tells."""
    n, k = field(job, D.N), field(job, D.K)
    is_scaled = cast(job, D.B, source, target, scratch, item)
    if is_scaled:
        _cast_scaled(job, D.B, source, target, n, k, item, n * item, exponents, scratch)
    store(exponents - 8, int(is_scaled), "i64")


@njit
def cast_addends(job, c, bias, has_bias, scratch, item):
    """Cast what is added, and return where it is, 0 where there is nothing; the bias may be there already."""
    c_at = bias_at = 0
    if bias != 0:
        bias_at = scratch + field(job, D.AT_BIAS)
        if not has_bias:
            cast(job, D.BIAS, bias, bias_at, scratch, item)
    if c != 0:
        c_at = scratch + field(job, D.AT_C)
        cast(job, D.C, c, c_at, scratch, item)
    return c_at, bias_at


@njit
def _complete_exponents(a_is_scaled, of_a, m, of_b, n):
    """Return whether any operand is scaled; the exponents of one that is not beside it become 0."""
    b_is_scaled = load(of_b - 8, "i64") != 0
    if a_is_scaled and not b_is_scaled:
        for col in range(n):
            store(of_b + 8 * col, 0, "i64")
    elif b_is_scaled and not a_is_scaled:
        for row in range(m):
            store(of_a + 8 * row, 0, "i64")
    return a_is_scaled or b_is_scaled


@njit
def unscale(block, rows, columns, of_a, of_b, scratch):
    """Take back what rows of A and columns of B were scaled by."""
    for row in range(rows):
        for col in range(columns):
            at = block + (row * 16 + col) * 4
            exponent = load(of_a + 8 * row, "i64") + load(of_b + 8 * col, "i64")
            x = types.float64(load(at, "f32")) * _power_of_two(-exponent, scratch)
            store(at, types.float32(x), "f32")


# --- products ---------------------------------------------------------------------------------


@njit(inline="always")
def _write_product(item, vectors, m, n, k, a, row_step, k_step, b, out, row_stride):
    """Write sums as they are, to rows without gaps."""
    for j in range(0, n, 16 * vectors):
        columns = min(16 * vectors, n - j)
        for i in range(0, m, 8):
            rows, to = min(8, m - i), out + i * row_stride + j * item
            if columns > 16:
                multiply_block(
                    item, vectors, a + i * row_step, rows - 1, row_step, k_step, b + j * item,
                    n * item, k, to, row_stride, columns,
                )  # fmt: skip
            else:
                multiply_block(
                    item, 1, a + i * row_step, rows - 1, row_step, k_step, b + j * item,
                    n * item, k, to, row_stride, columns,
                )  # fmt: skip


@njit(inline="always")
def write_block(item, kind, word, width, job, block, i, j, out, c_at, bias_at, factors):
    """Write 8 rows by 16 columns of sums, those from row `i` and column `j` on, with their epilogue.

    Columns come from the last to the first: where rows follow one another without gaps, what is written beyond the end
    of a row is written again with the next one.
    """
    m, n, activation = field(job, D.M), field(job, D.N), field(job, D.ACTIVATION)
    row_stride, col_stride = field(job, D.OUT_ROW_STRIDE), field(job, D.OUT_COL_STRIDE)
    row_buffer, columns = block + 8 * 16 * item, min(16, n - j)
    spills = col_stride == width and row_stride == n * width
    whole = columns == 16 and col_stride == width
    for row in range(min(8, m - i)):
        to = out + (i + row) * row_stride + j * col_stride
        in_place = whole or (spills and (i + row) * n + j + 16 <= m * n)
        target = to if in_place else row_buffer
        finish_row(
            item, kind, block + row * 16 * item, factors,
            c_at + ((i + row) * n + j) * item if c_at != 0 else 0,
            bias_at + j * item if bias_at != 0 else 0, activation, target,
        )  # fmt: skip
        if not in_place:
            for col in range(columns):
                number = load(row_buffer + col * width, word)
                store(to + col * col_stride, number, word)


def _product_function(item: int, kind: int) -> Any:
    width = D.OUT_BYTES[kind]
    # Twice as many sums fit into the registers of AVX-512: each number of A is read for 32 of B.
    vectors = 2 if item == 4 and "avx512f" in cpu_flags() else 1
    word = WORDS[width]

    def product(job, a, b, out, c, bias, factors, has_a, has_b, scratch):
        m, n, k = field(job, D.M), field(job, D.N), field(job, D.K)
        a_at, b_at = scratch + field(job, D.AT_A), scratch + field(job, D.AT_B)
        row_step, k_step = field(job, D.A_ROW_STEP), field(job, D.A_K_STEP)
        of_b = scratch + field(job, D.AT_EXPONENTS) + 8
        of_a = of_b + 8 * n
        is_scaled = False
        if has_a != 0:
            a_at = has_a
        else:
            is_scaled = cast(job, D.A, a, a_at, scratch, item)
        if is_scaled:
            _cast_scaled(job, D.A, a, a_at, m, k, row_step, k_step, of_a, scratch)
        if has_b == 0:
            _cast_b(job, b, b_at, of_b, scratch, item)
        elif has_b != 1:
            b_at = has_b
            store(of_b - 8, 0, "i64")
        c_at, bias_at = cast_addends(job, c, bias, has_b == 1, scratch, item)
        is_scaled = _complete_exponents(is_scaled, of_a, m, of_b, n)
        row_stride, block = field(job, D.OUT_ROW_STRIDE), scratch + field(job, D.AT_BLOCK)
        if field(job, D.PLAIN) != 0 and not is_scaled:
            _write_product(item, vectors, m, n, k, a_at, row_step, k_step, b_at, out, row_stride)
            return 0
        # The last columns come first: see `write_block`.
        for j in range((n - 1) // 16 * 16, -16, -16):
            for i in range(0, m, 8):
                rows = min(8, m - i)
                multiply_block(
                    item, 1, a_at + i * row_step, rows - 1, row_step, k_step, b_at + j * item,
                    n * item, k, block, 16 * item, 16,
                )  # fmt: skip
                if is_scaled:
                    unscale(block, rows, min(16, n - j), of_a + 8 * i, of_b + 8 * j, scratch)
                write_block(item, kind, word, width, job, block, i, j, out, c_at, bias_at, factors)
        return 0

    return product


@cache
def product_kernel(wide: bool, dtype: str) -> int:
    """Return the address of the kernel that sums in float32 or float64 and writes ``dtype``.

    Its arguments, `PRODUCT_ARITY` integers: address of the job; of a, b, out, c and bias (0 where there is none); of
    alpha and beta as two float64; the address of a where it was cast before, else 0; 1 where the scratch memory holds b
    and bias already, the address of b where it was cast before, else 0; address of the scratch memory.
    """
    function = _product_function(8 if wide else 4, D.OUT_DTYPES.index(dtype))
    return compile_kernel(function, PRODUCT_ARITY)


@njit(inline="always")
def _matrices(batch, index):
    """Return where the matrices of one product of a batch lie."""
    a, b = field(batch, D.BATCH_A), field(batch, D.BATCH_B)
    out, c = field(batch, D.BATCH_OUT), field(batch, D.BATCH_C)
    dimensions, rest = field(batch, D.BATCH_DIMENSIONS), index
    at = batch + 8 * D.BATCH_WORDS
    for number in range(dimensions):
        i = rest
        if number + 1 < dimensions:
            rest = i // field(at, D.EXTENT)
            i -= rest * field(at, D.EXTENT)
        a, b = a + i * field(at, D.A_STEP), b + i * field(at, D.B_STEP)
        out, c = out + i * field(at, D.OUT_STEP), c + i * field(at, D.C_STEP)
        at += 8 * D.DIMENSION_WORDS
    return a, b, out, c


@njit
def _cast_run(job, first, source, target, count, scratch):
    """Cast several matrices that follow one another without gaps; return where they are, 0 if they may be apart."""
    size = field(job, first + D.ROWS) * field(job, first + D.COLS) * count
    kernel, col_stride = field(job, first + D.CAST), field(job, first + D.COL_STRIDE)
    extrema = call(kernel, (source, 0, col_stride, 1, size, target, scratch))
    return 0 if extrema != 0 and _lies_apart(extrema) else target


@njit
def _cast_runs(batch, first, count, scratch):
    """Cast the operands of several products; return where those of A and B are, 0 if each casts its own."""
    at_a, at_b = field(batch, D.BATCH_RUN_A), field(batch, D.BATCH_RUN_B)
    job = field(batch, D.BATCH_JOB)
    a, b, _, _ = _matrices(batch, first)
    cast_a = cast_b = 0
    if at_a != 0:
        cast_a = _cast_run(job, D.A, a, scratch + at_a, count, scratch)
    if at_b != 0:
        cast_b = _cast_run(job, D.B, b, scratch + at_b, count, scratch)
    return cast_a, cast_b


@cache
def batch_kernel() -> int:
    """Return the address of the kernel that runs a product's for each of a batch.

    Its arguments, `BATCH_ARITY` integers: address of the batch's words, of the scratch memory. Threads take products
    from a shared counter, several at a time, so that a matrix that is the same in all of them is cast once for them,
    and small ones that follow one another are cast together.
    """

    def drive(batch, scratch):
        job, product = field(batch, D.BATCH_JOB), field(batch, D.BATCH_PRODUCT)
        count, share = field(batch, D.BATCH_COUNT), field(batch, D.BATCH_SHARE)
        bias, factors = field(batch, D.BATCH_BIAS), field(batch, D.BATCH_FACTORS)
        kept_b, before, run = field(batch, D.BATCH_KEPT_B), 0, field(batch, D.BATCH_RUN)
        bytes_a = 4 * field(job, D.M) * field(job, D.K)
        bytes_b = 4 * field(job, D.K) * field(job, D.N)
        while True:
            first = atomic_add(batch + 8 * D.BATCH_NEXT, share)
            if first >= count:
                break
            end = min(first + share, count)
            for start in range(first, end, run):
                stop, cast_a, cast_b = min(start + run, end), 0, 0
                if run > 1:
                    cast_a, cast_b = _cast_runs(batch, start, stop - start, scratch)
                for index in range(start, stop):
                    a, b, out, c = _matrices(batch, index)
                    has_b = kept_b
                    if cast_b != 0:
                        has_b, cast_b, before = cast_b, cast_b + bytes_b, 0
                    elif kept_b == 0:
                        has_b, before = int(b == before), b
                    call(product, (job, a, b, out, c, bias, factors, cast_a, has_b, scratch))
                    if cast_a != 0:
                        cast_a += bytes_a
        return 0

    return compile_kernel(drive, BATCH_ARITY)
