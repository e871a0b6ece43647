"""Texts with brackets: those of recipes and of rules."""

from __future__ import annotations

from typing import Any


def split_at_commas(text: str) -> list[str]:
    """Return the parts of a text between the commas that are not in brackets."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth < 1:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def text_of(value: Any) -> str:
    """Return a value, or a pair of formats or of numbers, as text."""
    if not isinstance(value, tuple):
        return str(value)
    mark = "x" if isinstance(value[0], int) else "/"
    return mark.join(map(str, value))
