"""Arrays that are known only by DLPack, and the array that lowprec gives back for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.arrays.base import Library
from lowprec.arrays.dlpack import DLPackArray, import_array
from lowprec.arrays.numpy_library import host_empty, host_view
from lowprec.arrays.view import ArrayView, Device
from lowprec.formats import DType

__all__ = ["DLPACK", "DLPackLibrary"]

_CUDA_TYPES = frozenset({2, 13})


class DLPackLibrary(Library):
    """Anything with ``__dlpack__`` and ``__dlpack_device__``."""

    name = "dlpack"

    def view(self, array: Any) -> ArrayView:
        """Return the view of an array by its DLPack capsule, or of a buffer that lowprec made.

        Capsules from before DLPack 1.0 do not say whether they may be written; they count as writable.
        """
        if type(array) is DLPackArray:
            return host_view(array.memory)
        return host_view(array) if type(array) is np.ndarray else import_array(array)

    def empty(
        self, shape: tuple[int, ...], dtype: DType, device: Device, like: Any = None
    ) -> DLPackArray:
        """Return a new :class:`DLPackArray`."""
        return DLPackArray(host_empty(shape, dtype, device))

    def allocate(
        self, shape: tuple[int, ...], dtype: DType, device: Device, like: Any = None
    ) -> ArrayView:
        """Return the writable view of new host memory."""
        return host_view(host_empty(shape, dtype, device))

    def finish(self, buffer: Any, like: Any = None) -> Any:
        """Return a :class:`DLPackArray` on the buffer."""
        return buffer if type(buffer) is DLPackArray else DLPackArray(buffer)

    def current_stream(self, device: Device) -> int | None:
        """Return CUDA's legacy default stream, on which the producers have made their data ready."""
        return 1 if device.type in _CUDA_TYPES else None

    def describe(self) -> dict[str, str]:
        """Return the name and the DLPack version that is read and written."""
        return {"name": self.name, "version": "1.0"}


#: The one instance.
DLPACK = DLPackLibrary()
