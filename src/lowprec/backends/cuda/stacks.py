"""Stacks of matrices with any strides, as the kernels walk them: with three batch dimensions at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from lowprec.planning.batches import Dimension, merged

__all__ = ["Dimension", "Walk", "are_multiples", "merged", "walks"]

#: Batch dimensions that one launch walks.
_PER_LAUNCH = 3


@dataclass(frozen=True, slots=True)
class Walk:
    """The batch of one launch.

    Parameters
    ----------
    count : int
        Of matrices.
    offsets : tuple of int
        Where it begins, in elements of each array.
    extents : tuple of int
        The inner two of the three dimensions.
    steps : tuple of (int, int, int)
        Per array, over the three dimensions.
    """

    count: int
    offsets: tuple[int, ...]
    extents: tuple[int, int]
    steps: tuple[tuple[int, int, int], ...]


def walks(dimensions: Sequence[Dimension], arrays: int) -> Iterator[Walk]:
    """Yield the launches that walk a batch of ``arrays`` arrays; nothing if the batch is empty.

    Examples
    --------
    >>> [w.offsets for w in walks([(2, (20,)), (2, (9,)), (2, (5,)), (2, (2,))], 1)]
    [(0,), (20,)]
    """
    dimensions = merged(dimensions)
    outer, inner = dimensions[:-_PER_LAUNCH], dimensions[-_PER_LAUNCH:]
    missing: list[Dimension] = [(1, (0,) * arrays)] * (_PER_LAUNCH - len(inner))
    inner = [*missing, *inner]
    count = prod(extent for extent, _ in inner)
    if not count:
        return
    steps = tuple((inner[0][1][i], inner[1][1][i], inner[2][1][i]) for i in range(arrays))
    for place in product(*(range(extent) for extent, _ in outer)):
        offsets = tuple(
            sum(at * step[i] for at, (_, step) in zip(place, outer, strict=True))
            for i in range(arrays)
        )
        yield Walk(count, offsets, (inner[1][0], inner[2][0]), steps)


def are_multiples(nbytes: int, itemsize: int, steps: Sequence[int]) -> bool:
    """Whether all steps, counted in elements, are multiples of so many bytes.

    Examples
    --------
    >>> are_multiples(16, 4, [0, -8]), are_multiples(16, 4, [6])
    (True, False)
    """
    return not any(step * itemsize % nbytes for step in steps)
