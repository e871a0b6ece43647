"""Which operands are cast to which floating-point types, and products in their own type."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.arrays import is_array
from lowprec.arrays.namespaces import cast, dtype_name, shape_of

#: Floating-point types of which the one further right holds less; bfloat16 and float16 do not hold each other.
FLOATS = ("float64", "float32", "bfloat16", "float16")


def is_operand(x: Any) -> bool:
    """Whether something is an array or a scalar of NumPy's; the libraries' classes of element types are neither."""
    return is_array(x) or isinstance(x, np.generic)


def is_float(array: Any, *, wide: bool = True) -> bool:
    """Whether an array has one of :data:`FLOATS` as its element type; float64 only if ``wide``."""
    return is_operand(array) and dtype_name(array) in FLOATS[not wide :]


def times(x: Any, factor: Any) -> Any:
    """Return a product in the type of the array, rounded once: 16-bit numbers are multiplied in float32."""
    name = dtype_name(x)
    wide = cast(x, "float32") if name in FLOATS[2:] else x
    product = wide * factor
    return product if dtype_name(product) == name else cast(product, name)


def scaled_loss(x: Any, scale: Any) -> Any:
    """Return a loss times a scale: in float32 where it has 16 bits and no dimensions, else in its own type."""
    is_narrow = not shape_of(x) and dtype_name(x) in FLOATS[2:]
    return times(cast(x, "float32") if is_narrow else x, scale)


def has_type(xp: Any, name: str) -> bool:
    """Whether a namespace has an element type: by its name, or with NumPy's help, as NumPy has bfloat16."""
    module = getattr(xp, "__name__", "").split(".")[0]
    return hasattr(xp, name) or (module == "numpy" and name in FLOATS)


def widest(names: list[str]) -> str:
    """Return the type that holds all of these.

    Examples
    --------
    >>> widest(["float16", "float32"]), widest(["float16", "bfloat16"])
    ('float32', 'float32')
    """
    if {"bfloat16", "float16"} <= set(names):
        names = [*names, "float32"]
    return min(names, key=FLOATS.index)
