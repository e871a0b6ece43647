"""``info``: devices, libraries, the current mode and the environment, as plain values and as tables.

It imports no library: loaded ones are inspected in ``sys.modules``, others by their metadata.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowprec._version import __version__
from lowprec.arrays import CPU, Device
from lowprec.backends import backend_of, disk
from lowprec.errors import EnvironmentVariableError, LowprecError
from lowprec.modes import available_modes
from lowprec.policy import environment, resolve
from lowprec.policy.controllers import switch_rows
from lowprec.report import Report
from lowprec.util.tables import Table
from lowprec.util.tracing import uncompiled

#: Module, distributions that may provide it, role.
_LIBRARIES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("numpy", ("numpy",), "arrays; float64 products on the CPU"),
    ("ml_dtypes", ("ml-dtypes",), "bfloat16 and float8 in NumPy arrays"),
    ("torch", ("torch",), "arrays"),
    ("jax", ("jax",), "arrays"),
    ("cupy", ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"), "arrays"),
)

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

Facts = dict[str, Any]


class Info(Report, Facts):
    """The dictionary that :func:`info` returns; ``print`` and notebooks show it as tables."""

    def __repr__(self) -> str:
        mode = self["mode"]["name"]
        return (
            f"<Info lowprec {self['version']}, {self['python']}, {self['platform']}, mode {mode}>"
        )

    _width = 120
    _gap = "\n\n"

    def tables(self, every_variable: bool = False) -> Iterator[Table]:
        """Yield the facts as tables, with ``every_variable`` also the variables that are not set."""
        return tables(self, every_variable)

    def to_dict(self) -> Facts:
        return dict(self)


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
    cache = disk.cache_directory()
    has_cache = not isinstance(cache, str)
    variables = environment.rows()
    warnings = [*environment.problems(), *cpu["warnings"]]
    if gpu["driver"] is not None and not gpu["used"]:
        warnings.append(
            f"this machine has an NVIDIA driver, but its GPU is not used: {gpu['reason']}"
        )
    if not has_cache:
        for row in variables:
            if row["name"] == "LOWPREC_CACHE_DIR":
                row["effect"] = "no cache"
    if gpu["used"] and not has_cache:  # only GPUs need the cache
        warnings.append(cache)
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
            "cache": str(cache) if has_cache else None,
            "available_modes": [str(m) for m in available_modes()],
            "environment": variables,
            "frameworks": list(switch_rows()),
            "warnings": warnings,
        }
    )


def _gpus() -> tuple[Facts, list[Facts]]:
    driver = None
    with suppress(OSError):
        driver = _NVIDIA_DRIVER.read_text().partition("\n")[0].strip() or None
    nothing: Facts = {"used": False, "driver": driver, "cuda": None, "cublas": None}
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


def _library(
    name: str, distributions: tuple[str, ...], role: str, opened: dict[str, str | None]
) -> Facts:
    module = sys.modules.get(name)
    version = getattr(module, "__version__", None) or _installed_version(distributions)
    detail = opened.get(name)
    is_loaded = opened.get(name, module) is not None
    status = "missing"
    if version is not None:
        version = str(version)
        status = "installed"
    if is_loaded:
        status = "loaded"
    return {"name": name, "version": version, "status": status, "role": role, "detail": detail}


def _installed_version(distributions: tuple[str, ...]) -> str | None:
    from importlib import metadata  # costs more to import than the rest of lowprec

    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _mode() -> Facts:
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


def tables(facts: Facts, every_variable: bool) -> Iterator[Table]:
    """Yield the facts of :func:`info` as tables."""
    title = f"lowprec {facts['version']}, {facts['python']}, {facts['platform'].replace('-', ' ')}"
    modes = ("modes", ", ".join(facts["available_modes"]))
    cache = ("cache", facts["cache"] or "none: see the warnings")
    yield Table(title, ("", ""), [*_mode_rows(facts["mode"]), modes, cache])
    for device in facts["devices"]:
        if device["device"] == "cpu":
            rows = list(_cpu_rows(device, facts["gpu"]))
        else:
            rows = [(label, show(device[key])) for key, label, show in _GPU_ROWS if key in device]
        yield Table(f"{device['device']}: {device['name']}", ("", ""), rows)
    yield Table(
        "libraries",
        ("name", "version", "status", "role"),
        [_library_row(entry, facts["blas"]) for entry in facts["libraries"]],
    )
    variables = facts["environment"]
    shown = [v for v in variables if every_variable or v["value"] or v["problem"]]
    unset = len(variables) - len(shown)
    title = "environment"
    if unset:
        title += f" ({unset} variables are not set: --all lists them)"
    settings = [(v["name"], v["value"] or "(unset)", v["effect"]) for v in shown]
    yield Table(title, ("variable", "value", "effect"), settings)
    if facts["frameworks"]:
        yield Table(
            "frameworks' switches for float32 products",
            ("library", "switch", "value", "scope"),
            [_switch(row) for row in facts["frameworks"]],
        )
    warnings = facts["warnings"] or ["none"]
    yield Table("warnings", ("", ""), [("-", text) for text in warnings])


def _mode_rows(mode: Facts) -> Iterator[tuple[str, str]]:
    if mode["error"]:
        yield "mode", f"none: {mode['error']}"
        return
    source = mode["source"]
    if mode["requested"]:
        source = f"{source}; {mode['requested']} was requested"
    yield "mode", f"{mode['name']} ({source})"
    for reason in mode["reasons"]:
        yield "because", reason


def _cpu_rows(device: Facts, gpu: Facts) -> Iterator[tuple[str, str]]:
    yield "CPUs", f"{device['cores']}, of which this process may use {device['affinity']}"
    yield "threads", f"up to {device['threads']} per product"
    for instruction_set in device["instruction_sets"]:
        yield instruction_set["name"], _use(instruction_set)
    if gpu["used"]:
        yield "GPU", f"used: driver for CUDA {gpu['cuda']}, cuBLAS {gpu['cublas']}"
    elif gpu["driver"]:
        yield "GPU", f"not used: {gpu['reason']} ({gpu['driver']})"
    else:
        yield "GPU", f"not used: {gpu['reason']}"


#: Properties of a GPU: key, label, format.
_GPU_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("compute_capability", "compute capability", str),
    ("memory_bytes", "memory", lambda nbytes: f"{nbytes / 2**30:.1f} GiB"),
    ("multiprocessors", "multiprocessors", str),
    (
        "peak_tflops",
        "peak TFLOP/s",
        lambda x: ", ".join(f"{name} {rate:.0f}" for name, rate in x.items()) or "unknown",
    ),
    ("workspace_bytes", "workspace", lambda n: f"{n / 2**20:.0f} MiB per handle and stream"),
)


def _use(instruction_set: Facts) -> str:
    if not instruction_set["present"]:
        return "no"
    used = instruction_set["used"]
    by = instruction_set["by"]
    if used is None:
        return f"yes; {by}"
    if used:
        return f"yes, used by {by}"
    return f"yes, not used: {by}" if by else "yes, not used"


def _library_row(entry: Facts, blas: Facts) -> tuple[str, str, str, str]:
    role = entry["role"]
    if entry["name"] == "numpy" and blas["name"]:
        about = f"BLAS: {blas['name']} {blas['version']}"
        if blas["core_type"]:
            about += f", kernels for {blas['core_type']}"
        role += f" ({about})"
    return entry["name"], entry["version"] or "-", entry["status"], role


def _switch(row: Facts) -> tuple[str, str, str, str]:
    value = str(row["value"])
    if row["problem"]:
        value = f"cannot be read: {row['problem']}"
    return row["library"], row["switch"] or "-", value, row["tier"]
