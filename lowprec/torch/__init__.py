"""The product inside PyTorch: recorded by autograd, transformed by ``torch.func``, compiled and exported.

``lowprec.matmul`` delegates to this package for tensors that require grad, under a transform or a mode, and in a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowprec.torch.functions import linear, matmul
from lowprec.torch.interception import intercept
from lowprec.torch.interception_report import InterceptedProduct, InterceptionReport, PassedBy
from lowprec.torch.layers import Linear

if TYPE_CHECKING:
    from lowprec.torch.inductor import inductor_options

__all__ = [
    "InterceptedProduct",
    "InterceptionReport",
    "Linear",
    "PassedBy",
    "inductor_options",
    "intercept",
    "linear",
    "matmul",
]


if not TYPE_CHECKING:  # for type checkers any name would exist

    def __getattr__(name: str) -> Any:
        if name != "inductor_options":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lowprec.torch.inductor import inductor_options  # which imports PyTorch's compiler

        globals()[name] = inductor_options
        return inductor_options
