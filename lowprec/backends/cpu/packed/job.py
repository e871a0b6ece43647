"""The fields of a GEMM job, an array of 64-bit words that Python passes to the macro-kernel.

Strides are in bytes; `ALPHA` and `BETA` are float64. The counters shared by threads come first, each on its own cache
line.
"""

from __future__ import annotations

# --- written by the threads ---
PACK_NEXT = 0  # the next task of the packing phase
PACK_DONE = 8  # number of completed tasks of the packing phase
TASK_NEXT = 16  # the next block of the result
NOT_FINITE = 24  # set if a two-part operand contains Inf or NaN
SUM_NOT_FINITE = 25  # set if a sum of split operands is Inf or NaN

# --- set up once ---
(
    M, N, K, STEPS,
    A, A_ROW_STRIDE, A_COL_STRIDE,
    B, B_ROW_STRIDE, B_COL_STRIDE,
    OUT, OUT_ROW_STRIDE, OUT_COL_STRIDE,
    C, C_ROW_STRIDE, C_COL_STRIDE, C_KIND,
    BIAS, BIAS_ROW_STRIDE, BIAS_COL_STRIDE, BIAS_KIND,
    ALPHA, BETA, ACTIVATION, STREAM, TILE_CONFIG,
    PACK_A, PACK_B, KERNEL, EPILOGUE,
    A_PARTS, B_PARTS, B_PACKED, B_STRIP_BYTES, A_STRIP_BYTES,
    STRIPS_M, STRIPS_N, PACK_B_STRIPS, PACK_B_STEPS, PACK_B_TASKS, PACK_TASKS,
    TASK_STRIPS_M, TASK_STRIPS_N, TASKS_N, TASKS, CHUNK_STEPS, INNER_STEPS,
    ACC_OFFSET, SCRATCH_OFFSET, CHUNK_OFFSET, KEPT_OFFSET,
    A_OWN_BYTES, B_TASK_STRIP_BYTES, LAST_KERNEL,
) = range(32, 32 + 54)  # fmt: skip

WORDS = 96

# STREAM: the result is written with non-temporal stores of whole cache lines. The incomplete line at the end of a row
# may be kept for the next block, in scratch memory at KEPT_OFFSET.

# CHUNK_OFFSET: for split operands, the offset of a scratch block in which each chunk of k is summed separately, before
# it is added to the other sums and checked for non-finite numbers. Otherwise 0.

# A_OWN_BYTES: bytes of packed A if A is short. Each thread then packs all of A before its first task, and each task
# packs its strips of B, B_TASK_STRIP_BYTES each (0 if B was prepared). Otherwise 0; each task packs its strips of A.

#: Codes of element types in `C_KIND` and `BIAS_KIND`.
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int32": 3}

RELU, GELU = 1, 2
ACTIVATIONS = {None: 0, "relu": RELU, "gelu": GELU}

# --- a batch: its products are copies of one job with other addresses ---
BATCH_NEXT = 0  # the next product; written by the threads
BATCH_NOT_FINITE = 1  # set if NOT_FINITE or SUM_NOT_FINITE of a product is set
BATCH_JOB, BATCH_COUNT, BATCH_FIELD_A, BATCH_FIELD_B, BATCH_SCRATCH = range(8, 8 + 5)
BATCH_TABLE = 14  # addresses of a, b, out and c of each product
BATCH_BYTES_A, BATCH_BYTES_B = 15, 16  # bytes from these addresses to be prefetched
BATCH_EXTREMA = 17  # the kernel whose results for a and b replace their addresses in the table; 0 for none
BATCH_WORDS = 24

#: Bytes of an accumulator block and of the scratch memory of its epilogue.
BLOCK_SCRATCH_BYTES = 4096 + 256

#: Cache lines of the next piece of B that a micro-kernel prefetches per step, which is a strip in eight calls.
PREFETCH_LINES = 4
