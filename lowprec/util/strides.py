"""Arithmetic of strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from operator import mul

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]

#: The extent of a dimension, and its stride in each array, in elements.
Dimension = tuple[int, Shape]


def contiguous_strides(shape: Shape, step: int = 1) -> Shape:
    """Return the strides of a row-major array without gaps, the last one ``step``; an extent of 0 counts as 1."""
    if len(shape) == 2:
        return (step * (shape[1] or 1), step)
    strides = []
    for extent in reversed(shape):
        strides.append(step)
        step *= extent or 1
    return tuple(reversed(strides))


def packed_strides(shape: Shape, strides: Shape) -> Shape:
    """Return the strides of a copy of matrices without gaps, in the order of the source's rows or columns.

    Batch axes along which the source is broadcast (stride 0) keep their stride.
    """
    outer_shape = shape[:-2]
    outer_strides = strides[:-2]
    batch = [n if stride else 1 for n, stride in zip(outer_shape, outer_strides, strict=True)]
    in_columns = len(shape) > 1 and strides[-2] == 1 != strides[-1]
    order = -1 if in_columns else 1
    matrix = shape[-2:][::order]
    found = contiguous_strides((*batch, *matrix))
    core = found[len(batch) :]
    outer = [step if stride else 0 for step, stride in zip(found, outer_strides, strict=False)]
    return (*outer, *core[::order])


def reach(shape: Shape, strides: Shape) -> tuple[int, int]:
    """Return the offsets of the first and the last element in memory from the element with all indices zero."""
    first = last = 0
    for extent, stride in zip(shape, strides, strict=True):
        if stride < 0:
            first += stride * (extent - 1)
        else:
            last += stride * (extent - 1)
    return first, last


def overlaps_itself(shape: Shape, strides: Shape) -> bool:
    """Whether two indices of a view may refer to the same element.

    True for every view with such indices, and also for interleaved strides without them (3 and 2 over shape
    ``(2, 2)``), which no slice, transpose or reshape creates.
    """
    if 0 in shape:
        return False
    reach = 0
    pairs = zip(map(abs, strides), shape, strict=True)
    for stride, extent in sorted(pairs):
        if extent == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def coalesce(dimensions: Sequence[Dimension]) -> list[Dimension]:
    """Coalesce dimensions, outermost first, as far as the strides of all arrays allow.

    Two adjacent dimensions become one if in every array the outer stride is the inner stride times the inner extent.
    Dimensions of extent 1 are dropped.
    """
    result: list[Dimension] = []
    for extent, strides in dimensions:
        if extent == 1:
            continue
        if result:
            outer, outer_strides = result[-1]
            if outer_strides == tuple(extent * s for s in strides):
                result[-1] = (outer * extent, strides)
                continue
        result.append((extent, strides))
    return result


def offsets_of(dimensions: Sequence[Dimension], arrays: int) -> Iterator[Shape]:
    """Yield for each index over the dimensions the offset of each array, in elements."""
    columns = [[strides[i] for _, strides in dimensions] for i in range(arrays)]
    for indices in product(*(range(extent) for extent, _ in dimensions)):
        yield tuple(sum(map(mul, indices, column)) for column in columns)
