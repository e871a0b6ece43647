"""CuPy arrays, by their own attributes.

Source: the CuPy reference (``cupy.ndarray``, ``cupy.cuda.MemoryPointer``, ``cupy.cuda.get_current_stream``). CuPy
supports bfloat16 (of ml_dtypes) since version 14, and no float8.
"""

from __future__ import annotations

from typing import Any

from lowprec.arrays.base import Library
from lowprec.arrays.view import FROM_NUMPY, NUMPY_DTYPES, ArrayView, Device
from lowprec.errors import ArrayError
from lowprec.formats import DType, dtype_from_name
from lowprec.util.strides import Shape

_CUDA = 2
_ROCM = 10


class CupyLibrary(Library):
    """CuPy: arrays on a GPU."""

    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._device_type = _ROCM if cupy.cuda.runtime.is_hip else _CUDA

    def check_type(self, array: Any) -> None:
        """Raise ArrayError for subclasses, because the result would be a plain array."""
        if type(array) is not self._cupy.ndarray:
            raise ArrayError(f"{type(array).__name__} is not accepted; pass cupy.asarray(array)")

    def describe(self, array: Any) -> ArrayView:
        dtype = FROM_NUMPY.get(array.dtype)
        if dtype is None:
            dtype = dtype_from_name(array.dtype.name)
            raise ArrayError(
                f"the cupy array of {dtype} is not in native byte order; convert it with astype({dtype.label!r})"
            )
        itemsize = dtype.itemsize
        if any(s % itemsize for s in array.strides):
            raise ArrayError(
                f"the cupy array's byte strides {array.strides} are not multiples of {itemsize}; pass array.copy()"
            )
        strides = tuple([s // itemsize for s in array.strides])
        device = Device(self._device_type, int(array.device.id))
        return ArrayView(dtype, array.shape, strides, device, array, False, array.data.ptr)

    def allocate(self, shape: Shape, dtype: DType, device: Device, like: Any) -> ArrayView:
        with self._cupy.cuda.Device(device.index):
            return self.describe(self._cupy.empty(shape, NUMPY_DTYPES[dtype]))

    def current_stream(self, device: Device) -> int | None:
        stream: int = self._cupy.cuda.get_current_stream(device.index).ptr
        return stream or 1
