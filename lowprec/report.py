"""``info``: devices, libraries, the mode in force and the environment, as plain values.

Nothing is imported for it: loaded libraries are inspected in ``sys.modules``, and of others the metadata is read.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import platform
import sys
from pathlib import Path
from typing import Any

from lowprec._version import __version__
from lowprec.arrays import CPU
from lowprec.arrays.libraries import OPTIONAL
from lowprec.backends import backend_of, disk
from lowprec.errors import EnvironmentVariableError, LowprecError
from lowprec.modes import available_modes
from lowprec.policy import environment, resolve
from lowprec.policy.switch_report import disagreements, switch_rows

#: Module, distributions that may contain it, role.
_LIBRARIES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("numpy", ("numpy",), "arrays; products where no faster kernel is"),
    ("ml_dtypes", ("ml-dtypes",), "bfloat16 and float8 in NumPy arrays"),
    ("scipy_openblas64", ("scipy-openblas64",), "products on the CPU"),
    ("numba", ("numba",), "compiles lowprec's own kernels"),
    *((name, library.distributions, "arrays") for name, library in OPTIONAL.items()),
)

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def info() -> dict[str, Any]:
    """Return the devices, libraries, modes and settings of this process.

    An illegal value of an environment variable is reported under ``warnings``; it does not raise here. The mode in
    force is resolved, which counts as its first use: variables that are read once are read now.

    Returns
    -------
    dict
        Ready for JSON. ``version``, ``python`` and ``platform``: strings. ``devices``: those that can compute, each
        with its name, ``cores``, ``affinity`` and ``threads`` (CPUs of the machine, CPUs this process may use,
        threads of a product) and, on x86-64, ``instruction_sets``, where ``used`` is None if the libraries choose for
        themselves, and the ``units`` for 16 and 8 bits that are used; of a GPU ``compute_capability``,
        ``memory_bytes``, ``multiprocessors``, ``clock_khz``, ``peak_tflops`` by format and ``workspace_bytes``.
        ``gpu``: whether GPUs are used, why not, and versions. ``libraries`` with version and status
        (``loaded``, ``installed``, ``missing``). ``blas``: NumPy's, with ``core_type``, the processor of an
        OpenBLAS's kernels. ``mode``: the mode in force, its source and reasons. ``cache``: the folder of
        the cache on disk, None without one. ``available_modes``.
        ``environment``: each variable with its value, its effect and its legal values. ``frameworks``: each switch
        for float32 products of each loaded library, as it is now in this thread, with ``library``, ``switch``,
        ``value``, ``tier`` (how far it reaches) and ``problem`` (why it cannot be read). ``warnings``: sentences.

    Examples
    --------
    >>> import lowprec
    >>> found = lowprec.info()
    >>> found["mode"]["name"], found["devices"][0]["device"]
    ('fp32', 'cpu')
    """
    cpu = backend_of(CPU).info()
    mode = _mode()  # first: it reads the variables that are read once
    gpu, gpus = _gpus()
    switches, absence, unused = switch_rows(), disk.absence(), ""
    without_cache = {"LOWPREC_CACHE_DIR"} if absence else set()
    if gpu["driver"] is not None and not gpu["used"]:
        unused = f"this machine has an NVIDIA driver, but its GPU is not used: {gpu['reason']}"
    return {
        "version": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "devices": [*cpu["devices"], *gpus],
        "gpu": gpu,
        "libraries": [_library(*entry, cpu["versions"]) for entry in _LIBRARIES],
        "blas": cpu["blas"],
        "mode": mode,
        "cache": None if absence else str(disk.cache_directory()),
        "available_modes": [str(m) for m in available_modes()],
        "environment": [
            (row._replace(effect="no cache") if row.name in without_cache else row)._asdict()
            for row in environment.rows()
        ],
        "frameworks": [dataclasses.asdict(row) for row in switches],
        "warnings": [
            *environment.problems(),
            *disagreements(switches),
            *cpu["warnings"],
            *filter(None, [unused, absence]),
        ],
    }


def _gpus() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    driver = _driver()
    nothing: dict[str, Any] = {"used": False, "driver": driver, "cuda": None, "cublas": None}
    module = "lowprec.backends.cuda.backend"
    if module not in sys.modules and driver is None and not _opens_driver():
        return {**nothing, "reason": "no NVIDIA driver was found"}, []
    try:
        found = importlib.import_module(module).info()
    except LowprecError as error:
        return {**nothing, "reason": str(error)}, []
    return {**nothing, **found["versions"], "used": True, "reason": None}, found["devices"]


def _opens_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _driver() -> str | None:
    try:
        return _NVIDIA_DRIVER.read_text().partition("\n")[0].strip() or None
    except OSError:
        return None


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
