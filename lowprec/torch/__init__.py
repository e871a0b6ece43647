"""The product inside PyTorch: recorded by autograd, transformed by ``torch.func``, compiled and exported.

``lowprec.matmul`` delegates to this package for tensors that require grad, under a transform or a mode, and in a graph.
"""

from __future__ import annotations

from lowprec.contractions import linear
from lowprec.core.dispatch import matmul
from lowprec.core.interception_report import (
    InterceptedProduct,
    InterceptionReport,
    OperandStatistics,
    PassedBy,
)
from lowprec.torch.batch_invariance import batch_invariant
from lowprec.torch.inductor import inductor_options
from lowprec.torch.interception import intercept
from lowprec.torch.layers import Linear
from lowprec.torch.mode_search import LayerModes, search_modes

__all__ = [
    "InterceptedProduct",
    "InterceptionReport",
    "LayerModes",
    "Linear",
    "OperandStatistics",
    "PassedBy",
    "batch_invariant",
    "inductor_options",
    "intercept",
    "linear",
    "matmul",
    "search_modes",
]


def __dir__() -> list[str]:
    return __all__
