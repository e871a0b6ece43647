"""What ``info()`` tells of the GPUs and of the libraries that serve them, as plain values."""

from __future__ import annotations

from typing import Any

from lowprec.arrays import Device
from lowprec.backends.cuda import bindings, driver
from lowprec.backends.cuda.backend import capabilities
from lowprec.backends.cuda.libraries import libraries

__all__ = ["devices", "versions"]


def devices() -> list[dict[str, Any]]:
    """Return the GPUs that this process sees.

    Each with ``device``, ``name``, ``compute_capability``, ``memory_bytes``, ``multiprocessors``, ``clock_khz`` (the
    highest; 0 where the driver does not tell), ``peak_tflops`` (by format, where the data sheet of the model is known)
    and ``workspace_bytes`` (what cuBLASLt may use per handle and stream).
    """
    return [_device(index) for index in range(driver.device_count())]


def _device(index: int) -> dict[str, Any]:
    found, able = driver.properties(index), capabilities(Device(2, index))
    return {
        "device": able.device,
        "name": found.name,
        "compute_capability": "{}.{}".format(*found.capability),
        "memory_bytes": found.memory_bytes,
        "multiprocessors": found.multiprocessors,
        "clock_khz": found.clock_khz,
        "peak_tflops": dict(able.peak_tflops),
        "workspace_bytes": able.workspace_bytes,
    }


def versions() -> dict[str, str]:
    """Return the newest CUDA that the driver serves, and cuBLASLt's version."""
    libraries()
    major, minor = driver.driver_version()
    return {"cuda": f"{major}.{minor}", "cublas": bindings.cublas_version_text()}
