"""The parameters behind a copy of a weight: of `weight_norm`, LoRA, `functional_call` and others.

Autograd's graph of the copy leads to them. Without gradients the module whose ``forward`` multiplies is known. Both are
unknown in compiled graphs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

_MOST_NODES = 64
_MOST_FRAMES = 24
#: Backward formulas of products with vectors, whose results scale weights, and of functions of data.
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


def parameters_behind(x: Tensor) -> list[Tensor]:
    """Return the leaves of autograd's graph that a tensor is a copy of; none for data and functions of data.

    These are the leaves with the number of elements of the copy if there are such, else all matrices (`cat`, products).
    """
    walk = _Walk()
    leaves = _leaves(x.grad_fn, walk)
    if not leaves or (walk.multiplies and x.ndim > 2):  # stacks of activations, of learned queries
        return []
    count = x.numel()
    whole = [p for p in leaves if p.numel() == count]
    if whole:
        return whole
    matrices = [p for p in leaves if p.ndim > 1]
    extents = {n for p in matrices for n in p.shape}
    is_complete = sum(p.numel() for p in matrices) >= count or extents.issuperset(x.shape)
    return matrices if is_complete else []


class _Walk:
    """The number of nodes so far, and whether one is a product."""

    nodes = 0
    multiplies = False


def _leaves(node: Any, walk: _Walk) -> list[Tensor] | None:
    """Return the leaves behind a node of the graph; None if one of its operands is data."""
    walk.nodes += 1
    if walk.nodes > _MOST_NODES:
        return None
    variable = getattr(node, "variable", None)
    if variable is not None:
        return [variable]
    name = type(node).__name__
    if name.startswith(_OF_VECTORS):
        return []
    if name.startswith(_OF_DATA):
        return None
    is_product = name.startswith("Mm")
    walk.multiplies |= is_product
    found: list[Tensor] = []
    for following, _ in getattr(node, "next_functions", ()):
        leaves = [] if following is None else _leaves(following, walk)
        if leaves is None or (is_product and not leaves):
            return None
        found += leaves
    return found


def calling_module() -> torch.nn.Module | None:
    """Return the module whose ``forward`` calls, outside of compiled graphs."""
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            found = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(found, torch.nn.Module):
                return None if isinstance(found, torch.fx.GraphModule) else found
        if frame.f_back is None or frame.f_globals.get("__name__", "").startswith(_COMPILERS):
            return None
        frame = frame.f_back
    return None


def holds(module: torch.nn.Module, x: Tensor) -> bool:
    """Whether a tensor is one of the module's own, as those that `functional_call` puts there."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(p is not None and torch._C._is_alias_of(x, p) for p in own)
