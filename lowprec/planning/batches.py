"""Batches for cuBLASLt, which takes one batch stride per matrix; irregular strides need several calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Shape = tuple[int, ...]

#: Extent, and the stride of each array in elements.
Dimension = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Batches:
    """The calls that compute a batch, all with the same batch count and strides."""

    count: int  # matrices per call
    strides: Shape  # batch stride of each array, in elements
    offsets: tuple[Shape, ...]  # per call the offset of each array's first matrix, in elements


def coalesce(dimensions: Sequence[Dimension]) -> list[Dimension]:
    """Coalesce dimensions, outermost first, as far as the strides of all arrays allow.

    Two adjacent dimensions become one if in every array the outer stride is the inner stride times the inner extent.
    Dimensions of extent 1 are dropped.

    Examples
    --------
    >>> coalesce([(2, (12, 0)), (3, (4, 0)), (4, (1, 1))])
    [(6, (4, 0)), (4, (1, 1))]
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


def split_batches(shape: Shape, stacks: Sequence[Shape]) -> Batches:
    """Return the calls that compute a batch: each call covers the largest dimension, the calls loop over the others.

    No dimension of ``shape`` is empty; ``stacks`` are the strides of each array over ``shape``, in elements.
    """
    dimensions = coalesce([(n, tuple(s[axis] for s in stacks)) for axis, n in enumerate(shape)])
    # cuBLASLt does not document negative batch strides.
    forward = [i for i, (_, strides) in enumerate(dimensions) if min(strides) >= 0]
    count, strides = 1, (0,) * len(stacks)
    if forward:
        count, strides = dimensions.pop(max(forward, key=lambda i: dimensions[i][0]))
    offsets = tuple(offsets_of(dimensions, len(stacks)))
    assert len(offsets) * count == prod(shape)
    return Batches(count, strides, offsets)


def offsets_of(dimensions: Sequence[Dimension], arrays: int) -> Iterator[Shape]:
    """Yield for each index over the dimensions the offset of each array, in elements."""
    for indices in product(*(range(extent) for extent, _ in dimensions)):
        yield tuple(
            sum(index * strides[i] for index, (_, strides) in zip(indices, dimensions, strict=True))
            for i in range(arrays)
        )
