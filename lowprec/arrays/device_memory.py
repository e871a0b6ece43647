"""Memory and streams of a device, for arrays of libraries that provide neither (JAX, plain DLPack).

A backend, one layer above, registers its functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lowprec.arrays.dlpack import DLPackArray
from lowprec.arrays.view import NUMPY_DTYPES, ArrayView, Device, memory_at
from lowprec.errors import ArrayError, DeviceError
from lowprec.formats import DType
from lowprec.util.strides import contiguous_strides

#: CUDA's default stream, as DLPack numbers it.
LEGACY_STREAM = 1


class Block(Protocol):
    """Memory of a device. It is given back after this object died, once no stream may be at work on it."""

    @property
    def address(self) -> int:
        """Of the first byte; also where there are no bytes."""


class DeviceMemory(Protocol):
    """Functions of a backend for its devices; a module with these functions is a provider.

    Streams are CUDA's numbers: 1 is the legacy default stream, 2 that of the thread.
    """

    def allocate(self, nbytes: int, device: Device, stream: int) -> Block:
        """Return new memory for work on a stream."""

    def own_stream(self, device: Device) -> int:
        """Return lowprec's own stream of a device, always the same."""

    def order(self, before: int, after: int, device: Device) -> None:
        """Have later work of stream ``after`` wait for the current work of stream ``before``."""

    def check_captures(self, streams: Sequence[int], device: Device) -> None:
        """Raise a BackendError if work that joins these streams would end the capture of a graph."""

    def synchronize(self, stream: int, device: Device) -> None:
        """Wait on the host for the current work of a stream."""

    def copy(self, source: int, target: int, nbytes: int, device: Device, stream: int) -> None:
        """Copy bytes between two addresses of the device, in the order of a stream."""

    def hold(self, owners: Sequence[Any], device: Device) -> None:
        """Hold objects that work on a device is about to need, whatever happens, until :meth:`keep` sets how long."""

    def keep(self, owners: Sequence[Any], stream: int, device: Device) -> None:
        """Hold objects until the work that a stream holds now is done."""


_loaders: dict[int, Callable[[], DeviceMemory]] = {}
_providers: dict[int, DeviceMemory] = {}


def register(device_type: int, load: Callable[[], DeviceMemory]) -> None:
    """Make devices of a ``DLDeviceType`` known; ``load`` returns their provider, called with the first of them."""
    _providers.pop(device_type, None)
    _loaders[device_type] = load


def is_served(device: Device) -> bool:
    """Whether a provider is registered for the device."""
    return device.type in _loaders


def provider(device: Device) -> DeviceMemory:
    """Return the provider of a device; raises DeviceError if there is none."""
    found = _providers.get(device.type)
    if found is None:
        load = _loaders.get(device.type)
        if load is None:
            raise DeviceError(
                f"the result would be on {device}, where lowprec has no memory for it; arrays must be in host "
                "memory or on an NVIDIA GPU"
            )
        found = _providers[device.type] = load()
    return found


_NO_SYNCHRONISATION = -1
#: A consumer that names no stream; a number that DLPack allows to none.
_NO_STREAM = 0


class DeviceArray(DLPackArray):
    """A new, row-major :class:`DLPackArray` on a device, written on a stream.

    A NumPy array holds its shape and type; its memory is the device's, so the host must not read it.
    """

    __slots__ = ("_block", "_device", "_stream")

    def __init__(self, shape: tuple[int, ...], dtype: DType, device: Device, stream: int) -> None:
        block = provider(device).allocate(prod(shape) * dtype.itemsize, device, stream)
        super().__init__(np.ndarray(shape, NUMPY_DTYPES[dtype], memory_at(block.address, block)))
        self._block = block
        self._device = device
        self._stream = stream

    def view(self) -> ArrayView:
        """Return the view of the array, whose work is on its own stream."""
        shape = self.shape
        strides = contiguous_strides(shape)
        return ArrayView(self._dtype, shape, strides, self._device, self, False, self._block.address)

    @property
    def memory(self) -> NDArray[Any]:
        """Refused: NumPy cannot read a device."""
        raise self._not_on_the_host()

    @property
    def device(self) -> Device:
        """Where the elements are."""
        return self._device

    @property
    def stream(self) -> int:
        """On which the elements are written."""
        return self._stream

    def __repr__(self) -> str:
        return f"DLPackArray(shape={self.shape}, dtype={self.dtype!r}, device='{self._device}')"

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> NDArray[Any]:
        raise self._not_on_the_host()

    def _not_on_the_host(self) -> ArrayError:
        return ArrayError(
            f"the array is on {self._device}, where NumPy cannot read it; take it to a library that works there, and "
            "from there to the host: torch.from_dlpack(array).cpu().numpy(), or "
            "cupy.asnumpy(cupy.from_dlpack(array))"
        )

    def _consumer(self, stream: Any) -> int:
        """Return the stream that a consumer passes.

        None means the legacy default stream by the standard. JAX passes it where its client reports no stream, and then
        works on streams that do not wait for the default one.
        """
        if stream is None:
            return _NO_STREAM
        if type(stream) is int and (stream > 0 or stream == _NO_SYNCHRONISATION):
            return stream
        raise BufferError(
            f"stream must be None, -1 (no synchronisation), 1 (legacy default), 2 (per-thread default) or a CUDA "
            f"stream's handle, not {stream!r}"
        )

    def _hand_over(self, consumer: int) -> None:
        if consumer == _NO_STREAM:
            provider(self._device).synchronize(self._stream, self._device)
        elif consumer != _NO_SYNCHRONISATION:
            memory = provider(self._device)
            memory.check_captures((self._stream, consumer), self._device)
            memory.order(self._stream, consumer, self._device)

    def _copy(self) -> DeviceArray:
        device, stream = self._device, self._stream
        twin = DeviceArray(self.shape, self._dtype, device, stream)
        provider(device).copy(self._block.address, twin._block.address, self._memory.nbytes, device, stream)
        return twin
