"""``Report``: text, HTML, plain values, JSON and a figure of every result."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from lowprec import plotting
from lowprec.errors import UnsupportedError
from lowprec.util.atomic import write_json
from lowprec.util.plain import plain
from lowprec.util.tables import Table, fill, html, plain_text


class Report:
    """Base class of results; ``print`` and notebooks show the tables, and the remarks below them."""

    __slots__ = ()

    #: Characters of a line of ``print``, and the text between tables.
    _width = sys.maxsize
    _gap = "\n"

    @property
    def remarks(self) -> Sequence[str]:
        """Sentences below the tables."""
        return ()

    def tables(self) -> Iterable[Table]:
        """Return the tables; one without columns is a line of text."""
        raise NotImplementedError

    def figure(self) -> Any:
        """Return the figure of matplotlib that :meth:`plot` writes."""
        raise UnsupportedError(f"{type(self).__name__} has no figure; print it, or use to_dict()")

    def text(self, width: int | None = None) -> str:
        """Return tables and remarks as text, in lines of this many characters."""
        return document(self.tables(), self.remarks, width or self._width, self._gap)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which has no Inf and NaN: None instead."""
        return dict(plain(self))

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` to a file, atomically."""
        write_json(path, self.to_dict(), indent=1)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the figure and write it to a file, atomically; the path's suffix is the image format.

        Raises
        ------
        SettingError
            matplotlib does not support the format.
        UnsupportedError
            matplotlib is not installed, or the result has no figure.
        """
        plotting.write(path, self.figure)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return "".join(
            [
                *map(html, self.tables()),
                *(f"<div>{escape(remark)}</div>" for remark in self.remarks),
            ]
        )


def document(tables: Iterable[Table], remarks: Iterable[str], width: int, gap: str = "\n") -> str:
    """Return tables, with ``gap`` between them, and remarks as text."""
    text = gap.join(plain_text(table, width) for table in tables)
    return "\n".join([text, *(fill(remark, width, hang=4) for remark in remarks)])
