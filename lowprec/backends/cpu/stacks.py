"""The arrays of a product as NumPy's views in matrix form."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np

from lowprec.backends.cpu import epilogue
from lowprec.backends.execution import Arguments
from lowprec.planning import GemmPlan


class Stacks(NamedTuple):
    """Stacks of matrices: vectors lifted to matrices, the batch collapsed to rows where the plan says so."""

    #: Views of the arguments, shapes (..., m, k), (..., k, n) and (..., m, n). The batches of ``a`` and ``b`` broadcast
    #: to that of ``out``.
    a: Any
    b: Any
    out: Any
    c: Any | None  # broadcast to the shape of ``out``; None where beta is zero
    bias: Any | None  # shape (n,)


def stacks_of(plan: GemmPlan, arguments: Arguments) -> Stacks:
    """Return the arguments in matrix form."""
    a, b, out = arguments.a.ndarray(), arguments.b.ndarray(), arguments.out.ndarray()
    vector_a, vector_b = a.ndim == 1, b.ndim == 1
    if vector_b:
        b, out = b[:, None], out[..., None]
    if vector_a:
        a, out = a[None, :], out[..., None, :]
    if plan.layout.collapsed:
        m = plan.layout.m  # given, since -1 is ambiguous where k or n is 0
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
    """Return a stack without the repeats along its batch, which would be rounded and copied one by one."""
    return x[tuple([slice(None) if step else slice(1) for step in x.strides[:-2]])]


def apply_epilogue(plan: GemmPlan, arguments: Arguments, product: Any, stacks: Stacks) -> None:
    """Apply the plan's epilogue to ``product`` (overwritten) and write ``stacks.out``."""
    epilogue.apply(
        product,
        stacks.out,
        alpha=arguments.alpha,
        beta=arguments.beta,
        c=stacks.c,
        bias=stacks.bias,
        activation=plan.problem.activation,
    )


def array_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return memory as a C-contiguous array, which does not keep it alive."""
    memory: Any = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)
