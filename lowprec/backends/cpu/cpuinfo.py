"""The processor's name and instruction sets, without those that ``LOWPREC_MAX_CPU_ISA`` hides."""

from __future__ import annotations

import functools
import os
import platform

from lowprec.policy import environment
from lowprec.policy.protocol import raised_in


@functools.cache
def _cpuinfo() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo", "rb") as file:
            text = os.fsdecode(file.read())
    except OSError as error:
        if not raised_in(error, __name__):
            raise
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def cpu_name() -> str:
    """Return the processor's name from the operating system."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def is_x86_64() -> bool:
    """Whether this is an x86-64 processor, for which lowprec has kernels."""
    return platform.machine() in ("x86_64", "AMD64")


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


def llvm_features() -> str | None:
    """Return the processor's features for LLVM without hidden ones; None if none is hidden.

    They apply to numba's compiler in the whole process, unless it has already compiled a function.
    """
    if not hidden_flags():
        return None
    import llvmlite.binding

    found = llvmlite.binding.get_host_cpu_features()
    present = [f"+{name}" for name, is_there in sorted(found.items()) if is_there]
    names = (x.replace("_", "-" if x.startswith("amx") else "") for x in sorted(hidden_flags()))
    # Removals last: removing a feature also removes those that depend on it.
    return ",".join([*present, *(f"-{name}" for name in names)])
