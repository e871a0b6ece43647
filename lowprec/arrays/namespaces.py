"""Functions of an array's own library: dtype names, casts, permuting and reshaping axes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec.arrays.libraries import is_dask_array, library_name, library_of, refuse_subclasses
from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.errors import ArrayError, quoted
from lowprec.formats import dtype_from_name
from lowprec.util.strides import Shape

#: Module with the array functions of each library known by name.
_MODULES = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy", "cupy": "cupy"}


def array_module(array: Any) -> Any:
    """Return the Array API namespace of an array's library, or its equivalent."""
    return namespace_of(array)._xp


def namespace_of(array: Any) -> Namespace:
    """Return the functions of an array's library; raise ArrayError if it has no Array API namespace."""
    kind = type(array)
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    module: str | None = "dask.array"
    if not is_dask_array(array):
        module = _MODULES.get(library_name(array))
    if module is not None:
        namespace = _BY_TYPE[kind] = Namespace(sys.modules[module])
        return namespace
    if hasattr(array, "__array_namespace__"):
        return Namespace(array.__array_namespace__())
    raise ArrayError(
        f"{quoted(type(array).__qualname__)} has no Array API namespace, which is needed to permute axes and cast "
        "elements; pass an array of NumPy, PyTorch, JAX, CuPy or of a library with the Array API"
    )


@functools.lru_cache(maxsize=256)
def numpy_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a NumPy dtype, cached because NumPy builds it in each call."""
    return dtype.name


def dtype_label(dtype: Any) -> str:
    """Return the name of a library's element type: ``"float32"`` of ``torch.float32``."""
    if isinstance(dtype, np.dtype):
        return numpy_name(dtype)
    return str(dtype).rpartition(".")[2]


dtype_label._dynamo_marked_constant = True  # type: ignore[attr-defined]  # PyTorch's compiler calls it


def dtype_name(array: Any) -> str:
    """Return the name of an array's element type, also for arrays known only by DLPack."""
    dtype = getattr(array, "dtype", None)
    if isinstance(dtype, np.dtype):
        return numpy_name(dtype)
    if dtype is None:
        return library_of(array).view(array).dtype.label
    return dtype_label(dtype)


def shape_of(array: Any) -> Shape:
    if hasattr(array, "shape"):
        return tuple(array.shape)
    return library_of(array).view(array).shape


def converted(x: Any, dtype: Any) -> Any:
    """Return an array in another element type of its library."""
    if hasattr(x, "to"):
        return x.to(dtype)
    return x.astype(dtype)


def cast(array: Any, label: str) -> Any:
    """Return an array cast to another element type; unchanged if it has that type, or if its library lacks the type."""
    if dtype_name(array) == label:
        return array
    if hasattr(array, "astype"):  # NumPy scalars too
        jax = sys.modules.get("jax")
        wide = label in ("float64", "complex128")
        if wide and jax and isinstance(array, jax.Array) and not jax.config.jax_enable_x64:
            return array
        return array.astype(NUMPY_DTYPES[dtype_from_name(label)])
    xp = array_module(array)
    dtype = getattr(xp, label, None)
    if dtype is None:
        return array
    if hasattr(array, "to"):
        return array.to(dtype)
    return xp.astype(array, dtype)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of an array that raises ArrayError if the array's class lacks it."""

    def call(x: Any, argument: Any) -> Any:
        try:
            return function(x, argument)
        except (NotImplementedError, TypeError) as error:
            refuse_subclasses(error, x)
            raise

    return call


class Namespace:
    """The functions of one library that contractions use."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        names = ("permute_dims", "permute", "transpose")  # Array API, PyTorch, Dask
        permute = next(getattr(xp, name) for name in names if hasattr(xp, name))
        self._permute = _checked(permute)
        self._reshape = _checked(xp.reshape)

    def permuted(self, x: Any, order: tuple[int, ...]) -> Any:
        if order == tuple(range(len(order))):
            return x
        return self._permute(x, order)

    def arranged(self, x: Any, order: tuple[int, ...], shape: Shape) -> Any:
        """Return ``x`` with its axes in this order, then reshaped."""
        return self.reshaped(self.permuted(x, order), shape)

    def reshaped(self, x: Any, shape: Shape) -> Any:
        if tuple(x.shape) == shape:
            return x
        if hasattr(x, "numblocks"):  # Dask's reshape fails on empty axes and chunks
            if 0 in x.shape:
                return self._xp.zeros_like(x, shape=shape, chunks=shape)
            chunks = [tuple(filter(None, axis)) for axis in x.chunks]
            x = x.rechunk(tuple(chunks))
        return self._reshape(x, shape)

    def last(self, x: Any, axis: int) -> Any:
        rest = [i for i in range(len(x.shape)) if i != axis % len(x.shape)]
        return self.permuted(x, (*rest, axis % len(x.shape)))

    def diagonal(self, x: Any, first: int, second: int) -> Any:
        rest = [i for i in range(len(x.shape)) if i not in (first, second)]
        last = self.permuted(x, (*rest, first, second))
        if hasattr(self._xp.linalg, "diagonal"):
            return self._xp.linalg.diagonal(last)
        return self._xp.diagonal(last, 0, len(rest), len(rest) + 1)

    def ones(self, n: int, like: Any) -> Any:
        """Return ``n`` ones with the element type and device of ``like``."""
        if hasattr(like, "new_ones"):
            return like.new_ones(n)
        return self._xp.ones((n,), dtype=like.dtype)

    def conjugated(self, x: Any) -> Any:
        """Return the complex conjugate; real arrays are returned unchanged."""
        if "complex" in str(x.dtype):
            return self._xp.conj(x)
        return x


_BY_TYPE: dict[type, Namespace] = {}
