"""The page of results: charts by Vega-Lite of the files in `benchmarks/results`, drawn in the browser without network.

The directive `results` puts one chart into a page. Its data are part of the page, and vl-convert-python carries the
JavaScript, so that a page opens from a folder too. Colours are variables of the style sheet, for both themes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import common
import render

Row = Mapping[str, Any]
INK, GRID, PAPER = "var(--color-foreground-primary)", "var(--color-background-border)", "none"
SCRIPT = "vega.js"


def _results(*benchmarks: str) -> Iterable[tuple[str, Row, Row]]:
    """Return the machine's name, the document and the row of each result."""
    for benchmark in benchmarks:
        for document in render.load(common.RESULTS, benchmark).values():
            name = render._machine_name(document)
            for row in document["results"]:
                yield name, document, row


def _measured(document: Row) -> str:
    machine = document["machine"]
    return f"{machine['date']}, lowprec {machine['versions']['lowprec']}, commit {(machine['commit'] or '-')[:10]}"


def speed() -> dict[str, Any]:
    """Return the chart of `bench_gemm.py`; every element type has NumPy's float32 product to compare with."""
    commands = {"gemm": "", "gemm-schemes": " --schemes"}
    rows = []
    for name, document, r in _results(*commands):
        ratio = r["speed"]["numpy float32"]
        suffix = {"gemm": "", "gemm-schemes": ", schemes"}[document["benchmark"]]
        row = {
            "machine": name + suffix,
            "type": r["operands"].split()[0],
            "shape": render._size(r),
            "product": r["variant"],
            "library": {"numpy": "NumPy", "torch": "PyTorch"}.get(r["library"], r["library"]),
            "GFLOP/s": round(r["gflops"], 1),
            "times numpy float32": round(ratio["median"], 2),
            "quartiles": f"{ratio['q1']:.2f} to {ratio['q3']:.2f}",
            "kernel": r["kernel"] or "-",
            "measured": _measured(document),
            "command": f"python benchmarks/bench_gemm.py{commands[document['benchmark']] or ' --shapes more'}",
        }
        rows.append(row)
    types = list(dict.fromkeys(r["type"] for r in rows))
    baseline = [r for r in rows if r["product"] == "numpy float32"]
    rows += [{**r, "type": t} for r in baseline for t in types if t != "float32"]
    return _bars(rows, ("machine", "type", "shape"), "product", "GFLOP/s", "library", is_ranking=True)


def errors() -> dict[str, Any]:
    """Return the chart of `bench_accuracy.py --parts sizes`: error and guaranteed bound by size."""
    rows = []
    for name, document, r in _results("accuracy"):
        shared = {
            "machine": name,
            "operands": r["distribution"],
            "mode": r["mode"],
            "n": r["n"],
            "measured": _measured(document),
            "command": "python benchmarks/bench_accuracy.py --parts sizes",
        }
        rows += [{**shared, "figure": figure, "value": r[key]} for figure, key in FIGURES.items()]
    chart = _chart(rows, ("machine", "operands"))
    x = {"field": "n", "type": "quantitative", "scale": {"type": "log", "base": 2}, "axis": {"grid": False}}
    y = {"field": "value", "type": "quantitative", "scale": {"type": "log"}, "title": "|C - AB| / (|A| |B|)"}
    y["axis"] = {"format": ".0e", "tickCount": 6}
    colours = {f"var(--chart-{i})": mode for i, mode in enumerate(dict.fromkeys(r["mode"] for r in rows))}
    colour = {"field": "mode", "scale": {"domain": list(colours.values()), "range": list(colours)}, "legend": None}
    dash = {"field": "figure", "scale": {"domain": list(FIGURES), "range": [[1, 0], [4, 3]]}}
    dash["legend"] = {"orient": "top", "title": None, "symbolStrokeColor": INK}
    line = {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"color": colour, "strokeDash": dash}}
    tooltip = _tooltip(rows, "mode", "figure", "n", "value")
    point = {"mark": {"type": "point", "filled": True, "size": 60}, "encoding": {"color": colour, "tooltip": tooltip}}
    # Where two modes end at one place, the labels are next to each other.
    last = {"filter": f"datum.n == {max(r['n'] for r in rows)} && datum.figure == 'error'"}
    label = {
        "transform": [last, {"calculate": "datum.mode == 'fp16' ? 40 : 8", "as": "offset"}],
        "mark": {"type": "text", "align": "left", "dx": {"expr": "datum.offset"}},
        "encoding": {"text": {"field": "mode"}},
    }
    return chart | {"encoding": {"x": x, "y": y}, "layer": [line, point, label], "height": 320}


FIGURES = {"error": "normalised", "guaranteed bound": "bound"}


def overhead() -> dict[str, Any]:
    """Return the chart of `bench_overhead.py`: a call on 8 x 8 float32."""
    rows = []
    for name, document, r in _results("overhead"):
        if r["measured"] in ("call", "variant"):
            what = r.get("variant", "plain call")
            for library, key in (("lowprec", "lowprec"), ("the library itself", "own")):
                rows.append(
                    {
                        "machine": name,
                        "arrays": r["library"],
                        "call": f"{what}, {library}",
                        "by": library,
                        "microseconds": round(1e6 * r[key]["median"], 2),
                        "quartiles": f"{1e6 * r[key]['q1']:.2f} to {1e6 * r[key]['q3']:.2f}",
                        "measured": _measured(document),
                        "command": "python benchmarks/bench_overhead.py",
                    }
                )
    return _bars(rows, ("machine", "arrays"), "call", "microseconds", "by")


def _chart(rows: Sequence[Row], choices: Sequence[str]) -> dict[str, Any]:
    """Return data, menus and looks of a chart."""
    params = []
    for name in choices:
        options = list(dict.fromkeys(r[name] for r in rows))
        # The machine that comes last has the newest results.
        value = next(o for o in reversed(options) if o.endswith("cores")) if name == "machine" else options[0]
        params.append({"name": name, "value": value, "bind": {"input": "select", "options": options, "name": name}})
    axis = {"labelColor": INK, "titleColor": INK, "domainColor": GRID, "tickColor": GRID, "gridColor": GRID}
    axis |= {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 220}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "data": {"values": list(rows)},
        "params": params,
        "transform": [{"filter": " && ".join(f"datum.{name} == {name}" for name in choices)}],
        "width": "container",
        "background": PAPER,
        "config": {
            "font": "sans-serif",
            "axis": axis,
            "view": {"stroke": None},
            "legend": {"labelColor": INK, "labelFontSize": 12},
            "text": {"fill": INK, "fontSize": 12},
        },
    }


def _tooltip(rows: Sequence[Row], *names: str) -> list[dict[str, Any]]:
    formats = {"value": ".2e"}
    return [
        {"field": name.replace(".", "\\."), "title": name} | ({"format": formats[name]} if name in formats else {})
        for name in (*names, "measured", "command")
    ]


def _bars(
    rows: Sequence[Row], choices: Sequence[str], name: str, value: str, group: str, *, is_ranking: bool = False
) -> dict[str, Any]:
    """Return a chart of bars with their figures at the ends; a colour for each group, which the names contain."""
    groups = list(dict.fromkeys(r[group] for r in rows))
    groups.sort(key=lambda g: g != "lowprec")
    sort = {"field": value, "op": "max", "order": "descending"} if is_ranking else "ascending"
    y = {"field": name, "type": "nominal", "sort": sort, "title": None, "axis": {"ticks": False, "domain": False}}
    x = {"field": value, "type": "quantitative", "axis": {"tickCount": 4}, "scale": {"nice": False, "padding": 30}}
    colour = {"field": group, "scale": {"domain": groups, "range": [f"var(--chart-{i})" for i in range(len(groups))]}}
    colour["legend"] = {"orient": "top", "title": None}
    others = [key for key in rows[0] if key not in (*choices, name, value, group, "measured", "command")]
    tooltip = _tooltip(rows, name, value, *others)
    bar = {"mark": {"type": "bar", "cornerRadiusEnd": 3}, "encoding": {"color": colour, "tooltip": tooltip}}
    text = {"mark": {"type": "text", "align": "left", "dx": 4}, "encoding": {"text": {"field": value}}}
    empty = {
        "transform": [{"aggregate": [{"op": "count", "as": "count"}]}, {"filter": "datum.count == 0"}],
        "mark": {"type": "text", "text": "not measured on this machine"},
        "encoding": {"x": {"value": 150}, "y": {"value": 10}},
    }
    layers = [part | {"encoding": {"x": x, "y": y, **part["encoding"]}} for part in (bar, text)]
    return _chart(rows, choices) | {"layer": [*layers, empty], "height": {"step": 24}}


CHARTS = {"speed": speed, "errors": errors, "overhead": overhead}


class Results(Directive):
    """The chart of this name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the chart with its data."""
        name = self.arguments[0]
        spec = json.dumps(CHARTS[name](), separators=(",", ":")).replace("</", "<\\/")
        html = (
            f'<div class="chart"><div id="chart-{name}"></div></div><script src="_static/{SCRIPT}"></script>'
            f'<script>vegaEmbed("#chart-{name}",{spec},{{renderer:"svg",actions:false}})</script>'
        )
        return [nodes.raw("", html, format="html")]


def _write_script(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        import vl_convert

        (Path(app.outdir) / "_static" / SCRIPT).write_text(vl_convert.javascript_bundle(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive, and write the script with the pages."""
    app.add_directive("results", Results)
    app.connect("build-finished", _write_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
