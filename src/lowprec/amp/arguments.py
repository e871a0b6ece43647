"""The operands of one call, cast by the list that its function is on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from lowprec.amp.casts import has_type, is_float, is_operand, widest
from lowprec.arrays.namespaces import cast, dtype_name
from lowprec.modes import MathMode
from lowprec.policy import math_mode, resolve

#: The math mode that rounds float32 operands as each type holds them.
_MODES = {"tf32": MathMode.TF32, "bfloat16": MathMode.BF16, "float16": MathMode.FP16}


@dataclass(frozen=True)
class Operands:
    """What a function is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: The type that operands were cast to, or the mode that products round to; None if nothing changes.
    to: str | None = None
    mode: MathMode | None = None  # of products, where the operands' type does not say it all

    def scope(self) -> AbstractContextManager[Any]:
        """Return the scope in which products have the mode."""
        return contextlib.nullcontext() if self.mode is None else math_mode(self.mode)


def by_list(
    compute: str, which: str, args: tuple[Any, ...], kwargs: dict[str, Any], xp: Any = None
) -> Operands:
    """Return the operands as a list ("allow", "deny", "infer") wants them. float64, integers and complex numbers stay.

    ``compute`` is the policy's type of products; in ``fp32_guard``, and where ``LOWPREC_FORCE_MATH_MODE`` decides, it
    is float32. Arrays, and lists and tuples of arrays, are looked at; ``out`` is not, since what is written to a cast
    one would be lost. Where the namespace ``xp`` has no such type, a math mode takes its place.
    """
    if "out" in kwargs:
        own = {name: x for name, x in kwargs.items() if name != "out"}
        found = by_list(compute, which, args, own, xp)
        return replace(found, kwargs={**found.kwargs, "out": kwargs["out"]})
    if which == "infer":
        names = sorted({dtype_name(x) for x in _arrays(args, kwargs) if is_float(x)})
        to = widest(names) if len(names) > 1 else None
        return _cast_all(args, kwargs, to, lambda x: is_float(x)) if to else Operands(args, kwargs)
    if which == "deny" or compute == "float32":
        return _cast_all(args, kwargs, "float32", lambda x: is_float(x, wide=False))
    mode = _MODES[compute]
    if resolve(mode).mode is not mode:
        return _cast_all(args, kwargs, "float32", lambda x: is_float(x, wide=False))
    if compute != "tf32" and (xp is None or has_type(xp, compute)):
        return _cast_all(args, kwargs, compute, lambda x: is_float(x, wide=False))
    found = _cast_all(args, kwargs, "float32", lambda x: is_float(x, wide=False))
    acts = any(dtype_name(x) == "float32" for x in _arrays(found.args, found.kwargs))
    return Operands(found.args, found.kwargs, compute, mode) if acts else found


def _arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found = []
    for x in (*args, *kwargs.values()):
        found += [y for y in (x if isinstance(x, list | tuple) else (x,)) if is_operand(y)]
    return found


def _cast_all(
    args: tuple[Any, ...], kwargs: dict[str, Any], to: str, takes: Callable[[Any], bool]
) -> Operands:
    changed = False

    def one(x: Any) -> Any:
        nonlocal changed
        if type(x) in (list, tuple):
            return type(x)(map(one, x))
        if not takes(x) or dtype_name(x) == to:
            return x
        changed = True
        return cast(x, to)

    args, kwargs = tuple(map(one, args)), {name: one(x) for name, x in kwargs.items()}
    return Operands(args, kwargs, to if changed else None)
