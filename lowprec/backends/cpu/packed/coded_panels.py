"""Prepared operands of 8- and 4-bit formats, kept as codes in the order of packed tiles; see `codes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowprec.backends.cpu.packed.codes import blocks_per_step, code_bits

_LANES = 32


def records_of(name: str, codes: Any, scales: Any) -> Any:
    """Return the records of a matrix (k, n), shape (strips, steps).

    ``codes`` has shape (n, bytes along k) and ``scales`` shape (n, blocks along k), both uint8; it is None for formats
    without blocks.
    """
    pair, blocks = np.dtype(f"u{code_bits(name) // 4}"), blocks_per_step(name)
    n, nbytes = codes.shape
    strips, steps = -(-n // _LANES), -(-nbytes // (16 * pair.itemsize))
    fields: list[Any] = [("codes", pair, (2, 16, 16)), ("scales", np.uint8, (2, blocks, 16))]
    records = np.empty((strips, steps), np.dtype(fields))
    whole = _padded(codes, (strips * _LANES, steps * 16 * pair.itemsize)).view(pair)
    records["codes"] = whole.reshape(strips, 2, 16, steps, 16).transpose(0, 3, 1, 4, 2)
    if blocks:
        every = _padded(scales, (strips * _LANES, steps * blocks))
        records["scales"] = every.reshape(strips, 2, 16, steps, blocks).transpose(0, 3, 1, 4, 2)
    return records


def _padded(x: Any, shape: Sequence[int]) -> Any:
    """Return a contiguous array with zeros, the code of 0, up to this shape."""
    if x.shape == tuple(shape):
        return np.ascontiguousarray(x)
    padded = np.zeros(shape, x.dtype)
    padded[tuple(map(slice, x.shape))] = x
    return padded
