"""The product inside PyTorch: recorded by autograd, transformed by ``torch.func``, compiled and exported.

``lowprec.matmul`` comes here by itself where a plain product would be missed: for tensors that require grad, under a
transform or a mode, and in a graph. The names here are for what needs one: a mode for the backward pass, a layer.
"""

from __future__ import annotations

from lowprec.torch.layers import Linear
from lowprec.torch.product import linear, matmul

__all__ = ["Linear", "linear", "matmul"]
