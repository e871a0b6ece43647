"""Batches that one strided call can walk, and the loop around it for those that it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Shape = tuple[int, ...]

#: A number of steps, and the length of a step in elements for each array that is walked.
Dimension = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Batches:
    """How stacks of matrices are walked together.

    Parameters
    ----------
    count : int
        Matrices per call.
    strides : tuple of int
        Elements from one matrix to the next, per stack.
    offsets : tuple of tuple of int
        Where each call begins: one entry per call, in it one number of elements per stack.
    """

    count: int
    strides: Shape
    offsets: tuple[Shape, ...]


def merged(dimensions: Sequence[Dimension]) -> list[Dimension]:
    """Make neighbours one where every array steps regularly from the end of the inner one to its next beginning.

    Examples
    --------
    >>> merged([(2, (12, 0)), (3, (4, 0)), (4, (1, 1))])
    [(6, (4, 0)), (4, (1, 1))]
    """
    result: list[Dimension] = []
    for extent, steps in dimensions:
        if extent == 1:
            continue
        if result:
            outer_extent, outer = result[-1]
            if all(o == extent * s for o, s in zip(outer, steps, strict=True)):
                result[-1] = (outer_extent * extent, steps)
                continue
        result.append((extent, steps))
    return result


def split_batches(shape: Shape, stacks: Sequence[Shape]) -> Batches:
    """Return the longest regular run forward through a batch, and the offsets of the runs.

    Parameters
    ----------
    shape : tuple of int
        The batch; no dimension is empty.
    stacks : sequence of tuple of int
        Per stack of matrices its strides over ``shape``.

    Examples
    --------
    >>> split_batches((2, 3), [(30, 10), (0, 0)])
    Batches(count=6, strides=(10, 0), offsets=((0, 0),))
    >>> split_batches((2, 3), [(5, 20)])
    Batches(count=3, strides=(20,), offsets=((0,), (5,)))
    >>> split_batches((2,), [(-6,)])
    Batches(count=1, strides=(0,), offsets=((0,), (-6,)))
    """
    steps = [tuple(strides[axis] for strides in stacks) for axis in range(len(shape))]
    dimensions = merged(list(zip(shape, steps, strict=True)))
    # Nobody promises a stride from one matrix back to the one before.
    forward = [i for i, (_, steps) in enumerate(dimensions) if min(steps) >= 0]
    count, strides = 1, (0,) * len(stacks)
    if forward:
        count, strides = dimensions.pop(max(forward, key=lambda i: dimensions[i][0]))
    offsets = tuple(
        tuple(
            sum(index * steps[stack] for index, (_, steps) in zip(walk, dimensions, strict=True))
            for stack in range(len(stacks))
        )
        for walk in product(*(range(extent) for extent, _ in dimensions))
    )
    assert len(offsets) * count == prod(shape)
    return Batches(count, strides, offsets)
