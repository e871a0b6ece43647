"""What follows the product: ``out = activation(alpha * product + beta * c + bias)``, rounded once to out's dtype.

The arithmetic is done in the accumulator's dtype (float32 for 16-bit results), as the epilogues of cuBLASLt do
(cuBLAS documentation, ``cublasLtEpilogue_t``). Integers saturate: cuBLASLt adds nothing to int32 results, and oneDNN
saturates its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec.backends.cpu import casting
from lowprec.backends.cpu.rounding import rounded_to_odd
from lowprec.planning import Activation

_GELU_SLOPE = math.sqrt(2.0 / math.pi)


def relu(x: Any) -> Any:
    """Replace negative elements by zero, in place; NaN stays NaN."""
    return np.maximum(x, 0, out=x)


def gelu(x: Any) -> Any:
    """Apply the tanh form of GELU in place (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""
    np.maximum(x, np.finfo(x.dtype).min, out=x)  # of -Inf the formula makes NaN, not its limit
    inner = np.square(x, out=np.empty_like(x))  # an array where x has no dimensions, too
    inner *= x.dtype.type(0.044715)
    inner += 1
    inner *= x
    inner *= x.dtype.type(_GELU_SLOPE)
    np.tanh(inner, out=inner)
    inner += 1
    inner *= x.dtype.type(0.5)
    x *= inner
    return x


_ACTIVATIONS: dict[Activation, Callable[[Any], Any]] = {
    Activation.RELU: relu,
    Activation.GELU: gelu,
}


def _add_saturating(product: Any, addend: Any) -> None:
    """Add integers in place; a sum beyond the type becomes the nearest number of it."""
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
    """Apply the epilogue to ``product``, in place, and write the result to ``out``.

    ``product``, ``out`` and ``c`` have one shape (..., m, n), ``bias`` has (n,). ``product`` is overwritten; it and
    ``c`` may be ``out`` itself, which gets the result rounded to its dtype. ``c`` is not read where ``beta`` is zero,
    as in BLAS.
    """
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
            # ml_dtypes rounds float64 to bfloat16 by way of float32, which would be a rounding more.
            twice = product.dtype == np.float64 and out.dtype.itemsize == 2
            casting.narrow(rounded_to_odd(product) if twice else product, out)
