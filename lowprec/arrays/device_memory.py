"""Device memory and streams for libraries that do not expose theirs (JAX, plain DLPack).

Backends, one layer above, register a provider here: a module with the functions of ``backends.cuda.memory``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from math import prod
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowprec.arrays.dlpack import DLPackArray
from lowprec.arrays.view import NUMPY_DTYPES, ArrayView, Device, memory_at
from lowprec.errors import ArrayError, DeviceError
from lowprec.formats import DType
from lowprec.util.strides import Shape, contiguous_strides

#: CUDA's default streams, as DLPack numbers them; number 2 is another stream in each thread.
LEGACY_STREAM = 1
PER_THREAD_STREAM = 2

#: An unknown stream; DLPack reserves the number.
UNKNOWN_STREAM = 0


_loaders: dict[int, Callable[[], ModuleType]] = {}


def register(device_type: int, load: Callable[[], ModuleType]) -> None:
    """Register the devices of a ``DLDeviceType``; ``load``, called at their first use, returns the provider."""
    _loaders[device_type] = cache(load)


def is_served(device: Device) -> bool:
    return device.type in _loaders


def provider(device: Device) -> ModuleType:
    """Return the provider of a device; raise DeviceError if there is none."""
    if device.type not in _loaders:
        raise DeviceError(
            f"lowprec cannot allocate the result on {device}; arrays must be in host memory or on an NVIDIA GPU"
        )
    return _loaders[device.type]()


_NO_SYNCHRONISATION = -1


class DeviceArray(DLPackArray):
    """A new, row-major :class:`DLPackArray` on a device, written on a stream; its NumPy array must not be read."""

    __slots__ = ("_block", "_device", "stream")

    def __init__(self, shape: Shape, dtype: DType, device: Device, stream: int) -> None:
        nbytes = prod(shape) * dtype.itemsize
        block = provider(device).allocate(nbytes, device, stream)
        memory = memory_at(block.address, block)
        super().__init__(np.ndarray(shape, NUMPY_DTYPES[dtype], memory))
        self._block = block
        self._device = device
        self.stream = stream  # on which the elements are written

    def view(self) -> ArrayView:
        strides = contiguous_strides(self.shape)
        return ArrayView(
            self._dtype, self.shape, strides, self._device, self, False, self._block.address
        )

    @property
    def memory(self) -> NDArray[Any]:
        """Raises ArrayError: NumPy cannot read device memory."""
        raise ArrayError(
            f"the array is on {self._device}, where NumPy cannot read it; use torch.from_dlpack(array).cpu().numpy() "
            "or cupy.asnumpy(cupy.from_dlpack(array))"
        )

    @property
    def device(self) -> Device:
        return self._device

    def __repr__(self) -> str:
        return f"DLPackArray(shape={self.shape}, dtype={self.dtype!r}, device='{self._device}')"

    def _consumer(self, stream: Any) -> int:
        """Return the consumer's stream.

        In the standard None is the legacy default stream. But JAX passes None if its client does not report a stream,
        and JAX's streams do not wait for the default stream. So for None the host waits.
        """
        if stream is None:
            return UNKNOWN_STREAM
        if type(stream) is int and (stream > 0 or stream == _NO_SYNCHRONISATION):
            return stream
        raise BufferError(
            f"stream must be None, -1 (no synchronisation), 1 (legacy default), 2 (per-thread default) or a CUDA "
            f"stream's handle, not {stream!r}"
        )

    def _hand_over(self, consumer: int) -> None:
        # JAX computes on another stream than it passes.
        self._block.used_on(UNKNOWN_STREAM if "jax" in sys.modules else consumer)
        if consumer == UNKNOWN_STREAM:
            provider(self._device).synchronize(self.stream, self._device)
        elif consumer != _NO_SYNCHRONISATION:
            memory = provider(self._device)
            memory.check_captures((self.stream, consumer), self._device)
            memory.order(self.stream, consumer, self._device)

    def _copy(self) -> DeviceArray:
        device = self._device
        stream = self.stream
        twin = DeviceArray(self.shape, self._dtype, device, stream)
        provider(device).copy(
            self._block.address, twin._block.address, self._memory.nbytes, device, stream
        )
        return twin
