"""A report as one HTML file: tables that sort by a click, and bars. It loads nothing from a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from lowprec.util.tables import Table, html

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.25rem; font-weight: 600; }
h1, p { overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { font-weight: 600; padding: .5rem 0; }
th, td { border-bottom: 1px solid #8886; padding: .25rem .75rem .25rem 0; white-space: nowrap; }
th { cursor: pointer; }
th:hover, th:focus { text-decoration: underline; }
.bars { display: grid; gap: .2rem .75rem; grid-template-columns: fit-content(60%) 1fr; }
.bars span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.bars i { display: block; height: .45rem; margin: .1rem 0; min-width: 1px; }
.key i { display: inline-block; height: .6rem; margin: 0 .4rem 0 1rem; width: .6rem; }
"""

_SCRIPT = """
for (const head of document.querySelectorAll("th")) {
  head.tabIndex = 0;
  const sort = () => {
    const body = head.closest("table").tBodies[0];
    const value = row => row.cells[head.cellIndex].textContent;
    const falls = head.ariaSort !== "descending";
    for (const each of head.parentNode.cells) each.ariaSort = "none";
    head.ariaSort = falls ? "descending" : "ascending";
    const order = (x, y) => {
      const [a, b] = [x, y].map(parseFloat);
      if (isNaN(a) && isNaN(b)) return y.localeCompare(x);
      return (isNaN(b) ? -Infinity : b) - (isNaN(a) ? -Infinity : a);
    };
    const rows = [...body.rows].sort((x, y) => (falls ? 1 : -1) * order(value(x), value(y)));
    body.append(...rows);
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
}
"""

#: Distinct with every kind of colour vision, on light and dark grounds.
_COLOURS = ("#d55e00", "#0a84c6")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(
    title: str, heading: str, bars: Mapping[str, Sequence[float]], series: Sequence[str], tables: Iterable[Table],
    remarks: Iterable[str],
) -> str:  # fmt: skip
    """Return the file; ``bars`` has the lengths of each name's bars, one for each of at most two series."""
    body = [f"<h1>{escape(heading)}</h1>"]
    if bars:
        body.append(_bars(bars, series))
    body += [f'<div class="wide">{html(table)}</div>' for table in tables]
    body += [f"<p>{escape(remark)}</p>" for remark in remarks]
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
    ]
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        *head,
        *body,
        f"<script>{_SCRIPT}</script>",
        "</html>",
        "",
    ]
    return "\n".join(lines)


def _bars(bars: Mapping[str, Sequence[float]], series: Sequence[str]) -> str:
    longest = max(max(lengths) for lengths in bars.values()) or 1.0
    keys = "".join(
        f'<i style="background:{c}"></i>{escape(s)}' for c, s in zip(_COLOURS, series, strict=False)
    )
    rows = []
    for name, lengths in bars.items():
        each = "".join(
            f'<i style="background:{colour};width:{100 * x / longest:.2f}%" title="{x:.2e}"></i>'
            for colour, x in zip(_COLOURS, lengths, strict=False)
        )
        rows.append(f'<span title="{escape(name)}">{escape(name)}</span><div>{each}</div>')
    scale = f"the longest bar is {longest:.1e}"
    return f'<h2>Errors by layer ({scale})</h2><p class="key">{keys}</p><div class="bars">{"".join(rows)}</div>'
