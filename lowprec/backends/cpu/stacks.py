"""The arrays of a product as stacks of matrices: NumPy views, and tables of addresses for compiled code."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np

from lowprec.backends.execution import Arguments
from lowprec.planning import GemmPlan, MatrixStack

#: Batch size up to which the offsets of matrices are precomputed.
KEPT = 1 << 10

#: Matrices of a, b, out and c; None without c.
Matrices = tuple[MatrixStack, MatrixStack, MatrixStack, MatrixStack | None]


def offsets_of(matrices: Matrices) -> Any:
    """Return the offset of each matrix from the first, in bytes; shape (batch_count, 4)."""
    shape = matrices[0].batch_shape
    columns = []
    for x in matrices:
        offsets = np.zeros(shape if x is None else (), np.int64)
        if x is not None:
            for extent, stride in zip(shape, x.batch_strides, strict=True):
                offsets = np.add.outer(offsets, np.arange(extent) * (stride * x.dtype.itemsize))
        columns.append(offsets.ravel())
    return np.stack(columns, axis=1)


def addresses_of(matrices: Matrices, arguments: Arguments, kept: Any) -> Any:
    """Return the addresses of all matrices, 0 for a missing c; ``kept`` are precomputed offsets or None."""
    a, b, out, c = arguments[:4]
    first = [x.address for x in (a, b, out)]
    first.append(0 if c is None or matrices[3] is None else c.address)
    return (offsets_of(matrices) if kept is None else kept) + np.array(first, np.int64)


class Stacks(NamedTuple):
    """Arrays as stacks of matrices: vectors are one-row or one-column matrices, a batch may be collapsed to rows."""

    #: Views of shapes (..., m, k), (..., k, n) and (..., m, n); the batches of ``a`` and ``b`` broadcast to ``out``'s.
    a: Any
    b: Any
    out: Any
    c: Any | None  # broadcast to the shape of ``out``; None if beta is zero
    bias: Any | None  # shape (n,)


def stacks_of(plan: GemmPlan, arguments: Arguments) -> Stacks:
    """Return the arguments as stacks of matrices."""
    a, b, out = arguments.a.ndarray(), arguments.b.ndarray(), arguments.out.ndarray()
    vector_a, vector_b = a.ndim == 1, b.ndim == 1
    if vector_b:
        b, out = b[:, None], out[..., None]
    if vector_a:
        a, out = a[None, :], out[..., None, :]
    if plan.layout.collapsed:
        m = plan.layout.m  # explicit, because -1 is ambiguous if k or n is 0
        a = np.broadcast_to(a, out.shape[:-2] + a.shape[-2:]).reshape(m, a.shape[-1])
        b = b[(0,) * (b.ndim - 2)]
        out = out.reshape(m, out.shape[-1], copy=False)
    c = bias = None
    if arguments.c is not None and plan.problem.has_beta:
        c = np.broadcast_to(arguments.c.ndarray(), plan.out_shape).reshape(out.shape)
    if arguments.bias is not None:
        bias = arguments.bias.ndarray()
    if out.ndim > 2:
        a, b = _each_once(a), _each_once(b)
    return Stacks(a, b, out, c, bias)


def _each_once(x: Any) -> Any:
    """Return a stack without broadcast copies of a matrix, which would each be rounded and copied."""
    return x[tuple([slice(None) if step else slice(1) for step in x.strides[:-2]])]


def array_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return memory at an address as a C-contiguous array, which does not keep the memory alive."""
    memory: Any = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)
