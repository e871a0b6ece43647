"""What this machine can do, as planning wants to know it."""

from __future__ import annotations

import functools
from dataclasses import replace

from lowprec.architectures import Architecture
from lowprec.arrays import Device
from lowprec.backends.cpu import casting
from lowprec.backends.cpu.cpuinfo import cpu_flags, cpu_name
from lowprec.backends.cpu.kernel_rows import KERNELS
from lowprec.backends.cpu.openblas import openblas
from lowprec.backends.cpu.packed.micro_kernels import MICRO_KERNELS, is_available
from lowprec.planning import Capabilities
from lowprec.policy.state import emulated


def capabilities(device: Device) -> Capabilities:
    """Return the kernels and features of this CPU, cached; inside ``emulate``, kernels of tensor cores come first."""
    architecture = emulated()
    return _capabilities() if architecture is None else _emulating(architecture)


@functools.cache
def _capabilities() -> Capabilities:
    return Capabilities("cpu", cpu_name(), KERNELS, features())


def forget() -> None:
    """Clear the cached capabilities of the CPU."""
    _capabilities.cache_clear()
    _emulating.cache_clear()


@functools.cache
def _emulating(architecture: Architecture) -> Capabilities:
    from lowprec.backends.cpu.emulation.kernel_rows import kernels  # only who emulates needs them

    real = _capabilities()
    return replace(real, kernels=(*kernels(architecture), *real.kernels))


def features() -> frozenset[str]:
    """Return what this machine has of what the kernels' rows require."""
    found = {
        **{x.name: is_available(x) and x.is_for(cpu_flags()) for x in MICRO_KERNELS},
        # Its panels are shared by compiled kernels; without them NumPy's BLAS has threads of its own.
        "openblas": casting.has_kernels() and openblas() is not None,
        "numba": casting.has_kernels(),
    }
    return frozenset(name for name, present in found.items() if present)
