"""Nested containers of arrays: lists, tuples, named tuples and mappings; None is an empty leaf."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lowprec.arrays import is_array
from lowprec.errors import ArrayError, ShapeError, quoted


def leaves(tree: Any) -> list[Any]:
    """Return the arrays of a container, in its order."""
    found: list[Any] = []
    mapped(found.append, tree)
    return found


def paths(tree: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return each array's path of keys, in the order of :func:`leaves`; for lists and tuples, indices."""
    if isinstance(tree, list | tuple):
        tree = dict(zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True))
    if not isinstance(tree, Mapping):
        return [] if tree is None else [above]
    return [path for key, item in tree.items() for path in paths(item, (*above, str(key)))]


def mapped(function: Callable[..., Any], tree: Any, *others: Any, numbers: bool = False) -> Any:
    """Return a container of the same structure with the function's results in place of the arrays.

    The function receives an array and the corresponding ones of the other containers. ``numbers`` also allows Python
    numbers; NumPy scalars become arrays. Raises ArrayError for any other leaf, ShapeError if the structures differ.
    """
    if hasattr(tree, "__dlpack__"):  # first, since it is the usual case
        return function(tree, *others)
    if tree is None:
        _check(all(other is None for other in others), tree, others)
        return None
    if isinstance(tree, Mapping):
        _check(all(isinstance(o, Mapping) and o.keys() == tree.keys() for o in others), tree, others)
        items = {key: mapped(function, item, *(o[key] for o in others), numbers=numbers) for key, item in tree.items()}
        return items if type(tree) is dict else _like(tree, items)
    if isinstance(tree, list | tuple):
        same = all(isinstance(o, list | tuple) and len(o) == len(tree) for o in others)
        _check(same, tree, others)
        row = [mapped(function, *item, numbers=numbers) for item in zip(tree, *others, strict=True)]
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*row)
        return type(tree)(row)
    if isinstance(tree, np.generic):  # a result of NumPy's reductions
        tree = np.asarray(tree)
    if is_array(tree) or (numbers and isinstance(tree, int | float)):
        return function(tree, *others)
    raise ArrayError(
        f"expected arrays in lists, tuples or dicts, got {quoted(tree)} of type {type(tree).__name__}; "
        "None may replace an array"
    )


def _like(tree: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class, including its state (``defaultdict``)."""
    try:
        made = copy.copy(tree)
        for key, item in items.items():
            made[key] = item
    except TypeError:  # a read-only mapping
        return items
    return made


def _check(same: bool, tree: Any, others: Any) -> None:
    if not same:
        kinds = " and ".join(quoted(type(other).__name__) for other in others)
        size = "nothing" if tree is None else len(tree)
        raise ShapeError(
            f"containers of different structures: {quoted(type(tree).__name__)} of {size} and {kinds}; give both "
            "the same keys and lengths"
        )


#: Names of normalization classes, PyTorch's and others; not those of parametrizations (``_WeightNorm``).
_NORM = re.compile(r"[^_].*Norm(\dd)?")

#: The same in names of weights, as words or the last part of a word: "bn1", "LayerNorm_0", "layer_normalization".
_NORM_WORD = re.compile(r"([Nn]orm|NORM)(ali[sz]ation)?s?(?![a-z])|((?<![A-Za-z])bn|B[Nn])s?(?![a-z])")

_STATISTICS = ("running_mean", "running_var")


def is_module(value: Any) -> bool:
    """Whether a value is a PyTorch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def norms_of(model: Any) -> frozenset[str]:
    """Return the names of the parameters and buffers of a model's normalizations."""
    if not is_module(model):
        raise ArrayError(f"model must be a torch.nn.Module, got {quoted(model)}")
    found: list[str] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        if any(_NORM.fullmatch(c.__name__) for c in type(module).__mro__):
            for own in (module.named_parameters, module.named_buffers):
                found += dict(own(prefix, recurse=False))
    return frozenset(found)


def norms_by_name(all_names: list[str]) -> frozenset[str]:
    """Return the names with a word that is "bn" or ends with "norm", and those next to running statistics."""
    owners = {owner for owner, _, last in (name.rpartition(".") for name in all_names) if last in _STATISTICS}
    return frozenset(n for n in all_names if _NORM_WORD.search(n) or n.rpartition(".")[0] in owners)
