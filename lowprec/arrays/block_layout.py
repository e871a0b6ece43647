"""Division of an array into the blocks of a narrow format: shapes, and ranges that are converted at once."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from lowprec.formats import BlockFormat
from lowprec.util.strides import Shape

#: Numbers that are converted at once in host memory, so that temporary arrays stay in the cache.
_AT_ONCE = 1 << 16


def joined(parts: Any, shape: Shape, xp: Any) -> Any:
    """Return the parts as one array in row-major order, which elementwise functions of NumPy need not keep."""
    joined = xp.concatenate(parts).reshape(shape)
    if xp is np:
        return np.ascontiguousarray(joined)
    return joined


def axis_layout(shape: Shape, axis: int, row: BlockFormat) -> tuple[Shape, int, int]:
    """Return the lengths of the other axes, the number of blocks along the axis, and its length when padded."""
    row = row.of_length(shape[axis])
    blocks = 0
    if row.block:
        blocks = -(-shape[axis] // row.block)
    others = (*shape[:axis], *shape[axis + 1 :])
    length = blocks * row.block or shape[axis]
    return others, blocks, length


def part_shapes(shape: Shape, axis: int, row: BlockFormat) -> tuple[Any, ...]:
    """Return the shapes of codes, scales and zeros, None for those that the format lacks."""
    others, blocks, padded = axis_layout(shape, axis, row)
    of_blocks = (*others, blocks)
    scales = of_blocks if row.scales else None
    zeros = of_blocks if row.has_zeros else None
    nbytes = padded * row.bits // 8
    return (*others, nbytes), scales, zeros


def blocks_of(x: Any, row: BlockFormat, xp: Any) -> Any:
    """Return ``x`` in shape (blocks, elements), its last axis padded with zeros; blocks of 1 without blocks."""
    block = row.block or 1
    x = padded(x, x.ndim - 1, block, xp)
    return x.reshape((prod(x.shape) // block, block))


def part_of(x: Any, of: slice, count: int) -> Any:
    """Return the scales or zeros of some of ``count`` blocks."""
    if x is None:
        return None
    return x.reshape((count,))[of]


def ranges(count: int, row: BlockFormat, xp: Any) -> list[slice]:
    """Return the ranges of blocks that are converted at once; one if there are no blocks."""
    if xp is np:
        step = max(_AT_ONCE // (row.block or 1), 1)
    else:
        step = max(count, 1)
    starts = range(0, max(count, 1), step)
    return [slice(i, i + step) for i in starts]


def padded(x: Any, axis: int, size: int, xp: Any) -> Any:
    """Return an array padded with zeros to a multiple of a size along an axis."""
    missing = -x.shape[axis] % size
    if not missing:
        return x
    padding = [*x.shape]
    padding[axis] = missing
    first = x[(slice(1),) * x.ndim]
    zeros = xp.broadcast_to(xp.zeros_like(first), tuple(padding))
    return xp.concatenate((x, zeros), axis)
