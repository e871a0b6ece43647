"""Division of batches with any strides into kernel launches, which have at most three batch dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lowprec.util.strides import Dimension, coalesce, contiguous_strides, offsets_of

#: Batch dimensions of one launch.
_PER_LAUNCH = 3


@dataclass(frozen=True, slots=True)
class LaunchBatch:
    """The batch of one launch; offsets and strides are in elements."""

    count: int  # matrices of this launch
    before: int  # matrices of earlier launches
    offsets: tuple[int, ...]  # of the first matrix of each array
    extents: tuple[int, int]  # of the two inner dimensions
    strides: tuple[tuple[int, int, int], ...]  # of each array over the three dimensions


def batch_dimensions(shape: Sequence[int], step: int, *strides: Sequence[int]) -> list[Dimension]:
    """Return a batch whose first array is contiguous with matrices of ``step`` elements; others have these strides."""
    return list(zip(shape, zip(contiguous_strides(tuple(shape), step), *strides, strict=True), strict=True))


def launch_batches(dimensions: Sequence[Dimension], arrays: int) -> Iterator[LaunchBatch]:
    dimensions = coalesce(dimensions)
    outer, inner = dimensions[:-_PER_LAUNCH], dimensions[-_PER_LAUNCH:]
    missing: list[Dimension] = [(1, (0,) * arrays)] * (_PER_LAUNCH - len(inner))
    inner = [*missing, *inner]
    count = prod(extent for extent, _ in inner)
    if not count:
        return
    strides = tuple((inner[0][1][i], inner[1][1][i], inner[2][1][i]) for i in range(arrays))
    for number, offsets in enumerate(offsets_of(outer, arrays)):
        yield LaunchBatch(count, number * count, offsets, (inner[1][0], inner[2][0]), strides)


def in_sequence(launches: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """Return the function that queues launches one after another, with the same arguments."""
    if len(launches) == 1:
        return launches[0]

    def queue_all(*arguments: Any) -> None:
        for launch in launches:
            launch(*arguments)

    return queue_all


def are_multiples(nbytes: int, itemsize: int, strides: Sequence[int]) -> bool:
    """Whether all strides, given in elements, are multiples of ``nbytes`` bytes."""
    return not any(stride * itemsize % nbytes for stride in strides)
