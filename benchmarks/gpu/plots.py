"""Plots of a report, drawn from its content alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def write(content: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw what the report has figures of, beside it; nothing where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401 - its absence is all that is asked
    except ImportError:
        print("no plots: matplotlib is not installed")
        return []
    written = []
    for name, draw in DRAWN.items():
        rows = content["results"].get(name, {}).get("rows", [])
        figure = draw([r for r in rows if r["device"] == "gpu" or name == "accuracy"])
        if figure is None:
            continue
        target = path.with_name(f"{path.stem}-{name}.png")
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=120, bbox_inches="tight")
        target.write_bytes(drawn.getvalue())
        written.append(target)
    return written


def _panels(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * count, 3.4), facecolor="white")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def speed(rows: list[Mapping[str, Any]]) -> Any | None:
    """Draw the speed of each kind over torch.matmul, by size, without and with autotuning."""
    rows = [r for r in rows if r.get("speed", {}).get("torch")]
    if not rows:
        return None
    figure, panels = _panels(2)
    for panel, tuned in zip(panels, (False, True), strict=True):
        for kind in dict.fromkeys(r["kind"] for r in rows):
            own = [r for r in rows if r["kind"] == kind and r["tuned"] is tuned]
            ratios = [r["speed"]["torch"]["median"] for r in own]
            panel.plot([r["n"] for r in own], ratios, marker="o", markersize=3, label=kind)
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_title("autotuned" if tuned else "first choice")
        panel.set_xlabel("n")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("speed over torch.matmul")
    panels[0].legend(fontsize=7)
    return figure


def accuracy(rows: list[Mapping[str, Any]]) -> Any | None:
    """Draw error and bound of the float32 modes by inner dimension."""
    rows = [r for r in rows if r["dtypes"] == ["float32", "float32"] and r.get("error")]
    distributions = list(dict.fromkeys(r["distribution"] for r in rows))
    if not rows:
        return None
    figure, panels = _panels(len(distributions))
    for panel, distribution in zip(panels, distributions, strict=True):
        here = [r for r in rows if r["distribution"] == distribution]
        for number, mode in enumerate(dict.fromkeys(r["mode"] for r in here)):
            own = [r for r in here if r["mode"] == mode]
            k, colour = [r["k"] for r in own], f"C{number}"
            panel.plot(
                k, [r["error"] for r in own], color=colour, marker="o", markersize=3, label=mode
            )
            panel.plot(k, [r["bound"] for r in own], color=colour, linestyle="--", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(distribution)
        panel.set_xlabel("k")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("error / (|A| |B|); dashed: bound")
    panels[0].legend(fontsize=7)
    return figure


def heuristics(rows: list[Mapping[str, Any]]) -> Any | None:
    """Draw how far the first choice is from the best, by shape."""
    rows = [r for r in rows if r.get("first_over_best")]
    if not rows:
        return None
    figure, (panel,) = _panels(1)
    kinds = list(dict.fromkeys(r["kind"] for r in rows))
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    for kind in kinds:
        own = {r["shape"]: r["first_over_best"] for r in rows if r["kind"] == kind}
        at = [i for i, shape in enumerate(shapes) if shape in own]
        panel.plot(at, [own[shapes[i]] for i in at], marker="o", linestyle="", label=kind)
    panel.set_xticks(range(len(shapes)), shapes, rotation=60, ha="right", fontsize=7)
    panel.set_ylabel("time of the first choice / best")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
    return figure


DRAWN: dict[str, Callable[[list[Mapping[str, Any]]], Any | None]] = {
    "speed": speed,
    "accuracy": accuracy,
    "heuristics": heuristics,
}
