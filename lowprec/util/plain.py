"""JSON values and string enumerations."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def plain(value: Any, texts: tuple[type, ...] = ()) -> Any:
    """Return a value for JSON: None for Inf and NaN, dictionaries for records, text for ``texts`` and enumerations."""
    if isinstance(value, (Enum, *texts)):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): plain(item, texts) for key, item in value.items()}
    if isinstance(value, frozenset):
        value = sorted(value)
    if isinstance(value, (list, tuple)):
        return [plain(item, texts) for item in value]
    return value


class StrEnum(str, Enum):
    """An enumeration of strings, as :class:`enum.StrEnum` of Python 3.11."""

    def __str__(self) -> str:
        return str.__str__(self)

    # Faster than Enum's own: modes are hashed on every call.
    __hash__ = str.__hash__
