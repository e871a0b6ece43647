"""Layouts of a matrix in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows": lambda x: x,
    "columns": np.asfortranarray,
    "backwards": lambda x: x[::-1],
    "stepped": lambda x: np.repeat(x, 2, 1)[:, ::2],
}
