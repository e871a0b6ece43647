"""Figures of comparisons: error and bound over speed, speed and error over the size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowprec import plotting

if TYPE_CHECKING:
    from lowprec.checking.comparison import Comparison, Row

_ERROR = "error / (|A| |B|), Frobenius norms"


def _drawn(row: Row) -> float:
    """Return the error to draw; an exact or an overflowed product has no point on a logarithmic scale."""
    error = row.errors.normalised
    if 0 < error < math.inf:
        return error
    return math.nan


def errors_by_speed(comparisons: Sequence[Comparison]) -> Any:
    """Return a figure of the error of each mode, and its bound above it, over the mode's speed; one panel per case."""
    count = len(comparisons)
    figure, (panels,) = plotting.figure(5.0, 1, count, width=0.6 + 4.2 * count)
    for panel, comparison in zip(panels, comparisons, strict=True):
        rows = comparison.rows
        speeds = [row.speedup for row in rows]
        errors = list(map(_drawn, rows))
        bounds = [row.errors.bound for row in rows]
        panel.vlines(speeds, errors, bounds, colors=plotting.GRID)
        panel.plot(speeds, bounds, "_", color=plotting.INK, markersize=9, label="guaranteed bound")
        places = {row.name: (row.speedup, _drawn(row)) for row in rows}
        plotting.points(panel, places)
        panel.set_title(comparison.name)
        panel.set_xlabel(f"speed-up over {rows[0].name}")
    panels[0].set_ylabel(_ERROR)
    plotting.legend(figure, panels[0], ncols=3 * count)
    return figure


def speeds_and_errors(comparisons: Sequence[Comparison]) -> Any:
    """Return a figure of speed (above) and error (below) over the size, a column for each kind of data."""
    columns: dict[str, dict[str, tuple[Row, ...]]] = {}
    for comparison in comparisons:
        kind, _, size = comparison.name.partition(" ")
        columns.setdefault(kind, {})[size] = comparison.rows
    names = [row.name for row in comparisons[0].rows]
    count = len(columns)
    figure, panels = plotting.figure(6.0, 2, count, width=1.8 + 2.8 * count)
    for (kind, cases), (above, below) in zip(columns.items(), panels.T, strict=True):
        sizes = list(cases)
        has_error = False
        for number, name in enumerate(names):
            style = plotting.marked(number)
            rows = [cases[size][number] for size in sizes]
            errors = list(map(_drawn, rows))
            has_error |= any(error > 0 for error in errors)
            speeds = [row.speedup for row in rows]
            above.plot(sizes, speeds, label=name, **style)
            below.plot(sizes, errors, **style)
        above.set_title(kind)
        above.set_yscale("log", base=2)
        above.yaxis.set_major_formatter(lambda y, _: f"{y:.3g}")
        below.set_yscale("log" if has_error else "linear")
        below.set_xlabel("size")
        below.tick_params(axis="x", rotation=30 * any("x" in size for size in sizes))
    panels[0, 0].set_ylabel(f"speed-up over {names[0]}")
    panels[1, 0].set_ylabel(_ERROR)
    plotting.legend(figure, panels[0, 0], loc="outside right upper", ncols=1)
    return figure
