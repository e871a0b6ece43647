"""Common parts of all benchmarks: the environment before NumPy, command line, machine, claims and result files.

Import this module before NumPy: it sets `OPENBLAS_THREAD_TIMEOUT`, which NumPy's OpenBLAS reads once, when it loads.
lowprec, which loads NumPy, is imported inside functions.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from claims import RESULTS, Row
from generated import ROOT, write_text


def load_average() -> float | None:
    """Return the load average of the last minute; on a quiet machine well below 1."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


#: The load before this process adds to it.
LOAD_BEFORE = load_average()

#: Whether the variable below still reaches OpenBLAS.
CAME_BEFORE_NUMPY = "numpy" not in sys.modules

# The workers of OpenBLAS otherwise spin for tens of milliseconds after a product, and make whatever runs next two to
# three times slower. 2^4 cycles is the shortest time that OpenBLAS accepts.
os.environ["OPENBLAS_THREAD_TIMEOUT"] = "4"


def parser(doc: str) -> argparse.ArgumentParser:
    """Return the command line that every benchmark has, described by the first line of the script's docstring."""
    options = argparse.ArgumentParser(description=doc.strip().splitlines()[0])
    options.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes: does it run? No figure of it means anything",
    )
    options.add_argument(
        "--output", "--out", type=Path, default=RESULTS, metavar="DIR", help="of the result file"
    )
    options.add_argument(
        "--seed", type=int, default=0, help="of the operands and of the order of the variants"
    )
    return options


def main(
    doc: str | None,
    benchmark: str,
    measure: Callable[[bool, int], Iterable[dict[str, Any]]],
    claims: Callable[[list[dict[str, Any]]], Iterable[Row]],
) -> None:
    """Run a script of one measurement: `measure(quick, seed)` yields the rows, `claims` are about all of them."""
    arguments = parser(doc or "").parse_args()
    rows = list(measure(arguments.quick, arguments.seed))
    report(benchmark, arguments, rows, claims(rows))


def run_parts(doc: str | None, parts: Mapping[str, Callable[[argparse.Namespace], None]]) -> None:
    """Run the parts of a script that the command line names, in the order of `parts`; each writes a result file."""
    command_line = parser(doc or "")
    command_line.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    arguments = command_line.parse_args()
    for part, run in parts.items():
        if part in arguments.parts:
            run(arguments)


# -- the machine ----------------------------------------------------------------------------------

#: Instruction sets that determine the speed of a product, the most important first.
FLAGS = (
    "amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni",
    "avx2", "fma", "f16c",
)  # fmt: skip

#: Variables that set the number of threads or the instruction set of a library.
VARIABLES = (
    "JAX_PLATFORMS", "LOWPREC_MAX_CPU_ISA", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS",
)  # fmt: skip


def cpu_flags() -> list[str]:
    """Return those of `FLAGS` that the processor has."""
    from lowprec.backends.cpu import cpuinfo

    return [flag for flag in FLAGS if flag in cpuinfo.cpu_flags()]


def generation() -> str:
    """Return AMD's generation with AVX-512, which names may not show; empty for other processors."""
    from lowprec.backends.cpu import cpuinfo

    is_amd = "amd" in cpuinfo.cpu_name().lower() and "avx512f" in cpuinfo.system_flags()
    return (
        {"25": "Zen 4", "26": "Zen 5"}.get(cpuinfo._cpuinfo().get("cpu family", ""), "")
        if is_amd
        else ""
    )


def slug() -> str:
    """Return a short name for machines of this kind, such as `xeon-amx-2core` or `epyc-zen5-avx512-2core`."""
    from lowprec.backends.cpu import cpuinfo, threads

    words = re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)", " ", cpuinfo.cpu_name().lower()))
    dull = {"amd", "cpu", "gen", "genuine", "intel", "processor"}
    family = next(
        (w for w in words if w not in dull and not w[0].isdigit()), platform.machine().lower()
    )
    known = {"amx_bf16": "amx", "avx512f": "avx512", "avx2": "avx2"}
    units = next((name for flag, name in known.items() if flag in cpu_flags()), None)
    zen = generation().replace(" ", "").lower()
    return "-".join(filter(None, (family, zen, units, f"{threads.affinity()}core")))


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    installed = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def _git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def thread_counts() -> dict[str, int]:
    """Return how many threads each loaded library uses, by the library's name."""
    counts: dict[str, int] = {}
    if importlib.util.find_spec("threadpoolctl"):
        import threadpoolctl

        # The path distinguishes two OpenMP runtimes of a process; result files do not include it.
        for pool in threadpoolctl.threadpool_info():
            stem = re.match(r"(?:lib)?[a-z_]+", Path(pool["filepath"]).name)
            counts[stem.group() if stem else pool["internal_api"]] = pool["num_threads"]
    if torch := sys.modules.get("torch"):
        counts["torch"] = torch.get_num_threads()
    return counts


def describe() -> dict[str, Any]:
    """Return the machine's description. Call it after the measurement, when the libraries are loaded."""
    import lowprec
    from lowprec.backends.cpu import cpuinfo, threads

    # Uncommitted results and documentation do not change what was measured.
    changes = _git("status", "--porcelain", "--", "lowprec", "benchmarks/*.py")
    names = ("numpy", "ml_dtypes", "torch", "jax", "jaxlib", "threadpoolctl")
    return {
        "name": slug(),
        "cpu": cpuinfo.cpu_name(),
        "generation": generation(),
        "flags": cpu_flags(),
        "cores": threads.affinity(),
        "threads": thread_counts(),
        "python": platform.python_version(),
        "versions": {"lowprec": lowprec.__version__, **versions(names)},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "commit": _git("rev-parse", "--verify", "-q", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "date": today(),
    }


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


# -- result files ---------------------------------------------------------------------------------


def result_path(folder: Path, benchmark: str) -> Path:
    return folder / f"{benchmark}-{slug()}.json"


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: an infinity or NaN becomes None, an object without a number its text.

    Examples
    --------
    >>> plain({"a": (1, float("inf")), 2: None})
    {'a': [1, None], '2': None}
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    value = value.item() if hasattr(value, "item") else value  # NumPy's numbers
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (int, str)) else str(value)


def write_json(path: Path, content: Row) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def report(
    benchmark: str,
    arguments: argparse.Namespace,
    results: Sequence[Row],
    claims: Iterable[Row],
    **settings: Any,
) -> None:
    """Print the result of a run and write its file; `settings` are those beyond what every command line has."""
    import render

    import lowprec
    from lowprec.checking.measure import Load

    machine = describe()
    machine |= {
        "load_before": LOAD_BEFORE,
        "openblas_thread_timeout": 4 if CAME_BEFORE_NUMPY else None,
    }
    content = {
        "benchmark": benchmark,
        "machine": machine,
        "settings": {"quick": arguments.quick, "seed": arguments.seed, **settings},
        "claims": list(claims),
        "results": list(results),
    }
    path = result_path(arguments.output, benchmark)
    write_json(path, content)
    print(f"\n{render.page(benchmark, content)}")
    print(f"wrote {path.name} to {path.parent}")
    # Slow kernels of NumPy's OpenBLAS make a slow baseline.
    handicaps = (text for text in lowprec.info()["warnings"] if "OpenBLAS" in text)
    for remark in filter(None, [Load(LOAD_BEFORE, machine["cores"]).remark, *handicaps]):
        print(remark)


# -- claims ---------------------------------------------------------------------------------------


def claim(
    what: str, value: float | None, limit: float, *, at_most: bool = False, **details: Any
) -> dict[str, Any]:
    """Return a measured value (None where it could not be measured) and its limit, a lower one unless `at_most`."""
    met = None if value is None else (value <= limit if at_most else value >= limit)
    relation = "<=" if at_most else ">="
    return {
        "what": what,
        "value": value,
        "relation": relation,
        "limit": limit,
        "met": met,
        **details,
    }
