"""JSON values and string enumerations."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any


def finite(value: Any) -> Any:
    """Return a value or container with Inf and NaN, which JSON lacks, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


class StrEnum(str, Enum):
    """An enumeration of strings, as :class:`enum.StrEnum` of Python 3.11."""

    def __str__(self) -> str:
        return str.__str__(self)

    # Faster than Enum's own: modes are hashed on every call.
    __hash__ = str.__hash__
