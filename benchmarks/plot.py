"""Charts of the result files, drawn from a file alone, so that they can be drawn again anywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import claims
import digits
import generated

from lowprec import plotting

#: From the smallest product to the largest, and the marker that goes with it.
BY_SIZE = (("#6ca6d9", "o"), ("#2f78b7", "s"), ("#0b3c6f", "D"))
#: tf32 and fp16 have the same errors on most data: one is a wide band with hollow markers, the other a thin line on it.
MODES: dict[str, dict[str, Any]] = {
    "fp32": {"color": "#4c4c4d", "marker": "o"},
    "tf32": {"color": "#0072b2", "marker": "s", "linewidth": 4, "alpha": 0.45, "markersize": 8},
    "bf16": {"color": "#d55e00", "marker": "^"},
    "fp16": {"color": "#009e73", "marker": "x"},
}

Rows = Sequence[Mapping[str, Any]]


def _figure(height: float, panels: int = 1) -> tuple[Any, Sequence[Any]]:
    """Return an empty figure as wide as the page, and its panels, side by side."""
    figure, (row,) = plotting.figure(height, 1, panels)
    return figure, row


def _errors_and_bounds(panel: Any, rows: Rows) -> None:
    for mode in dict.fromkeys(r["mode"] for r in rows):
        own = [r for r in rows if r["mode"] == mode]
        sizes = [r["n"] for r in own]
        style = {"fillstyle": "none", **MODES.get(mode, {})}
        panel.plot(sizes, [r["normalised"] for r in own], label=f"{mode}, error", **style)
        dashes = (2, 1) if mode == "tf32" else (5, 2)
        style |= {"marker": "", "linestyle": (0, dashes)}
        panel.plot(sizes, [r["bound"] for r in own], label=f"{mode}, bound", **style)


def accuracy(rows: Rows) -> Any:
    """Draw error and guaranteed bound over size, one panel per distribution."""
    distributions = list(dict.fromkeys(r["distribution"] for r in rows))
    figure, panels = _figure(4.2, len(distributions))
    for panel, distribution in zip(panels, distributions, strict=True):
        _errors_and_bounds(panel, [r for r in rows if r["distribution"] == distribution])
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.minorticks_off()
        panel.set_title(distribution)
        panel.set_xlabel("n")
        panel.grid()
    panels[0].set_ylabel("|C - AB| / (|A| |B|), Frobenius norms")
    title = "full lines: the error that was measured; broken lines: the bound that it never exceeds"
    plotting.legend(figure, panels[0], title=title)
    return figure


def recovery(rows: Rows) -> Any:
    """Draw the largest error and the digit that it affects over size, by interval and arithmetic."""
    arithmetics = list(dict.fromkeys(r["arithmetic"] for r in rows))
    intervals = list(dict.fromkeys(r["interval"] for r in rows))
    measures = {"largest_error": "largest error", "affected_digit": "digits before it"}
    wanted = [(measure, arithmetic) for measure in measures for arithmetic in arithmetics]
    figure, grid = plotting.figure(1.2 + 1.9 * len(wanted), len(wanted), len(intervals))
    for (measure, arithmetic), panels in zip(wanted, grid, strict=True):
        for panel, interval in zip(panels, intervals, strict=True):
            own = [r for r in rows if r["arithmetic"] == arithmetic and r["interval"] == interval]
            for number, scheme in enumerate(dict.fromkeys(r["scheme"] for r in own)):
                points = [(r["n"], r[measure]) for r in own if r["scheme"] == scheme and r[measure]]
                # Hollow, since some points coincide.
                panel.plot(
                    *zip(*points, strict=True),
                    label=scheme,
                    fillstyle="none",
                    **plotting.marked(number),
                )
            panel.set_xscale("log", base=2)
            if measure == "largest_error":
                panel.set_yscale("log")
            panel.minorticks_off()
            panel.grid()
        panels[0].set_ylabel(f"{arithmetic}:\n{measures[measure]}")
    for panel, interval in zip(grid[0], intervals, strict=True):
        panel.set_title(interval)
    for panel in grid[-1]:
        panel.set_xlabel("n")
    plotting.legend(figure, grid[0][0], loc="outside upper center")
    return figure


def tradeoff(rows: Rows) -> Any:
    """Draw error against speed of the largest matrices, and a line through the modes that no other one beats."""
    n = max(r["n"] for r in rows)
    own = [r for r in rows if r["n"] == n]
    figure, (panel,) = _figure(4.6)
    best = sorted((r["speed"]["median"], r["normalised"]) for r in own if r["on_front"])
    panel.plot(*zip(*best, strict=True), color=plotting.INK, alpha=0.5, zorder=1)
    plotting.points(
        panel, {r["mode"]: (r["speed"]["median"], r["normalised"]) for r in own}, markersize=7
    )
    panel.set_xlabel(f"speed over fp32, n = {n} (faster to the right)")
    panel.set_ylabel("|C - AB| / (|A| |B|)")
    plotting.legend(figure, panel, ncols=5)
    return figure


def speed(rows: Rows) -> Any:
    """Draw how many times as fast as `numpy.matmul` each variant is, with quartiles, for the square products."""
    from matplotlib.ticker import FixedLocator

    square = [r for r in rows if claims.is_square(r)]
    variants = [v for v in dict.fromkeys(r["variant"] for r in square) if v != "numpy float32"]
    figure, (panel,) = _figure(1.3 + 0.27 * len(variants))
    panel.axvline(1, color=plotting.INK)
    for n, (colour, marker) in zip(sorted({r["n"] for r in square}), BY_SIZE, strict=False):
        own = {r["variant"]: r["speed"]["numpy float32"] for r in square if r["n"] == n}
        at = [y for y, variant in enumerate(variants) if variant in own]
        found = [own[variants[y]] for y in at]
        middle = [f["median"] for f in found]
        spread = [[f["median"] - f["q1"] for f in found], [f["q3"] - f["median"] for f in found]]
        style = {"color": colour, "marker": marker, "linestyle": "", "markersize": 6}
        panel.errorbar(middle, at, xerr=spread, label=f"n = {n}", elinewidth=1.5, **style)
    panel.set_xscale("log", base=2)
    ticks = [x * 2.0**e for e in range(-6, 7) for x in (1, 1.5)]
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:.3g}")
    panel.set_yticks(range(len(variants)), variants)
    panel.invert_yaxis()
    panel.grid()
    panel.set_xlabel("times as fast as numpy.matmul on float32: median and quartiles")
    plotting.legend(figure, panel, loc="outside upper center")
    return figure


def solve(rows: Rows) -> Any:
    """Draw speed over the best library and steps of refinement against the condition number, by mode of the factor."""
    own = [r for r in rows if r["kind"] == "condition"]
    figure, grid = plotting.figure(4.6, 2, 1)
    panels = [row[0] for row in grid]
    for mode in dict.fromkeys(r["mode"] for r in own):
        points = [r for r in own if r["mode"] == mode]
        style = MODES[mode]
        at = [r["condition"] for r in points]
        panels[0].plot(
            at, [r["speed"]["median"] for r in points], label=f"factor in {mode}", **style
        )
        panels[1].plot(at, [r["steps"] for r in points], **style)
    for panel, title in zip(
        panels, ("speed over the best library", "steps of refinement"), strict=True
    ):
        panel.set_xscale("log")
        panel.set_ylim(bottom=0)
        panel.set_title(title)
        panel.grid()
    panels[1].set_xlabel("condition number")
    panels[0].axhline(1, color=plotting.INK)
    plotting.legend(figure, panels[0])
    return figure


#: By the name of the benchmark: how its result is drawn, and what the drawing shows.
CHARTS: dict[str, tuple[Callable[[Rows], Any], str]] = {
    "accuracy": (accuracy, "Error and bound by size, mode and distribution"),
    "recovery": (
        recovery,
        "Largest error and affected digit by size, scheme, interval and arithmetic",
    ),
    "tradeoff": (tradeoff, "Error against speed of each mode, and those that no other one beats"),
    "gemm": (speed, "Speed of each variant over numpy.matmul on float32, by size"),
    "solve": (
        solve,
        "Speed and steps of refinement against the condition number, by mode of the factor",
    ),
    "digits": (
        digits.draw,
        "Share of test digits that each training does not recognise, by library and precision",
    ),
}


def chart_path(result: Path) -> Path:
    return result.with_suffix(".svg")


def _digest(result: Path) -> str:
    # matplotlib of another version draws another file; what must agree is what it was drawn from, and how.
    sources = (result, Path(__file__), Path(plotting.__file__))
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    return f"<!-- drawn from {hashlib.sha256(text.encode()).hexdigest()} -->"


def is_current(result: Path) -> bool:
    """Whether the chart of this result file was drawn from its figures by this script."""
    path = chart_path(result)
    return path.exists() and _digest(result) in path.read_text(encoding="utf-8")


def write(result: Path) -> None:
    content = json.loads(result.read_text(encoding="utf-8"))
    draw, _ = CHARTS[content["benchmark"]]
    svg = plotting.image(lambda: draw(content["results"]), "svg").decode()
    generated.write_text(chart_path(result), svg.replace("<defs>", f"{_digest(result)}\n<defs>", 1))
