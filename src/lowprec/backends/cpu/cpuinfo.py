"""What the processor is and which instruction sets it has, as the operating system tells."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

__all__ = ["cpu_flags", "cpu_name"]


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
