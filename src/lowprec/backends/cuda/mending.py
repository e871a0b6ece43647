"""What a sum of products of parts leaves NaN or infinite, computed again from the operands as they are.

An infinity, a NaN, or a number that overflows in the parts' format makes NaN of every element it enters. Whether there
is such an element only the device knows: the kernel, ``kernels/mend.cu``, always runs, reads the product once, and the
host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
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


@cached
def prepare_mending(
    dtype: DType, leading_dimension: int, a: MatrixStack, b: MatrixStack, device: int
) -> Mender:
    """Return the function that queues it on a stream of a device, which is the current one then.

    The product, float32 or complex64, lies row-major and matrix after matrix in temporary memory, its rows
    ``leading_dimension`` elements apart; the operands lie where the caller has them, their batches broadcast to one
    shape. The kernel is compiled at its first call.
    """
    step = a.rows * leading_dimension
    batch = batch_dimensions(a.batch_shape, step, a.batch_strides, b.batch_strides)
    parts = launch_batches(batch, 3)
    return in_sequence([_launch(dtype, leading_dimension, a, b, part, device) for part in parts])


def _launch(
    dtype: DType, leading: int, a: MatrixStack, b: MatrixStack, batch: LaunchBatch, device: int
) -> Mender:
    """Return the kernel for the batch of one launch."""
    definitions = {"PRODUCT": ELEMENT[dtype], "A": ELEMENT[a.dtype], "B": ELEMENT[b.dtype]}
    constants = [a.rows, b.cols, a.cols, leading]
    constants += [a.row_stride, a.col_stride, b.row_stride, b.col_stride]
    constants += [batch.count, *batch.extents, *(x for array in batch.strides for x in array)]
    blocks = pick_blocks(-(-batch.count * a.rows * b.cols // _THREADS), device)
    launch = Launch("mend", "mend.cu", definitions, device, blocks, (_THREADS,), 3, constants)
    dtypes = (dtype, a.dtype, b.dtype)
    offsets = [at * x.itemsize for at, x in zip(batch.offsets, dtypes, strict=True)]

    def queue(product: int, first: int, second: int, stream: int) -> None:
        launch(stream, product + offsets[0], first + offsets[1], second + offsets[2])

    return queue
