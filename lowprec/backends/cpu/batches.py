"""Where the matrices of a batch lie, as a table that native code reads: a row of four addresses for each product."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.backends.execution import Arguments
from lowprec.planning import MatrixStack

#: Batches up to this keep where their matrices lie, relative to the first.
KEPT = 1 << 10

#: Those of a, b, out and c; None where there is no c.
Matrices = tuple[MatrixStack, MatrixStack, MatrixStack, MatrixStack | None]


def offsets_of(matrices: Matrices) -> Any:
    """Return how far each matrix lies from the first, in bytes; shape (batch_count, 4)."""
    shape = matrices[0].batch_shape
    columns = []
    for x in matrices:
        offsets = np.zeros(shape if x is None else (), np.int64)
        if x is not None:
            for extent, stride in zip(shape, x.batch_strides, strict=True):
                offsets = np.add.outer(offsets, np.arange(extent) * (stride * x.dtype.itemsize))
        columns.append(offsets.ravel())
    return np.stack(columns, axis=1)


def addresses_of(matrices: Matrices, arguments: Arguments, kept: Any) -> Any:
    """Return the addresses of all matrices, 0 for those of no c; ``kept`` are the offsets where they were kept."""
    a, b, out, c = arguments[:4]
    first = [x.address for x in (a, b, out)]
    first.append(0 if c is None or matrices[3] is None else c.address)
    return (offsets_of(matrices) if kept is None else kept) + np.array(first, np.int64)
