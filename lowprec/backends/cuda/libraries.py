"""The third-party modules that the backend stands on, loaded with the first array on a GPU.

Nothing here is imported before: ``import lowprec`` and products in host memory need none of it. What is missing is told
apart, because each has its own remedy: the Python packages, the driver, a device, cuBLAS itself.

Of cuda.core only what makes kernels is used. Its streams, events and memory resources are compiled against the driver,
which no stand-in can replace below them, and its buffers free memory in finalisers, which here call nothing of CUDA.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from lowprec.errors import BackendError, DeviceError

_T = TypeVar("_T")

_INSTALL = 'install them with: pip install "lowprec[cuda13]" (or "lowprec[cuda12]" for a driver before CUDA 13)'


class Libraries(NamedTuple):
    """Modules by what they are for.

    ``runtime`` has devices, memory, streams and events; ``core`` makes kernels; ``driver`` launches them, and tells
    each thread's current context.
    """

    cublas_lt: Any
    cublas: Any
    runtime: Any
    core: Any
    driver: Any


_MODULES = Libraries(
    "nvmath.bindings.cublasLt",
    "nvmath.bindings.cublas",
    "cuda.bindings.runtime",
    "cuda.core",
    "cuda.bindings.driver",
)

_loaded: Libraries | None = None


def libraries() -> Libraries:
    """Return the modules, known to work: a BackendError if one is missing, a DeviceError if driver or device is."""
    return _loaded if _loaded is not None else _load()


def loaded() -> Libraries | None:
    """Return the modules if they are loaded."""
    return _loaded


_caches: list[functools._lru_cache_wrapper[Any]] = []


def cached(function: Callable[..., _T]) -> functools._lru_cache_wrapper[_T]:
    """Keep what a function returns for its arguments, until other modules stand in."""
    found = functools.lru_cache(maxsize=1024)(function)
    _caches.append(found)
    return found


def use(replacement: Libraries | None) -> Libraries | None:
    """Stand other modules in for NVIDIA's, and return those that were in use; None loads them anew."""
    global _loaded
    before, _loaded = _loaded, replacement
    for cache in _caches:
        cache.cache_clear()
    return before


def _load() -> Libraries:
    global _loaded
    modules = []
    for name in _MODULES:
        try:
            modules.append(importlib.import_module(name))
        except ImportError as error:
            raise BackendError(
                f"arrays on a GPU need nvmath-python, cuda-bindings and cuda-core ({error}); {_INSTALL}"
            ) from error
    found = Libraries(*modules)
    _check_devices(found.runtime)
    _check_cublas(found.cublas_lt)
    _loaded = found
    return found


def _check_devices(runtime: Any) -> None:
    """Raise unless there is a device that this process can use, with what CUDA itself says."""
    status, count = runtime.cudaGetDeviceCount()
    if status != runtime.cudaError_t.cudaSuccess or not count:
        raise DeviceError(f"{_no_device(runtime, status)}, or keep the arrays in host memory")


def _no_device(runtime: Any, status: Any) -> str:
    """Return why there is no device, and what to do about it."""
    errors = runtime.cudaError_t
    if status in (errors.cudaSuccess, errors.cudaErrorNoDevice):
        return (
            "no usable NVIDIA GPU: none is visible; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
        )
    if status == errors.cudaErrorInsufficientDriver:
        # Of a driver that is missing the version is 0.
        driver = _version(runtime.cudaDriverGetVersion())
        wanted = _version(runtime.cudaRuntimeGetVersion())
        if driver is None:
            return "no NVIDIA driver was found; install one (a container must be started with access to the GPUs)"
        return (
            f"the NVIDIA driver is too old: it serves CUDA {driver}, and the packages that are installed are for CUDA "
            f'{wanted}; update the driver, or install packages that it serves: pip install "lowprec[cuda12]"'
        )
    _, words = runtime.cudaGetErrorString(status)
    text = f"{status.name}: {words.decode() if isinstance(words, bytes) else words}"
    if status == errors.cudaErrorInitializationError:
        return (
            f"CUDA cannot be initialised ({text}), as in a process that was forked from one which had used CUDA; start "
            'processes by multiprocessing\'s "spawn", look at nvidia-smi'
        )
    return f"the NVIDIA GPUs cannot be used ({text}); look at nvidia-smi"


def _version(answer: tuple[Any, Any]) -> str | None:
    """Return a version that the runtime tells, as words; None where it tells none."""
    status, number = answer
    return f"{number // 1000}.{number % 1000 // 10}" if not int(status) and number else None


#: Before it there are no FP8 types, and descriptors lack attributes that are set here.
_OLDEST_CUBLAS = 120000


def _check_cublas(cublas_lt: Any) -> None:
    """Load cuBLASLt, which the bindings put off until the first call of a function."""
    try:
        version = int(cublas_lt.get_version())
    except Exception as error:
        raise BackendError(f"cuBLASLt cannot be loaded: {error}; {_INSTALL}") from error
    if version < _OLDEST_CUBLAS:
        raise BackendError(
            f"cuBLASLt {version // 10000}.{version // 100 % 100} is too old: lowprec needs 12.0 or later; {_INSTALL}"
        )
