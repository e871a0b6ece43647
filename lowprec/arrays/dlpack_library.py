"""Arrays of libraries known only by DLPack."""

from __future__ import annotations

from typing import Any

from lowprec.arrays.base import Library
from lowprec.arrays.device_memory import LEGACY_STREAM, DeviceArray, is_served, provider
from lowprec.arrays.dlpack import DLPackArray, device_of, import_array
from lowprec.arrays.numpy_library import NUMPY, host_view
from lowprec.arrays.view import CPU, ArrayView, Device
from lowprec.errors import ArrayError
from lowprec.formats import DType
from lowprec.util.strides import Shape

_CUDA = 2


class DLPackLibrary(Library):
    """Arrays known only by DLPack; on a GPU work is ordered on the legacy default stream."""

    name = "dlpack"
    keeps_owners = True

    def describe(self, array: Any) -> ArrayView:
        """Return the view of an array; capsules before DLPack 1.0 cannot mark it as read-only."""
        kind = type(array)
        if kind is DLPackArray:
            return host_view(array.memory)
        device = device_of(array)
        stream = None
        if device is not CPU:
            stream = self.current_stream(device)
        if stream is not None and is_served(device):
            provider(device).check_captures((stream,), device)
        if kind is DeviceArray:
            if array.stream != LEGACY_STREAM:
                provider(device).order(array.stream, LEGACY_STREAM, device)
            of_device: ArrayView = array.view()
            return of_device
        view = import_array(array, stream)
        if view.device != device:
            raise ArrayError(
                f"the array reports {device} as its device but exports memory on {view.device}; the stream on which "
                "its elements are ready is unknown"
            )
        return view

    def allocate(self, shape: Shape, dtype: DType, device: Device, like: Any) -> ArrayView:
        if device == CPU:
            return NUMPY.allocate(shape, dtype, device, like)
        return DeviceArray(shape, dtype, device, LEGACY_STREAM).view()

    def wrap(self, buffer: Any, *operands: Any) -> Any:
        """Return an array of the first operand's library if its Array API namespace has the dtype, or a DLPackArray."""
        array = buffer
        if not isinstance(buffer, DLPackArray):
            array = DLPackArray(buffer)
        namespace_of = None
        if operands:
            namespace_of = getattr(operands[0], "__array_namespace__", None)
        namespace = None
        if namespace_of is not None:
            namespace = namespace_of()
        if namespace is None or not hasattr(namespace, array.dtype):
            return array
        return namespace.from_dlpack(array)

    def current_stream(self, device: Device) -> int | None:
        """Return CUDA's legacy default stream, on which producers have ordered their data."""
        return LEGACY_STREAM if device.type == _CUDA else None


#: The one instance.
DLPACK = DLPackLibrary()
