"""Cells under headings, and how they look as plain text and in a notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

_GAP = 2


@dataclass(frozen=True)
class Table:
    """Cells under headings, or without any where all headings are empty."""

    title: str
    columns: Sequence[str]  # headings; one that starts with ">" is aligned to the right
    rows: Sequence[Sequence[str]] = ()
    optional: Sequence[str] = ()  # headings that go, the first one first, from too wide a table

    @property
    def headings(self) -> list[str]:
        """The headings without their alignment."""
        return [c.removeprefix(">") for c in self.columns]

    @property
    def lines(self) -> list[list[str]]:
        """The rows, below the headings if there are any."""
        return [*([self.headings] if any(self.headings) else []), *map(list, self.rows)]

    @property
    def widths(self) -> list[int]:
        """Of the columns, in characters."""
        return [max(map(len, column)) for column in zip(*self.lines, strict=True)]

    def fitted(self, width: int) -> Table:
        """Return the table without as many of its optional columns as it takes to fit."""
        if not self.optional or sum(self.widths) + _GAP * len(self.columns) <= width:
            return self
        first, *others = self.optional
        gone = self.headings.index(first)
        columns, *rows = ([*x[:gone], *x[gone + 1 :]] for x in (self.columns, *self.rows))
        return replace(self, columns=columns, rows=rows, optional=others).fitted(width)


def plain_text(table: Table, wrap: int | None = None) -> str:
    """Return the table as aligned text; its last column is broken into lines to fit the width ``wrap``.

    Examples
    --------
    >>> print(plain_text(Table("Sizes", ["name", ">n"], [["a", "8"], ["bc", "1024"]])))
    Sizes
      name     n
      a        8
      bc    1024
    """
    widths = table.widths
    right = [c.startswith(">") for c in table.columns]
    margin = sum(w + _GAP for w in widths[:-1]) + _GAP
    text = [table.title]
    for line in table.lines:
        *first, last = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        broken = [last]
        if wrap is not None:
            broken = textwrap.wrap(last, wrap - margin, break_long_words=False)
        text.append((" " * _GAP).join(["", *first, *broken[:1]]).rstrip())
        text += [" " * margin + rest for rest in broken[1:]]
    return "\n".join(text)


def html(table: Table, remarks: Sequence[str] = ()) -> str:
    """Return the table for a notebook, remarks below it; its colours are the notebook's, readable on any ground."""

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
