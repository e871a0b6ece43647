"""Common parts of all benchmarks: the environment before NumPy, the command line, claims and result files.

Import this module before NumPy: it sets `OPENBLAS_THREAD_TIMEOUT`, which NumPy's OpenBLAS reads once, when it loads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
from generated import table, write_text

#: The load before this process adds to it.
LOAD_BEFORE = machine.load_average()

#: Whether the variable below still reaches OpenBLAS.
CAME_BEFORE_NUMPY = "numpy" not in sys.modules

# The workers of OpenBLAS otherwise spin for tens of milliseconds after a product, and make whatever runs next two to
# three times slower. 2^4 cycles is the shortest time that OpenBLAS accepts.
os.environ["OPENBLAS_THREAD_TIMEOUT"] = "4"

RESULTS = machine.ROOT / "benchmarks" / "results"

Row = Mapping[str, Any]


def parser(doc: str) -> argparse.ArgumentParser:
    """Return the command line that every benchmark has, described by the first line of the script's docstring."""
    made = argparse.ArgumentParser(description=doc.strip().splitlines()[0])
    quick = "tiny sizes: does it run? No figure of it means anything"
    made.add_argument("--quick", action="store_true", help=quick)
    where = {"type": Path, "default": RESULTS, "metavar": "DIR"}
    made.add_argument("--output", "--out", help="folder of the result file", **where)
    seed = "of the operands and of the order of the variants"
    made.add_argument("--seed", type=int, default=0, help=seed)
    return made


# -- result files ---------------------------------------------------------------------------------


def result_path(folder: Path, benchmark: str) -> Path:
    """Return the path of a benchmark's result on this machine."""
    return folder / f"{benchmark}-{machine.slug()}.json"


def document(benchmark: str, settings: Row, results: Sequence[Row], claims: Sequence[Row] = ()) -> dict[str, Any]:
    """Return the content of a result file: measurements, settings and machine."""
    timeout = 4 if CAME_BEFORE_NUMPY else None
    before = {"load_before": LOAD_BEFORE, "openblas_thread_timeout": timeout}
    return {
        "benchmark": benchmark,
        "machine": machine.describe() | before,
        "settings": dict(settings),
        "claims": list(claims),
        "results": list(results),
    }


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: an infinity or NaN becomes None, what is no plain value its text.

    Examples
    --------
    >>> plain({"a": (1, float("inf")), 2: None})
    {'a': [1, None], '2': None}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    # NumPy's numbers.
    return plain(value.item()) if hasattr(value, "item") else str(value)


def write_json(path: Path, content: Row) -> None:
    """Write a result file atomically."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def finish(path: Path, content: Row) -> None:
    """Print a result as in the documentation, write its file and print the path."""
    import render

    from lowprec.checking.measure import Load

    write_json(path, content)
    show(f"\n{render.PAGES[content['benchmark']](content)}")
    print(f"wrote {path.name} to {path.parent}")
    if remark := Load(LOAD_BEFORE, machine.cores()).remark:
        print(remark)


def report(
    benchmark: str, arguments: argparse.Namespace, results: Sequence[Row], claims: Sequence[Row], **settings: Any
) -> None:
    """Print the result of a run and write its file; `settings` are those beyond what every command line has."""
    settings = {"quick": arguments.quick, "seed": arguments.seed, **settings}
    made = document(benchmark, settings, results, claims)
    finish(result_path(arguments.output, benchmark), made)


# -- claims ---------------------------------------------------------------------------------------


def claim(what: str, value: float | None, limit: float, *, at_most: bool = False, **details: Any) -> dict[str, Any]:
    """Return a measured value (None where it could not be measured) beside its limit, a lower one unless `at_most`."""
    met = None if value is None else (value <= limit if at_most else value >= limit)
    relation = "<=" if at_most else ">="
    judged = {"what": what, "value": value, "relation": relation, "limit": limit, "met": met}
    return judged | details


VERDICTS = {True: "met", False: "MISSED", None: "not measured"}
CLAIM_HEADER = ("claim", "by size", "measured", "limit", "")


def claim_rows(claims: Iterable[Row]) -> list[list[str]]:
    """Return the claims as rows of a table under `CLAIM_HEADER`."""
    return [
        [
            c["what"],
            ", ".join(f"{n}: {value:.2f}" for n, value in c.get("by_size", {}).items()) or "-",
            "-" if c["value"] is None else f"{c['value']:.3g}",
            f"{c['relation']} {c['limit']:g}",
            VERDICTS[c["met"]],
        ]
        for c in claims
    ]


def is_square(row: Row) -> bool:
    """Whether a row of `bench_gemm.py` is that of a single product of square matrices."""
    return row["batch"] == 1 and row["m"] == row["k"] == row["n"]


def square_speeds(rows: Iterable[Row], variant: str, baseline: str) -> dict[str, float]:
    """Return how many times as fast as the baseline a variant is on square products, by size."""
    own = (r for r in rows if r["variant"] == variant and baseline in r["speed"] and is_square(r))
    return {str(r["n"]): r["speed"][baseline]["median"] for r in own}


# -- printing -------------------------------------------------------------------------------------


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    show(f"\n**{title}**\n\n{table(header, rows, words=1)}")


def show(markdown: str) -> None:
    """Print a page, on a terminal by rich if that is installed."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(markdown))
    else:
        print(markdown)
