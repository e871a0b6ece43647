"""The backend of each device type; the CPU's is imported with the package, so that a first product imports nothing."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, cast

from lowprec.arrays import CPU, Device
from lowprec.arrays.device_memory import register
from lowprec.backends.cpu import backend as cpu
from lowprec.backends.interface import Backend
from lowprec.errors import DeviceError, DeviceMemoryError
from lowprec.planning import Capabilities

#: DLPack's device types.
_CPU, _CUDA = 1, 2


@functools.cache
def _cuda() -> Any:
    from lowprec.backends.cuda import backend

    return backend


def backend_of(device: Device) -> Backend:
    """Return the backend of a device; raise DeviceError if there is none."""
    if device.type not in (_CPU, _CUDA):
        raise DeviceError(
            f"device {device} is not supported; arrays must be in host memory or on an NVIDIA GPU"
        )
    return cast(Backend, cpu if device.type == _CPU else _cuda())


def predicted(device: str) -> Capabilities:
    """Return the capabilities of this CPU, or of a GPU by model or compute capability; DeviceError if unknown."""
    if device == "cpu":
        return cpu.capabilities(CPU)
    from lowprec.backends.cuda import models

    return models.predicted(device)


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
    if _cuda.cache_info().currsize:
        _cuda().release_memory()


def is_out_of_memory(error: Exception) -> bool:
    """Whether a library's allocation failed; false for lowprec's own error, raised after a second attempt."""
    if isinstance(error, DeviceMemoryError):
        return False
    # PyTorch and CuPy each have a class of this name.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _cuda_memory() -> ModuleType:
    from lowprec.backends.cuda import memory

    return memory


# Memory for results of libraries that do not allocate themselves.
register(_CUDA, _cuda_memory)
