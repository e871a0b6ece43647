"""What ``info()`` tells of the CPU and of the libraries that serve it, as plain values."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np

from lowprec.backends.cpu import cpuinfo, mkl, threads
from lowprec.backends.cpu.amx import tile_gemm as amx

_BLAS_CHOOSES = "NumPy's BLAS and MKL choose for themselves"
_X86_64 = ("x86_64", "AMD64")


def info() -> dict[str, Any]:
    """Return the CPU, NumPy's BLAS, MKL's version (None where it cannot be opened), and what the machine lacks."""
    obstacle, library = amx.obstacle(), mkl.mkl()
    warnings = []
    if obstacle:
        warnings.append(
            f"{obstacle}: modes round the operands and multiply in FP32, which is not faster than fp32"
        )
    if library is None and platform.machine() in _X86_64:
        warnings.append(
            f'MKL {_why_not_mkl()} (pip install "lowprec[cpu]"): products that do not run on tile units are left to '
            "NumPy's BLAS"
        )
    return {
        "devices": [_device(tiles=not obstacle)],
        "versions": {"mkl": None if library is None else library.version},
        "blas": _blas(),
        "warnings": warnings,
    }


def _device(tiles: bool) -> dict[str, Any]:
    flags = cpuinfo.cpu_flags()
    try:
        affinity = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # the system cannot tell
        affinity = os.cpu_count() or 1
    return {
        "device": "cpu",
        "name": cpuinfo.cpu_name(),
        "cores": os.cpu_count(),
        "affinity": affinity,
        "threads": threads.num_threads(),
        "instruction_sets": [
            {
                "name": name,
                "present": name in flags,
                "used": used if name in flags else False,
                "by": by,
            }
            for name, used, by in _instruction_sets(tiles)
        ],
    }


def _instruction_sets(tiles: bool) -> list[tuple[str, bool | None, str]]:
    """Return the instruction sets that matter for products, whether lowprec uses them, and who does."""
    by_tiles = "lowprec's tile kernels" if tiles else ""
    return [
        ("avx2", None, _BLAS_CHOOSES),
        ("avx512f", None, _BLAS_CHOOSES),
        ("avx512_bf16", tiles, by_tiles),
        ("avx512_fp16", False, ""),
        *((name, tiles, by_tiles) for name in ("amx_tile", "amx_bf16", "amx_int8")),
    ]


def _blas() -> dict[str, Any]:
    """Return which BLAS NumPy was built with."""
    config: Any = np.show_config(mode="dicts")
    blas = (config or {}).get("Build Dependencies", {}).get("blas", {})
    return {key: blas.get(key) for key in ("name", "version", "openblas configuration")}


def _why_not_mkl() -> str:
    # Here, because it costs more to import than the rest of lowprec.
    from importlib import metadata

    try:
        metadata.version("mkl")
    except metadata.PackageNotFoundError:
        return "is not installed"
    return "is installed but cannot be opened"
