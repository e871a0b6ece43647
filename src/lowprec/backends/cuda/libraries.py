"""The third-party modules that the backend stands on, loaded with the first array on a GPU.

Nothing here is imported before: ``import lowprec`` and products in host memory need none of it. What is missing is told
apart, because each has its own remedy: the Python packages, the driver, a device, cuBLAS itself.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from lowprec.errors import BackendError, DeviceError

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
    """Return the modules, loaded and known to work.

    Raises
    ------
    BackendError
        If a Python package or a CUDA library is missing.
    DeviceError
        If there is no driver, or no device that it can use.
    """
    return _loaded if _loaded is not None else _load()


def use(replacement: Libraries | None) -> Libraries | None:
    """Stand other modules in for NVIDIA's, and return those that were in use; None loads them anew."""
    global _loaded
    before, _loaded = _loaded, replacement
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
    status, count = runtime.cudaGetDeviceCount()
    if status == runtime.cudaError_t.cudaErrorInsufficientDriver:
        raise DeviceError(
            "no NVIDIA driver was found, or it is older than CUDA's runtime asks for; install or update it "
            "(nvidia-smi shows the version), or keep the arrays in host memory"
        )
    if status != runtime.cudaError_t.cudaSuccess or not count:
        why = "none is visible" if not count else str(status)
        raise DeviceError(
            f"no usable NVIDIA GPU: {why}; look at nvidia-smi and at CUDA_VISIBLE_DEVICES, or keep the arrays in host "
            "memory"
        )


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
