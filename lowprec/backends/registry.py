"""The backend of each device type; the CPU's is imported with the package, so that a first product imports nothing."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import cast

from lowprec.arrays import CPU, Device
from lowprec.arrays.device_memory import DeviceMemory, register
from lowprec.backends.cpu import backend as cpu
from lowprec.backends.execution import Backend, imported
from lowprec.errors import DeviceError, DeviceMemoryError
from lowprec.planning import Capabilities

#: By DLPack's device type: the CPU, and the module of CUDA.
_CPU, _MODULES = 1, {2: "lowprec.backends.cuda.backend"}


@functools.cache
def _backend(device_type: int) -> Backend:
    return cast(Backend, cpu if device_type == _CPU else importlib.import_module(_MODULES[device_type]))


def backend_of(device: Device) -> Backend:
    """Return the backend of a device; raise DeviceError if there is none."""
    if device.type not in (_CPU, *_MODULES):
        raise DeviceError(f"device {device} is not supported; arrays must be in host memory or on an NVIDIA GPU")
    return _backend(device.type)


def predicted(device: str) -> Capabilities:
    """Return the capabilities of this CPU, or of a GPU by model or compute capability; DeviceError if unknown."""
    if device == "cpu":
        return backend_of(CPU).capabilities(CPU)
    found: Capabilities = imported("lowprec.backends.cuda.models:predicted")(device)
    return found


def release_memory() -> None:
    """Free memory that is cached for later products.

    These are buffers on the CPU and memory pools on GPUs; memory in use is kept. The call waits for all work on the
    streams that lowprec has used. lowprec itself calls it when an allocation fails, and tries again. It does not free
    the caches of other libraries; call, for example, ``torch.cuda.empty_cache()``.

    Raises
    ------
    BackendError
        Work that was queued on a GPU has failed.

    Examples
    --------
    >>> import lowprec
    >>> lowprec.release_memory()
    """
    cpu.release_memory()
    for module in _MODULES.values():
        release = getattr(sys.modules.get(module), "release_memory", None)
        if release is not None:
            release()


def is_out_of_memory(error: Exception) -> bool:
    """Whether a library's allocation failed; false for lowprec's own error, raised after a second attempt."""
    if isinstance(error, DeviceMemoryError):
        return False
    # PyTorch and CuPy each have a class of this name.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


# Memory for results of libraries that do not allocate themselves.
register(2, lambda: cast(DeviceMemory, importlib.import_module("lowprec.backends.cuda.memory")))
