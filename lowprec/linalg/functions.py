"""Functions of the arrays' library, called inside the guard.

The library is in ``sys.modules``, because its arrays exist. Only its submodules (``jax.scipy.linalg``) are imported,
and SciPy for NumPy arrays.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache, reduce
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np

from lowprec.arrays import DLPackArray, library_name, library_of
from lowprec.arrays.dlpack import device_of
from lowprec.arrays.libraries import is_array
from lowprec.arrays.namespaces import cast as cast_array
from lowprec.arrays.namespaces import dtype_name
from lowprec.errors import ArrayError, DTypeError, UnsupportedError
from lowprec.formats import DType, promote
from lowprec.policy import fp32_guard
from lowprec.util.tracing import uncompiled

#: The modules of each library, in the order in which a function is looked up.
MODULES: Mapping[str, tuple[str, ...]] = {
    "numpy": ("numpy.linalg", "scipy.linalg"),
    "torch": ("torch.linalg",),
    "jax": ("jax.numpy.linalg", "jax.scipy.linalg"),
    "cupy": ("cupy.linalg", "cupyx.scipy.linalg"),
}
#: By name: the libraries that have a function in another module or by another name.
OTHERS: Mapping[str, Mapping[str, str]] = {
    "expm": {"torch": "torch.linalg.matrix_exp"},
    "cdist": {
        "numpy": "scipy.spatial.distance.cdist",
        "torch": "torch.cdist",
        "cupy": "cupyx.scipy.spatial.distance.cdist",
    },
}

#: Element types that LAPACK has.
_DTYPES = {
    dtype.label: dtype
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)
}
_INTEGERS = ("int", "uint", "bool")  # first letters of the types of pivots and masks

_CUDA = 2  # ``DLDeviceType`` of dlpack.h


def find(function: str, library: str) -> Callable[..., Any]:
    """Return a function of a library; raise UnsupportedError if there is none."""
    other = OTHERS.get(function, {})
    paths = [f"{module}.{function}" for module in MODULES[library]]
    if library in other:
        paths = [other[library]]
    remedy = "pass an array of another library"
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            value: Any = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            package = (error.name or module).partition(".")[0]
            remedy = f"{package} is not installed: install it (pip install {package}), or {remedy}"
            continue
        if _is_function(value):
            return cast("Callable[..., Any]", value)
    version = getattr(sys.modules.get(library), "__version__", "")
    raise UnsupportedError(
        f"{library} {version} has no function {function} ({' or '.join(paths)}); {remedy}"
    )


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _has(library: str, function: str) -> bool:
    try:
        return library in sys.modules and _is_function(find(function, library))
    except UnsupportedError:
        return False


def names() -> list[str]:
    """Return the names of the functions in the modules that are loaded."""
    functions = set(OTHERS)
    modules = chain.from_iterable(MODULES.values())
    for module in filter(None, map(sys.modules.get, modules)):
        for name in getattr(module, "__all__", dir(module)):
            if name[0] != "_" and _is_function(getattr(module, name, None)):
                functions.add(name)
    return sorted(functions)


@cache
def guarded(name: str) -> Callable[..., Any]:
    """Return a function that calls the function of this name of the arrays' library inside the guard."""
    if name not in OTHERS and not any(_has(library, name) for library in MODULES):
        close = get_close_matches(name, names())
        hint = ""
        if close:
            hint = f"; names close to it: {', '.join(close)}"
        raise AttributeError(
            f"lowprec.linalg: no loaded library has a function {name!r} of linear algebra{hint}"
        )

    def function(*arguments: Any, **keywords: Any) -> Any:
        return _call(name, arguments, keywords)

    function.__name__ = function.__qualname__ = name
    function.__module__ = "lowprec.linalg"
    function.__doc__ = (
        f"Call the function {name} of the arrays' library inside :func:`lowprec.fp32_guard`."
    )
    return uncompiled(function)


def _call(function: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    arrays: list[Any] = []
    _map_arrays(arrays.append, [arguments, keywords])
    first = next(iter((*arguments, *keywords.values())), None)
    if not arrays or not isinstance(first, list | tuple):
        library_name(first)  # raises ArrayError unless it is an array
    library = _common_library(function, arrays)
    by_dlpack = library == "dlpack"
    if by_dlpack:
        library, arrays = _adopted(function, arrays)
        rest = iter(arrays)
        arguments, keywords = _map_arrays(lambda _: next(rest), [arguments, keywords])
    for i, label in enumerate(map(dtype_name, arrays)):
        if label not in _DTYPES and (i == 0 or not label.startswith(_INTEGERS)):
            raise _unsupported_type(function, label)
    work = find(function, library)
    with fp32_guard():
        result = work(*arguments, **keywords)
    if by_dlpack:
        return _handed_back(library, result)
    return result


def _map_arrays(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to the arrays of nested lists, tuples and dictionaries."""
    if isinstance(x, list | tuple):
        items = [_map_arrays(function, item) for item in x]
        return items if isinstance(x, list) else tuple(items)
    if isinstance(x, dict):
        return {key: _map_arrays(function, item) for key, item in x.items()}
    if is_array(x):
        return function(x)
    return x


class Operands(NamedTuple):
    """The operands of ``solve``, of one library and one element type."""

    library: str
    arrays: tuple[Any, ...]
    dtype: DType
    by_dlpack: bool  # whether they support only DLPack

    def handed_back(self, result: Any) -> Any:
        """Convert a result of the library to the caller's kind of array."""
        if self.by_dlpack:
            return _handed_back(self.library, result)
        return result


def operands(function: str, **arrays: Any) -> Operands:
    """Return the arrays in the form that the library accepts; raise ArrayError or DTypeError."""
    for name, x in arrays.items():
        try:
            library_name(x)
        except ArrayError as error:
            error.argument = name
            raise
    values = list(arrays.values())
    library = _common_library(function, values)
    by_dlpack = library == "dlpack"
    if by_dlpack:
        library, values = _adopted(function, values)
    labels = [dtype_name(x) for x in values]
    for name, label in zip(arrays, labels, strict=True):
        if label not in _DTYPES:
            raise _unsupported_type(function, label, name)
    common = reduce(promote, (_DTYPES[label] for label in labels))
    cast_values = tuple(cast_array(x, common.label) for x in values)
    return Operands(library, cast_values, common, by_dlpack)


def _unsupported_type(function: str, label: str, name: str = "an array") -> DTypeError:
    return DTypeError(
        f"{function} takes {', '.join(_DTYPES)}, and {name} is {label}; convert it first, for example to float32, and "
        "the result back if needed"
    )


def _common_library(function: str, arrays: Any) -> str:
    libraries = [library_name(x) for x in arrays]
    if len(set(libraries)) > 1:
        raise ArrayError(
            f"{function} takes arrays of one library, got {' and '.join(dict.fromkeys(libraries))}; convert one of "
            "them, for example with the library's from_dlpack"
        )
    return libraries[0]


def _adopted(function: str, arrays: Any) -> tuple[str, list[Any]]:
    """Return arrays that support only DLPack as arrays of NumPy, or of CuPy in CUDA memory."""
    devices = [device_of(x) for x in arrays]
    if all(d.is_host for d in devices):
        return "numpy", [library_of(x).view(x).ndarray() for x in arrays]
    cupy = sys.modules.get("cupy")
    if cupy is None or not all(d.type == _CUDA for d in devices):
        where = " and ".join(dict.fromkeys(map(str, devices)))
        raise UnsupportedError(
            f"{function} has no library for DLPack arrays on {where}: NumPy computes on the CPU, and CuPy on CUDA if "
            "the program has imported it; import cupy, or pass an array of a library known by name"
        )
    return "cupy", [cupy.from_dlpack(x) for x in arrays]


def _handed_back(library: str, result: Any) -> Any:
    """Return NumPy's results as DLPack arrays; CuPy's support DLPack. Ranks become int32."""
    if library != "numpy":
        return result
    if isinstance(result, tuple):
        values = [_handed_back(library, x) for x in result]
        if hasattr(result, "_fields"):
            return type(result)(*values)
        return tuple(values)
    if not isinstance(result, np.ndarray | np.generic):
        return result
    array = np.asarray(result)
    if array.dtype.kind in "iu":
        array = array.astype(np.int32)
    return DLPackArray(array)
