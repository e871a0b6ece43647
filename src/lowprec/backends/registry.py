"""Which backend serves a device. A backend is imported with the first product that it runs."""

from __future__ import annotations

import functools
import importlib
from typing import cast

from lowprec.arrays import Device
from lowprec.arrays.device_memory import DeviceMemory, register
from lowprec.backends.execution import Backend
from lowprec.errors import DeviceError
from lowprec.planning import Capabilities

#: Modules by DLPack's device type; 1 is the CPU, 2 CUDA.
_MODULES = {1: "lowprec.backends.cpu", 2: "lowprec.backends.cuda"}

#: Those with memory of their own to give.
_MEMORY_MODULES = {2: "lowprec.backends.cuda.memory"}


@functools.cache
def _backend(device_type: int) -> Backend:
    return cast(Backend, importlib.import_module(_MODULES[device_type]))


def backend_of(device: Device) -> Backend:
    """Return the backend that serves a device.

    Raises
    ------
    DeviceError
        If none does.
    """
    if device.type not in _MODULES:
        raise DeviceError(
            f"no backend of this version serves the device {device}; arrays must lie in host memory or on an NVIDIA GPU"
        )
    return _backend(device.type)


def predicted(device: str) -> Capabilities:
    """Return what a GPU can do that need not be there, by its model or compute capability.

    Raises
    ------
    DeviceError
        If no such model is known; the message lists those that are.
    """
    from lowprec.backends.cuda import models  # with the first plan that asks

    return models.predicted(device)


def _register_memory(device_type: int, module: str) -> None:
    register(device_type, lambda: cast(DeviceMemory, importlib.import_module(module)))


for _device_type, _module in _MEMORY_MODULES.items():
    _register_memory(_device_type, _module)
