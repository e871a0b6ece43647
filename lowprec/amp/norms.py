"""Which weights belong to normalizations: by the types of a PyTorch model's modules, else by names."""

from __future__ import annotations

import re
import sys
from typing import Any

from lowprec.errors import ArrayError, quoted

#: Classes of PyTorch's and of users; those of PyTorch's parametrizations (``_WeightNorm``) are private.
_NORM = re.compile(r"[^_].*Norm(\dd)?")

_STATISTICS = ("running_mean", "running_var")


def is_module(value: Any) -> bool:
    """Whether something is a PyTorch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def norms_of(model: Any) -> frozenset[str]:
    """Return the names of the parameters and buffers of a model's normalizations."""
    if not is_module(model):
        raise ArrayError(f"model is a torch.nn.Module, got {quoted(model)}")
    found: list[str] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        if any(_NORM.fullmatch(c.__name__) for c in type(module).__mro__):
            for own in (module.named_parameters, module.named_buffers):
                found += dict(own(prefix, recurse=False))
    return frozenset(found)


def norms_by_name(all_names: list[str]) -> frozenset[str]:
    """Return the names with "norm" or "bn" in them, and those beside running statistics."""
    owners = {
        owner for owner, _, last in (name.rpartition(".") for name in all_names)
        if last in _STATISTICS
    }  # fmt: skip
    return frozenset(
        name
        for name in all_names
        if "norm" in name.lower() or "bn" in name.lower() or name.rpartition(".")[0] in owners
    )
