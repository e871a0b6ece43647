"""The steps of products on NumPy around the multiplication: batches, scales, the epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec.arrays.narrow_numbers import rounded_to_odd
from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.backends.cpu.numpy_rounding import BLOCK
from lowprec.backends.interface import Arguments
from lowprec.planning import ACTIVATIONS, GemmPlan
from lowprec.planning.layout import GemmLayout, stacked_layout


def execute(plan: GemmPlan, multiply: Callable[..., None], arguments: Arguments) -> None:
    """Compute a product with its epilogue; ``multiply(plan, arguments, a, b, product)`` writes the sums."""
    a, b, out, c = stacks(plan, arguments)
    dtype = NUMPY_DTYPES[plan.accumulator]
    product = out
    # ``c`` may be ``out``, so the product must not overwrite it before it is read.
    if out.dtype != dtype or c is not None:
        product = np.empty(out.shape, dtype)
    with np.errstate(all="ignore"):
        multiply(plan, arguments, a, b, product)
        _scale(plan, arguments, product)
        if plan.problem.has_epilogue or product is not out:
            _apply_epilogue(plan, arguments, product, out, c)


def _scale(plan: GemmPlan, arguments: Arguments, product: Any) -> None:
    """Multiply a product by the scales of its rows times those of its columns, as the kernels do."""
    if arguments.row_scales is None is arguments.col_scales:
        return
    layout = stacked_layout(plan.problem.a, plan.problem.b)
    rows = _of_batch(arguments.row_scales, layout, layout.m)
    cols = _of_batch(arguments.col_scales, layout, layout.n)
    if cols is not None and plan.layout.collapsed:
        cols = cols[(0,) * len(layout.batch_shape)]
    elif cols is not None:
        cols = cols[..., None, :]
    factors = cols
    if rows is not None:
        factors = rows.reshape((*product.shape[:-1], 1))
        if cols is not None:
            factors = factors * cols
    product *= factors


def _of_batch(scales: Any, layout: GemmLayout, count: int) -> Any:
    """Return the scales of rows or columns of all matrices of a batch, None for none."""
    if scales is None:
        return None
    return np.broadcast_to(scales, (*layout.batch_shape, count))


def stacks(plan: GemmPlan, arguments: Arguments) -> tuple[Any, Any, Any, Any]:
    """Return a, b, out and c (None if beta is zero) as matrices or stacks of them; batches of a and b broadcast."""
    a = arguments.a.ndarray()
    b = arguments.b.ndarray()
    out = arguments.out.ndarray()
    if b.ndim == 1:
        b = b[:, None]
        out = out[..., None]
    if a.ndim == 1:
        a = a[None, :]
        out = out[..., None, :]
    if plan.layout.collapsed:
        m = plan.layout.m  # explicit, because -1 is ambiguous if k or n is 0
        a = np.broadcast_to(a, out.shape[:-2] + a.shape[-2:]).reshape(m, a.shape[-1])
        b = b[(0,) * (b.ndim - 2)]
        out = out.reshape(m, out.shape[-1], copy=False)
    c = None
    if arguments.c is not None and plan.problem.has_beta:
        c = np.broadcast_to(arguments.c.ndarray(), plan.out_shape).reshape(out.shape)
    if out.ndim > 2:
        a = once(a)
        b = once(b)
    return a, b, out, c


def once(x: Any) -> Any:
    """Return the matrices of a batch without the copies of a broadcast one, which would each be rounded."""
    return x[tuple([slice(None) if step else slice(1) for step in x.strides[:-2]])]


def set_to_zero(plan: GemmPlan, arguments: Arguments, a: Any, b: Any, out: Any) -> None:
    """Compute the product where ``k`` or alpha is zero."""
    out[...] = 0


def _apply_epilogue(
    plan: GemmPlan, arguments: Arguments, product: Any, out: Any, c: Any | None
) -> None:
    """Compute ``out = activation(alpha * product + beta * c + bias)``, rounded once; ``product`` is overwritten.

    It is computed in the accumulator's type (float32 for 16-bit results), as in cuBLASLt (``cublasLtEpilogue_t``).
    """
    # ml_dtypes rounds float64 to bfloat16 and float8 via float32, which would round twice.
    twice = product.dtype == np.float64 and out.dtype.itemsize <= 2
    step = max(1, BLOCK * out.shape[-2] // max(1, out.size))
    for first in range(0, out.shape[-2], step):
        rows = slice(first, first + step)
        x = product[..., rows, :]
        addend = None if c is None else c[..., rows, :]
        _finish(plan, arguments, x, addend)
        if product is not out:
            out[..., rows, :] = rounded_to_odd(x, np) if twice else x


def _finish(plan: GemmPlan, arguments: Arguments, x: Any, c: Any | None) -> None:
    """Apply the epilogue to some rows, in place. Sums with an int32 bias saturate, as in oneDNN."""
    dtype = x.dtype
    activation = plan.problem.activation
    if arguments.alpha != 1:
        x *= dtype.type(arguments.alpha)
    if c is not None:
        addend = c.astype(dtype, copy=False)
        if arguments.beta != 1:
            addend = addend * dtype.type(arguments.beta)
        x += addend
    if arguments.bias is not None:
        bias = arguments.bias.ndarray().astype(dtype, copy=False)
        if dtype.kind == "i":
            limits = np.iinfo(dtype)
            np.clip(x, limits.min - np.minimum(bias, 0), limits.max - np.maximum(bias, 0), out=x)
        x += bias
    if activation is not None:
        x[...] = ACTIVATIONS[activation].host(x, np)
