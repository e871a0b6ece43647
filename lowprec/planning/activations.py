"""Activation functions of the epilogue; ``gelu`` is the tanh form.

PyTorch and JAX apply and differentiate their own functions of the same names. Those of the CPU's kernels are in
``native/epilogue.hpp``, in the order of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lowprec.errors import SettingError, quoted
from lowprec.modes import ActivationName


class ActivationRow(NamedTuple):
    """The implementations of an activation function, but for that of the CPU's kernels."""

    host: Callable[[Any, Any], Any]  # of an array and the module numpy
    # expression of x of type T (float or double, for relu also int), with functions of ``epilogue.cu``
    cuda: str
    # name in ``cublasLtEpilogue_t``; empty if a kernel applies the function to a staged product
    fused: str


_GELU_SCALE = -2 * math.sqrt(2 / math.pi)


def _gelu(x: Any, np: Any) -> Any:
    """Return the tanh form of GELU (Hendrycks and Gimpel, arXiv 1606.08415, section 2), computed in float64.

    ``0.5 x (1 + tanh y)`` is ``x / (1 + exp(-2 y))``, which does not cancel for negative y.
    """
    least = np.finfo(x.dtype).min  # the formula gives NaN for -Inf
    wide = np.maximum(x, least, dtype=np.float64)
    return wide / (1 + np.exp(_GELU_SCALE * wide * (1 + 0.044715 * wide * wide)))


ACTIVATIONS: Mapping[ActivationName, ActivationRow] = {
    "relu": ActivationRow(lambda x, np: np.maximum(x, 0), "x < 0 ? 0 : x", "RELU"),
    "gelu": ActivationRow(
        _gelu,
        "gated(x, hyperbolic_tangent((x * x * (T)0.044715 + (T)1) * x * (T)0.7978845608028654))",
        "GELU",
    ),
}


def parse_activation(name: ActivationName | None) -> ActivationName | None:
    """Return the name of an activation, or None; raise SettingError for an unknown one."""
    if name not in (None, *ACTIVATIONS):
        legal = ", ".join([*ACTIVATIONS, "None"])
        raise SettingError(f"activation {quoted(name)} is not supported; choose one of: {legal}")
    return name
