"""The words of a job for the kernels of small products, 64 bits each; strides and steps are in bytes."""

from __future__ import annotations

from lowprec.backends.cpu import casting

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
WORDS = 40

#: As `ACTIVATION` says it. GELU of float64 is left to NumPy.
RELU, GELU = 1, 2

BATCH_NEXT = 0  # the next product; written by the threads
(
    BATCH_JOB,
    BATCH_PRODUCT,  # the kernel
    BATCH_COUNT,
    BATCH_SHARE,  # how many a thread takes at a time
    BATCH_TABLE,  # the addresses of a, b, out and c for each product
    BATCH_BIAS,
    BATCH_FACTORS,
    BATCH_KEPT_B,  # of a prepared b, the same in all of them, the rows once cast; else 0
) = range(8, 16)
BATCH_WORDS = 16

#: Element types of results, by the number that the kernels know them by, and their bytes.
OUT_DTYPES, OUT_BYTES = ("float32", "float64", "float16", "bfloat16"), (4, 8, 2, 2)

#: The scratch memory begins with what a cast needs, and goes on with what it has made where that is to be widened.
CAST_SCRATCH = casting.SCRATCH_BYTES
