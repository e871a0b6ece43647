"""Products too small to share among threads, and batches of them, in one call of native code.

All of a job but its addresses follows from the plan, so it is made once, and a call copies it and puts the addresses
in. Of a batch each thread takes products from a shared counter, and works through each alone; a matrix of B that the
product before had, too, is packed once for both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays.prepared_view import PreparedView
from lowprec.backends.cpu import buffers, threads
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel
from lowprec.backends.cpu.packed.packed_gemm import Operand, single_thread_job
from lowprec.backends.cpu.packed.prepared_panels import Panels
from lowprec.backends.execution import Arguments
from lowprec.planning import GemmLayout, MatrixStack

_Job = ctypes.c_int64 * J.WORDS
_Batch = ctypes.c_int64 * J.BATCH_WORDS
_JOB_BYTES = 4096
#: Batches up to this keep where their matrices lie, relative to the first.
_KEPT = 1 << 10


class Launch(NamedTuple):
    """What runs the products of one plan.

    Parameters
    ----------
    template : bytes
        The job, without addresses.
    fields : tuple of int
        Those of the job that take the addresses of ``a``, ``b`` and ``out``; the first two are exchanged where the
        transposed product is computed.
    drive : callable
        The macro-kernel.
    drive_address : int
        Of the same.
    drive_all : callable
        What runs it for each product of a batch.
    packed_bytes, scratch_bytes : int
        Memory that each thread needs.
    layout : GemmLayout
    offsets : numpy.ndarray or None, shape (batch_count, 3)
        Of the matrices, in bytes; None where they are not kept.
    shared : bool
        Whether waking a thread for the batch pays.
    panels : callable or None
        Returns those of a prepared ``b``, None where the product packs it.
    """

    template: bytes
    fields: tuple[int, int, int]
    drive: Callable[[int, int], int]
    drive_address: int
    drive_all: Callable[[int, int], int]
    packed_bytes: int
    scratch_bytes: int
    layout: GemmLayout
    offsets: Any
    shared: bool
    panels: Callable[[Arguments], Panels | None] | None = None


def launch_of(micro_kernel: MicroKernel, layout: GemmLayout, rounding: str) -> Launch | None:
    """Return the launch of the products of a layout, None where each is large enough for several threads.

    The operands are multiplied as they are stored, in one part, and nothing follows the product.
    """
    a, b, out = (_operand(x) for x in (layout.a, layout.b, layout.out))
    single = single_thread_job(
        micro_kernel, layout.m, layout.n, layout.k, a, b, out, rounding=rounding
    )
    if single is None:
        return None
    from lowprec.backends.cpu.packed.macro_kernel import MACRO_ARITY, batch_kernel, macro_kernel
    from lowprec.backends.cpu.packed.native import callable_at

    count, products = layout.batch_count, layout.m * layout.n * layout.k
    return Launch(
        template=bytes(single.job),
        fields=(J.B, J.A, J.OUT) if single.transposed else (J.A, J.B, J.OUT),
        drive=single.drive,
        drive_address=macro_kernel(),
        drive_all=callable_at(batch_kernel(), MACRO_ARITY),
        packed_bytes=single.packed_b_bytes,
        scratch_bytes=single.scratch_bytes,
        layout=layout,
        offsets=_offsets(layout) if 1 < count <= _KEPT else None,
        shared=count * products >= micro_kernel.shared_from,
    )


def _operand(stack: MatrixStack) -> Operand:
    return Operand(0, stack.dtype.label, stack.row_stride, stack.col_stride)


def _offsets(layout: GemmLayout) -> Any:
    """Return where the matrices of each product lie, in bytes from the first; shape (batch_count, 3)."""
    columns = []
    for x in (layout.a, layout.b, layout.out):
        offsets = np.zeros((), np.int64)
        for extent, stride in zip(layout.batch_shape, x.batch_strides, strict=True):
            offsets = np.add.outer(offsets, np.arange(extent) * (stride * x.dtype.itemsize))
        columns.append(offsets.ravel())
    return np.stack(columns, axis=1)


def execute(launch: Launch, arguments: Arguments) -> None:
    """Run the products of a plan."""
    if launch.layout.batch_count > 1:
        _execute_batch(launch, arguments)
        return
    job = _Job.from_buffer_copy(launch.template)
    a, b, out = launch.fields
    job[a], job[b], job[out] = (
        arguments.a.address,
        arguments.b.address,
        arguments.out.address,
    )
    packed_bytes = launch.packed_bytes
    if type(arguments.b) is PreparedView and launch.panels is not None:
        panels = launch.panels(arguments)
        if panels is not None:
            job[J.B_PACKED], job[J.PACK_TASKS] = panels.address, 0
            with buffers.borrow(launch.scratch_bytes) as memory:
                launch.drive(ctypes.addressof(job), memory)
            return
    with buffers.borrow(packed_bytes + launch.scratch_bytes) as memory:
        job[J.B_PACKED] = memory
        launch.drive(ctypes.addressof(job), memory + packed_bytes)


def _execute_batch(launch: Launch, arguments: Arguments) -> None:
    offsets = _offsets(launch.layout) if launch.offsets is None else launch.offsets
    table = offsets + np.array([x.address for x in arguments[:3]], np.int64)
    job = _Job.from_buffer_copy(launch.template)
    batch = _Batch()
    batch[J.BATCH_JOB] = ctypes.addressof(job)
    batch[J.BATCH_COUNT] = launch.layout.batch_count
    batch[J.BATCH_TABLE] = table.ctypes.data
    batch[J.BATCH_FIELD_A], batch[J.BATCH_FIELD_B] = launch.fields[:2]
    batch[J.BATCH_DRIVE] = launch.drive_address
    batch[J.BATCH_SCRATCH] = _JOB_BYTES + launch.packed_bytes
    address = ctypes.addressof(batch)

    def work() -> None:
        with buffers.borrow(_JOB_BYTES + launch.packed_bytes + launch.scratch_bytes) as memory:
            launch.drive_all(address, memory)

    workers = min(threads.num_threads(), launch.layout.batch_count) if launch.shared else 1
    threads.run(work, workers)
