"""Tables, as plain text and as HTML for notebooks."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import zip_longest

_GAP = 2


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings; if all headings are empty, they are not shown."""

    title: str
    columns: Sequence[str]  # headings; one that starts with ">" is aligned to the right
    rows: Sequence[Sequence[str]] = ()
    optional: Sequence[str] = ()  # headings of the columns that are dropped, in this order, from too wide a table

    @property
    def headings(self) -> list[str]:
        return [c.removeprefix(">") for c in self.columns]

    def narrower(self) -> Table:
        """Return the table without the first of its optional columns."""
        first, *others = self.optional
        kept = [i for i, heading in enumerate(self.headings) if heading != first]
        columns, *rows = ([line[i] for i in kept] for line in (self.columns, *self.rows))
        return replace(self, columns=columns, rows=rows, optional=others)


def fill(text: str, width: int, hang: int = 0) -> str:
    """Break a text into lines between words; lines after the first are indented by ``hang``."""
    return textwrap.fill(text, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)


def plain_text(table: Table, width: int = sys.maxsize) -> str:
    """Return the table as text; if it exceeds the width, without optional columns, or else as one table per row."""
    lines = [*([table.headings] if table.rows and any(table.headings) else []), *table.rows]
    columns = list(zip(*lines, strict=True))
    right = [c.startswith(">") for c in table.columns]
    widths = [max(map(len, column), default=0) for column in columns]
    words = [max(map(len, " ".join(column).split()), default=0) for column in columns]
    least = [widths[i] if right[i] else words[i] for i in range(len(columns))]
    available = width - _GAP * len(columns)
    if sum(least) > available and table.optional:
        return plain_text(table.narrower(), width)
    text = [fill(table.title, width)]
    if sum(least) > available and len(columns) > 1:
        for name, *cells in table.rows:
            rows = [[x, cell] if x else [cell] for x, cell in zip(table.headings[1:], cells, strict=True)]
            text.append(plain_text(Table(name, [""] * len(rows[0]), rows), width))
        return "\n".join(text)
    while sum(widths) > available and widths != least:
        widest = max((i for i, w in enumerate(widths) if w > least[i]), key=widths.__getitem__)
        widths[widest] -= 1
    for line in lines:
        broken = [fill(cell, max(widths[i], 1)).splitlines() for i, cell in enumerate(line)]
        for parts in zip_longest(*broken, fillvalue=""):
            aligned = [x.rjust(widths[i]) if right[i] else x.ljust(widths[i]) for i, x in enumerate(parts)]
            text.append((" " * _GAP).join(["", *aligned]).rstrip())
    return "\n".join(text)


def html(table: Table, remarks: Sequence[str] = ()) -> str:
    """Return the table as HTML with remarks below it; it sets no colours, to suit every theme of a notebook."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} style="text-align: {"right" if column.startswith(">") else "left"}">{escape(cell)}</{tag}>'
            for cell, column in zip(cells, table.columns, strict=True)
        )

    head = f"<thead><tr>{row(table.headings, 'th')}</tr></thead>" if any(table.headings) else ""
    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    caption = f'<caption style="text-align: left">{escape(table.title)}</caption>'
    below = "".join(f"<div>{escape(remark)}</div>" for remark in remarks)
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>{below}"
