"""Third-party modules of the backend, loaded with the first array on a GPU.

Only the compiler of cuda.core is used. Its streams, events and memory resources are compiled against the driver, so
tests cannot replace the driver, and its buffers free memory in finalisers, where lowprec avoids calls of CUDA.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from lowprec.errors import BackendError, DeviceError

_T = TypeVar("_T")

_INSTALL = (
    'install lowprec with its extra cuda13 (in a clone: pip install ".[cuda13]"), or cuda12 where torch.version.cuda '
    "is 12.x or the driver is older than CUDA 13"
)


_MODULES = {
    "cublas_lt": "nvmath.bindings.cublasLt",
    "cublas": "nvmath.bindings.cublas",
    "runtime": "cuda.bindings.runtime",  # devices, memory, streams and events
    "core": "cuda.core",  # compilers
    "driver": "cuda.bindings.driver",  # launches
    "cusparse_lt": "nvmath.bindings.cusparseLt",
}

#: Earlier versions lack FP8 types and some attributes of descriptors.
_OLDEST_CUBLAS = 120000

_loaded: SimpleNamespace | None = None


def libraries() -> SimpleNamespace:
    """Return the modules; raise BackendError if one is missing, DeviceError without a usable driver or device."""
    return _loaded or _load()


def loaded() -> SimpleNamespace | None:
    return _loaded


_caches: list[functools._lru_cache_wrapper[Any]] = []


def cached(function: Callable[..., _T]) -> functools._lru_cache_wrapper[_T]:
    """Cache the results of a function until :func:`use` replaces the modules."""
    wrapper = functools.lru_cache(maxsize=1024)(function)
    _caches.append(wrapper)
    return wrapper


def use(replacement: SimpleNamespace | None) -> SimpleNamespace | None:
    """Replace NVIDIA's modules, and return the old ones; None loads them again at the next use."""
    global _loaded
    before = _loaded
    _loaded = replacement
    for cache in _caches:
        cache.cache_clear()
    return before


def _load() -> SimpleNamespace:
    global _loaded
    try:
        found = {name: importlib.import_module(path) for name, path in _MODULES.items()}
    except ImportError as error:
        raise BackendError(
            f"arrays on a GPU need nvmath-python, cuda-bindings and cuda-core ({error}); {_INSTALL}"
        ) from error
    modules = SimpleNamespace(**found)
    status, count = modules.runtime.cudaGetDeviceCount()
    if status != modules.runtime.cudaError_t.cudaSuccess or not count:
        raise DeviceError(
            f"{_no_device(modules.runtime, status)}, or keep the arrays in host memory"
        )
    try:
        # the bindings load cuBLASLt at the first call of a function
        version = int(modules.cublas_lt.get_version())
    except Exception as error:
        raise BackendError(f"cuBLASLt cannot be loaded: {error}; {_INSTALL}") from error
    if version < _OLDEST_CUBLAS:
        raise BackendError(
            f"cuBLASLt {version // 10000}.{version // 100 % 100} is too old: lowprec needs 12.0 or later; {_INSTALL}"
        )
    _loaded = modules
    return modules


def _no_device(runtime: Any, status: Any) -> str:
    errors = runtime.cudaError_t
    if status in (errors.cudaSuccess, errors.cudaErrorNoDevice):
        return "no usable NVIDIA GPU: none is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    if status == errors.cudaErrorInsufficientDriver:
        # A missing driver has version 0.
        _, driver = runtime.cudaDriverGetVersion()
        _, wanted = runtime.cudaRuntimeGetVersion()
        if not driver:
            return "no NVIDIA driver was found; install one (a container must be started with access to the GPUs)"
        return (
            f"the NVIDIA driver is too old: it supports CUDA {version_text(driver)}, but the installed packages are "
            f"for CUDA {version_text(wanted)}; update the driver, or install packages for it: lowprec's extra cuda12"
        )
    _, words = runtime.cudaGetErrorString(status)
    text = f"{status.name}: {words.decode()}"
    if status == errors.cudaErrorInitializationError:
        return (
            f"CUDA cannot be initialised ({text}), as in a process forked after CUDA was used; start processes with "
            'multiprocessing\'s "spawn", or check nvidia-smi'
        )
    return f"the NVIDIA GPUs cannot be used ({text}); check nvidia-smi"


def version_text(version: int) -> str:
    """Return a version of CUDA in words: 13000 is 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"
