"""Plain values, as JSON has them."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """Return a value, or what holds values, with None for each number that JSON does not have (Inf, NaN).

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
