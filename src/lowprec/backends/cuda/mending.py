"""What a sum of products of parts leaves NaN or infinite, computed again from the operands as they are.

An infinity, a NaN, or a number that overflows in the parts' format makes NaN of every element it enters. Whether there
is such an element only the device knows: the kernel, ``kernels/mend.cu``, always runs, reads the product once, and the
host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from lowprec.backends.cuda.batching import (
    LaunchBatch,
    batch_dimensions,
    in_sequence,
    launch_batches,
)
from lowprec.backends.cuda.compiling import ELEMENT, Launch, pick_blocks
from lowprec.backends.cuda.libraries import cached
from lowprec.formats import DType
from lowprec.planning import MatrixStack

_THREADS = 256

#: Queues the work: addresses of the product, ``a`` and ``b``, and a stream.
Mender: TypeAlias = Callable[[int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class Mending:
    """A product in temporary memory, and what it is made of."""

    #: float32 or complex64, in which sums are taken.
    product_dtype: DType
    #: The product lies row-major and matrix after matrix, its rows so many elements apart.
    leading_dimension: int
    #: The operands where the caller has them, their batches broadcast to one shape.
    a: MatrixStack
    b: MatrixStack


@cached
def prepare_mending(spec: Mending, device: int) -> Mender:
    """Return the function that queues it on a stream of a device, which is the current one then.

    The kernel is compiled at its first call.
    """
    a, b = spec.a, spec.b
    step = a.rows * spec.leading_dimension
    batch = batch_dimensions(a.batch_shape, step, a.batch_strides, b.batch_strides)
    return in_sequence([_launch(spec, part, device) for part in launch_batches(batch, 3)])


def _launch(spec: Mending, batch: LaunchBatch, device: int) -> Mender:
    """Return the kernel for the batch of one launch."""
    a, b = spec.a, spec.b
    definitions: dict[str, str | int] = {
        "PRODUCT": ELEMENT[spec.product_dtype],
        "A": ELEMENT[a.dtype],
        "B": ELEMENT[b.dtype],
    }
    constants = [a.rows, b.cols, a.cols, spec.leading_dimension]
    constants += [a.row_stride, a.col_stride, b.row_stride, b.col_stride]
    constants += [batch.count, *batch.extents, *(x for array in batch.strides for x in array)]
    blocks = pick_blocks(-(-batch.count * a.rows * b.cols // _THREADS), device)
    launch = Launch("mend", "mend.cu", definitions, device, blocks, (_THREADS,), 3, constants)
    sizes = (spec.product_dtype.itemsize, a.dtype.itemsize, b.dtype.itemsize)
    offsets = [offset * size for offset, size in zip(batch.offsets, sizes, strict=True)]

    def queue(product: int, first: int, second: int, stream: int) -> None:
        launch(stream, product + offsets[0], first + offsets[1], second + offsets[2])

    return queue
