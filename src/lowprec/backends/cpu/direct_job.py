"""The job of a kernel for small products: its words, 64 bits each, and how they are written.

Strides and steps are in bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any

from lowprec.backends.cpu import casting
from lowprec.backends.cpu.fp32_units import rounding_format
from lowprec.backends.cpu.scaling import FLOAT16_DIGITS
from lowprec.formats import FLOAT16, DType, NumberFormat
from lowprec.planning import Activation, GemmLayout, GemmPlan, MatrixStack

M, N, K = range(3)
#: The first words of the matrices that are cast, and those that each has. `CAST` is the address of what casts, 0 for
#: float64 that stays what it is; `WIDEN` that of what casts and rounds nothing, where the matrix may have to be scaled.
A, B, C, BIAS = range(3, 27, 6)
ROWS, COLS, ROW_STRIDE, COL_STRIDE, CAST, WIDEN = range(6)
(
    A_ROW_STEP,  # of A once cast
    A_K_STEP,
    OUT_ROW_STRIDE,
    OUT_COL_STRIDE,
    ACTIVATION,
    AT_A,  # places in the scratch memory
    AT_B,
    AT_C,
    AT_BIAS,
    AT_EXPONENTS,  # whether b is scaled, and the exponents of b and of a, 64 bits each
    AT_BLOCK,
    TO_FLOAT16,  # the address of what rounds scaled numbers
    PLAIN,  # whether sums are the result, in rows without gaps
) = range(27, 40)
#: Of products of parts: the first words of a and b, which are split, and those that each has.
PARTS_A, PARTS_B = 40, 45
(
    PART_COUNT,  # but for the sum of all
    HAS_SUM,  # whether that is the part behind the last
    PART_STEP,  # from one to the next
    AT_PARTS,  # the place in the scratch memory; the exponents of b's columns are in front of its parts
    IS_SCALED,
) = range(5)
(
    PART_EXPONENT,  # of the power of two by which a part is multiplied, beyond the one before
    SPLIT,  # the address of what splits
    PRODUCTS,  # how many are summed
    MENDS,  # whether elements that are not finite are computed again, from the operands as they are
) = range(50, 54)
WORDS = 54

#: The products of parts, one after the other behind the words above: how far both parts begin behind the first of
#: their operand, the length of the sums, and the factor as a float64.
A_OFFSET, B_OFFSET, LENGTH, FACTOR = range(4)
PRODUCT_WORDS = 4

#: As `ACTIVATION` says it. GELU of float64 is left to NumPy.
RELU, GELU = 1, 2
ACTIVATIONS = {None: 0, Activation.RELU: RELU, Activation.GELU: GELU}

BATCH_NEXT = 0  # the next product; written by the threads
(
    BATCH_JOB,
    BATCH_PRODUCT,  # the kernel
    BATCH_COUNT,
    BATCH_SHARE,  # how many a thread takes at a time
    BATCH_BIAS,
    BATCH_FACTORS,
    BATCH_KEPT_B,  # of a prepared b, the same in all of them, the rows once cast; else 0
    BATCH_A,  # addresses of the first of each
    BATCH_B,
    BATCH_OUT,
    BATCH_C,
    BATCH_RUN,  # how many products have their operands cast at a time; 1 where each casts its own
    BATCH_RUN_A,  # of each operand, the place in the scratch memory; 0 where it does not follow one another
    BATCH_RUN_B,
    BATCH_DIMENSIONS,  # how many; they follow, the innermost first
) = range(8, 23)
BATCH_WORDS = 23

#: A dimension of a batch: its extent, and how far one matrix of a, b, out and c lies from the next.
EXTENT, A_STEP, B_STEP, OUT_STEP, C_STEP = range(5)
DIMENSION_WORDS = 5

#: Element types of results, by the number that the kernels know them by, and their bytes.
OUT_DTYPES, OUT_BYTES = ("float32", "float64", "float16", "bfloat16", "int32"), (4, 8, 2, 2, 4)

#: The scratch memory begins with what a cast needs, and goes on with what it has made where that is to be widened.
CAST_SCRATCH = casting.SCRATCH_BYTES

#: Vectors are read and written as a whole, and may begin with the last element of a matrix.
PAD = 256


def job_of(
    plan: GemmPlan,
    layout: GemmLayout,
    c: MatrixStack | None,
    to: NumberFormat | None,
    places: dict[int, int],
    more: int = 0,
) -> Any:
    """Return the words of a product, operands rounded as they are cast.

    ``places`` are words for places in the scratch memory besides those of the matrices once cast, with their bytes;
    ``more`` words follow for the caller to write.
    """
    problem = plan.problem
    m, n, k, item = layout.m, layout.n, layout.k, plan.accumulator.itemsize
    # A is read number by number, so it may stay in columns.
    in_columns = abs(layout.a.row_stride) < abs(layout.a.col_stride)
    a = layout.a.transposed if in_columns else layout.a
    matrices = {A: (a, to), B: (layout.b, to)}
    if c is not None:
        matrices[C] = c, None
    if problem.bias is not None:
        (stride,) = problem.bias.strides
        matrices[BIAS] = MatrixStack.of(problem.bias.dtype, 1, n, 0, stride), None
    words = {
        M: m, N: n, K: k,
        A_ROW_STEP: item if in_columns else k * item,
        A_K_STEP: m * item if in_columns else item,
        OUT_ROW_STRIDE: layout.out.row_stride * layout.out.dtype.itemsize,
        OUT_COL_STRIDE: layout.out.col_stride * layout.out.dtype.itemsize,
        ACTIVATION: ACTIVATIONS.get(problem.activation, 0),
        PLAIN: not problem.has_epilogue and layout.out.col_stride == 1
        and layout.out.dtype is plan.accumulator is not DType.INT32,
    }  # fmt: skip
    for first, (matrix, fmt) in matrices.items():
        words |= {first + i: word for i, word in enumerate(_cast_words(matrix, fmt))}
    if to is FLOAT16_DIGITS:
        words[TO_FLOAT16] = _cast_address(DType.FLOAT32, FLOAT16)
    place = CAST_SCRATCH
    if item == 8:
        place += 4 * max(m * k, k * n, m * n) + PAD
    elements = {AT_A: m * k, AT_B: k * n, AT_C: m * n, AT_BIAS: n}
    sizes = {at: count * item for at, count in elements.items()} | places | {AT_BLOCK: 0}
    for at, nbytes in sizes.items():
        words[at] = place
        place += nbytes + PAD
    job = (ctypes.c_int64 * (WORDS + more))()
    for index, word in words.items():
        job[index] = word
    return job


def rounding_of(plan: GemmPlan) -> NumberFormat | None:
    """Return the format to which operands are rounded that need not be scaled."""
    return FLOAT16_DIGITS if any(plan.scaled) else rounding_format(plan)


def _cast_words(matrix: MatrixStack, to: NumberFormat | None) -> tuple[int, ...]:
    """Return how a matrix is read, from `ROWS` to `WIDEN`; one without gaps as a single row."""
    rows, cols, item = matrix.rows, matrix.cols, matrix.dtype.itemsize
    row_stride, col_stride = matrix.row_stride, matrix.col_stride
    if col_stride == 1 and row_stride == cols:
        rows, cols = 1, rows * cols
    cast = widen = 0
    if matrix.dtype is not DType.FLOAT64:
        cast = _cast_address(matrix.dtype, to)
    if to is FLOAT16_DIGITS:
        widen = _cast_address(matrix.dtype, None)
    return rows, cols, row_stride * item, col_stride * item, cast, widen


def _cast_address(dtype: DType, to: NumberFormat | None) -> int:
    index = casting.cast_index(dtype.label, to)
    assert index is not None, "plans for this kernel multiply what it reads"
    address: int = casting.kernels().cast_address(index)
    return address
