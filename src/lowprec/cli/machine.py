"""Under which conditions something was measured."""

from __future__ import annotations

from typing import Any

from lowprec.checking.measure import Load
from lowprec.report import info


def conditions(load: Load) -> dict[str, Any]:
    """Return what a measured time depends on: machine, how busy it was before, threads, versions."""
    facts = info()
    cpu = facts["devices"][0]
    versions = {entry["name"]: entry["version"] for entry in facts["libraries"] if entry["version"]}
    return {
        "lowprec": facts["version"],
        "python": facts["python"],
        "machine": {key: cpu[key] for key in ("name", "cores", "threads")},
        "load_average": load.average,
        "tile_units": any(s["used"] for s in cpu["instruction_sets"] if s["name"] == "amx_tile"),
        "units": cpu["units"],
        "blas": facts["blas"]["name"],
        "versions": versions,
    }


def describe(found: dict[str, Any]) -> str:
    """Return the conditions as one line."""
    machine, versions = found["machine"], found["versions"]
    units = ", ".join(found["units"]) or "FP32 units alone"
    openblas = versions.get("scipy_openblas64")
    own = f", OpenBLAS {openblas}" if openblas else ""
    return (
        f"{machine['name']}, {units}, {machine['threads']} threads; lowprec {found['lowprec']}, "
        f"NumPy {versions['numpy']} ({found['blas']}){own}"
    )
