"""Tables, as plain text and as HTML for notebooks."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import compress, zip_longest

_GAP = "  "


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings; if all headings are empty, they are not shown."""

    title: str
    columns: Sequence[str]  # headings; one that starts with ">" is aligned to the right
    rows: Sequence[Sequence[str]] = ()
    # headings of the columns that are dropped, in this order, from too wide a table
    optional: Sequence[str] = ()

    @property
    def headings(self) -> list[str]:
        return [c.removeprefix(">") for c in self.columns]

    def without(self, dropped: str) -> Table:
        """Return the table without the column of this heading."""
        kept = [heading != dropped for heading in self.headings]
        columns = list(compress(self.columns, kept))
        rows = [list(compress(row, kept)) for row in self.rows]
        optional = [heading for heading in self.optional if heading != dropped]
        return replace(self, columns=columns, rows=rows, optional=optional)


def fill(text: str, width: int, hang: int = 0) -> str:
    """Break a text into lines between words; lines after the first are indented by ``hang``."""
    return textwrap.fill(
        text, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False
    )


def plain_text(table: Table, width: int = sys.maxsize) -> str:
    """Return the table as text; if it exceeds the width, without optional columns, or else as one table per row."""
    lines = list(table.rows)
    if lines and any(table.headings):
        lines = [table.headings, *lines]
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column), default=0) for column in columns]
    least = list(map(_least_width, table.columns, columns))
    available = width - len(_GAP) * len(columns)
    is_narrow = sum(least) > available
    if is_narrow and table.optional:
        return plain_text(table.without(table.optional[0]), width)
    text = [fill(table.title, width)]
    if is_narrow and len(columns) > 1:
        text += [plain_text(_of_row(table, row), width) for row in table.rows]
        return "\n".join(text)
    while sum(widths) > available and widths != least:
        shrinking = [i for i, w in enumerate(widths) if w > least[i]]
        widths[max(shrinking, key=widths.__getitem__)] -= 1
    for line in lines:
        broken = []
        for cell, w in zip(line, widths, strict=True):
            broken.append(fill(cell, max(w, 1)).splitlines())
        for parts in zip_longest(*broken, fillvalue=""):
            aligned = map(_aligned, table.columns, parts, widths)
            text.append(_GAP.join(["", *aligned]).rstrip())
    return "\n".join(text)


def _least_width(heading: str, cells: Sequence[str]) -> int:
    """Return the width below which a column cannot be broken: numbers stay whole."""
    parts = list(cells)
    if not heading.startswith(">"):
        parts = " ".join(cells).split()
    return max(map(len, parts), default=0)


def _aligned(heading: str, cell: str, width: int) -> str:
    if heading.startswith(">"):
        return cell.rjust(width)
    return cell.ljust(width)


def _of_row(table: Table, row: Sequence[str]) -> Table:
    """Return one row as a table of headings and cells under its first cell."""
    name, *cells = row
    _, *headings = table.headings
    pairs = [[x, cell] if x else [cell] for x, cell in zip(headings, cells, strict=True)]
    return Table(name, [""] * len(pairs[0]), pairs)


def html(table: Table) -> str:
    """Return the table as HTML; it sets no colours, to suit every theme of a notebook."""
    sides = ["right" if column.startswith(">") else "left" for column in table.columns]

    def row(cells: Sequence[str], tag: str) -> str:
        pairs = zip(cells, sides, strict=True)
        parts = [
            f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>' for cell, side in pairs
        ]
        return "".join(parts)

    head = ""
    if any(table.headings):
        head = f"<thead><tr>{row(table.headings, 'th')}</tr></thead>"
    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    caption = f'<caption style="text-align: left">{escape(table.title)}</caption>'
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>"
