"""The capabilities of this machine, and the entries of ``lowprec.info`` about it."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lowprec.architectures import Emulated
from lowprec.arrays import Device
from lowprec.backends.cpu import cpuinfo, library, threads
from lowprec.backends.cpu.emulation import arithmetic
from lowprec.backends.cpu.kernel_rows import kernels_of
from lowprec.errors import EnvironmentVariableError, warn
from lowprec.formats import BFLOAT16, FLOAT16, TF32
from lowprec.modes import MathMode
from lowprec.modes import row as mode_row
from lowprec.planning import Capabilities, KernelRow
from lowprec.policy import environment
from lowprec.policy.resolution import emulated_architecture

_WITHOUT = "{}: products run on NumPy, no faster than fp32 in any mode"


def capabilities(device: Device) -> Capabilities:
    """Return the cached kernels and features of this CPU; inside ``emulate``, emulated tensor cores come first."""
    why = library.unavailable_reason()
    if why is not None:
        warn(_WITHOUT.format(why), once="kernels")
    architecture = emulated_architecture()
    if architecture is not None:
        return _emulating(architecture)
    return _capabilities()


@functools.cache
def _capabilities() -> Capabilities:
    rows = kernels_of(cpuinfo.machine())
    if (why := library.unavailable_reason()) is not None:
        rows = tuple(row._replace(missing=why) for row in rows)
    return Capabilities("cpu", cpuinfo.cpu_name(), rows, library.units())


@functools.cache
def _emulating(architecture: Emulated) -> Capabilities:
    real = _capabilities()
    return replace(real, kernels=(*arithmetic.kernels(architecture), *real.kernels))


def info() -> dict[str, Any]:
    """Return the CPU, NumPy's BLAS, and warnings about missing units."""
    device: dict[str, Any] = {**_device(), "instruction_sets": [], "units": []}
    warnings: list[str] = []
    try:
        able = _capabilities()
        rows = [x for x in able.kernels if x.requires in able.features and x.summation != "blocks"]
        device["instruction_sets"] = list(_instruction_sets(rows))
        device["units"] = [row.units for row in rows if row.holds_in is None and row.parts == 1]
        warnings = list(_warnings(rows))
    except EnvironmentVariableError:  # reported with the variables; products raise it
        pass
    return {"devices": [device], "versions": {}, "blas": _blas(), "warnings": warnings}


def _warnings(rows: list[KernelRow]) -> Iterator[str]:
    if (why := library.unavailable_reason()) is not None:
        yield _WITHOUT.format(why)
    elif not any(row.summation == "tiles" for row in rows):
        on_units = {name for row in rows if row.holds_in is None for name in row.formats or ()}
        in_fp32 = {TF32.name, FLOAT16.name, BFLOAT16.name} - on_units
        modes = [str(m) for m in MathMode if _multiplied(m) in in_fp32]
        yield (
            f"this processor has no tile units: {', '.join(modes)} round the operands and multiply in FP32, no faster "
            "than fp32"
        )
    core_type = _numpys_core_type()
    if core_type in _BELOW_AVX512 and cpuinfo.cpu_flags() >= _AVX512:
        cure = "set OPENBLAS_CORETYPE=SkylakeX before Python starts"
        held = next(x["value"] for x in environment.rows() if x["name"] == "OPENBLAS_CORETYPE")
        if held:
            cure = f"OPENBLAS_CORETYPE={held} holds it there; unset it, or set it to SkylakeX, before Python starts"
        yield (
            f"NumPy's OpenBLAS has its kernels for {core_type} on a processor with AVX-512, so numpy.matmul and "
            f"float64 products take up to twice as long as they could: {cure}"
        )


def _multiplied(mode: MathMode) -> str:
    """Return the name of the format of the numbers that a mode multiplies."""
    row = mode_row(mode)
    return row.data.label if row.data else row.operand_format.name


#: Kernels of OpenBLAS that are older than AVX-512, and what those for AVX-512 need.
_BELOW_AVX512 = ("Haswell", "Zen", "Sandybridge", "Nehalem", "Prescott", "Katmai")
_AVX512 = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})


def _device() -> dict[str, Any]:
    try:
        count, team = threads.num_threads(), threads.description()
    except EnvironmentVariableError:  # reported with the variables; products raise it
        count, team = 1, ""
    return {
        "device": "cpu",
        "name": cpuinfo.cpu_name(),
        "cores": os.cpu_count(),
        "affinity": threads.affinity(),
        "threads": count,
        "team": team,
    }


def _instruction_sets(rows: list[KernelRow]) -> Iterator[dict[str, Any]]:
    """Yield the instruction sets that matter for products, whether they are used, and the kernels that use them."""
    hidden, flags = cpuinfo.hidden_flags(), cpuinfo.cpu_flags()
    named = (name for row in kernels_of(cpuinfo.machine()) for name in row.instruction_sets)
    for name in dict.fromkeys(("avx2", "avx512f", *named) if flags else ()):
        users = ", ".join(row.name for row in rows if name in row.instruction_sets)
        by = f"lowprec's kernels {users}" if users else ""
        if name in hidden:
            by = "hidden by LOWPREC_MAX_CPU_ISA"
        yield {"name": name, "present": name in flags | hidden, "used": bool(users), "by": by}


def _blas() -> dict[str, Any]:
    config: Any = np.show_config(mode="dicts")
    blas = (config or {}).get("Build Dependencies", {}).get("blas", {})
    keys = ("name", "version", "openblas configuration")
    return {**{key: blas.get(key) for key in keys}, "core_type": _numpys_core_type()}


def _numpys_core_type() -> str | None:
    for path in threads.openblas_paths():
        function = threads.openblas_function(path, "openblas_get_corename")
        if function is not None and "numpy" in path:
            function.restype = ctypes.c_char_p
            return str(function().decode())
    return None
