"""The capabilities of this machine, and the entries of ``lowprec.info`` about it."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lowprec.architectures import Architecture
from lowprec.arrays import Device
from lowprec.backends.cpu import casting, cpuinfo, numba_import, openblas, team, threads
from lowprec.backends.cpu.kernel_rows import KERNELS
from lowprec.backends.cpu.packed.micro_kernels import (
    AMX_BF16,
    AVX512_BF16,
    MICRO_KERNELS,
    is_available,
    unsupported_reason,
)
from lowprec.errors import EnvironmentVariableError
from lowprec.formats import BFLOAT16
from lowprec.modes import MathMode
from lowprec.modes import row as mode_row
from lowprec.planning import Capabilities
from lowprec.policy import environment
from lowprec.policy.state import emulated


def capabilities(device: Device) -> Capabilities:
    """Return the cached kernels and features of this CPU; inside ``emulate``, emulated tensor cores come first."""
    architecture = emulated()
    return _capabilities() if architecture is None else _emulating(architecture)


@functools.cache
def _capabilities() -> Capabilities:
    why = _without_kernels()
    rows = tuple(row._replace(missing=why) for row in KERNELS) if why else KERNELS
    return Capabilities("cpu", cpuinfo.cpu_name(), rows, features())


def _without_kernels() -> str:
    """Return the reason why lowprec has no kernels of its own, and the units that they would use."""
    why, flags = numba_import.missing(), cpuinfo.cpu_flags()
    units = ", ".join(dict.fromkeys(x.unit for x in MICRO_KERNELS if x.is_for(flags)))
    return f"{why}: lowprec's own kernels would use the {units or 'FP32 units'} of this CPU" if why else ""


def forget() -> None:
    """Clear the cached capabilities of the CPU."""
    _capabilities.cache_clear()
    _emulating.cache_clear()


@functools.cache
def _emulating(architecture: Architecture) -> Capabilities:
    from lowprec.backends.cpu.emulation.arithmetic import kernels  # needed for emulation only

    real = _capabilities()
    return replace(real, kernels=(*kernels(architecture), *real.kernels))


def features() -> frozenset[str]:
    """Return the features of this machine, for `KernelRow.requires`."""
    found = {
        **{x.name: is_available(x) and x.is_for(cpuinfo.cpu_flags()) for x in MICRO_KERNELS},
        # Compiled kernels distribute its panels to threads; without them NumPy's multithreaded BLAS is faster.
        "openblas": casting.has_kernels() and openblas.openblas() is not None,
        "numba": casting.has_kernels(),
    }
    return frozenset(name for name, present in found.items() if present)


def info() -> dict[str, Any]:
    """Return the CPU, NumPy's BLAS, the version of lowprec's OpenBLAS (None if missing), and missing features."""
    try:
        hidden = cpuinfo.hidden_flags()
    except EnvironmentVariableError:  # reported with the variables; products raise it
        device = {**_device(), "instruction_sets": [], "units": []}
        return {"devices": [device], "versions": {}, "blas": _blas(), "warnings": []}
    no_tiles, library = _without_kernels() or unsupported_reason(AMX_BF16), openblas.openblas()
    warnings = [numba_import.failure()] if numba_import.failure() else []
    if no_tiles:
        on_units = [str(m) for m in MathMode if mode_row(m).operand_format is BFLOAT16]
        modes = "all modes" if unsupported_reason(AVX512_BF16) else f"modes other than {', '.join(on_units)}"
        warnings.append(f"{no_tiles}; {modes} round the operands and multiply in FP32, no faster than fp32")
    if library is None and sys.platform != "darwin":
        why = "is not installed"
        if openblas.library_path() is not None:
            why = "is installed, but its library cannot be opened or is in the process for something else"
        warnings.append(
            f'scipy-openblas64 {why} (pip install "lowprec[cpu]"): products that do not run on tile '
            "units are left to NumPy's BLAS"
        )
    blas = _blas()
    warnings += _blas_below_the_machine(blas["core_type"])
    return {
        "devices": [{**_device(), "instruction_sets": _instruction_set_rows(hidden), "units": _units()}],
        "versions": {"scipy_openblas64": None if library is None else library.version},
        "blas": blas,
        "warnings": warnings,
    }


def _threads() -> tuple[int, str]:
    try:
        return threads.num_threads(), team.description()
    except EnvironmentVariableError:  # reported with the variables; products raise it
        return 1, ""


def _device() -> dict[str, Any]:
    count, name_of_team = _threads()
    return {
        "device": "cpu",
        "name": cpuinfo.cpu_name(),
        "cores": os.cpu_count(),
        "affinity": threads.affinity(),
        "threads": count,
        "team": name_of_team,
    }


def _units() -> list[str]:
    found = features()
    here = (x.unit for x in MICRO_KERNELS if x.name in found and x.storage != "float32")
    return list(dict.fromkeys(here))


def _instruction_set_rows(hidden: frozenset[str]) -> list[dict[str, Any]]:
    if not cpuinfo.is_x86_64():
        return []
    flags = cpuinfo.cpu_flags()
    rows = []
    for name, used, by in _instruction_sets():
        if name in hidden:
            used, by = False, "hidden by LOWPREC_MAX_CPU_ISA"
        elif name not in flags:
            used = False
        rows.append({"name": name, "present": name in flags | hidden, "used": used, "by": by})
    return rows


def _instruction_sets() -> Iterator[tuple[str, bool | None, str]]:
    """Yield the instruction sets that matter for products, whether they are used, and the kernels that use them."""
    library = openblas.openblas()
    chosen = {"avx2": "Haswell", "avx512f": "SkylakeX"}
    for name, core_type in chosen.items():
        if library is None or library.core_type not in chosen.values():
            yield name, None, "NumPy's BLAS chooses for itself"
        else:
            is_it = library.core_type == core_type
            yield name, is_it, f"OpenBLAS, kernels for {core_type}" if is_it else ""
    found = features()
    here = [row for row in KERNELS if row.requires in found]
    named = (name for row in KERNELS for name in row.instruction_sets)
    for name in dict.fromkeys(("avx512_fp16", *named)):
        users = ", ".join(row.name for row in here if name in row.instruction_sets)
        yield name, bool(users), f"lowprec's kernels {users}" if users else ""


def _blas() -> dict[str, Any]:
    config: Any = np.show_config(mode="dicts")
    blas = (config or {}).get("Build Dependencies", {}).get("blas", {})
    found = {key: blas.get(key) for key in ("name", "version", "openblas configuration")}
    return {**found, "core_type": _numpys_core_type()}


def _numpys_core_type() -> str | None:
    for path in threads.openblas_paths():
        function = threads.openblas_function(path, "openblas_get_corename")
        if function is not None and "numpy" in path:
            function.restype = ctypes.c_char_p
            return str(function().decode())
    return None


def _blas_below_the_machine(core_type: str | None) -> list[str]:
    """Return a warning if NumPy's BLAS uses kernels for an older processor."""
    best = openblas.core_type(cpuinfo.cpu_flags())
    if best != openblas.AVX512 or core_type not in openblas.BELOW_AVX512:
        return []
    held = next(row.value for row in environment.rows() if row.name == "OPENBLAS_CORETYPE")
    cure = (
        f"set OPENBLAS_CORETYPE={best} before Python starts"
        if held is None
        else f"OPENBLAS_CORETYPE={held} holds it there; unset it, or set it to {best}, before Python starts"
    )
    warning = (
        f"NumPy's OpenBLAS has its kernels for {core_type} on a processor with AVX-512, so numpy.matmul takes up to "
        f"twice as long as it could (lowprec's own copy is not affected): {cure}"
    )
    return [warning]
