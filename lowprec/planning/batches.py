"""Batches for cuBLASLt, which takes one batch stride per matrix; irregular strides need several calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

Shape = tuple[int, ...]

#: The extent of a dimension, and its stride in each array, in elements.
Dimension = tuple[int, tuple[int, ...]]


def coalesce(dimensions: Sequence[Dimension]) -> list[Dimension]:
    """Coalesce dimensions, outermost first, as far as the strides of all arrays allow.

    Two adjacent dimensions become one if in every array the outer stride is the inner stride times the inner extent.
    Dimensions of extent 1 are dropped.
    """
    result: list[Dimension] = []
    for extent, strides in dimensions:
        if extent == 1:
            continue
        if result and result[-1][1] == tuple(extent * s for s in strides):
            result[-1] = (result[-1][0] * extent, strides)
        else:
            result.append((extent, strides))
    return result


def split_batches(shape: Shape, stacks: Sequence[Shape]) -> tuple[int, Shape, tuple[Shape, ...]]:
    """Split a batch into calls, each over its largest dimension; ``stacks`` has the strides of each array.

    Return the number of matrices per call, the batch stride of each array, and for each call the offset of each array's
    first matrix. Strides and offsets count elements; no dimension is empty.
    """
    dimensions = coalesce([(n, tuple(s[axis] for s in stacks)) for axis, n in enumerate(shape)])
    # cuBLASLt does not document negative batch strides.
    forward = [i for i, (_, strides) in enumerate(dimensions) if min(strides) >= 0]
    count, strides = 1, (0,) * len(stacks)
    if forward:
        count, strides = dimensions.pop(max(forward, key=lambda i: dimensions[i][0]))
    offsets = tuple(offsets_of(dimensions, len(stacks)))
    assert len(offsets) * count == prod(shape)
    return count, strides, offsets


def offsets_of(dimensions: Sequence[Dimension], arrays: int) -> Iterator[Shape]:
    """Yield for each index over the dimensions the offset of each array, in elements."""
    for indices in product(*(range(extent) for extent, _ in dimensions)):
        yield tuple(
            sum(index * strides[i] for index, (_, strides) in zip(indices, dimensions, strict=True))
            for i in range(arrays)
        )
