"""Enumerations whose members are words."""

from __future__ import annotations

from enum import Enum


class StrEnum(str, Enum):
    """An enumeration whose members are strings and print as such: Python's own, which comes with 3.11.

    Examples
    --------
    >>> class Colour(StrEnum):
    ...     RED = "red"
    >>> str(Colour.RED), f"{Colour.RED}", Colour.RED == "red"
    ('red', 'red', True)
    """

    def __str__(self) -> str:
        return str.__str__(self)

    # Without Enum's detour: modes are looked up on every call.
    __hash__ = str.__hash__
