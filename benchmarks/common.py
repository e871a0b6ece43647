"""What every benchmark shares: the environment before NumPy, the command line, tables and result files.

Import this module before NumPy: it sets `OPENBLAS_THREAD_TIMEOUT`, which NumPy's OpenBLAS reads once, when it loads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
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


def parser(doc: str) -> argparse.ArgumentParser:
    """Return the command line that every benchmark has, described by the first line of the script's docstring."""
    made = argparse.ArgumentParser(description=doc.strip().splitlines()[0])
    made.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes: does it run? No figure of it means anything",
    )
    made.add_argument(
        "--output",
        "--out",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="folder of the result file",
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
    """Return a measured value (None where it could not be measured) beside its limit, a lower one unless `at_most`."""
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


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    from generated import table

    show(f"\n**{title}**\n\n{table(header, rows, words=1)}")


def show(markdown: str) -> None:
    """Print a page: by rich on a terminal, where that is installed, else as it is."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(markdown))
    else:
        print(markdown)


def finish(path: Path, content: Mapping[str, Any]) -> None:
    """Print what the documentation would show of a result, write its file and say where it is."""
    import render

    write_json(path, content)
    show(f"\n{render.PAGES[content['benchmark']](content)}")
    print(f"wrote {path.name} to {path.parent}")
    if LOAD_BEFORE is not None and LOAD_BEFORE > QUIET_LOAD:
        print(
            f"The machine was not quiet: load {LOAD_BEFORE} before the start. Timings are those of a busy machine."
        )
