"""Results as files: a table of comma-separated values, a plot."""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lowprec.checking import Comparison
from lowprec.checking.comparison import Row
from lowprec.cli.files import check_output, write_output
from lowprec.cli.output import CommandError

_SUFFIXES = (".png", ".svg")


class _Theme(NamedTuple):
    paper: str
    ink: str
    muted: str
    grid: str
    hues: tuple[str, ...]


#: Any two of a theme's hues, ink and muted colour differ by at least 0.11 in OKLab, also under each kind of colour
#: blindness (G. M. Machado et al., 2009). Hues have a contrast of at least 3 to the paper.
_LIGHT = _Theme(
    "#ffffff", "#1f2328", "#b6bac0", "#eceef0",
    ("#0056cf", "#f55d1a", "#41a083", "#59187d", "#b376de", "#26541c", "#934f71"),
)  # fmt: skip
_DARK = _Theme(
    "#131416", "#e6e6e6", "#565b62", "#26292c",
    ("#5978fd", "#ecaa0b", "#3ad693", "#c77884", "#c4a4fe", "#718516", "#9f39b5"),
)  # fmt: skip
_MARKERS = "osD^vPX"

#: Positions of a label around its point: distances in points, and directions.
_DISTANCES = np.geomspace(4, 160, 12)
_DIRECTIONS = [np.array([np.cos(turn), np.sin(turn)]) for turn in np.radians(range(0, 360, 20))]


def check_exports(options: argparse.Namespace) -> None:
    """Raise for files that cannot be written, before measuring."""
    for path in filter(None, (options.csv, options.plot)):
        check_output(path)
    if options.plot is None:
        return
    if Path(options.plot).suffix.lower() not in _SUFFIXES:
        raise CommandError(f"--plot {options.plot}: its name must end in {' or '.join(_SUFFIXES)}")
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise CommandError('--plot needs matplotlib: pip install "lowprec[plot]"') from None


def export(options: argparse.Namespace, found: Sequence[Comparison]) -> None:
    """Write the files of the options."""
    if options.csv is not None:
        rows = []
        for case in found:
            a, b = (f"{x.dtype} {'x'.join(map(str, x.shape))}" for x in (case.a, case.b))
            rows += [{"case": case.name, "a": a, "b": b, **row.to_dict()} for row in case.rows]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_output(options.csv, lambda file: file.write(text.getvalue().encode()))
    if options.plot is not None:
        matplotlib: Any = importlib.import_module("matplotlib")
        suffix = Path(options.plot).suffix.lower().removeprefix(".")
        metadata = {"Date": None} if suffix == "svg" else None  # equal figures give equal files
        theme = _DARK if options.dark else _LIGHT
        draw = speeds_and_errors if len(options.sizes or ()) > 1 else errors_by_speed
        with matplotlib.rc_context(_settings(theme)):
            drawn = io.BytesIO()  # a pipe cannot seek
            draw(found, theme).savefig(drawn, format=suffix, dpi=150, metadata=metadata)
        write_output(options.plot, lambda file: file.write(drawn.getvalue()))


def _settings(theme: _Theme) -> dict[str, Any]:
    inked = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    muted = ("xtick.color", "ytick.color", "axes.edgecolor")
    return {
        **dict.fromkeys(inked, theme.ink), **dict.fromkeys(muted, theme.muted),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.paper),
        "axes.grid": True, "axes.axisbelow": True, "grid.color": theme.grid, "grid.linewidth": 0.6,
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "legend.frameon": False,
        "lines.linewidth": 1.2, "lines.markersize": 4.5, "font.size": 9, "axes.titlesize": 10,
        "svg.hashsalt": "lowprec",
    }  # fmt: skip


def _panels(width: float, height: float, rows: int, columns: int) -> tuple[Any, Any]:
    module: Any = importlib.import_module("matplotlib.figure")
    figure = module.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False)


def _drawn(row: Row) -> float:
    """Return the error to draw; an exact or an overflowed product has no point on a logarithmic scale."""
    return row.errors.normalised if 0 < row.errors.normalised < math.inf else math.nan


def errors_by_speed(found: Sequence[Comparison], theme: _Theme) -> Any:
    """Return a figure of the error of each mode, and its bound above it, over the mode's speed; one panel per case."""
    figure, (panels,) = _panels(0.6 + 4.2 * len(found), 4.6, 1, len(found))
    for panel, comparison in zip(panels, found, strict=True):
        rows = [row for row in comparison.rows if _drawn(row) > 0]
        x, errors, bounds = ([f(row) for row in rows] for f in (lambda r: r.speedup, _drawn, lambda r: r.errors.bound))
        panel.vlines(x, errors, bounds, colors=theme.grid, linewidths=0.8)
        panel.plot(x, bounds, "_", color=theme.muted, markersize=9, label="guaranteed bound")
        panel.plot(x, errors, "o", color=theme.hues[0], label="error")
        if noisy := [(row.speedup, _drawn(row)) for row in rows if row.is_noisy]:
            style = {"color": theme.hues[0], "markerfacecolor": theme.paper}
            panel.plot(*zip(*noisy, strict=True), "o", label="error, noisy speed-up", **style)
        panel.set_title(comparison.name)
        panel.set_xlabel(f"speed-up over {comparison.rows[0].name}")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:.3g}")
        panel.margins(0.15)
    panels[0].set_ylabel("error / (|A| |B|), Frobenius norms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    figure.draw_without_rendering()  # puts the panels into their places
    for panel, comparison in zip(panels, found, strict=True):
        _name_points(panel, [row for row in comparison.rows if _drawn(row) > 0], theme)
    return figure


def _name_points(panel: Any, rows: Sequence[Row], theme: _Theme) -> None:
    """Label each point where the label covers no mark and no other label; a line connects the two."""
    bbox: Any = importlib.import_module("matplotlib.transforms").Bbox
    path: Any = importlib.import_module("matplotlib.path").Path
    point_size = panel.figure.dpi / 72
    values = np.array([[(row.speedup, _drawn(row)), (row.speedup, row.errors.bound)] for row in rows])
    marks = [bbox([x - 4 * point_size, x + 4 * point_size]) for x in panel.transData.transform(values.reshape(-1, 2))]
    names: list[Any] = []
    lines: list[Any] = []

    def defects(place: tuple[Any, Any]) -> tuple[int, int]:
        name, line = place
        outside = sum(not panel.bbox.fully_contains(*corner) for corner in (name.min, name.max))
        under = [x for x in (*names, *marks) if not x.contains(*line.vertices[0])]
        crossings = sum(line.intersects_bbox(x, filled=False) for x in under)
        crossings += sum(x.intersects_bbox(name, filled=False) for x in lines)
        return outside + name.count_overlaps([*marks, *names]), crossings

    arrow = {"arrowstyle": "-", "color": theme.muted, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
    how = {"textcoords": "offset points", "ha": "center", "va": "center", "size": 8, "arrowprops": arrow}
    for row, (value, _) in zip(rows, values, strict=True):
        text = panel.text(0, 0, row.name, size=8)
        half, point = text.get_window_extent().size / 2 + point_size, panel.transData.transform(value)
        text.remove()
        middles = [point + (half + away * point_size) * turn for away, turn in product(_DISTANCES, _DIRECTIONS)]
        # Of the positions with the fewest defects, the nearest.
        name, line = min(((bbox([x - half, x + half]), path([point, x])) for x in middles), key=defects)
        names.append(name)
        lines.append(line)
        panel.annotate(row.name, value, (line.vertices[1] - point) / point_size, **how).set_in_layout(False)


def speeds_and_errors(found: Sequence[Comparison], theme: _Theme) -> Any:
    """Return a figure of speed (above) and error (below) over the size, a column for each kind of data."""
    columns: dict[str, list[tuple[str, dict[str, Row]]]] = {}
    for comparison in found:
        kind, _, size = comparison.name.partition(" ")
        columns.setdefault(kind, []).append((size, {row.name: row for row in comparison.rows}))
    baseline, *others = (row.name for row in found[0].rows)
    every = [row for comparison in found for row in comparison.rows]
    fastest = sorted(others, key=lambda name: -max(row.speedup for row in every if row.name == name))
    shown, rest = fastest[: len(theme.hues)], fastest[len(theme.hues) :]
    styles = {name: {"color": theme.muted, "linewidth": 0.8, "label": f"{len(rest)} slower modes"} for name in rest}
    styles |= {n: {"color": c, "marker": m, "label": n} for n, c, m in zip(shown, theme.hues, _MARKERS, strict=False)}
    styles[baseline] = {"color": theme.ink, "label": baseline}
    figure, panels = _panels(1.8 + 2.8 * len(columns), 5.4, 2, len(columns))
    for (kind, cases), (above, below) in zip(columns.items(), panels.T, strict=True):
        sizes = [size for size, _ in cases]
        for name, style in styles.items():
            above.plot(sizes, [rows[name].speedup for _, rows in cases], **style)
            below.plot(sizes, [_drawn(rows[name]) for _, rows in cases], **style)
        above.set_title(kind)
        above.set_yscale("log", base=2)
        above.yaxis.set_major_formatter(lambda y, _: f"{y:.3g}")
        below.set_yscale("log" if any(_drawn(row) > 0 for row in every) else "linear")
        below.set_xlabel("size")
        below.tick_params(axis="x", rotation=30 * any("x" in size for size in sizes))
    panels[0, 0].set_ylabel(f"speed-up over {baseline}")
    panels[1, 0].set_ylabel("error / (|A| |B|), Frobenius norms")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))
    order = [*shown, baseline, *(label for label in legend if label not in styles)]
    figure.legend([legend[name] for name in order], order, loc="outside right upper")
    return figure
