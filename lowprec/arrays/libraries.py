"""The library of an array, looked up once per type.

Libraries are found in ``sys.modules``: an array exists only where its library has been imported.
"""

from __future__ import annotations

import pkgutil
import sys
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import ml_dtypes
import numpy as np

from lowprec.arrays.base import Library
from lowprec.arrays.dask_library import DASK
from lowprec.arrays.device_memory import DeviceArray
from lowprec.arrays.dlpack import DLPackArray, type_name
from lowprec.arrays.dlpack_library import DLPACK
from lowprec.arrays.numpy_library import NUMPY
from lowprec.arrays.prepared_view import Prepared
from lowprec.arrays.view import ArrayView
from lowprec.errors import ArrayError
from lowprec.util.lock import locked

#: Array class and adapter of each optional library, by module name; adapters are imported lazily.
OPTIONAL = {
    "torch": ("Tensor", "lowprec.arrays.torch_library:TorchLibrary"),
    "jax": ("Array", "lowprec.arrays.jax_library:JaxLibrary"),
    "cupy": ("ndarray", "lowprec.arrays.cupy_library:CupyLibrary"),
}


class _Views(Library):
    """Views themselves, with which ``plan`` describes arrays that do not exist."""

    name = "view"

    def describe(self, array: ArrayView) -> ArrayView:
        return array


_INSTANCES: dict[str, Library] = {}
BY_TYPE: dict[type, Library] = {
    **dict.fromkeys((np.ndarray, np.memmap), NUMPY),
    **dict.fromkeys((DLPackArray, DeviceArray), DLPACK),
    ArrayView: _Views(),
}

# Classes known only by DLPack. Weak references, because such a class may be created and deleted at run time.
_DLPACK_TYPES: WeakSet[type] = WeakSet()


def library_of(array: Any) -> Library:
    """Return the library of an array; ArrayError, with a remedy, for objects that cannot be read in place."""
    library = BY_TYPE.get(type(array))
    if library is None:
        return _look_up(array)
    return library


def refuse_subclasses(error: Exception, *arrays: Any) -> None:
    """Raise ArrayError if a tensor's class may lack an operation, which raised ``error``."""
    for array in arrays:
        if hasattr(array, "__torch_dispatch__") and (why := library_of(array).refusal(array)):  # type: ignore[attr-defined]
            raise ArrayError(why) from error


def _look_up(array: Any) -> Library:
    kind = type(array)
    if kind in _DLPACK_TYPES:
        return DLPACK
    library = _find(array)
    if array.__class__ is not kind:  # a proxy for an array of any type
        return library
    if library is not DLPACK:
        BY_TYPE[kind] = library
    elif hasattr(kind, "__dlpack__"):
        _DLPACK_TYPES.add(kind)
    return library


def _find(array: Any) -> Library:
    if isinstance(array, np.ndarray):
        raise _subclass_error(array)
    name = _optional_name(array)
    if name is not None:
        library = _INSTANCES.get(name)
        if library is None:
            adapter = locked(pkgutil.resolve_name, OPTIONAL[name][1])(sys.modules[name])
            library = _INSTANCES.setdefault(name, adapter)  # another thread may have been first
        library.check_type(array)
        return library
    if is_dask_array(array):
        return DASK
    if isinstance(array, Prepared):
        raise ArrayError(
            f"expected an array, got {array._description} and as the weight of linear; pass {array._remedy}"
        )
    if dense := dense_method(array):
        raise ArrayError(
            f"expected a dense array, got {type_name(array)}, which is sparse; pass its {dense}()"
        )
    has_dlpack = hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")
    if isinstance(array, type) or not has_dlpack:
        raise _no_array_error(array)
    return DLPACK


def _subclass_error(array: np.ndarray[Any, Any]) -> ArrayError:
    """Return the error for a subclass, which may give the elements or ``*`` another meaning, such as units."""
    name = type(array).__name__
    if isinstance(array, np.ma.MaskedArray):
        return ArrayError(
            f"{name} is not accepted: a matrix product has no mask; pass array.filled(0), or array.data to ignore "
            "the mask"
        )
    return ArrayError(
        f"{name} is not accepted: the result would be a plain numpy.ndarray; pass numpy.asarray(array)"
    )


def _no_array_error(value: Any) -> ArrayError:
    remedy = ""
    with suppress(Exception):  # the caller's own class may raise anything
        if np.asarray(value).dtype.kind in "biufc":
            remedy = "; wrap it with numpy.asarray"
    return ArrayError(
        f"expected an array ({NUMPY.name}, {', '.join(OPTIONAL)}, or any other with __dlpack__), got "
        f"{type_name(value)}{remedy}"
    )


def promoted(operands: tuple[Any, ...], *addends: Any) -> tuple[Any, ...]:
    """Cast weakly typed JAX arrays by JAX's rules: operands to their common type, each addend to its own with them."""
    if True not in [getattr(x, "weak_type", None) for x in (*operands, *addends)]:
        return (*operands, *addends)
    kinds = [_kind(x) for x in operands]
    result_type = sys.modules["jax"].numpy.result_type
    found = []
    for x in operands:
        found.append(x.astype(result_type(*kinds)) if _is_weak(x) else x)
    for x in addends:
        found.append(x.astype(result_type(*kinds, x)) if _is_weak(x) else x)
    return tuple(found)


def _is_weak(x: Any) -> bool:
    return getattr(x, "weak_type", False) is True and hasattr(x, "astype")


def _kind(x: Any) -> Any:
    if isinstance(x, Prepared):
        label = x._view.dtype.label
    else:
        dtype = getattr(x, "dtype", None)
        label = str(dtype).rpartition(".")[2]
    if _is_weak(x):
        return x
    return np.dtype(getattr(ml_dtypes, label, label))


def is_dask_array(array: Any) -> bool:
    array_class = getattr(sys.modules.get("dask.array"), "Array", ())
    return isinstance(array, array_class)


def _optional_name(array: Any) -> str | None:
    for name, (class_name, _) in OPTIONAL.items():
        array_class = getattr(sys.modules.get(name), class_name, None)
        if array_class is not None and isinstance(array, array_class):
            return name
    return None


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array of any library, readable or not."""
    return hasattr(x, "__dlpack__") or type(x) in BY_TYPE or _optional_name(x) is not None


def dense_method(x: Any) -> str:
    """Return the name of the method that makes a sparse array of SciPy, CuPy or JAX dense; "" for other objects."""
    return next((name for name in ("toarray", "todense") if hasattr(type(x), name)), "")


def library_name(array: Any) -> str:
    """Return the name of an array's library, also of a class that :func:`library_of` rejects; not of a lazy array's."""
    name = _optional_name(array)
    if name is None and (library := library_of(array)) is DASK:
        library.view(array)  # raises
    return name or library_of(array).name
