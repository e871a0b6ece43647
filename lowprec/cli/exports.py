"""Results of ``check`` as files: a table of comma-separated values, a plot."""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowprec import plotting
from lowprec.checking import Comparison
from lowprec.checking.comparison import Row
from lowprec.cli.output import CommandError, flush
from lowprec.util.atomic import write_file

_ERROR = "error / (|A| |B|), Frobenius norms"


def check_exports(options: argparse.Namespace) -> None:
    """Raise for files that cannot be written, before measuring."""
    for path in (options.csv, options.plot):
        if path is not None:
            check_output(path)
    if options.plot is not None:
        plotting.image_format(options.plot)


def export(options: argparse.Namespace, comparisons: Sequence[Comparison]) -> None:
    if options.csv is not None:
        rows = []
        for case in comparisons:
            a, b = (f"{x.dtype} {'x'.join(map(str, x.shape))}" for x in (case.a, case.b))
            rows += [{"case": case.name, "a": a, "b": b, **row.to_dict()} for row in case.rows]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_output(options.csv, text.getvalue().encode())
    if options.plot is not None:
        draw = speeds_and_errors if len(options.sizes or ()) > 1 else errors_by_speed
        write_output(options.plot, plotting.image(lambda: draw(comparisons), plotting.image_format(options.plot)))


def check_output(path: str) -> None:
    """Raise if a file cannot be written; called before the computation."""
    target, reason = Path(path), ""
    try:
        if not path:
            reason = "the name is empty"
        elif target.is_dir():
            reason = "it is a folder"
        elif target.exists() and not target.is_file():
            reason = "" if os.access(path, os.W_OK) else "it is not writable"
        elif not (folder := target.resolve().parent).is_dir():
            reason = f"the folder {folder} does not exist"
        elif not os.access(folder, os.W_OK | os.X_OK):
            reason = f"the folder {folder} is not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise CommandError(f"cannot write {path or repr(path)}: {reason}")


def write_output(path: str, content: bytes) -> None:
    """Write a file of exactly this name, completely or not at all, or append to a pipe, a device or an open file."""
    is_open = path.startswith(("/dev/fd/", "/dev/std"))
    try:
        if is_open or (Path(path).exists() and not Path(path).is_file()):
            flush()  # keeps the order of the output
            with open(path, "ab") as file:
                file.write(content)
        else:
            write_file(path, content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from None


def _drawn(row: Row) -> float:
    """Return the error to draw; an exact or an overflowed product has no point on a logarithmic scale."""
    return row.errors.normalised if 0 < row.errors.normalised < math.inf else math.nan


def errors_by_speed(comparisons: Sequence[Comparison]) -> Any:
    """Return a figure of the error of each mode, and its bound above it, over the mode's speed; one panel per case."""
    figure, (panels,) = plotting.figure(5.0, 1, len(comparisons), width=0.6 + 4.2 * len(comparisons))
    for panel, comparison in zip(panels, comparisons, strict=True):
        rows = comparison.rows
        speeds, bounds = [row.speedup for row in rows], [row.errors.bound for row in rows]
        panel.vlines(speeds, list(map(_drawn, rows)), bounds, colors=plotting.GRID)
        panel.plot(speeds, bounds, "_", color=plotting.INK, markersize=9, label="guaranteed bound")
        plotting.points(panel, {row.name: (row.speedup, _drawn(row)) for row in rows})
        panel.set_title(comparison.name)
        panel.set_xlabel(f"speed-up over {comparison.rows[0].name}")
    panels[0].set_ylabel(_ERROR)
    plotting.legend(figure, panels[0], ncols=3 * len(comparisons))
    return figure


def speeds_and_errors(comparisons: Sequence[Comparison]) -> Any:
    """Return a figure of speed (above) and error (below) over the size, a column for each kind of data."""
    columns: dict[str, list[tuple[str, dict[str, Row]]]] = {}
    for comparison in comparisons:
        kind, _, size = comparison.name.partition(" ")
        columns.setdefault(kind, []).append((size, {row.name: row for row in comparison.rows}))
    names = [row.name for row in comparisons[0].rows]
    figure, panels = plotting.figure(6.0, 2, len(columns), width=1.8 + 2.8 * len(columns))
    for (kind, cases), (above, below) in zip(columns.items(), panels.T, strict=True):
        sizes = [size for size, _ in cases]
        for number, name in enumerate(names):
            style = plotting.marked(number)
            above.plot(sizes, [rows[name].speedup for _, rows in cases], label=name, **style)
            below.plot(sizes, [_drawn(rows[name]) for _, rows in cases], **style)
        above.set_title(kind)
        above.set_yscale("log", base=2)
        above.yaxis.set_major_formatter(lambda y, _: f"{y:.3g}")
        below.set_yscale("log" if any(_drawn(row) > 0 for _, rows in cases for row in rows.values()) else "linear")
        below.set_xlabel("size")
        below.tick_params(axis="x", rotation=30 * any("x" in size for size in sizes))
    panels[0, 0].set_ylabel(f"speed-up over {names[0]}")
    panels[1, 0].set_ylabel(_ERROR)
    plotting.legend(figure, panels[0, 0], loc="outside right upper", ncols=1)
    return figure
