"""What ``lowprec.info()`` tells of the GPUs and of the libraries that serve them, as plain values."""

from __future__ import annotations

from typing import Any

from lowprec.arrays import Device
from lowprec.backends.cuda import bindings, runtime
from lowprec.backends.cuda.backend import capabilities
from lowprec.backends.cuda.libraries import libraries


def info() -> dict[str, Any]:
    """Return what decides how products run on the GPUs that this process sees.

    Returns
    -------
    dict
        ``devices``: each with ``device``, ``name``, ``compute_capability``, ``memory_bytes``, ``multiprocessors``,
        ``clock_khz`` (the highest; 0 where the driver does not tell), ``peak_tflops`` (by format, where the data sheet
        of the model is known) and ``workspace_bytes`` (what cuBLASLt may use per handle and stream). ``versions``:
        the newest ``cuda`` that the driver serves, and that of ``cublas``.
    """
    libraries()
    major, minor = runtime.driver_version()
    return {
        "devices": [_device(index) for index in range(runtime.call("cudaGetDeviceCount"))],
        "versions": {"cuda": f"{major}.{minor}", "cublas": bindings.cublas_version_text()},
    }


def _device(index: int) -> dict[str, Any]:
    found, able = runtime.properties(index), capabilities(Device(2, index))
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
