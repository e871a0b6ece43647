"""What this machine can do, as planning wants to know it."""

from __future__ import annotations

import functools

from lowprec.arrays import Device
from lowprec.backends.cpu import casting
from lowprec.backends.cpu.amx import tile_gemm as amx
from lowprec.backends.cpu.cpuinfo import cpu_name
from lowprec.backends.cpu.kernel_rows import KERNELS
from lowprec.backends.cpu.openblas import openblas
from lowprec.planning import Capabilities


def capabilities(device: Device) -> Capabilities:
    """Return what this CPU and the installed libraries can do. Looked up once per process."""
    return _capabilities()


@functools.cache
def _capabilities() -> Capabilities:
    return Capabilities("cpu", cpu_name(), KERNELS, features())


def features() -> frozenset[str]:
    """Return what this machine has of what the kernels' rows require."""
    found = {
        "amx_bf16": amx.is_available(),
        "amx_int8": amx.is_available(),
        "openblas": openblas() is not None,
        "numba": casting.has_kernels(),
    }
    return frozenset(name for name, present in found.items() if present)
