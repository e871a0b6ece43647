"""Figures by matplotlib in one look: those of ``lowprec check``, of plans, of reports and of the benchmarks."""

from __future__ import annotations

import importlib
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowprec.errors import SettingError, UnsupportedError, quoted
from lowprec.util.atomic import write_file

PAPER = "#ffffff"
INK = "#1f2328"
GRID = "#d7dbe0"

#: Distinct with every kind of colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#8a5a00", "#a0468a", "#6ca6d9", "#4c4c4d")
_MARKERS = "os^Dv"
_MOST_ROWS = 24

#: matplotlib's settings. Fixed identifiers, and text as text: equal figures give equal SVG files.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lowprec",
    "font.size": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "lines.linewidth": 1,
    "lines.markersize": 5,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def figure(
    height: float, rows: int = 1, columns: int = 1, width: float = 7.6, *, sharex: bool = True
) -> tuple[Any, Any]:
    """Return an empty figure of this size in inches, and its rows of panels; those of a row have one scale."""
    module: Any = importlib.import_module("matplotlib.figure")
    empty = module.Figure(figsize=(width, height), layout="constrained")
    return empty, empty.subplots(rows, columns, sharex=sharex, sharey="row", squeeze=False)


def marked(number: int) -> dict[str, Any]:
    """Return colour and marker of one of at most 35 series."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}


def points(panel: Any, places: Mapping[str, tuple[float, float]], **style: Any) -> None:
    """Draw named points, each with a colour and a marker for the legend, on logarithmic scales."""
    for number, (name, (x, y)) in enumerate(places.items()):
        panel.plot([x], [y], linestyle="", label=name, **marked(number), **style)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:.3g}")
    panel.minorticks_off()
    panel.grid()


def first(names: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return the names that a figure has space for, and a note for its title if there are more."""
    shown = names[:_MOST_ROWS]
    if len(shown) == len(names):
        return shown, ""
    return shown, f" (first {len(shown)} of {len(names)})"


def bars(panel: Any, names: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw a horizontal bar for each name, of one part for each series."""
    left = [0.0] * len(names)
    rows = range(len(names))
    for number, (label, widths) in enumerate(series.items()):
        panel.barh(rows, widths, left=left, height=0.7, color=COLOURS[number], label=label)
        left = [x + y for x, y in zip(left, widths, strict=True)]
    panel.set_xlim(0, 1.05 * max(left, default=1))
    _name_rows(panel, names)


def dots(panel: Any, names: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw a point for each name and series on a logarithmic scale, which omits zeros."""
    exponents = []
    for number, (label, values) in enumerate(series.items()):
        panel.plot(values, range(len(names)), linestyle="", label=label, **marked(number))
        exponents += [math.log10(x) for x in values if 0 < x < math.inf]
    lowest = min(exponents, default=0.0) - 0.05
    highest = max(exponents, default=0.0) + 0.05
    panel.set_xscale("log")
    panel.set_xlim(10 ** math.floor(lowest), 10 ** math.ceil(highest))
    panel.minorticks_off()
    _name_rows(panel, names)


def _name_rows(panel: Any, names: Sequence[str]) -> None:
    """Write names from the top to the bottom; long ones without their middle."""
    panel.set_yticks(range(len(names)), [_shortened(name) for name in names])
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.grid()


def _shortened(name: str) -> str:
    if len(name) <= 40:
        return name
    return f"{name[:18]}...{name[-19:]}"


def legend(of: Any, panel: Any, **how: Any) -> None:
    """Add the legend of one panel to a figure, outside of the panels."""
    how = {"loc": "outside lower center", "ncols": 4, **how}
    of.legend(*panel.get_legend_handles_labels(), **how)


def image_format(path: str | os.PathLike[str]) -> str:
    """Return the image format of a path, by its suffix; raise SettingError for an unknown one."""
    try:
        bases: Any = importlib.import_module("matplotlib.backend_bases")
    except ModuleNotFoundError:
        raise UnsupportedError(
            "plot needs matplotlib, which is not installed: pip install matplotlib, or lowprec with its extra plot"
        ) from None
    suffix = Path(path).suffix.lower().removeprefix(".")
    known = bases.FigureCanvasBase.get_supported_filetypes()
    if suffix not in known:
        names = ", ".join(known)
        raise SettingError(
            f"plot writes {names}, chosen by the suffix of the path, got {quoted(os.fspath(path))}"
        )
    return suffix


def image(draw: Callable[[], Any], kind: str) -> bytes:
    matplotlib: Any = importlib.import_module("matplotlib")
    file = io.BytesIO()
    dateless = {"metadata": {"Date": None}} if kind == "svg" else {}
    with matplotlib.rc_context(STYLE):
        draw().savefig(file, format=kind, dpi=150, **dateless)
    return file.getvalue()


def write(path: str | os.PathLike[str], draw: Callable[[], Any]) -> None:
    """Draw a figure and write it to a file, atomically; the suffix of the path is the image format."""
    write_file(path, image(draw, image_format(path)))


def bar_figure(
    title: str, names: Sequence[str], series: Mapping[str, Sequence[float]], label: str
) -> Any:
    """Return a figure of horizontal bars, one for each name."""
    shown, note = first(names)
    drawn, ((panel,),) = figure(1.6 + 0.22 * len(shown))
    bars(panel, shown, {name: values[: len(shown)] for name, values in series.items()})
    panel.set(xlabel=label, title=title + note)
    legend(drawn, panel)
    return drawn
