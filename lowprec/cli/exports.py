"""Results as files: a table of comma-separated values, a plot."""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowprec.checking import Comparison
from lowprec.cli.files import check_output, write_output
from lowprec.cli.output import CommandError

_SUFFIXES = (".png", ".svg")

#: Markers of two sizes, since points often coincide.
_MARKERS = "osx^+vD*p"
_COLOURS = ("#4c4c4c", "#999999", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


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
        with matplotlib.rc_context({"svg.hashsalt": "lowprec", "font.size": 9}):
            drawn = io.BytesIO()  # a pipe cannot seek
            errors_by_speed(found).savefig(drawn, format=suffix, dpi=150, metadata=metadata, bbox_inches="tight")
        write_output(options.plot, lambda file: file.write(drawn.getvalue()))


def _style(number: int) -> dict[str, Any]:
    return {
        "marker": _MARKERS[number % len(_MARKERS)],
        "color": _COLOURS[number % len(_COLOURS)],
        "markerfacecolor": "none",
        "markersize": 5 if number % 2 else 7,
    }


def errors_by_speed(found: Sequence[Comparison]) -> Any:
    """Return a figure of the error of each mode, and its bound above it, over the mode's speed; one panel per case."""
    lines: Any = importlib.import_module("matplotlib.lines")
    module: Any = importlib.import_module("matplotlib.figure")
    figure = module.Figure(figsize=(3.4 * len(found), 3.6), facecolor="white")
    panels = figure.subplots(1, len(found), sharex=True, sharey=True, squeeze=False)[0]
    names = list(dict.fromkeys(row.name for c in found for row in c.rows))
    for panel, comparison in zip(panels, found, strict=True):
        for row in comparison.rows:
            style, errors = _style(names.index(row.name)), row.errors
            # An exact or an overflowed product has no point on a logarithmic scale.
            if not 0 < errors.normalised < math.inf:
                continue
            ends = [errors.normalised, errors.bound]
            limit = {**style, "marker": "_", "markersize": 14}
            panel.plot([row.speedup] * 2, ends, ":", color=style["color"], linewidth=0.8)
            panel.plot([row.speedup], ends[:1], linestyle="none", **style)
            panel.plot([row.speedup], ends[1:], linestyle="none", **limit)
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:.3g}")
        panel.margins(x=0.15)
        panel.set_title(comparison.name)
        panel.set_xlabel(f"speed-up over {comparison.rows[0].name}")
    panels[0].set_ylabel("error / (|A| |B|), Frobenius norms")
    handles = [lines.Line2D([], [], linestyle="none", label=name, **_style(i)) for i, name in enumerate(names)]
    bound = lines.Line2D([], [], color="grey", marker="_", markersize=14, linestyle=":")
    bound.set_label("guaranteed bound")
    panels[-1].legend(handles=[*handles, bound], loc="upper left", bbox_to_anchor=(1.02, 1))
    return figure
