"""Memory of rounded operands, kept from one product to the next: new pages would take as long as the rounding."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Sizes that are kept, as exponents of 2, and how many of each: 128 MiB in all.
_SMALLEST, _LARGEST, _OF_EACH = 17, 25, 2

#: By exponent. Operations of lists are atomic and need no lock, which could be held during a fork.
_kept: dict[int, list[NDArray[np.uint8]]] = {exponent: [] for exponent in range(_SMALLEST, _LARGEST + 1)}


class Workspace:
    """Arrays for one product."""

    def __init__(self) -> None:
        self._used: list[NDArray[np.uint8]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array without values, as ``numpy.empty``."""
        nbytes = prod(shape) * dtype.itemsize
        exponent = max(nbytes - 1, 1).bit_length()
        if not _SMALLEST <= exponent <= _LARGEST:
            return np.empty(shape, dtype)
        try:
            memory = _kept[exponent].pop()
        except IndexError:
            memory = np.empty(1 << exponent, np.uint8)
        self._used.append(memory)
        return memory[:nbytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Keep the memory for later products; the arrays are invalid from then on."""
        for memory in self._used:
            kept = _kept[len(memory).bit_length() - 1]
            if len(kept) < _OF_EACH:
                kept.append(memory)


def release_memory() -> None:
    for kept in _kept.values():
        kept.clear()
