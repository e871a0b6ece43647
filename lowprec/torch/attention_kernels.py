"""PyTorch's attention on the CPU inside an interception: its products by lowprec, in the mode of the calling module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowprec.core.interception_report import PassedBy
from lowprec.core.rules import Layer, first_match
from lowprec.modes import rules_of
from lowprec.planning.problem import broadcasts
from lowprec.torch.accounting import Found
from lowprec.torch.aten import Kernel
from lowprec.torch.attention import Attention, AttentionProducts, rounded
from lowprec.torch.layer_names import NAMES, Part
from lowprec.torch.operator_products import OperatorProduct, computed, operator_kernel
from lowprec.torch.registration import Function

#: The name of all products, in reports and rules.
_NAME = "attention"
#: The pattern of the rule for keys and values.
CACHE = "kv"


def attention_kernel(kernel: Kernel, own: Function) -> Function:
    """Return the function that computes attention, or its gradients, in a block."""
    is_backward = "backward" in kernel.operator

    def compute(found: Found, own: Function, args: Any, records: bool, **given: Any) -> Any:
        by_torch = partial(own, *args, **given)
        before: tuple[Any, ...] = ()
        tensors = args[:3]
        rest = (*args[3:], *(0.0, False)[len(args[3:]) :])
        if is_backward:
            gradient, *tensors = args[:4]
            before = gradient, *args[4:6]
            rest = args[6:]
        attention = _attention(*tensors, *rest, **given)
        if attention is None or (is_backward and gradient.dtype != tensors[0].dtype):
            return by_torch()
        attention = _with_cache(attention, found[0])
        layer = NAMES.of_activation(before[2]) if is_backward else NAMES.of_caller()
        product = OperatorProduct(
            _NAME,
            Part(layer, "grad_input" if is_backward else "forward"),
            [x.detach() for x in tensors],
            attention.multiplications * (5 if is_backward else 2),
            partial(AttentionProducts, attention),
            lambda products, _: products.backward(*before) if is_backward else products.forward(),
            lambda products: products.operands(),
            lambda: _in_float64(own, args, given),
            _is_named(found[0], layer),
        )
        result, passed_by = computed(found, product, records)
        if result is None:
            result = by_torch()
            passed_by(result)
        elif (mode := dict(found[0].rules).get(CACHE)) is not None:
            found[0].ledger.notes[f"Keys and values of attention are rounded to {mode}."] = None
        if not is_backward:
            NAMES.of_activation(result[1], layer)
        return result

    return operator_kernel(own, compute, PassedBy.ATTENTION)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    is_causal: bool,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Attention | None:
    """Return the arguments of an attention; None where PyTorch computes it or raises its error."""
    shapes = {x.ndim == 4 and (x.shape[0], x.shape[3]) for x in (q, k, v)}
    if dropout or len(shapes) > 1 or False in shapes or k.shape != v.shape:
        return None
    if not q.numel() or not k.numel() or q.shape[1] % k.shape[1]:
        return None
    if any(x.dtype != q.dtype or x.layout is not torch.strided for x in (q, k, v)):
        return None
    mask = attn_mask
    if mask is not None:
        shape = (*q.shape[:3], k.shape[2])
        is_accepted = mask.dtype in (q.dtype, torch.float32) and mask.ndim in (2, 4)
        if is_causal or not is_accepted or not broadcasts(tuple(mask.shape), shape):
            return None
        mask = mask.expand(*mask.shape[:-1], shape[3])
        if mask.stride(-1) != 1:
            mask = mask.contiguous()
        mask = mask.expand(shape)
    return Attention(q, k, v, mask, is_causal, q.shape[3] ** -0.5 if scale is None else scale)


def _with_cache(attention: Attention, scope: Any) -> Attention:
    """Return an attention whose keys and values are rounded to the format of their rule, each key alone."""
    mode = dict(scope.rules).get(CACHE)
    if mode is None:
        return attention
    _, rule = rules_of(mode)
    k, v = (rounded(x, rule).to(x.dtype) for x in attention[1:3])
    return attention._replace(k=k, v=v)


def _in_float64(own: Function, args: Any, given: Any) -> Any:
    wide = [x.double() if isinstance(x, Tensor) else x for x in args]
    mask = given.get("attn_mask")
    if mask is not None:
        given = {**given, "attn_mask": mask.double()}
    return own(*wide, **given)


def _is_named(scope: Any, layer: Layer) -> bool:
    """Whether the rule of an attention is not one for all layers below a module."""
    for rule in scope.rules:
        if first_match((rule,), layer, _NAME) is not None:
            return not rule[0].endswith("*")
    return False
