"""NumPy arrays, including the dtypes of ml_dtypes."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowprec.arrays.base import Library
from lowprec.arrays.view import NUMPY_DTYPES, POINTER, WORDS, ArrayView, Device, HostView, data_pointer
from lowprec.formats import DType, dtype_from_name
from lowprec.util.strides import contiguous_strides

#: Alignment in bytes with which JAX imports memory without a copy, and kernels write whole cache lines.
CACHE_LINE = 64
#: Results of at least this many bytes are aligned, for non-temporal stores.
_LARGE_BYTES = 1 << 20

# By NumPy dtype in native byte order: the element type, the shift from byte strides to element strides, and the bits
# of a byte stride that the shift drops.
_ENTRIES = {numpy_dtype: (d, d.itemsize.bit_length() - 1, d.itemsize - 1) for d, numpy_dtype in NUMPY_DTYPES.items()}
_ALLOCATED = {d: (numpy_dtype, d.itemsize) for d, numpy_dtype in NUMPY_DTYPES.items()}
#: Makes a view without ``__init__``, in two thirds of the time.
_new, _empty = object.__new__, np.empty


def host_view(array: NDArray[Any], copied: str | None = None) -> ArrayView:
    """Return the view of a NumPy array, or of a copy with its reason: foreign byte order, misaligned, odd strides."""
    entry = _ENTRIES.get(array.dtype)
    if entry is None:
        return view_of_copy(array)
    dtype, shift, lost = entry
    strides = array.strides
    address = WORDS[(id(array) >> 3) + POINTER] if POINTER else array.ctypes.data  # data_pointer, without a call
    # NumPy's flag takes longer, and is needed for complex numbers at multiples of their parts' size.
    if address & lost and not array.flags.aligned:
        return view_of_copy(array)
    if len(strides) == 2:  # the common case, 0.3 us faster than the loop below
        first, second = strides
        if (first | second) & lost:
            return view_of_copy(array)
        strides = (first >> shift, second >> shift)
    else:
        for stride in strides:
            if stride & lost:
                return view_of_copy(array)
        strides = tuple([s >> shift for s in strides])
    view = _new(HostView)
    view.dtype, view.shape, view.strides, view.owner = dtype, array.shape, strides, array
    view.address, view.copied = address, copied
    return view


def view_of_copy(array: NDArray[Any]) -> ArrayView:
    """Return the view of a copy in native byte order, contiguous and aligned, with the reason for it."""
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    entry = _ENTRIES.get(native)
    dtype = dtype_from_name(native.name) if entry is None else entry[0]
    if array.dtype != native:
        reason = "its byte order is not this machine's"
    elif array.flags.aligned and any(stride % native.itemsize for stride in array.strides):
        reason = "its byte strides are not multiples of the element size"
    else:
        reason = "its memory is not aligned to the element size"
    copy = np.array(array, NUMPY_DTYPES[dtype], order="C")
    copy.flags.writeable = array.flags.writeable
    return host_view(copy, reason)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        raw: NDArray[Any] = np.empty(prod(shape) * dtype.itemsize + CACHE_LINE, np.uint8)
    except (MemoryError, ValueError):  # ValueError: no such size exists
        return np.empty(shape, dtype)  # raises with the shape in the message
    return np.ndarray(shape, dtype, raw, -data_pointer(raw) % CACHE_LINE)


class NumpyLibrary(Library):
    """NumPy arrays, read and written in place."""

    name = "numpy"

    describe = view = staticmethod(host_view)  # one call less per operand

    def allocate(self, shape: tuple[int, ...], dtype: DType, device: Device, like: Any) -> ArrayView:
        numpy_dtype, itemsize = _ALLOCATED[dtype]
        if len(shape) == 2:  # the common case
            rows, cols = shape
            size = rows * cols
            strides: tuple[int, ...] = (cols or 1, 1)
        else:
            size, strides = prod(shape), contiguous_strides(shape)
        large = size * itemsize >= _LARGE_BYTES
        array = aligned_empty(shape, numpy_dtype) if large else _empty(shape, numpy_dtype)
        address = WORDS[(id(array) >> 3) + POINTER] if POINTER else array.ctypes.data
        view = _new(HostView)
        view.dtype, view.shape, view.strides, view.owner = dtype, shape, strides, array
        view.address, view.copied = address, None
        return view

    def wrap(self, buffer: Any, *operands: Any) -> Any:
        return buffer if buffer.ndim else buffer[()]


#: The one instance.
NUMPY = NumpyLibrary()
