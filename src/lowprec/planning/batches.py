"""Batches as cuBLASLt takes them: one stride per array; several calls where the strides are not regular."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Shape = tuple[int, ...]

#: An extent, and for each array the stride in elements.
Dimension = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Batches:
    """The calls that compute a batch, all of one count and of the same strides.

    Parameters
    ----------
    count : int
        Matrices per call.
    strides : tuple of int
        Per array, the elements from one matrix to the next.
    offsets : tuple of tuple of int
        Per call, the elements of each array before its first matrix.
    """

    count: int
    strides: Shape
    offsets: tuple[Shape, ...]


def coalesce(dimensions: Sequence[Dimension]) -> list[Dimension]:
    """Return the same elements in as few dimensions as their strides allow, outermost first.

    Two adjacent dimensions become one where, in every array, the outer stride is the inner stride times the inner
    extent. Dimensions of extent 1 go.

    Examples
    --------
    >>> coalesce([(2, (12, 0)), (3, (4, 0)), (4, (1, 1))])
    [(6, (4, 0)), (4, (1, 1))]
    """
    result: list[Dimension] = []
    for extent, strides in dimensions:
        if extent == 1:
            continue
        if result:
            outer_extent, outer = result[-1]
            if all(o == extent * s for o, s in zip(outer, strides, strict=True)):
                result[-1] = (outer_extent * extent, strides)
                continue
        result.append((extent, strides))
    return result


def split_batches(shape: Shape, stacks: Sequence[Shape]) -> Batches:
    """Return the calls that compute a batch: the largest dimension is that of each call, the others are looped over.

    Parameters
    ----------
    shape : tuple of int
        The batch; no dimension is empty.
    stacks : sequence of tuple of int
        Per array its strides over ``shape``, in elements.

    Examples
    --------
    >>> split_batches((2, 3), [(30, 10), (0, 0)])
    Batches(count=6, strides=(10, 0), offsets=((0, 0),))
    >>> split_batches((2, 3), [(5, 20)])
    Batches(count=3, strides=(20,), offsets=((0,), (5,)))
    >>> split_batches((2,), [(-6,)])
    Batches(count=1, strides=(0,), offsets=((0,), (-6,)))
    """
    dimensions = coalesce([(n, tuple(s[axis] for s in stacks)) for axis, n in enumerate(shape)])
    # cuBLASLt does not promise to take a negative batch stride.
    forward = [i for i, (_, strides) in enumerate(dimensions) if min(strides) >= 0]
    count, strides = 1, (0,) * len(stacks)
    if forward:
        count, strides = dimensions.pop(max(forward, key=lambda i: dimensions[i][0]))
    offsets = tuple(offsets_of(dimensions, len(stacks)))
    assert len(offsets) * count == prod(shape)
    return Batches(count, strides, offsets)


def offsets_of(dimensions: Sequence[Dimension], arrays: int) -> Iterator[Shape]:
    """Yield the offsets of each index over some dimensions, in elements of each of so many arrays.

    Examples
    --------
    >>> list(offsets_of([(2, (30, 0)), (2, (10, 7))], 2))
    [(0, 0), (10, 7), (30, 0), (40, 7)]
    """
    for indices in product(*(range(extent) for extent, _ in dimensions)):
        yield tuple(
            sum(index * strides[i] for index, (_, strides) in zip(indices, dimensions, strict=True))
            for i in range(arrays)
        )
