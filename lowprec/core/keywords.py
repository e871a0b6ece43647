"""The keyword arguments of products: described once, for type checkers, for ``help`` and for calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict

from lowprec.modes import ActivationName, BoundName, ModeLike
from lowprec.util.tracing import F


class ModeOptions(TypedDict, total=False):
    """Arguments of every sum of products."""

    out_dtype: Any
    math_mode: ModeLike | None
    rtol: float | None
    bound: BoundName | None
    k_chunk: int | None


class LayerOptions(ModeOptions, total=False):
    """Arguments of the product of a layer."""

    activation: ActivationName | None
    backward_mode: ModeLike | None


class ProductOptions(LayerOptions, total=False):
    """Arguments of a product."""

    out: Any
    c: Any
    alpha: complex
    beta: complex
    bias: Any
    scale_a: Any
    scale_b: Any


#: Others are None by default.
_DEFAULTS = {"alpha": 1.0, "beta": 0.0}


def shows(options: type) -> Callable[[F], F]:
    """Return a decorator by which ``help`` shows the arguments of a function's ``**options`` one by one."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        listed = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_DEFAULTS.get(name),
                annotation=getattr(kind, "__forward_arg__", kind),
            )
            for name, kind in options.__annotations__.items()
        ]
        described: Any = function
        described.__signature__ = signature.replace(parameters=[*own, *listed])
        return function

    return decorate


#: Names of the arguments; sets, which PyTorch's compiler can read.
OF_MODES = frozenset(ModeOptions.__annotations__)
OF_LAYERS = frozenset(LayerOptions.__annotations__)
OF_PRODUCTS = frozenset(ProductOptions.__annotations__)


def refuse_unknown(function: str, given: Any, names: frozenset[str]) -> None:
    """Raise TypeError, as Python does, for an argument of another name."""
    for name in given:
        if name not in names:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
