"""Show the settings that products depend on: devices, libraries, the mode in force, variables, warnings.

Frameworks are not imported for it; of those that are installed the version is read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from lowprec.cli.options import add_shared
from lowprec.cli.output import print_json, print_tables
from lowprec.report import info
from lowprec.util.tables import Table

EXAMPLES = """\
examples:
  lowprec info
  lowprec info --all
  lowprec info --json
  LOWPREC_MATH_MODE=tf32 lowprec info
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--all", action="store_true", help="list the variables that are not set, too")
    add_shared(parser, "--json")


def run(options: argparse.Namespace) -> int:
    """Print the facts."""
    facts = info()
    if options.json:
        print_json(facts)
    else:
        print_tables(_tables(facts, options.all))
    return 0


def _tables(facts: dict[str, Any], every_variable: bool) -> Iterator[Table]:
    title = f"lowprec {facts['version']}, {facts['python']}, {facts['platform'].replace('-', ' ')}"
    modes = ("modes", ", ".join(facts["available_modes"]))
    cache = ("cache", facts["cache"] or "none: see the warnings")
    yield Table(title, ("", ""), [*_mode(facts["mode"]), modes, cache])
    for device in facts["devices"]:
        yield _cpu(device, facts["gpu"]) if device["device"] == "cpu" else _device_table(device)
    yield Table(
        "libraries",
        ("name", "version", "status", "role"),
        [_library(entry, facts["blas"]) for entry in facts["libraries"]],
    )
    shown = [v for v in facts["environment"] if every_variable or v["value"] or v["problem"]]
    unset = len(facts["environment"]) - len(shown)
    yield Table(
        "environment" + (f" ({unset} variables are not set: --all lists them)" if unset else ""),
        ("variable", "value", "effect"),
        [(v["name"], v["value"] or "(unset)", v["effect"]) for v in shown],
    )
    if facts["frameworks"]:
        yield Table(
            "frameworks' switches for float32 products",
            ("library", "switch", "now", "reaches"),
            [_switch(row) for row in facts["frameworks"]],
        )
    warnings = facts["warnings"] or ["none"]
    yield Table("warnings", ("", ""), [("-", text) for text in warnings])


def _mode(mode: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if mode["error"]:
        yield "mode", f"none: {mode['error']}"
        return
    asked = f"; {mode['requested']} was asked for" if mode["requested"] else ""
    yield "mode", f"{mode['name']} ({mode['source']}{asked})"
    for reason in mode["reasons"]:
        yield "because", reason


def _cpu(device: dict[str, Any], gpu: dict[str, Any]) -> Table:
    rows = [
        ("CPUs", f"{device['cores']}, of which this process may use {device['affinity']}"),
        ("threads", f"up to {device['threads']} per product"),
        *((s["name"], _use(s)) for s in device["instruction_sets"]),
        ("GPU", _gpu(gpu)),
    ]
    return Table(f"{device['device']}: {device['name']}", ("", ""), rows)


def _gpu(gpu: dict[str, Any]) -> str:
    if gpu["used"]:
        return f"used: driver for CUDA {gpu['cuda']}, cuBLAS {gpu['cublas']}"
    return f"not used: {gpu['reason']}" + (f" ({gpu['driver']})" if gpu["driver"] else "")


def _device_table(device: dict[str, Any]) -> Table:
    rows = [(label, show(device[key])) for key, label, show in _DEVICE_ROWS if key in device]
    return Table(f"{device['device']}: {device['name']}", ("", ""), rows)


def _rates(peak: dict[str, float]) -> str:
    return ", ".join(f"{name} {rate:.0f}" for name, rate in peak.items()) or "unknown"


#: A backend's facts about a device: key, label, and format.
_DEVICE_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("compute_capability", "compute capability", str),
    ("memory_bytes", "memory", lambda nbytes: f"{nbytes / 2**30:.1f} GiB"),
    ("multiprocessors", "multiprocessors", str),
    ("peak_tflops", "peak TFLOP/s", _rates),
    ("workspace_bytes", "workspace", lambda n: f"{n / 2**20:.0f} MiB per handle and stream"),
)


def _use(instruction_set: dict[str, Any]) -> str:
    if not instruction_set["present"]:
        return "no"
    used, by = instruction_set["used"], instruction_set["by"]
    unused = f"yes, not used: {by}" if by else "yes, not used"
    return {True: f"yes, used by {by}", False: unused, None: f"yes; {by}"}[used]


def _library(entry: dict[str, Any], blas: dict[str, Any]) -> tuple[str, str, str, str]:
    role = entry["role"]
    if entry["name"] == "numpy" and blas["name"]:
        kernels = f", kernels for {blas['core_type']}" if blas["core_type"] else ""
        role += f" (BLAS: {blas['name']} {blas['version']}{kernels})"
    return entry["name"], entry["version"] or "-", entry["status"], role


def _switch(row: dict[str, Any]) -> tuple[str, str, str, str]:
    problem = row["problem"]
    value = f"cannot be read: {problem}" if problem else str(row["value"])
    return row["library"], row["switch"] or "-", value, row["tier"]
