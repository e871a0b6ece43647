"""Nested containers of arrays: lists, tuples, named tuples and mappings; None is an empty leaf."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np

from lowprec.arrays import is_array
from lowprec.errors import ArrayError, ShapeError, quoted


def leaves(tree: Any) -> list[Any]:
    """Return the arrays of a container, in its order."""
    arrays: list[Any] = []
    mapped(arrays.append, tree)
    return arrays


def paths(tree: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return each array's path of keys, in the order of :func:`leaves`; for lists and tuples, indices."""
    items = _items(tree)
    if items is None:
        return [above]
    found = []
    for key, item in items.items():
        found += paths(item, (*above, str(key)))
    return found


def mapped(function: Callable[..., Any], tree: Any, *others: Any, numbers: bool = False) -> Any:
    """Return a container of the same structure with the function's results in place of the arrays.

    The function receives an array and the corresponding ones of the other containers. ``numbers`` also allows Python
    numbers; NumPy scalars become arrays. Raises ArrayError for any other leaf, ShapeError if the structures differ.
    """
    if hasattr(tree, "__dlpack__"):  # first, since it is the usual case
        return function(tree, *others)
    items = _items(tree)
    if items is None:
        if isinstance(tree, np.generic):  # a result of NumPy's reductions
            tree = np.asarray(tree)
        if is_array(tree) or (numbers and isinstance(tree, int | float)):
            return function(tree, *others)
        raise ArrayError(
            f"expected arrays in lists, tuples or dicts, got {quoted(tree)} of type {type(tree).__name__}; "
            "None may replace an array"
        )
    parts = []
    for other in others:
        part = _items(other)
        if part is None or part.keys() != items.keys():
            raise ShapeError(
                f"containers of different structures: {quoted(type(tree).__name__)} of {len(items)} and "
                f"{quoted(type(other).__name__)}; give both the same keys and lengths"
            )
        parts.append(part)
    results = {}
    for key, item in items.items():
        results[key] = mapped(function, item, *(part[key] for part in parts), numbers=numbers)
    return _like(tree, results)


def _items(tree: Any) -> dict[Any, Any] | None:
    if tree is None:
        return {}
    if isinstance(tree, list | tuple):
        keys = getattr(tree, "_fields", range(len(tree)))
        return dict(zip(keys, tree, strict=True))
    if isinstance(tree, Mapping):
        return dict(tree)
    return None


def _like(tree: Any, items: dict[Any, Any]) -> Any:
    """Return a container of the same class; a dict for a read-only mapping."""
    if tree is None:
        return None
    if hasattr(tree, "_fields"):
        return type(tree)(*items.values())
    if isinstance(tree, list | tuple):
        return type(tree)(items.values())
    if not isinstance(tree, MutableMapping):
        return items
    same = copy.copy(tree)  # with its state: defaultdict
    same.update(items)
    return same


#: Names of normalization classes, PyTorch's and others; not those of parametrizations (``_WeightNorm``).
_NORM = re.compile(r"[^_].*Norm(\dd)?")

#: The same in names of weights, as words or the last part of a word: "bn1", "LayerNorm_0", "layer_normalization".
_NORM_WORD = re.compile(
    r"([Nn]orm|NORM)(ali[sz]ation)?s?(?![a-z])|((?<![A-Za-z])bn|B[Nn])s?(?![a-z])"
)

_STATISTICS = ("running_mean", "running_var")


def is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def norms_of(model: Any) -> frozenset[str]:
    """Return the names of the parameters and buffers of a model's normalizations."""
    if not is_module(model):
        raise ArrayError(f"model must be a torch.nn.Module, got {quoted(model)}")
    names: list[str] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        if any(_NORM.fullmatch(c.__name__) for c in type(module).__mro__):
            for tensors in (module.named_parameters, module.named_buffers):
                names += dict(tensors(prefix, recurse=False))
    return frozenset(names)


def norms_by_name(all_names: list[str]) -> frozenset[str]:
    """Return the names with a word that is "bn" or ends with "norm", and those next to running statistics."""
    owners = {}
    has_statistics = set()
    for name in all_names:
        owner, _, last = name.rpartition(".")
        owners[name] = owner
        if last in _STATISTICS:
            has_statistics.add(owner)
    named = [name for name in all_names if _NORM_WORD.search(name)]
    neighbours = [name for name, owner in owners.items() if owner in has_statistics]
    return frozenset([*named, *neighbours])
