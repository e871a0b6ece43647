"""NumPy arrays, including the dtypes of ml_dtypes."""

from __future__ import annotations

from math import prod
from typing import Any, TypeVar

import numpy as np

from lowprec.arrays.base import Library
from lowprec.arrays.view import (
    NUMPY_DTYPES,
    POINTER,
    WORDS,
    Array,
    ArrayView,
    Device,
    HostView,
    Layout,
    data_pointer,
)
from lowprec.formats import DType, dtype_from_name
from lowprec.util.strides import Shape, contiguous_strides

#: Alignment in bytes with which JAX imports memory without a copy, and kernels write whole cache lines.
CACHE_LINE = 64
#: Results of at least this many bytes are aligned, for non-temporal stores.
_LARGE_BYTES = 1 << 20

# By NumPy dtype in native byte order: the element type, the shift from byte strides to element strides, and the bits
# of a byte stride that the shift drops.
_ENTRIES = {
    numpy_dtype: (d, d.itemsize.bit_length() - 1, d.itemsize - 1)
    for d, numpy_dtype in NUMPY_DTYPES.items()
}
#: Layouts by NumPy dtype, shape and byte strides; of results, with the dtype and whether they are large.
_layouts: dict[tuple[np.dtype[Any], Shape, Shape], Layout] = {}
_results: dict[tuple[Shape, DType], tuple[np.dtype[Any], bool, Layout]] = {}
_MOST_LAYOUTS = 4096
_K = TypeVar("_K")
_V = TypeVar("_V")
#: Makes a view without ``__init__``, in two thirds of the time.
_new = object.__new__
_empty = np.empty


def host_view(array: Array, copied: str | None = None) -> ArrayView:
    """Return the view of a NumPy array, or of a copy with its reason: foreign byte order, misaligned, odd strides."""
    layout = _layouts.get((array.dtype, array.shape, array.strides)) or _new_layout(array)
    # data_pointer, without a call
    address = WORDS[(id(array) >> 3) + POINTER] if POINTER else array.ctypes.data
    # NumPy's flag takes longer, and is needed for complex numbers at multiples of their parts' size.
    if layout is None or (address & layout.lost and not array.flags.aligned):
        return view_of_copy(array)
    view = _new(HostView)
    view.layout = layout
    view.owner = array
    view.address = address
    view.copied = copied
    return view


def _new_layout(array: Array) -> Layout | None:
    """Return the layout of an array, or None if its elements or strides cannot be described."""
    entry = _ENTRIES.get(array.dtype)
    if entry is None or any(stride & entry[2] for stride in array.strides):
        return None
    dtype, shift, lost = entry
    strides = tuple([stride >> shift for stride in array.strides])
    layout = Layout(dtype, array.shape, strides, lost)
    return _remember(_layouts, (array.dtype, array.shape, array.strides), layout)


def _new_result(shape: Shape, dtype: DType) -> tuple[np.dtype[Any], bool, Layout]:
    is_large = prod(shape) * dtype.itemsize >= _LARGE_BYTES
    layout = Layout(dtype, shape, contiguous_strides(shape), 0)
    return _remember(_results, (shape, dtype), (NUMPY_DTYPES[dtype], is_large, layout))


def _remember(cache: dict[_K, _V], key: _K, value: _V) -> _V:
    if len(cache) >= _MOST_LAYOUTS:
        cache.clear()
    return cache.setdefault(key, value)


def view_of_copy(array: Array) -> ArrayView:
    """Return the view of a copy in native byte order, contiguous and aligned, with the reason for it."""
    if array.dtype.isnative:
        native = array.dtype
    else:
        native = array.dtype.newbyteorder("=")
    entry = _ENTRIES.get(native)
    if entry is None:
        dtype = dtype_from_name(native.name)
    else:
        dtype = entry[0]
    if array.dtype != native:
        reason = "its byte order is not this machine's"
    elif array.flags.aligned and any(stride % native.itemsize for stride in array.strides):
        reason = "its byte strides are not multiples of the element size"
    else:
        reason = "its memory is not aligned to the element size"
    copy = np.array(array, NUMPY_DTYPES[dtype], order="C")
    copy.flags.writeable = array.flags.writeable
    return host_view(copy, reason)


def aligned_empty(shape: Shape, dtype: np.dtype[Any]) -> Array:
    try:
        raw: Array = np.empty(prod(shape) * dtype.itemsize + CACHE_LINE, np.uint8)
    except (MemoryError, ValueError):  # ValueError: no such size exists
        return np.empty(shape, dtype)  # raises with the shape in the message
    return np.ndarray(shape, dtype, raw, -data_pointer(raw) % CACHE_LINE)


class NumpyLibrary(Library):
    """NumPy arrays, read and written in place."""

    name = "numpy"

    describe = view = staticmethod(host_view)  # one call less per operand

    def allocate(self, shape: Shape, dtype: DType, device: Device, like: Any) -> ArrayView:
        numpy_dtype, is_large, layout = _results.get((shape, dtype)) or _new_result(shape, dtype)
        if is_large:
            array = aligned_empty(shape, numpy_dtype)
        else:
            array = _empty(shape, numpy_dtype)
        view = _new(HostView)
        view.layout = layout
        view.owner = array
        if POINTER:
            view.address = WORDS[(id(array) >> 3) + POINTER]
        else:
            view.address = array.ctypes.data
        view.copied = None
        return view

    def wrap(self, buffer: Any, *operands: Any) -> Any:
        if buffer.ndim:
            return buffer
        return buffer[()]


#: The one instance.
NUMPY = NumpyLibrary()
