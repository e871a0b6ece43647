"""Memory and streams of a device, for arrays of libraries that provide neither (JAX, plain DLPack).

A backend, one layer above, registers its functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lowprec.arrays.view import Device
from lowprec.errors import DeviceError

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
        """Have later work of stream ``after`` wait for what stream ``before`` holds now."""

    def check_captures(self, streams: Sequence[int], device: Device) -> None:
        """Raise a BackendError if work that joins these streams would end the capture of a graph."""

    def synchronize(self, stream: int, device: Device) -> None:
        """Wait on the host for what a stream holds now."""

    def copy(self, source: int, target: int, nbytes: int, device: Device, stream: int) -> None:
        """Copy bytes between two addresses of the device, in the order of a stream."""

    def hold(self, owners: Sequence[Any], device: Device) -> None:
        """Hold objects that work on a device is about to need, whatever happens, until :meth:`keep` tells how long."""

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
    """Return what serves a device; raises DeviceError if nothing does."""
    found = _providers.get(device.type)
    if found is None:
        load = _loaders.get(device.type)
        if load is None:
            raise DeviceError(
                f"the result would be on {device}, where lowprec has no memory to put it; arrays must lie in host "
                "memory or on an NVIDIA GPU"
            )
        found = _providers[device.type] = load()
    return found
