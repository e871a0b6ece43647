"""What this machine can do, as planning wants to know it."""

from __future__ import annotations

import functools
import importlib.util
import platform
from pathlib import Path

from lowprec.arrays import Device
from lowprec.backends.cpu import amx
from lowprec.backends.cpu.mkl import mkl
from lowprec.planning import Capabilities

__all__ = ["capabilities", "cpu_flags", "cpu_name"]


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """Return the first processor's entry of ``/proc/cpuinfo``, empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def cpu_name() -> str:
    """Return the processor's name as the operating system gives it."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Return the instruction-set flags of the processor, empty where the system does not list them."""
    return frozenset(_cpuinfo().get("flags", "").split())


def capabilities(device: Device) -> Capabilities:
    """Return what this CPU and the installed libraries can do. Looked up once per process."""
    return _capabilities()


@functools.cache
def _capabilities() -> Capabilities:
    return Capabilities(
        device="cpu",
        name=cpu_name(),
        amx_bf16=amx.is_available(),
        amx_int8=amx.is_available(),
        mkl=mkl() is not None,
        numba=importlib.util.find_spec("numba") is not None,
    )
