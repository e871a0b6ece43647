"""Which backend serves a device. A backend is imported with the first product that it runs."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, cast

from lowprec.arrays import CPU, Device
from lowprec.arrays.device_memory import DeviceMemory, register
from lowprec.backends.execution import Backend, imported
from lowprec.errors import DeviceError, DeviceMemoryError

if TYPE_CHECKING:  # planning is imported with the first product
    from lowprec.planning import Capabilities

#: Modules by DLPack's device type; 1 is the CPU, 2 CUDA.
_MODULES = {1: "lowprec.backends.cpu.backend", 2: "lowprec.backends.cuda.backend"}


@functools.cache
def _backend(device_type: int) -> Backend:
    return cast(Backend, importlib.import_module(_MODULES[device_type]))


def backend_of(device: Device) -> Backend:
    """Return the backend that serves a device; raises DeviceError if none does."""
    if device.type not in _MODULES:
        raise DeviceError(
            f"no backend of this version serves the device {device}; arrays must be in host memory or on an NVIDIA GPU"
        )
    return _backend(device.type)


def predicted(device: str) -> Capabilities:
    """Return the capabilities of this CPU, or of a GPU by model or compute capability; DeviceError if unknown."""
    if device == "cpu":
        return backend_of(CPU).capabilities(CPU)
    found: Capabilities = imported("lowprec.backends.cuda.models:predicted")(device)
    return found


def release_memory() -> None:
    """Free memory kept for later products: buffers of the CPU, pools of each GPU.

    Memory in use stays. It waits for all work queued on the GPUs that lowprec has used. Where an
    allocation fails inside lowprec it does the same and tries again. Caches of libraries are theirs to
    give back (``torch.cuda.empty_cache()``, for example).

    Raises
    ------
    BackendError
        If work that was queued on a GPU has failed.

    Examples
    --------
    >>> import lowprec
    >>> lowprec.release_memory()
    """
    for module in _MODULES.values():  # those that are loaded
        release = getattr(sys.modules.get(module), "release_memory", None)
        if release is not None:
            release()


def is_out_of_memory(error: Exception) -> bool:
    """Whether a library says that there is too little memory; not lowprec itself, which has tried twice then."""
    if isinstance(error, DeviceMemoryError):
        return False
    # PyTorch and CuPy have a class of that name each.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


# Memory for results whose library provides none.
register(2, lambda: cast(DeviceMemory, importlib.import_module("lowprec.backends.cuda.memory")))
