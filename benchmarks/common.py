"""What every benchmark shares: the environment before NumPy, the command line, tables and result files.

Import this module before NumPy: it sets `OPENBLAS_THREAD_TIMEOUT`, which NumPy's OpenBLAS reads once, when it loads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import machine

#: Before this process adds to it.
LOAD_BEFORE = machine.load_average()
#: A machine that is busier than this is measured together with its other work.
QUIET_LOAD = 0.5

#: Whether the variable below still reaches OpenBLAS.
CAME_BEFORE_NUMPY = "numpy" not in sys.modules

# The workers of OpenBLAS otherwise spin for tens of milliseconds after a product, and make whatever runs next two to
# three times slower. 2^4 cycles is the shortest time that OpenBLAS accepts.
os.environ["OPENBLAS_THREAD_TIMEOUT"] = "4"

RESULTS = Path(__file__).resolve().parent / "results"

#: Keys that every result file has; `README.md` says what is behind each.
DOCUMENT_KEYS = ("benchmark", "claims", "machine", "results", "settings")


def parser(doc: str) -> argparse.ArgumentParser:
    """Return the command line that every benchmark has.

    Parameters
    ----------
    doc : str
        The script's docstring; its first line becomes the description.
    """
    made = argparse.ArgumentParser(description=doc.strip().splitlines()[0])
    made.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes: does it run? No figure of it means anything",
    )
    made.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="folder of the result file"
    )
    made.add_argument(
        "--seed", type=int, default=0, help="of the operands and of the order of the variants"
    )
    return made


def result_path(folder: Path, benchmark: str) -> Path:
    """Return where the result of a benchmark on this machine belongs."""
    return folder / f"{benchmark}-{machine.slug()}.json"


def document(
    benchmark: str,
    settings: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    claims: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return a result as it is written: what was measured, how, and on which machine."""
    described = machine.describe()
    described["load_before"] = LOAD_BEFORE
    described["openblas_thread_timeout"] = 4 if CAME_BEFORE_NUMPY else None
    return {
        "benchmark": benchmark,
        "machine": described,
        "settings": dict(settings),
        "claims": [dict(c) for c in claims],
        "results": [dict(r) for r in results],
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result file, which appears under its name only once it is complete."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file by way of a temporary name in the same folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        # mkstemp makes the file private; a result is as readable as any other file.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def claim(
    what: str, value: float | None, limit: float, *, at_most: bool = False, **details: Any
) -> dict[str, Any]:
    """Return a measured value beside what it should reach.

    Parameters
    ----------
    what : str
        The statement, for people.
    value : float or None
        None where it could not be measured here.
    limit : float
    at_most : bool
        The limit is an upper one.
    """
    met = None if value is None else (value <= limit if at_most else value >= limit)
    return {
        "what": what,
        "value": value,
        "relation": "<=" if at_most else ">=",
        "limit": limit,
        "met": met,
        **details,
    }


VERDICTS = {True: "met", False: "MISSED", None: "not measured"}


CLAIM_HEADER = ("claim", "by size", "measured", "limit", "")


def claim_rows(claims: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the claims as rows of a table under `CLAIM_HEADER`."""
    return [
        [
            c["what"],
            ", ".join(f"{size}: {value:.2f}" for size, value in c.get("by_size", {}).items())
            or "-",
            "-" if c["value"] is None else f"{c['value']:.3g}",
            f"{c['relation']} {c['limit']:g}",
            VERDICTS[c["met"]],
        ]
        for c in claims
    ]


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: by rich where it is installed, else in plain columns."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain(title, header, rows)
        return
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    # A pipe has no width, and rich would fold the table to 80 columns.
    Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)


def _print_plain(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}")
    for line in (header, ["-" * w for w in widths], *rows):
        first, *rest = (
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())


def finish(path: Path, content: Mapping[str, Any]) -> None:
    """Print the claims, write the result file and say where it is."""
    if content["claims"]:
        print_table("claims", CLAIM_HEADER, claim_rows(content["claims"]))
    write_json(path, content)
    print(f"wrote {path.name} to {path.parent}")
    if LOAD_BEFORE is not None and LOAD_BEFORE > QUIET_LOAD:
        print(
            f"The machine was not quiet: load {LOAD_BEFORE} before the start. Timings are those of a busy machine."
        )
