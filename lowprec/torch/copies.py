"""The parameters behind a copy of a weight: of `weight_norm`, LoRA, `functional_call` and others.

Autograd's graph of the copy leads to them. Without gradients the module whose ``forward`` multiplies is known. Both are
unknown in compiled graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_MOST_NODES = 64
_MOST_FRAMES = 24
#: From the kernel of an operator to `calling_module` and `call_site`.
_OWN_FRAMES = 6

# Kinds of nodes: leaves, products with vectors, whose results scale weights, functions of data, and matrix products.
_LEAF, _VECTORS, _DATA, _PRODUCT, _OTHER = range(5)
_OF_VECTORS = ("Mv", "Dot", "Vdot")
_OF_DATA = (
    "Addmm",
    "Addbmm",
    "Bmm",
    "Baddbmm",
    "Addmv",
    "Embedding",
    "Index",
    "Gather",
    "Convolution",
    "ScaledDot",
)
#: Packages whose frames are between a compiled graph and the program.
_COMPILERS = ("torch._dynamo", "torch._functorch._aot", "torch._inductor", "torch.fx")


def parameters_behind(x: Tensor, is_known: Callable[[Tensor], bool]) -> list[Tensor]:
    """Return the leaves of autograd's graph that a tensor is a copy of; none for data and functions of data.

    Factors without gradients are data unless they are known, as buffers are.
    These are the leaves with the number of elements of the copy if there are such, else all matrices (`cat`, products).
    """
    node = x.grad_fn
    if node is None or _kind(type(node).__name__) == _DATA:
        return []
    kinds: list[int] = []
    leaves = _leaves(node, is_known, kinds)
    if not leaves or (
        _PRODUCT in kinds and x.ndim > 2
    ):  # stacks of activations, of learned queries
        return []
    count = x.numel()
    whole = [p for p in leaves if p.numel() == count]
    if whole:
        return whole
    matrices = [p for p in leaves if p.ndim > 1]
    extents = {n for p in matrices for n in p.shape}
    is_complete = sum(p.numel() for p in matrices) >= count or extents.issuperset(x.shape)
    return matrices if is_complete else []


def _leaves(node: Any, is_known: Callable[[Tensor], bool], kinds: list[int]) -> list[Tensor] | None:
    """Return the leaves behind a node of the graph; None if one of its operands is data.

    ``kinds`` are those of the nodes so far.
    """
    kind = _kind(type(node).__name__)
    kinds.append(kind)
    if len(kinds) > _MOST_NODES:
        return None
    if kind == _LEAF:
        return [node.variable]
    if kind == _VECTORS:
        return []
    if kind == _DATA:
        return None
    found: list[Tensor] = []
    for place, (following, _) in enumerate(node.next_functions):
        leaves = [] if following is None else _leaves(following, is_known, kinds)
        if leaves is None:
            return None
        if kind == _PRODUCT and not leaves:
            # autograd keeps a factor without gradients for the gradient of the other one
            factor = getattr(node, ("_saved_self", "_saved_mat2")[place], None)
            if following is not None or factor is None or not is_known(factor):
                return None
        found += leaves
    return found


@lru_cache(512)
def _kind(name: str) -> int:
    """Return the kind of nodes of a class."""
    if name == "AccumulateGrad":
        return _LEAF
    if name.startswith(_OF_VECTORS):
        return _VECTORS
    if name.startswith(_OF_DATA):
        return _DATA
    return _PRODUCT if name.startswith("Mm") else _OTHER


def calling_module(own_frames: int = _OWN_FRAMES) -> torch.nn.Module | None:
    """Return the module whose ``forward`` calls, outside of compiled graphs."""
    frame = sys._getframe(own_frames)
    for _ in range(_MOST_FRAMES):
        if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            found = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(found, torch.nn.Module):
                return None if isinstance(found, torch.fx.GraphModule) else found
        if frame.f_back is None or frame.f_globals.get("__name__", "").startswith(_COMPILERS):
            return None
        frame = frame.f_back
    return None


def call_site(a: Tensor, b: Tensor) -> tuple[Any, Any]:
    """Return the instruction of the program that multiplies, with the shapes of the operands, and its code."""
    frame = sys._getframe(_OWN_FRAMES - 1)
    code = frame.f_code
    return (id(code), frame.f_lasti, a.shape, b.shape), code


def holds(module: torch.nn.Module, x: Tensor) -> bool:
    """Whether a tensor is one of the module's own, as those that `functional_call` puts there."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(p is not None and torch._C._is_alias_of(x, p) for p in own)
