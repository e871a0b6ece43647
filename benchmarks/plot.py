"""The plot of a result of `bench_accuracy.py`; drawn from the file alone, so it can be drawn again anywhere."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common

COLOURS = {"fp32": "#4c4c4c", "tf32": "#0072b2", "bf16": "#d55e00", "fp16": "#009e73"}
#: tf32 and fp16 often lie upon each other: one is hollow, the other inside it.
MARKERS = {"fp32": "o", "tf32": "s", "bf16": "^", "fp16": "x"}


def write(result: Mapping[str, Any], path: Path) -> bool:
    """Draw error and bound over size, one panel per distribution; return whether matplotlib is there to do it."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install -e '.[plot]')")
        return False
    # Text as text and fixed identifiers: the same figures give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lowprec", "font.size": 9}):
        figure = _figure(result["results"])
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None}, bbox_inches="tight")
    common.write_text(path, drawn.getvalue())
    print(f"wrote {path.name} to {path.parent}")
    return True


def _figure(rows: list[Mapping[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    distributions = list(dict.fromkeys(r["distribution"] for r in rows))
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    figure = Figure(figsize=(3.2 * len(distributions), 3.6), facecolor="white")
    panels = figure.subplots(1, len(distributions), sharex=True, sharey=True, squeeze=False)[0]
    for panel, distribution in zip(panels, distributions, strict=True):
        for mode in modes:
            own = [r for r in rows if r["mode"] == mode and r["distribution"] == distribution]
            sizes, style = [r["n"] for r in own], {"color": COLOURS.get(mode), "linewidth": 1}
            marker = {"marker": MARKERS.get(mode, "."), "markersize": 6 if mode == "tf32" else 4}
            errors = [r["normalised"] for r in own]
            panel.plot(sizes, errors, fillstyle="none", label=mode, **marker, **style)
            panel.plot(sizes, [r["bound"] for r in own], linestyle="--", **style)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(distribution)
        panel.set_xlabel("n")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("error / (|A| |B|), Frobenius norms")
    panels[0].plot([], [], color="grey", linestyle="--", linewidth=1, label="bound")
    panels[-1].legend(
        *panels[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.02, 1)
    )
    return figure
