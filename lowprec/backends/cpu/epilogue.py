"""The epilogue, ``out = activation(alpha * product + beta * c + bias)``, rounded once to the dtype of ``out``.

It is computed in the accumulator's dtype (float32 for 16-bit results), as in cuBLASLt (``cublasLtEpilogue_t``).
Integer results saturate, as in oneDNN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import buffers, casting, team
from lowprec.backends.cpu.gelu import gelu_float32
from lowprec.backends.cpu.packed.job import ACTIVATIONS, BLOCK_SCRATCH_BYTES, KINDS
from lowprec.backends.cpu.packed.jobs import operand_of
from lowprec.backends.cpu.packed.rows import epilogue_of, is_usable
from lowprec.backends.cpu.rounding import rounded_to_odd
from lowprec.planning import Activation

#: Elements per block of NumPy's activation, which fit the cache; elements per piece of a thread.
_BLOCK, _PIECE = 1 << 15, 1 << 16

#: Columns of a block in the packed kernels.
_ROW = 32


def relu(x: Any) -> Any:
    """Replace negative elements by zero, in place; NaN stays NaN."""
    return np.maximum(x, 0, out=x)


def gelu(x: Any) -> Any:
    """Apply the tanh form of GELU in place (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""
    if x.dtype == np.float32:
        flat = x.reshape(-1)
        for i in range(0, flat.size, _BLOCK):
            flat[i : i + _BLOCK] = gelu_float32(flat[i : i + _BLOCK])
        x[...] = flat.reshape(x.shape)
        return x
    np.maximum(x, np.finfo(x.dtype).min, out=x)  # the formula gives NaN for -Inf
    inner = np.square(x, out=np.empty_like(x))  # an array also for 0-d x
    inner *= 0.044715
    inner += 1
    inner *= x
    inner *= math.sqrt(2.0 / math.pi)
    np.tanh(inner, out=inner)
    inner += 1
    inner *= 0.5
    x *= inner
    return x


_ACTIVATIONS: dict[Activation, Callable[[Any], Any]] = {Activation.RELU: relu, Activation.GELU: gelu}


def _add_saturating(product: Any, addend: Any) -> None:
    limits = np.iinfo(product.dtype)
    lowest, highest = limits.min - np.minimum(addend, 0), limits.max - np.maximum(addend, 0)
    np.clip(product, lowest, highest, out=product)
    product += addend


def apply(
    product: Any,
    out: Any,
    *,
    alpha: complex,
    beta: complex,
    c: Any | None,
    bias: Any | None,
    activation: Activation | None,
) -> None:
    """Apply the epilogue to ``product``, which is overwritten, and write the result to ``out``.

    ``product``, ``out`` and ``c`` have shape (..., m, n) and may be the same array; ``bias`` has shape (n,). ``c`` is
    not read if ``beta`` is zero, as in BLAS.
    """
    operands = [x for x in (out, c, bias) if x is not None]
    if (
        product.dtype == np.float32
        and product.flags.c_contiguous
        and activation in ACTIVATIONS
        and (alpha != 1 or operands[1:] or activation)
        and casting.is_ready()
        and is_usable()
        and casting.name_of(out.dtype) in KINDS
        and all(step % x.itemsize == 0 for x in operands for step in x.strides)
    ):
        _apply_native(product, out, alpha.real, beta.real, c, bias, activation)
        return
    scalar = product.dtype.type
    with np.errstate(all="ignore"):
        if alpha != 1:
            product *= scalar(alpha)
        if c is not None and beta != 0:
            addend = c.astype(product.dtype, copy=False)
            product += addend if beta == 1 else addend * scalar(beta)
        if bias is not None:
            addend = bias.astype(product.dtype, copy=False)
            if product.dtype.kind == "i":
                _add_saturating(product, addend)
            else:
                product += addend
        if activation is not None:
            _ACTIVATIONS[activation](product)
        if product is not out:
            # ml_dtypes rounds float64 to bfloat16 and float8 via float32, which would round twice.
            twice = product.dtype == np.float64 and out.dtype.itemsize <= 2
            casting.narrow(rounded_to_odd(product) if twice else product, out)


def _apply_native(product: Any, out: Any, alpha: float, beta: float, c: Any, bias: Any, activation: str | None) -> None:
    c = c if beta else None
    arrays = [x for x in (product, out, c) if x is not None]
    wide = _ROW // product.shape[-1]
    if wide > 1 and product.size % (wide * product.shape[-1]) == 0 and all(x.flags.c_contiguous for x in arrays):
        # Several rows as one, because blocks are wider than a row.
        shape = -1, wide * product.shape[-1]
        product, out = product.reshape(shape), out.reshape(shape)
        c = None if c is None else c.reshape(shape)
        bias = None if bias is None else np.tile(bias, wide)
    n = product.shape[-1]
    vector = None if bias is None else (casting.name_of(bias.dtype), bias.strides[0] // bias.itemsize)

    def run(piece: tuple[Any, ...]) -> None:
        numbers, to, addend = piece
        other = None if addend is None else operand_of(addend)
        apply = epilogue_of(len(numbers), n, operand_of(to), other, vector, activation)
        source, target, at_c, at_bias = (0 if x is None else data_pointer(x) for x in (numbers, to, addend, bias))
        with buffers.borrow(BLOCK_SCRATCH_BYTES) as memory:
            apply(source, target, at_c, at_bias, alpha, beta, memory)

    pieces: list[tuple[Any, ...]] = []
    height = max(1, _PIECE // n)
    for matrices in casting.matrices_of(product, out, c):
        for i in range(0, len(matrices[0]), height):
            pieces.append(tuple(None if x is None else x[i : i + height] for x in matrices))
    team.share(run, pieces)
