"""The product as autograd records it and ``torch.func`` transforms it.

Plain tensors are multiplied directly, under ``torch.func`` by an ``autograd.Function``, in graphs by the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowprec.errors import UnsupportedError
from lowprec.torch.operator import (
    COMPILED_KEY,
    OPERATOR,
    OperatorOptions,
    ensure_sharded,
    multiply_plain,
    operand_gradients,
    save_operands,
    with_batch_first,
)

_PLAIN = (Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling
#: For a tensor of a transform that has ended.
_unwrapped = torch._C._functorch.unwrap_if_dead
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_innermost = torch._C._functorch.peek_interpreter_stack
_JVP = torch._C._functorch.TransformType.Jvp
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize


def recorded_product(
    a: Tensor, b: Tensor, options: OperatorOptions, directly: Any = None
) -> Tensor:
    """Return a product that PyTorch records or transforms; ``directly`` computes it for plain tensors."""
    is_plain = type(a) in _PLAIN and type(b) in _PLAIN and not a.is_meta
    if is_plain and not _dispatch_modes() and not _transforms():
        if forward_ad._current_level < 0:
            if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
                return _Plain.apply(_unwrapped(a), _unwrapped(b), options, directly)
            return multiply_plain(a, b, options)
    elif not _transforms() or _innermost().key() == _FUNCTIONALIZE:
        ensure_sharded()
        return OPERATOR(a, b, *options.as_text())
    return _Transformed.apply(a, b, *options.as_text())


def _recorded(a: Tensor, b: Tensor, options: OperatorOptions) -> Tensor:
    """Return a product of a backward pass; a guard that is open now raises its mode."""
    if _is_compiling() or _is_batched(a) or _is_batched(b):
        # In torch.autograd.grad(is_grads_batched=True) PyTorch calls the operator once per gradient.
        return OPERATOR(a, b, *options.as_text())
    return recorded_product(a, b, options)


class _Plain(torch.autograd.function._SingleLevelFunction):
    _compiled_autograd_key = COMPILED_KEY

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, options: OperatorOptions, directly: Any) -> Tensor:
        save_operands(ctx, a, b, options, ctx.needs_input_grad[:2])
        if directly is not None:
            return directly()
        return multiply_plain(a, b, options)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_operands = operand_gradients(ctx, gradients[0], ctx.needs_input_grad[:2], _recorded)
        return *of_operands, None, None


class _Transformed(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        return OPERATOR(a, b, *rest)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_operands = operand_gradients(ctx, gradients[0], ctx.needs_input_grad[:2], _recorded)
        return *of_operands, None, None, None, None, None

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        a, b, *rest = inputs
        save_operands(ctx, a, b, OperatorOptions(*rest), ctx.needs_input_grad[:2])
        ctx.save_for_forward(a, b)
        # With several levels PyTorch passes the inner one's tangents to the outer one as constants.
        stack = torch._C._functorch.get_interpreter_stack() or ()
        ctx.levels = max(sum(x.key() == _JVP for x in stack), forward_ad._current_level + 1)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        if ctx.levels > 1:
            raise UnsupportedError(
                "nested forward-mode derivatives (jvp of jvp, jacfwd of jacfwd) of lowprec's product: PyTorch computes "
                "them wrongly through any autograd.Function; use torch.func.jacfwd(torch.func.jacrev(f)), as hessian"
            )
        a, b = ctx.saved_tensors
        of_a, of_b, *_ = tangents
        options = ctx.options._replace(mode=ctx.options.backward_mode)
        if of_a is None:
            return recorded_product(a, of_b, options)
        if of_b is None:
            return recorded_product(of_a, b, options)
        return recorded_product(of_a, b, options) + recorded_product(a, of_b, options)

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, int]:
        a, b = with_batch_first(in_dims[:2], a, b)
        return recorded_product(a, b, OperatorOptions(*rest)), 0
