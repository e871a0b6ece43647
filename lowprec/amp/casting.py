"""Operands cast by the list of the called function, and scalar factors applied in an array's own type."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np

from lowprec.arrays import is_array
from lowprec.arrays.namespaces import cast, dtype_name, shape_of
from lowprec.modes import MathMode
from lowprec.policy import math_mode, resolve

#: Floating-point types, from wide to narrow; neither of bfloat16 and float16 includes the other.
FLOATS = ("float64", "float32", "bfloat16", "float16")
_NARROW = FLOATS[2:]

#: The math mode that rounds float32 operands to each type.
_MODES = {"tf32": MathMode.TF32, "bfloat16": MathMode.BF16, "float16": MathMode.FP16}


#: Arguments of a call, cast or not, and the type of the cast operands, or to which products round; None if nothing
#: changes.
Cast: TypeAlias = tuple[tuple[Any, ...], dict[str, Any], str | None]


def by_list(
    compute: str, which: str, args: tuple[Any, ...], kwargs: dict[str, Any], xp: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any], str | None, AbstractContextManager[Any]]:
    """Return the operands in the type that a list ("allow", "deny", "infer") requires, and a scope for the call.

    Floats narrower than 64 bits are cast, also in lists and tuples, but not ``out``. ``compute`` is the policy's type
    of products, float32 in ``fp32_guard``; where the namespace ``xp`` lacks it, a math mode replaces it.
    """
    if which == "infer":
        return *_promoted(args, kwargs), nullcontext()
    if which == "deny" or compute == "float32":
        return *_cast_all(args, kwargs, "float32"), nullcontext()
    mode = _MODES[compute]
    if resolve(mode).mode is not mode:
        return *_cast_all(args, kwargs, "float32"), nullcontext()
    if compute != "tf32" and (xp is None or has_type(xp, compute)):
        return *_cast_all(args, kwargs, compute), nullcontext()
    args, kwargs, to = _cast_all(args, kwargs, "float32")
    if "float32" in _dtypes(args, kwargs):
        return args, kwargs, compute, math_mode(mode)
    return args, kwargs, to, nullcontext()


def _promoted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cast:
    """Return the operands in the widest of their types."""
    names = _dtypes(args, kwargs).intersection(FLOATS)
    if len(names) < 2:
        return args, kwargs, None
    if names >= {"bfloat16", "float16"}:
        names.add("float32")
    widest = min(names, key=FLOATS.index)
    return _cast_all(args, kwargs, widest, wide=True)


def _dtypes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    values = [*args]
    values += [x for name, x in kwargs.items() if name != "out"]
    names: set[str] = set()
    for value in values:
        arrays = value if isinstance(value, list | tuple) else [value]
        names.update(dtype_name(x) for x in arrays if is_operand(x))
    return names


def _cast_all(
    args: tuple[Any, ...], kwargs: dict[str, Any], to: str, *, wide: bool = False
) -> Cast:
    changed = False

    def one(x: Any) -> Any:
        nonlocal changed
        if type(x) in (list, tuple):
            return type(x)(map(one, x))
        if not is_float(x, wide=wide) or dtype_name(x) == to:
            return x
        changed = True
        return cast(x, to)

    args = tuple(map(one, args))
    kwargs = {name: x if name == "out" else one(x) for name, x in kwargs.items()}
    if not changed:
        return args, kwargs, None
    return args, kwargs, to


def is_operand(x: Any) -> bool:
    return is_array(x) or isinstance(x, np.generic)


def is_float(array: Any, *, wide: bool = True) -> bool:
    """Whether an array has one of :data:`FLOATS` as its element type; float64 only if ``wide``."""
    return is_operand(array) and dtype_name(array) in FLOATS[not wide :]


def cast_float(x: Any, name: str) -> Any:
    """Return an array of floats narrower than 64 bits in another element type; anything else is returned unchanged."""
    if is_float(x, wide=False):
        return cast(x, name)
    return x


def times(x: Any, factor: Any) -> Any:
    """Return ``x * factor`` in the type of ``x``, rounded once: 16-bit numbers are multiplied in float32."""
    name = dtype_name(x)
    if name in _NARROW:
        x = cast(x, "float32")
    product = x * factor
    if dtype_name(product) == name:
        return product
    return cast(product, name)


def scaled_loss(x: Any, scale: Any) -> Any:
    """Return a loss times a scale: in float32 for a 16-bit scalar, else in the type of the loss."""
    if not shape_of(x) and dtype_name(x) in _NARROW:
        x = cast(x, "float32")
    return times(x, scale)


def has_type(xp: Any, name: str) -> bool:
    """Whether a namespace has an element type; NumPy has bfloat16 by ml_dtypes."""
    module = getattr(xp, "__name__", "").split(".")[0]
    return hasattr(xp, name) or (module == "numpy" and name in FLOATS)
