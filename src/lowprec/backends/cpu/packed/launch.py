"""Products whose jobs are made once: small ones and batches of them in one call of native code, large ones in threads.

All of a job but its addresses follows from the plan, so it is made once, and a call copies it and puts the addresses
in. Of a batch each thread takes products from a shared counter, and works through each alone; a matrix of B that the
product before had, too, is packed once for both.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from lowprec.arrays.prepared_view import PreparedView
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import batches, buffers, threads
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed import packed_gemm
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel
from lowprec.backends.cpu.packed.prepared_panels import PanelStack
from lowprec.backends.cpu.packed.templates import (
    Operand,
    Product,
    float_bits,
    product_of,
    single_thread_template,
)
from lowprec.backends.execution import Arguments
from lowprec.planning import GemmLayout, GemmProblem, MatrixStack
from lowprec.planning.layout import addend_layout, stacked_layout

_Job = ctypes.c_int64 * J.WORDS
_Batch = ctypes.c_int64 * J.BATCH_WORDS
_JOB_BYTES = 4096


class Launch(NamedTuple):
    """What runs the products of one plan."""

    template: bytes  # the job, without addresses
    #: Those of the job that take the addresses of ``a``, ``b`` and ``out``; the first two are exchanged where the
    #: transposed product is computed.
    fields: tuple[int, int, int]
    drive: Callable[[int, int], int]  # the macro-kernel
    drive_address: int  # of the same
    drive_all: Callable[[int, int], int]  # what runs it for each product of a batch
    #: Memory that each thread needs.
    packed_bytes: int
    scratch_bytes: int
    batch_count: int
    matrices: batches.Matrices  # of a, b, out and c, as `batches` takes them
    #: Of the matrices, shape (batch_count, 4), in bytes; None where they are not kept.
    offsets: Any
    has_epilogue: bool  # whether alpha, beta, c and bias are put into the job, too
    shared: bool  # whether waking a thread for the batch pays
    declines: bool  # whether a b with a value that is not finite is left to others
    #: Returns those of a prepared ``b``, None where the product packs it.
    panels: Callable[[PreparedView], PanelStack | None] | None = None


class SharedLaunch(NamedTuple):
    """What runs the single product of one plan in several threads."""

    product: Product
    panels: Callable[[PreparedView], PanelStack | None] | None = None  # as of `Launch`


def _product(
    micro_kernel: MicroKernel, layout: GemmLayout, rounding: str, problem: GemmProblem | None
) -> tuple[Product, GemmLayout, MatrixStack | None]:
    """Return the product of each matrix of a layout, the layout beside that of c, and that."""
    c = bias = activation = None
    if problem is not None:
        layout, c = _with_addend(problem, layout)
        activation = problem.activation
        if problem.bias is not None:
            bias = 0, problem.bias.dtype.label, problem.bias.strides[0]
    a, b, out = (_operand(x) for x in (layout.a, layout.b, layout.out))
    product = product_of(
        micro_kernel, layout.m, layout.n, layout.k, a, b, out, rounding,
        None if c is None else _operand(c), bias, activation,
    )  # fmt: skip
    return product, layout, c


def shared_launch_of(
    micro_kernel: MicroKernel, layout: GemmLayout, rounding: str, problem: GemmProblem
) -> SharedLaunch | None:
    """Return the launch of a single product, None where there are several; otherwise as :func:`launch_of`."""
    product, layout, _ = _product(micro_kernel, layout, rounding, problem)
    return SharedLaunch(product) if layout.batch_count == 1 else None


@functools.cache
def _drivers() -> tuple[int, Callable[[int, int], int]]:
    """Return the address of the macro-kernel, and what runs it for each product of a batch."""
    from lowprec.backends.cpu.packed.macro_kernel import MACRO_ARITY, batch_kernel, macro_kernel
    from lowprec.backends.cpu.packed.native import callable_at

    return macro_kernel(), callable_at(batch_kernel(), MACRO_ARITY)


def launch_of(
    micro_kernel: MicroKernel, layout: GemmLayout, rounding: str, problem: GemmProblem | None = None
) -> Launch | None:
    """Return the launch of the products of a layout, None where each is large enough for several threads.

    The operands are multiplied as they are stored, in one part. What follows the products is that of ``problem``; by
    default nothing.
    """
    product, layout, c = _product(micro_kernel, layout, rounding, problem)
    single = single_thread_template(product)
    if single is None:
        return None
    macro_kernel, drive_all = _drivers()
    count, products = layout.batch_count, layout.m * layout.n * layout.k
    parts = product.kernels.parts_a * product.kernels.parts_b
    matrices = layout.a, layout.b, layout.out, c
    has_epilogue = problem is not None and problem.has_epilogue
    template = _Job.from_buffer_copy(single.job)
    if has_epilogue:
        template[J.EPILOGUE] = product.kernels.epilogue(True)
    return Launch(
        template=bytes(template),
        fields=(J.B, J.A, J.OUT) if product.transposed else (J.A, J.B, J.OUT),
        drive=single.drive,
        drive_address=macro_kernel,
        drive_all=drive_all,
        packed_bytes=single.packed_b_bytes,
        scratch_bytes=single.scratch_bytes,
        batch_count=count,
        matrices=matrices,
        offsets=batches.offsets_of(matrices) if 1 < count <= batches.KEPT else None,
        has_epilogue=has_epilogue,
        declines=product.kernels.parts_b > 1,
        shared=count * products * parts >= micro_kernel.shared_from,
    )


def _with_addend(problem: GemmProblem, layout: GemmLayout) -> tuple[GemmLayout, MatrixStack | None]:
    """Return a layout, collapsed only if the addend can be, and the matrices of that."""
    if problem.c is None or not problem.has_beta:
        return layout, None
    c = addend_layout(problem.c, problem.a, problem.b, layout)
    if c is None:
        layout = stacked_layout(problem.a, problem.b, problem.out, layout.out.dtype)
        c = addend_layout(problem.c, problem.a, problem.b, layout)
    return layout, c


def _operand(stack: MatrixStack) -> Operand:
    return Operand(0, stack.dtype.label, stack.row_stride, stack.col_stride)


def execute(launch: Launch, arguments: Arguments) -> bool:
    """Run the products of a plan; return whether they are done, as `packed_gemm.gemm` has it."""
    panels = None
    if type(arguments.b) is PreparedView and launch.panels is not None:
        panels = launch.panels(arguments.b)
        if panels is not None and launch.declines and not all(panels.finite):
            return False
    if launch.batch_count > 1:
        return _execute_batch(launch, arguments, panels)
    job = _Job.from_buffer_copy(launch.template)
    a, b, out = launch.fields
    job[a], job[b], job[out] = (
        arguments.a.address,
        arguments.b.address,
        arguments.out.address,
    )
    if launch.has_epilogue:
        _put_epilogue(job, arguments)
        if launch.matrices[3] is not None and arguments.c is not None:
            job[J.C] = arguments.c.address
    packed_bytes = launch.packed_bytes
    if panels is not None:
        job[J.B_PACKED], job[J.PACK_TASKS], packed_bytes = panels.address, 0, 0
    with buffers.borrow(packed_bytes + launch.scratch_bytes) as memory:
        if panels is None:
            job[J.B_PACKED] = memory
        launch.drive(ctypes.addressof(job), memory + packed_bytes)
    return not (job[J.NOT_FINITE] or job[J.SUM_NOT_FINITE])


def execute_shared(launch: SharedLaunch, arguments: Arguments) -> bool:
    """Run the single product of a plan in several threads; return whether it is done."""
    a, b, out, c, bias = arguments.a, arguments.b, arguments.out, arguments.c, arguments.bias
    panels = None
    if type(b) is PreparedView and launch.panels is not None:
        stack = launch.panels(b)
        panels = stack and stack.panels_at(0)
    return packed_gemm.multiply(
        launch.product,
        a.address,
        b.address,
        out.address,
        0 if c is None or launch.product.c is None else c.address,
        0 if bias is None else bias.address,
        arguments.alpha.real,
        arguments.beta.real,
        panels,
    )


def _put_epilogue(job: Any, arguments: Arguments) -> None:
    """Put the factors, and the address of the bias, into a job."""
    alpha, beta, bias = arguments.alpha, arguments.beta, arguments.bias
    job[J.ALPHA], job[J.BETA] = float_bits(alpha.real), float_bits(beta.real)
    job[J.BIAS] = 0 if bias is None else bias.address


def _execute_batch(launch: Launch, arguments: Arguments, panels: PanelStack | None) -> bool:
    table = batches.addresses_of(launch.matrices, arguments, launch.offsets)
    job = _Job.from_buffer_copy(launch.template)
    if launch.has_epilogue:
        _put_epilogue(job, arguments)
    batch = _Batch()
    batch[J.BATCH_JOB] = ctypes.addressof(job)
    batch[J.BATCH_COUNT] = launch.batch_count
    batch[J.BATCH_TABLE] = data_pointer(table)
    batch[J.BATCH_FIELD_A], batch[J.BATCH_FIELD_B] = launch.fields[:2]
    batch[J.BATCH_DRIVE] = launch.drive_address
    batch[J.BATCH_SCRATCH] = _JOB_BYTES + launch.packed_bytes
    if panels is not None:
        # No product packs then: each has the b, none at all, that the one before had.
        table[:, 1] = panels.addresses(table[:, 1] - arguments.b.address)
        batch[J.BATCH_FIELD_B] = J.B_PACKED
    address = ctypes.addressof(batch)

    def work() -> None:
        with buffers.borrow(_JOB_BYTES + launch.packed_bytes + launch.scratch_bytes) as memory:
            launch.drive_all(address, memory)

    workers = min(threads.num_threads(), launch.batch_count) if launch.shared else 1
    threads.run(work, workers)
    return not batch[J.BATCH_NOT_FINITE]
