"""Layouts of a matrix in memory."""

import numpy as np

LAYOUTS = {
    "rows": lambda x: x,
    "columns": np.asfortranarray,
    "backwards": lambda x: x[::-1],
    "stepped": lambda x: np.repeat(x, 2, 1)[:, ::2],
}
