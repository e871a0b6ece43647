"""What a result file says about the machine: processor, libraries, threads, commit. Nothing about who owns it."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

#: Instruction sets that decide how fast a product is, most telling first.
FLAGS = (
    "amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni",
    "avx2", "fma", "f16c",
)  # fmt: skip

LIBRARIES = (
    "numpy", "ml_dtypes", "mkl", "numba", "llvmlite", "torch", "jax", "jaxlib", "threadpoolctl",
)  # fmt: skip

#: Variables that set the number of threads or the instruction set of a library.
VARIABLES = (
    "JAX_PLATFORMS", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS",
)  # fmt: skip


@functools.cache
def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    first = text.split("\n\n", maxsplit=1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_model() -> str:
    """Return the processor's name for itself."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """Return those of `FLAGS` that the processor has."""
    found = set(_cpuinfo().get("flags", "").split())
    return [flag for flag in FLAGS if flag in found]


def has_amx() -> bool:
    """Whether the processor has matrix units for bfloat16."""
    return "amx_bf16" in cpu_flags()


def cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def caches() -> dict[str, int]:
    """Return the bytes of the data caches by level, as far as the system tells."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        if kind != "Instruction":
            found[f"l{level}"] = int(size.rstrip("K")) * 1024
    return found


def last_level_cache() -> int:
    """Return the bytes of the largest cache; 32 MiB where the system does not tell."""
    return max(caches().values(), default=32 << 20)


def memory_bytes() -> int | None:
    """Return the size of the memory, None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def slug() -> str:
    """Return a short name for machines of this kind, such as `xeon-amx-2core`."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)", " ", cpu_model().lower()))
    dull = {"amd", "cpu", "gen", "genuine", "intel", "processor"}
    family = next(
        (w for w in words if w not in dull and not w[0].isdigit()), platform.machine().lower()
    )
    flags = cpu_flags()
    known = {"amx_bf16": "amx", "avx512f": "avx512", "avx2": "avx2"}
    units = next((name for flag, name in known.items() if flag in flags), None)
    return "-".join(filter(None, (family, units, f"{cores()}core")))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def threads() -> dict[str, int]:
    """Return how many threads each loaded library uses, by the library's name."""
    found: dict[str, int] = {}
    try:
        import threadpoolctl
    except ImportError:
        pass
    else:
        # The path tells the two OpenMP runtimes of a process apart; it says too much for a result file.
        for pool in threadpoolctl.threadpool_info():
            stem = re.match(r"(?:lib)?[a-z_]+", Path(pool["filepath"]).name)
            found[stem.group() if stem else pool["internal_api"]] = pool["num_threads"]
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.get_num_threads()
    return found


def load_average() -> float | None:
    """Return how many processes wanted to run in the last minute; on a quiet machine well below 1."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def describe() -> dict[str, Any]:
    """Return the machine as a result file shows it. Call it after the measurement, when the libraries are loaded."""
    import lowprec

    versions = {name: _version(name) for name in LIBRARIES}
    # Uncommitted results and documentation do not change what was measured.
    changes = _git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    return {
        "name": slug(),
        "cpu": cpu_model(),
        "flags": cpu_flags(),
        "cores": cores(),
        "threads": threads(),
        "cache_bytes": caches(),
        "memory_bytes": memory_bytes(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {"lowprec": lowprec.__version__, **{k: v for k, v in versions.items() if v}},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "commit": _git("rev-parse", "--verify", "-q", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
