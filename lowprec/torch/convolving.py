"""``lowprec.conv`` of tensors, whose gradients autograd records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec import policy
from lowprec.arrays.dlpack import type_name
from lowprec.contractions import BoundConvolution
from lowprec.errors import ArrayError, UnsupportedError
from lowprec.modes import Mode, ResolvedMode, of_pass
from lowprec.torch.convolution_kernels import layout_of
from lowprec.torch.functions import TENSOR_ACTIVATIONS


def convolve_bound(checked: BoundConvolution, resolved: ResolvedMode, backward: Mode) -> Tensor:
    """Return the convolution of tensors on the CPU."""
    is_transformed = torch._C._are_functorch_transforms_active()
    tensors = (checked.x, checked.weight, checked.bias)
    for name, x in zip(("x", "weight", "bias"), tensors, strict=True):
        if not isinstance(x, Tensor) and x is not None:
            raise ArrayError(f"{name} is a {type_name(x)} together with tensors; pass a tensor")
        if x is not None and (
            is_transformed or x.is_meta or type(x) not in (Tensor, torch.nn.Parameter)
        ):
            raise UnsupportedError(
                f"{name} has no memory for conv, as in torch.compile and torch.func; call PyTorch's convolution inside "
                "lowprec.torch.intercept"
            )
    out: Tensor = _Convolution.apply(*tensors, checked, resolved, backward)
    if checked.activation is not None:
        out = TENSOR_ACTIVATIONS[checked.activation](out)
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Tensor:
        checked, resolved, backward = rest
        layout = layout_of(checked.given, checked.shape, x, weight, bias)
        ctx.save_for_backward(x, weight)
        ctx.settings = (layout, checked.given.transposed, backward, resolved.source)
        products = layout.products(x.dtype, resolved)
        if checked.given.transposed:
            return layout.of_images(products, x, weight, bias)
        return layout.forward(products, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        needed = ctx.needs_input_grad[:3]
        found = _Gradients.apply(gradient, *ctx.saved_tensors, *ctx.settings, needed)
        return *found, None, None, None


class _Gradients(torch.autograd.Function):
    """The gradients of a convolution, which have no gradients."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        layout, transposed, backward, source, needed = rest
        of_x = of_weight = of_bias = None
        if needed[0]:
            resolved = policy.restrict(of_pass(backward, "grad_input"), source)
            products = layout.products(x.dtype, resolved)
            compute = layout.forward if transposed else layout.of_images
            of_x = compute(products, gradient, weight)
        if needed[1]:
            resolved = policy.restrict(of_pass(backward, "grad_weight"), source)
            products = layout.products(x.dtype, resolved)
            operands = (gradient, x) if transposed else (x, gradient)
            of_weight = layout.of_weight(products, *operands, False)
        if needed[2]:
            of_bias = gradient.sum((0, *range(2, gradient.ndim)))
        return of_x, of_weight, of_bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(
            "conv has no second derivative; call PyTorch's convolution inside lowprec.torch.intercept, which has"
        )
