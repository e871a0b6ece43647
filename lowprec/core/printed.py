"""The numbers that two runs of a program print, line by line."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

#: A number that is no part of a name.
_TEXT = r"(?<![\w.])[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf)"
_NUMBER = re.compile(_TEXT + r"(?![\w.])", re.IGNORECASE)
#: Times and rates, which differ between any two runs.
_TIME = re.compile(_TEXT + r"\s?(?:[mun]?s|sec\w*|min\w*|h|it/s)\b", re.IGNORECASE)


class PrintedLine(NamedTuple):
    """A line with numbers of which some differ between the runs."""

    number: int  #: Of the line, from 1.
    #: Of the numbers that differ, relative to those of the reference, by Euclidean norms.
    change: float
    found: str
    expected: str


def compare_lines(
    found: Sequence[str], expected: Sequence[str]
) -> tuple[tuple[PrintedLine, ...], float | None, str]:
    """Return the lines with numbers that differ, up to the first line with other words, and the description of that.

    The largest change is first, and is also returned alone; None if no numbers were printed.
    """
    lines = []
    has_numbers = False
    parting = ""
    for number, texts in enumerate(zip(found, expected, strict=False), 1):
        x, y = (_TIME.sub("", text.strip()) for text in texts)
        if _NUMBER.sub("", x).split() != _NUMBER.sub("", y).split():
            parting = f"The printed lines part at line {number}: {x!r}, in the reference {y!r}."
            break
        pairs = list(zip(_NUMBER.findall(x), _NUMBER.findall(y), strict=False))
        has_numbers |= bool(pairs)
        changed = [(float(a), float(b)) for a, b in pairs if a != b]
        if changed:
            lines.append(PrintedLine(number, _change(changed), *(text.strip() for text in texts)))
    if not parting and len(found) != len(expected):
        parting = f"The runs printed {len(found)} and {len(expected)} lines."
    lines.sort(key=lambda line: -line.change)
    change = max((line.change for line in lines), default=0.0) if has_numbers else None
    return tuple(lines), change, parting


def _change(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the relative change; infinite if a number is not finite, or if the reference's are zero."""
    difference = math.hypot(*(x - y for x, y in pairs))
    size = math.hypot(*(y for _, y in pairs))
    if not math.isfinite(difference) or not size:
        return math.inf
    return difference / size
