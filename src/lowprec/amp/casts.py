"""Element types of any library's arrays: their names, and casts."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from lowprec.arrays import NUMPY_DTYPES, is_array, library_name, library_of
from lowprec.errors import ArrayError, quoted
from lowprec.formats import dtype_from_name

#: Floating-point types of which the one further right holds less; bfloat16 and float16 do not hold each other.
FLOATS = ("float64", "float32", "bfloat16", "float16")


def dtype_name(array: Any) -> str:
    """Return the name of an array's element type, as NumPy, ml_dtypes and the frameworks share it.

    Examples
    --------
    >>> import numpy as np
    >>> dtype_name(np.ones(2, np.float16))
    'float16'
    """
    if not hasattr(array, "dtype"):  # known only by DLPack
        return library_of(array).view(array).dtype.label
    if isinstance(array.dtype, np.dtype):
        return _numpy_name(array.dtype)
    name = getattr(array.dtype, "name", None) or str(array.dtype)
    return name.rpartition(".")[2]  # "torch.float16", "array_api_strict.float32"


@functools.lru_cache(maxsize=256)
def _numpy_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # which NumPy makes up each time


def shape_of(array: Any) -> tuple[int, ...]:
    """Return the lengths of an array's axes."""
    shape = array.shape if hasattr(array, "shape") else library_of(array).view(array).shape
    return tuple(shape)


def is_operand(x: Any) -> bool:
    """Whether something is an array or a scalar of NumPy's; the libraries' classes of element types are neither."""
    return is_array(x) or isinstance(x, np.generic)


def is_float(array: Any, *, wide: bool = True) -> bool:
    """Whether an array has one of :data:`FLOATS` as its element type; float64 only if ``wide``."""
    return is_operand(array) and dtype_name(array) in FLOATS[not wide :]


def cast(array: Any, name: str) -> Any:
    """Return an array with elements of another type; itself where it has that already.

    A library without the type (the Array API's own, which have no float16) keeps what it has.

    Examples
    --------
    >>> import numpy as np
    >>> cast(np.ones(2, np.float32), "bfloat16").dtype.name
    'bfloat16'
    """
    if dtype_name(array) == name:
        return array
    if hasattr(array, "astype"):  # NumPy's scalars have it, too
        return array.astype(NUMPY_DTYPES[dtype_from_name(name)])
    if library_name(array) == "torch":
        return array.to(getattr(sys.modules["torch"], name))
    if hasattr(array, "__array_namespace__"):
        xp = array.__array_namespace__()
        dtype = getattr(xp, name, None)
        return array if dtype is None else xp.astype(array, dtype)
    raise ArrayError(
        f"{quoted(type(array).__qualname__)} has no cast to another element type; pass an array of NumPy, PyTorch, "
        "JAX, CuPy or of a library with the Array API"
    )


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
