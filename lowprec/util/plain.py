"""Plain values: what JSON holds, and enumerations that are strings."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any


def finite(value: Any) -> Any:
    """Return a value, or a container of values, with None for each number that JSON lacks (Inf, NaN).

    Examples
    --------
    >>> finite({"a": [float("inf"), (float("nan"), 1.5)]})
    {'a': [None, [None, 1.5]]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


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
