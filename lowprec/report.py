"""``info``: devices, libraries, the current mode and the environment, as plain values and as tables.

It imports no library: loaded ones are inspected in ``sys.modules``, others by their metadata.
"""

from __future__ import annotations

import ctypes
import dataclasses
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowprec._version import __version__
from lowprec.arrays import CPU, Device
from lowprec.arrays.libraries import OPTIONAL
from lowprec.backends import backend_of, disk
from lowprec.errors import EnvironmentVariableError, LowprecError
from lowprec.modes import available_modes
from lowprec.policy import environment, resolve
from lowprec.policy.controllers import switch_rows
from lowprec.util.tables import Table, html, plain_text
from lowprec.util.tracing import uncompiled

#: Module, distributions that may provide it, role.
_LIBRARIES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("numpy", ("numpy",), "arrays; float64 products on the CPU"),
    ("ml_dtypes", ("ml-dtypes",), "bfloat16 and float8 in NumPy arrays"),
    *((name, library.distributions, "arrays") for name, library in OPTIONAL.items()),
)

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


class Info(dict[str, Any]):
    """The dictionary that :func:`info` returns; ``print`` and notebooks show it as tables."""

    def __repr__(self) -> str:
        mode = self["mode"]["name"]
        return f"<Info lowprec {self['version']}, {self['python']}, {self['platform']}, mode {mode}>"

    def __str__(self) -> str:
        return "\n\n".join(plain_text(table, 120) for table in tables(self))

    def _repr_html_(self) -> str:
        return "".join(map(html, tables(self)))


@uncompiled
def info() -> Info:
    """Return the devices, libraries, modes and settings of this process.

    An illegal value of an environment variable is reported under ``warnings``, not raised. Variables that are
    read once per process are read here, if not before.

    Returns
    -------
    dict
        Plain values for JSON; ``print`` and notebooks show tables. The keys:

        - ``version``, ``python``, ``platform``: strings.
        - ``devices``: usable devices by name. A CPU has ``cores``, ``affinity`` and ``threads`` (CPUs of the machine,
          CPUs of this process, threads of a product), on x86-64 also ``instruction_sets`` (``used`` is None if the
          libraries choose) and the ``units`` used for 16 and 8 bits. A GPU has ``compute_capability``,
          ``memory_bytes``, ``multiprocessors``, ``clock_khz``, ``peak_tflops`` by format and ``workspace_bytes``.
        - ``gpu``: whether GPUs are used, the reason if not, versions.
        - ``libraries``: version and status (``loaded``, ``installed``, ``missing``).
        - ``blas``: NumPy's BLAS; ``core_type`` is the processor type of OpenBLAS's kernels.
        - ``mode``: the current mode, its source and reasons; ``available_modes``: all modes.
        - ``cache``: folder of the cache on disk, or None.
        - ``environment``: each variable's value, effect and legal values.
        - ``frameworks``: switches for float32 products in this thread, of each loaded library: ``library``, ``switch``,
          ``value``, ``tier`` (its scope) and ``problem`` (the reason if it cannot be read).
        - ``warnings``: sentences.

    Examples
    --------
    >>> import lowprec
    >>> facts = lowprec.info()
    >>> facts["mode"]["name"], facts["devices"][0]["device"]
    ('fp32', 'cpu')
    """
    cpu = backend_of(CPU).info()
    mode = _mode()  # first: it reads the variables that are read once
    gpu, gpus = _gpus()
    switches, cache, unused = switch_rows(), disk.cache_directory(), ""
    absence = cache if isinstance(cache, str) else ""
    if gpu["driver"] is not None and not gpu["used"]:
        unused = f"this machine has an NVIDIA driver, but its GPU is not used: {gpu['reason']}"
    return Info(
        {
            "version": __version__,
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "platform": platform.platform(),
            "devices": [*cpu["devices"], *gpus],
            "gpu": gpu,
            "libraries": [_library(*entry, cpu["versions"]) for entry in _LIBRARIES],
            "blas": cpu["blas"],
            "mode": mode,
            "cache": None if absence else str(cache),
            "available_modes": [str(m) for m in available_modes()],
            "environment": [
                (row._replace(effect="no cache") if absence and row.name == "LOWPREC_CACHE_DIR" else row)._asdict()
                for row in environment.rows()
            ],
            "frameworks": [dataclasses.asdict(row) for row in switches],
            "warnings": [
                *environment.problems(),
                *cpu["warnings"],
                # Only GPUs need the cache.
                *filter(None, [unused, gpu["used"] and absence]),
            ],
        }
    )


def _gpus() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    driver = None
    with suppress(OSError):
        driver = _NVIDIA_DRIVER.read_text().partition("\n")[0].strip() or None
    nothing: dict[str, Any] = {"used": False, "driver": driver, "cuda": None, "cublas": None}
    if "lowprec.backends.cuda.backend" not in sys.modules and driver is None:
        try:
            ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        except OSError:
            return {**nothing, "reason": "no NVIDIA driver was found"}, []
    try:
        cuda = backend_of(Device(2, 0)).info()
    except LowprecError as error:
        return {**nothing, "reason": str(error)}, []
    return {**nothing, **cuda["versions"], "used": True, "reason": None}, cuda["devices"]


def _library(name: str, distributions: tuple[str, ...], role: str, opened: dict[str, str | None]) -> dict[str, Any]:
    module = sys.modules.get(name)
    version = getattr(module, "__version__", None) or _installed_version(distributions)
    detail = opened.get(name)
    loaded = detail is not None if name in opened else module is not None
    status = "loaded" if loaded else "missing" if version is None else "installed"
    version = None if version is None else str(version)
    return {"name": name, "version": version, "status": status, "role": role, "detail": detail}


def _installed_version(distributions: tuple[str, ...]) -> str | None:
    from importlib import metadata  # costs more to import than the rest of lowprec

    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _mode() -> dict[str, Any]:
    try:
        resolved = resolve()
    except EnvironmentVariableError as error:
        return {"name": None, "source": None, "requested": None, "reasons": [], "error": str(error)}
    return {
        "name": str(resolved.mode),
        "source": str(resolved.source),
        "requested": resolved.requested and str(resolved.requested),
        "reasons": list(resolved.reasons),
        "error": None,
    }


def tables(facts: dict[str, Any], every_variable: bool = False) -> Iterator[Table]:
    """Yield the facts of :func:`info` as tables."""
    title = f"lowprec {facts['version']}, {facts['python']}, {facts['platform'].replace('-', ' ')}"
    modes = ("modes", ", ".join(facts["available_modes"]))
    cache = ("cache", facts["cache"] or "none: see the warnings")
    yield Table(title, ("", ""), [*_mode_rows(facts["mode"]), modes, cache])
    for device in facts["devices"]:
        rows = [(label, show(device[key])) for key, label, show in _GPU_ROWS if key in device]
        if device["device"] == "cpu":
            rows = list(_cpu_rows(device, facts["gpu"]))
        yield Table(f"{device['device']}: {device['name']}", ("", ""), rows)
    yield Table(
        "libraries",
        ("name", "version", "status", "role"),
        [_library_row(entry, facts["blas"]) for entry in facts["libraries"]],
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
            ("library", "switch", "value", "scope"),
            [_switch(row) for row in facts["frameworks"]],
        )
    warnings = facts["warnings"] or ["none"]
    yield Table("warnings", ("", ""), [("-", text) for text in warnings])


def _mode_rows(mode: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if mode["error"]:
        yield "mode", f"none: {mode['error']}"
        return
    asked = f"; {mode['requested']} was requested" if mode["requested"] else ""
    yield "mode", f"{mode['name']} ({mode['source']}{asked})"
    for reason in mode["reasons"]:
        yield "because", reason


def _cpu_rows(device: dict[str, Any], gpu: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "CPUs", f"{device['cores']}, of which this process may use {device['affinity']}"
    yield "threads", f"up to {device['threads']} per product"
    for instruction_set in device["instruction_sets"]:
        yield instruction_set["name"], _use(instruction_set)
    if gpu["used"]:
        yield "GPU", f"used: driver for CUDA {gpu['cuda']}, cuBLAS {gpu['cublas']}"
    else:
        yield "GPU", f"not used: {gpu['reason']}" + (f" ({gpu['driver']})" if gpu["driver"] else "")


#: Properties of a GPU: key, label, format.
_GPU_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("compute_capability", "compute capability", str),
    ("memory_bytes", "memory", lambda nbytes: f"{nbytes / 2**30:.1f} GiB"),
    ("multiprocessors", "multiprocessors", str),
    ("peak_tflops", "peak TFLOP/s", lambda x: ", ".join(f"{name} {rate:.0f}" for name, rate in x.items()) or "unknown"),
    ("workspace_bytes", "workspace", lambda n: f"{n / 2**20:.0f} MiB per handle and stream"),
)


def _use(instruction_set: dict[str, Any]) -> str:
    if not instruction_set["present"]:
        return "no"
    used, by = instruction_set["used"], instruction_set["by"]
    unused = f"yes, not used: {by}" if by else "yes, not used"
    return {True: f"yes, used by {by}", False: unused, None: f"yes; {by}"}[used]


def _library_row(entry: dict[str, Any], blas: dict[str, Any]) -> tuple[str, str, str, str]:
    role = entry["role"]
    if entry["name"] == "numpy" and blas["name"]:
        kernels = f", kernels for {blas['core_type']}" if blas["core_type"] else ""
        role += f" (BLAS: {blas['name']} {blas['version']}{kernels})"
    return entry["name"], entry["version"] or "-", entry["status"], role


def _switch(row: dict[str, Any]) -> tuple[str, str, str, str]:
    problem = row["problem"]
    value = f"cannot be read: {problem}" if problem else str(row["value"])
    return row["library"], row["switch"] or "-", value, row["tier"]
