"""The arithmetic of a product, as its descriptors define it, on bytes of the software devices.

Products of up to 32-bit floating-point numbers are formed and summed in float64 and rounded once to float32, which
accumulates; split parts are rounded in the type that their reduction scheme names. The epilogue is float32, each of
its operations rounded. Integers wrap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from software_cuda import tables
from software_cuda.algorithms import INPLACE, OUTPUT_TYPE, Algorithm
from software_cuda.emulation import bf16x9, fixed_point
from software_cuda.problem import Matrix, Problem
from software_cuda.recorder import Fault
from support.oracles import round_to


def strided(memory, x, pointer, device):
    """Return an array (batch, rows, cols) on the device's memory; raises Fault if any element is not allocated."""
    first, end = x.span()
    data = memory.at(pointer + first, end - first, device, f"cublasLtMatmul, {x.name}")
    if x.bits == 4:
        data = np.stack([data & 15, data >> 4], -1).reshape(-1)
    size = x.dtype.itemsize
    strides = [s * size if n > 1 else 0 for s, n in zip(x.strides, x.shape, strict=True)]
    return np.ndarray(x.shape, x.dtype, data, -first, strides)


def _rounded(x, flags):
    """Return operands as the units round them, in the type in which they are multiplied."""
    for flag, mode in (
        (tables.INPUT_TF32, "tf32"),
        (tables.INPUT_16F, "fp16"),
        (tables.INPUT_16BF, "bf16"),
    ):
        if flags & flag:
            x = round_to(x, mode)
    kinds = {"c": np.complex128, "i": np.int64}
    return x.astype(kinds.get(x.dtype.kind, np.float64))


def block_scales(memory, pointer, mode, outer, k, device):
    """Return a factor for each element, (outer, k), from the scales of blocks of k in tiles of 128 x 4.

    Raises Fault if a scale is not allocated, or one of an incomplete tile, beyond the operand, is not zero.
    """
    block, dtype = tables.BLOCKS[mode]
    columns = -(-k // block)
    shape = (-(-outer // 128) * 128, -(-columns // 4) * 4)
    data = memory.at(pointer, math.prod(shape), device, "cublasLtMatmul, scales of blocks")
    row, column = np.indices(shape)
    tile = (column // 4 * 4 + row // 128 * shape[1]) * 128
    found = data[tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]
    if found[outer:].any() or found[:, columns:].any():
        raise Fault("scales beyond the operand are not zero")
    if mode == tables.VEC16_UE4M3:
        found = found & np.uint8(0x7F)  # whose sign is ignored
    factors = found[:outer, :columns].view(dtype).astype(np.float64)
    return np.repeat(factors, block, 1)[:, :k]


def float_scales(memory, pointer, mode, outer, k, device):
    """Return a factor for each element, (outer, k), from float32 scales of vectors or blocks.

    Scales of vectors and of 128 along k are contiguous along the vectors; those of 128 x 128 along k, in columns of
    a multiple of 4.
    """
    blocks, tall = -(-k // 128), -(-outer // 128)
    shape = {
        tables.OUTER_VEC_32F: (1, outer),
        tables.VEC128_32F: (blocks, outer),
        tables.BLK128x128_32F: (tall, blocks + -blocks % 4),
    }[mode]
    data = memory.at(pointer, 4 * math.prod(shape), device, "cublasLtMatmul, float32 scales")
    found = data.view(np.float32).reshape(shape).astype(np.float64)
    if mode == tables.OUTER_VEC_32F:
        return np.broadcast_to(found.T, (outer, k))
    if mode == tables.VEC128_32F:
        return np.repeat(found.T, 128, 1)[:, :k]
    return np.repeat(np.repeat(found[:, :blocks], 128, 0), 128, 1)[:outer, :k]


@dataclass(frozen=True)
class Call:
    """A product with its pointers and factors, as they were when it was called."""

    problem: Problem
    algorithm: Algorithm
    alpha: Any
    beta: Any
    a: int
    b: int
    c: int
    d: int
    device: int

    def multiply(self, memory):
        """Read the operands and return the values of D, in its type."""
        x = self.problem
        with np.errstate(all="ignore"):
            product = self._product(memory)
            value = product * self._scale(memory) * self.alpha
            if self.beta != 0:
                addend = strided(memory, x.c, self.c, self.device)
                value = value + self.beta * addend.astype(value.dtype)
            if x.has_bias:
                value = value + self._bias(memory).astype(value.dtype)
            return _activated(value, x.activation).astype(x.d.dtype)

    def _product(self, memory):
        x, algorithm = self.problem, self.algorithm
        scale = tables.DTYPES[x.scale]
        if x.emulation and algorithm.flags == tables.EMULATED_FLAGS[x.compute]:
            return self._emulated(memory, x.emulation)
        accumulator = np.dtype(np.int32) if algorithm.flags & tables.ACCUMULATOR_32I else scale
        a = _operand(strided(memory, x.a, self.a, self.device), x.op_a, algorithm.flags)
        b = _operand(strided(memory, x.b, self.b, self.device), x.op_b, algorithm.flags)
        if x.a_mode:
            scales = float_scales if (x.a_mode, x.b_mode) in tables.FLOAT_SCALES else block_scales
            a = a * scales(memory, x.a_scale, x.a_mode, x.m, x.k, self.device)
            b = b * scales(memory, x.b_scale, x.b_mode, x.n, x.k, self.device).T
        cuts = np.linspace(0, x.k, algorithm.split_k + 1).astype(int)
        parts = [
            np.matmul(a[:, :, i:j], b[:, i:j, :]).astype(accumulator) for i, j in pairwise(cuts)
        ]
        passes = x.d.dtype if algorithm.reduction in (INPLACE, OUTPUT_TYPE) else accumulator
        total = parts[0].astype(passes).astype(accumulator)
        for part in parts[1:]:
            total = total + part.astype(passes).astype(accumulator)
            if algorithm.reduction == INPLACE:
                total = total.astype(passes).astype(accumulator)
        return total.astype(scale)

    def _emulated(self, memory, how):
        x = self.problem
        a, b = (
            _transposed(strided(memory, matrix, pointer, self.device), operation)
            for matrix, pointer, operation in ((x.a, self.a, x.op_a), (x.b, self.b, x.op_b))
        )
        return bf16x9(a, b) if x.compute == tables.EMULATED_16BFX9 else fixed_point(a, b, how)

    def _scale(self, memory):
        found = np.float32(1)
        for pointer in (self.problem.a_scale, self.problem.b_scale):
            if pointer and not self.problem.a_mode:
                data = memory.at(pointer, 4, self.device, "cublasLtMatmul, a scale")
                found = found * data.view(np.float32)[0]
        return found if self.problem.is_narrow else tables.DTYPES[self.problem.scale].type(1)

    def _bias(self, memory):
        x = self.problem
        stride = x.bias_batch_stride if x.d.batch_count > 1 else 0
        bias = Matrix("bias", x.bias_type, x.m, 1, x.m, 0, x.d.batch_count, stride)
        return strided(memory, bias, x.bias_pointer, self.device)

    def write(self, memory, value):
        """Write the elements of D, and no other byte."""
        strided(memory, self.problem.d, self.d, self.device)[...] = value

    def poison(self, memory):
        """Write NaN, which no test takes for a result."""
        target = strided(memory, self.problem.d, self.d, self.device)
        target[...] = np.frombuffer(b"\xff" * target.dtype.itemsize, target.dtype)[0]


def _operand(x, operation, flags):
    return _transposed(_rounded(x, flags), operation)


def _transposed(x, operation):
    if operation:
        x = x.swapaxes(1, 2)
    return x.conj() if operation == 2 else x


def _activated(x, activation):
    if activation == "relu":
        # cuBLASLt documents max(x, 0); whether NaN passes is undocumented.
        return np.where(x < 0, x.dtype.type(0), x)
    if activation == "gelu":
        cubic = x + x.dtype.type(0.044715) * x * x * x
        tanh = np.tanh(x.dtype.type(math.sqrt(2 / math.pi)) * cubic)
        return x.dtype.type(0.5) * x * (x.dtype.type(1) + tanh)
    return x
