"""Batches for cuBLASLt: irregular strides, or more than 65,535 matrices, need several calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from operator import add
from typing import NamedTuple

from lowprec.util.strides import Dimension, Shape, coalesce

#: Most matrices of a call (``kMaxBatchCount`` in XLA; PyTorch issue 46001).
MOST_MATRICES = 65535


class Run(NamedTuple):
    """Calls over the same number of matrices, and for each the offset of every array's first matrix, in elements."""

    matrices: int
    offsets: tuple[Shape, ...]


def split_batches(shape: Shape, stacks: Sequence[Shape]) -> tuple[Shape, tuple[Run, ...]]:
    """Split a batch into calls, each over (a part of) its largest dimension; ``stacks`` has the strides of each array.

    Return the batch stride of each array, in elements, and one run, or two if the calls cannot have the same number of
    matrices. No dimension is empty.
    """
    dimensions = coalesce([(n, tuple(s[axis] for s in stacks)) for axis, n in enumerate(shape)])
    # cuBLASLt does not document negative batch strides.
    forward = [i for i, (_, strides) in enumerate(dimensions) if min(strides) >= 0]
    count, strides = 1, (0,) * len(stacks)
    if forward:
        count, strides = dimensions.pop(max(forward, key=lambda i: dimensions[i][0]))
    each = -(-count // -(-count // MOST_MATRICES))  # calls of similar sizes
    parts, rest = divmod(count, each)
    steps = [tuple(each * i * stride for stride in strides) for i in range(parts + 1)]
    starts = tuple(offsets_of(dimensions, len(stacks)))

    def run(count: int, steps: Sequence[Shape]) -> Run:
        return Run(count, tuple(tuple(map(add, start, step)) for start in starts for step in steps))

    runs = (run(each, steps[:-1]), *([run(rest, steps[-1:])] if rest else []))
    assert sum(x.matrices * len(x.offsets) for x in runs) == prod(shape)
    return strides, runs


def offsets_of(dimensions: Sequence[Dimension], arrays: int) -> Iterator[Shape]:
    """Yield for each index over the dimensions the offset of each array, in elements."""
    for indices in product(*(range(extent) for extent, _ in dimensions)):
        yield tuple(
            sum(index * strides[i] for index, (_, strides) in zip(indices, dimensions, strict=True))
            for i in range(arrays)
        )
