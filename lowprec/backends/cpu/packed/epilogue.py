"""The epilogue of the packed kernels: from a block of accumulators to the output.

An accumulator block is 32 x 32 float32 (int32 for int8 operands) as four 16 x 16 tiles of 1 KiB:
top left, top right, bottom left, bottom right. The epilogue computes in float32, in this order,

    v = alpha * acc;  v = v + beta * c;  v = v + bias;  v = activation(v)

each operation rounded once, and then rounds `v` once to the output's type, to nearest even. NaN stays NaN.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from lowprec.backends.cpu import gelu
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.compilation import compile_kernel, inlined
from lowprec.backends.cpu.packed.native import (
    F16,
    F32,
    I16,
    I32,
    call,
    compiled,
    emitted,
    field,
    lesser,
    load,
    pointer,
    store,
    vector,
)
from lowprec.backends.cpu.packed.result_rows import BFLOAT16, FLOAT16, FLOAT32, at, writer


@emitted(types.float32)
def _load_float16(builder, address):
    return builder.fpext(builder.load(pointer(builder, address, F16), align=2), F32)


@emitted(types.float32, of=types.uint32)
def _float32_of_bits(builder, bits):
    return builder.bitcast(bits, F32)


@emitted(types.CPointer(types.float32))
def _floats(builder, address):
    """The address of float32 values, for `carray`: loops over an array become vector code."""
    return pointer(builder, address, F32)


@emitted(literals=("kind",))
def _widen_row(builder, source, target, kind):
    floats, wide, halves = (ir.VectorType(t, 32) for t in (F32, I32, F16))
    if kind == FLOAT32:
        values = builder.load(pointer(builder, source, floats), align=1)
    elif kind == BFLOAT16:
        words = builder.load(pointer(builder, source, ir.VectorType(I16, 32)), align=1)
        shifted = builder.shl(builder.zext(words, wide), vector(I32, [16] * 32))
        values = builder.bitcast(shifted, floats)
    else:
        stored = builder.load(pointer(builder, source, halves), align=1)
        values = builder.fpext(stored, floats)
    builder.store(values, pointer(builder, target, floats), align=1)


@inlined(types.float32)
def _get(address, kind):
    if kind == FLOAT32:
        return load(address, "f32")
    if kind == BFLOAT16:
        return _float32_of_bits(np.uint32(load(address, "u16")) << np.uint32(16))
    return _load_float16(address)


_ONE, _TWO, _MINUS_ZERO = np.float32(1), np.float32(2), np.float32(-0.0)


@inlined(types.float32)
def _exp(x):
    """e**x for float32; every operation as in `gelu.py`."""
    x = x if x > gelu.LEAST_EXPONENT else gelu.LEAST_EXPONENT
    x = x if x < gelu.LARGEST_EXPONENT else gelu.LARGEST_EXPONENT
    n = (x * gelu.LOG2E + gelu.MAGIC) - gelu.MAGIC
    r = x - n * gelu.LN2_HIGH - n * gelu.LN2_LOW
    p = gelu.COEFFICIENTS[0]
    for i in range(1, 6):
        p = p * r + gelu.COEFFICIENTS[i]
    value = p * r * r + r + _ONE
    return value * _float32_of_bits(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))


@inlined(types.float32)
def _gelu(x):
    # The limits in _exp drop a NaN; dividing x restores it.
    y = gelu.OUTER * (x + gelu.INNER * x * x * x)
    return _MINUS_ZERO if y < gelu.LEAST else x / (_ONE + _exp(-_TWO * y))


@inlined(types.void)
def _activate(acc, activation):
    values = carray(_floats(acc), (1024,))
    if activation == J.RELU:
        for i in range(1024):
            # A comparison that keeps NaN.
            values[i] = np.float32(0) if values[i] < np.float32(0) else values[i]
    else:
        for i in range(1024):
            values[i] = _gelu(values[i])


@inlined(types.void)
def _read_row(source, stride, kind, end, target):
    """Read a row of up to 32 elements of any kind as float32."""
    whole = end == 32
    if whole and kind == FLOAT32 and stride == 4:
        _widen_row(source, target, FLOAT32)
    elif whole and kind == BFLOAT16 and stride == 2:
        _widen_row(source, target, BFLOAT16)
    elif whole and kind == FLOAT16 and stride == 2:
        _widen_row(source, target, FLOAT16)
    else:
        for j in range(end):
            store(target + 4 * j, _get(source + j * stride, kind), "f32")


@inlined(types.void)
def _add_array(acc, rows, end, factor, source, row_stride, col_stride, kind, scratch):
    """Add rows of any kind and strides. Columns beyond `end` are added too, but not written."""
    addend = carray(_floats(scratch), (32,))
    for i in range(rows):
        # A bias has row stride 0 and is read once.
        if i == 0 or row_stride != 0:
            _read_row(source + i * row_stride, col_stride, kind, end, scratch)
        left, right = (carray(_floats(at(acc, i, 0)), (16,)), carray(_floats(at(acc, i, 16)), (16,)))
        for j in range(16):
            left[j] += factor * addend[j]
        for j in range(16):
            right[j] += factor * addend[16 + j]


@inlined(types.void)
def _arithmetic(acc, job, row, col, rows, end, scratch):
    alpha = np.float32(load(job + 8 * J.ALPHA, "f64"))
    beta = np.float32(load(job + 8 * J.BETA, "f64"))
    if alpha != _ONE:
        values = carray(_floats(acc), (1024,))
        for i in range(1024):
            values[i] *= alpha
    if beta != np.float32(0):
        row_stride, col_stride = field(job, J.C_ROW_STRIDE), field(job, J.C_COL_STRIDE)
        source = field(job, J.C) + row * row_stride + col * col_stride
        kind = field(job, J.C_KIND)
        _add_array(acc, rows, end, beta, source, row_stride, col_stride, kind, scratch)
    if field(job, J.BIAS) != 0:
        row_stride, col_stride = field(job, J.BIAS_ROW_STRIDE), field(job, J.BIAS_COL_STRIDE)
        source = field(job, J.BIAS) + row * row_stride + col * col_stride
        kind = field(job, J.BIAS_KIND)
        _add_array(acc, rows, end, _ONE, source, row_stride, col_stride, kind, scratch)
    activation = field(job, J.ACTIVATION)
    if activation != 0:
        _activate(acc, activation)


@inlined(types.void)
def _fill_row(acc, i, source, end):
    if end == 32:
        left, right = carray(_floats(at(acc, i, 0)), (16,)), carray(_floats(at(acc, i, 16)), (16,))
        numbers = carray(_floats(source), (32,))
        for j in range(16):
            left[j] = numbers[j]
        for j in range(16):
            right[j] = numbers[16 + j]
    else:
        for j in range(end):
            store(at(acc, i, j), load(source + 4 * j, "f32"), "f32")


def _epilogue_function(kind: int, computes: bool) -> Any:
    write = writer(kind)

    def epilogue(acc, job, row, col, scratch, kept, place):
        rows, end = lesser(32, field(job, J.M) - row), lesser(32, field(job, J.N) - col)
        if computes:
            _arithmetic(acc, job, row, col, rows, end, scratch)
        target = field(job, J.OUT) + row * field(job, J.OUT_ROW_STRIDE) + col * field(job, J.OUT_COL_STRIDE)
        write(acc, job, target, rows, end, scratch, kept, place)
        return 0

    return epilogue


@cache
def epilogue_kernel(dtype: str, computes: bool) -> int:
    """Return the address of the epilogue that writes `dtype`; without `computes` it only writes.

    It takes seven integers: address of the accumulator block (which it may overwrite), address of the job,
    first row, first column, address of 256 bytes of scratch; the last two are those of ``result_rows.writer``.
    """
    return compile_kernel(_epilogue_function(J.KINDS[dtype], computes))


@cache
def rows_kernel() -> Any:
    """Return the kernel that applies a job's epilogue to a row-major float32 product.

    It takes the addresses of the product, the job, and `BLOCK_SCRATCH_BYTES` of memory at a multiple of 64.
    """

    def apply(product, job, acc):
        m, n = field(job, J.M), field(job, J.N)
        for row in range(0, m, 32):
            for col in range(0, n, 32):
                rows, end = lesser(32, m - row), lesser(32, n - col)
                for i in range(rows):
                    _fill_row(acc, i, product + 4 * ((row + i) * n + col), end)
                call(field(job, J.EPILOGUE), (acc, job, row, col, acc + 4096, 0, 0))
        return 0

    return compiled(apply)
