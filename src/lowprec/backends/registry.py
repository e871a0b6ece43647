"""Which backend serves a device."""

from __future__ import annotations

from typing import cast

from lowprec.arrays import Device
from lowprec.backends import cpu
from lowprec.backends.execution import Backend
from lowprec.errors import DeviceError

__all__ = ["backend_of"]

_CPU_DEVICE_TYPE = 1  # kDLCPU
_BACKENDS = {_CPU_DEVICE_TYPE: cast(Backend, cpu)}


def backend_of(device: Device) -> Backend:
    """Return the backend that serves a device.

    Raises
    ------
    DeviceError
        If none does.
    """
    try:
        return _BACKENDS[device.type]
    except KeyError:
        raise DeviceError(
            f"no backend of this version serves the device {device}; arrays must lie in host memory"
        ) from None
