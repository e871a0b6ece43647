"""The processor's name and instruction sets, without those that ``LOWPREC_MAX_CPU_ISA`` hides."""

from __future__ import annotations

import functools
import os
import platform

from lowprec.policy import environment


@functools.cache
def _cpuinfo() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo", "rb") as file:
            text = os.fsdecode(file.read())
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def machine() -> str:
    """Return the architecture by Linux's name, whatever the operating system calls it."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def system_flags() -> frozenset[str]:
    """Return the instruction-set flags of the processor, empty if the system does not list them."""
    return frozenset(_cpuinfo().get("flags", "").split())


@functools.cache
def hidden_flags() -> frozenset[str]:
    """Return the flags hidden by ``LOWPREC_MAX_CPU_ISA``; raise EnvironmentVariableError for an illegal value."""
    return system_flags() & environment.hidden_cpu_flags()


def cpu_flags() -> frozenset[str]:
    """Return the instruction-set flags that kernels may use; raises as :func:`hidden_flags`."""
    return system_flags() - hidden_flags()
