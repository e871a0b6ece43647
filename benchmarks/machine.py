"""The description of a machine in result files: processor, libraries, threads, commit; nothing about its owner.

lowprec, which loads NumPy, is imported inside functions: `common` imports this module before NumPy.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

#: Instruction sets that determine the speed of a product, the most important first.
FLAGS = (
    "amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni",
    "avx2", "fma", "f16c",
)  # fmt: skip

LIBRARIES = ("numpy", "ml_dtypes", "torch", "jax", "jaxlib", "threadpoolctl")

#: AMD's generations with AVX-512, by family.
_ZEN = {25: "Zen 4", 26: "Zen 5"}

#: Variables that set the number of threads or the instruction set of a library.
VARIABLES = (
    "JAX_PLATFORMS", "LOWPREC_MAX_CPU_ISA", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS",
)  # fmt: skip


def cpu_model() -> str:
    """Return the processor's name, as it reports it."""
    from lowprec.backends.cpu import cpuinfo

    return cpuinfo.cpu_name()


def cpu_flags() -> list[str]:
    """Return those of `FLAGS` that the processor has."""
    from lowprec.backends.cpu import cpuinfo

    return [flag for flag in FLAGS if flag in cpuinfo.cpu_flags()]


def cpu_family() -> int | None:
    """Return the family that an x86 processor reports, None where the system does not report it."""
    from lowprec.backends.cpu import cpuinfo

    family = cpuinfo._cpuinfo().get("cpu family", "")
    return int(family) if family.isdigit() else None


def generation() -> str:
    """Return AMD's generation with AVX-512, which names may not show; empty for other processors."""
    from lowprec.backends.cpu import cpuinfo

    is_one = "amd" in cpu_model().lower() and "avx512f" in cpuinfo.system_flags()
    return _ZEN.get(cpu_family(), "") if is_one else ""


def numpy_handicap() -> str:
    """Return a warning if NumPy's OpenBLAS uses kernels of a lesser processor, else an empty string."""
    import lowprec

    found = (text for text in lowprec.info()["warnings"] if text.startswith("NumPy's OpenBLAS has"))
    return next(found, "")


def has_amx() -> bool:
    """Whether the processor has matrix units for bfloat16."""
    return "amx_bf16" in cpu_flags()


def cores() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def caches() -> dict[str, int]:
    """Return the bytes of the data caches by level, where the system reports them."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                found[f"l{level}"] = int(size.rstrip("K")) * 1024
    return found


def memory_bytes() -> int | None:
    """Return the size of the memory, None where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def slug() -> str:
    """Return a short name for machines of this kind, such as `xeon-amx-2core` or `epyc-zen5-avx512-2core`."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)", " ", cpu_model().lower()))
    dull = {"amd", "cpu", "gen", "genuine", "intel", "processor"}
    named = (w for w in words if w not in dull and not w[0].isdigit())
    flags = cpu_flags()
    known = {"amx_bf16": "amx", "avx512f": "avx512", "avx2": "avx2"}
    units = next((name for flag, name in known.items() if flag in flags), None)
    family = next(named, platform.machine().lower())
    zen = generation().replace(" ", "").lower()
    return "-".join(filter(None, (family, zen, units, f"{cores()}core")))


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def threads() -> dict[str, int]:
    """Return how many threads each loaded library uses, by the library's name."""
    found: dict[str, int] = {}
    if importlib.util.find_spec("threadpoolctl"):
        import threadpoolctl

        # The path distinguishes two OpenMP runtimes of a process; result files do not include it.
        for pool in threadpoolctl.threadpool_info():
            stem = re.match(r"(?:lib)?[a-z_]+", Path(pool["filepath"]).name)
            found[stem.group() if stem else pool["internal_api"]] = pool["num_threads"]
    if torch := sys.modules.get("torch"):
        found["torch"] = torch.get_num_threads()
    return found


def load_average() -> float | None:
    """Return the load average of the last minute; on a quiet machine well below 1."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def describe() -> dict[str, Any]:
    """Return the machine's description. Call it after the measurement, when the libraries are loaded."""
    import lowprec

    # Uncommitted results and documentation do not change what was measured.
    changes = _git("status", "--porcelain", "--", "lowprec", "benchmarks/*.py")
    return {
        "name": slug(),
        "cpu": cpu_model(),
        "generation": generation(),
        "flags": cpu_flags(),
        "cores": cores(),
        "threads": threads(),
        "cache_bytes": caches(),
        "memory_bytes": memory_bytes(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {"lowprec": lowprec.__version__, **versions(LIBRARIES)},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "commit": _git("rev-parse", "--verify", "-q", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "date": today(),
    }


def today() -> str:
    """Return the date, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
