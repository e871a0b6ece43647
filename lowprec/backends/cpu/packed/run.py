"""Matrix products by the macro-kernel and a micro-kernel of x86-64 CPUs: any strides, any epilogue.

A product copies the words of its job, sets addresses and factors, and calls the macro-kernel in one or more threads, or
for each product of a batch. The threads of a batch take products from a shared counter; if two consecutive products
share a matrix of B, it is packed once.

A float16 or TF32 value has 11 significant bits and is the exact sum of two bfloat16 values, so on bfloat16 units
`fp16`, `tf32` and float16 storage run as four bfloat16 products that share one accumulator. So do the products of parts
of a mode such as `bf16x6`: three, six or nine products, or four for each product of TF32 parts.

Sums are rounded to nearest even in any rounding mode of the processor, and the result does not depend on the number of
threads. ``TDPBF16PS`` and the conversion to bfloat16 flush subnormal numbers to zero. Bounds: `planning.bounds`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from lowprec.arrays.prepared_view import PreparedView
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import buffers, casting, scaling, stacks, team, threads
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.jobs import (
    STREAM_BYTES,
    Job,
    Operand,
    Words,
    block_of,
    float_bits,
    job_of,
    matrix_of,
    operand_of,
)
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel
from lowprec.backends.execution import Arguments, imported
from lowprec.planning import GemmLayout, GemmProblem, MatrixStack
from lowprec.planning.layout import addend_layout, stacked_layout

if TYPE_CHECKING:
    from lowprec.backends.cpu.packed.prepared_panels import Panels

_BatchWords = ctypes.c_int64 * J.BATCH_WORDS
_JOB_BYTES = 4096


class _Memory(NamedTuple):
    """An address, as an argument of a job."""

    address: int


#: Returns the panels of a prepared ``b``; None if the product packs it.
FindPanels = Callable[[PreparedView], "Panels | None"]


def gemm(
    micro_kernel: MicroKernel,
    a: Any,
    b: Any,
    out: Any,
    *,
    rounding: str,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Any = None,
    bias: Any = None,
    activation: str | None = None,
    panels: Panels | None = None,
) -> bool:
    """Compute ``out = activation(alpha * a @ b + beta * c + bias)``; see `lowprec.matmul`.

    ``a`` (m, k) and ``b`` (k, n), with positive extents, are float32, bfloat16 or float16 in any combination, or both
    int8 (without epilogue). ``out`` is float32, bfloat16 or float16, or int32 for int8; it may be ``c`` itself.
    ``rounding`` of float32 operands is "bf16", "tf32", "fp16" (digits of float16, without its range), or the parts of
    "bf16x3", "bf16x6", "bf16x9" or "tf32x3"; "exact" on FP32 units and for 16- or 8-bit operands. ``panels`` replace
    the elements of ``b``; then the columns of ``out`` must not be contiguous, unless its rows are.

    Returns False if an operand in two parts has a non-finite value after rounding: ``c`` is then unchanged, and without
    ``c`` the contents of ``out`` are undefined. Also returns False if operands are split and a sum is not finite: the
    result is complete, with NaN or Inf in these elements. Raises ValueError for unsupported types.
    """
    (m, k), n = a.shape, b.shape[1]
    y = operand_of(b) if panels is None else Operand(panels.dtype, 0, 0)
    addend = c if beta else None
    vector = None if bias is None else (casting.name_of(bias.dtype), bias.strides[0] // bias.itemsize)
    job = job_of(
        micro_kernel, m, n, k, operand_of(a), y, operand_of(out), rounding,
        None if addend is None else operand_of(addend), vector, activation, alpha != 1,
    )  # fmt: skip
    places = (None if x is None else _Memory(data_pointer(x)) for x in (a, b, out, addend, bias))
    given: Any = (*places, alpha, beta)
    return execute(job, None, Arguments(*given), panels)


def execute(job: Job, find: FindPanels | None, arguments: Arguments, panels: Panels | None = None) -> bool:
    """Run a job with the result of :func:`gemm`; ``find`` returns the panels of a prepared ``b``."""
    a, b, out, c, bias, alpha, beta = arguments[:7]
    if find is not None and isinstance(b, PreparedView):
        panels = find(b)
    if panels is not None:
        if job.kernels.parts_b > 1 and not panels.finite[0]:
            return False
        b = _Memory(panels.address)  # type: ignore[assignment]  # of which only the address is read
    workers = threads.num_threads() if job.is_shared else 1
    made, packed_bytes, nbytes, tasks, is_short = job.blockings.get(workers) or job.blocking(workers)
    if job.block_columns and not is_short and (panels is None or panels.unpack):
        return _execute_blocks(job, arguments._replace(b=b), panels)
    words, to = Words.from_buffer_copy(made), out.address
    if job.transposed:
        a, b = b, a
    words[J.A], words[J.B], words[J.OUT] = a.address, b.address, to
    if alpha != 1:
        words[J.ALPHA] = float_bits(alpha.real)
    if c is not None and beta:
        words[J.C], words[J.BETA] = c.address, float_bits(beta.real)
    if bias is not None:
        words[J.BIAS] = bias.address
    if job.stream_bytes and not to % job.stream_bytes:
        words[J.STREAM] = 1
    if panels is not None:
        assert not job.transposed, "the panels of b are not those of its transpose"
        packed_bytes = _use_panels(words, panels, packed_bytes)
    workers = min(workers, tasks)
    address, kernels = ctypes.addressof(words), job.kernels
    packed_bytes = -(-packed_bytes // 4096) * 4096
    with buffers.borrow(packed_bytes + workers * nbytes) as memory:
        words[J.B_PACKED], scratch = words[J.B_PACKED] or memory, memory + packed_bytes
        if workers > 1:
            team.run(kernels.macro_kernel, address, workers, scratch, nbytes)
        else:
            kernels.run(address, scratch)
    return not (words[J.NOT_FINITE] or words[J.SUM_NOT_FINITE])


def _use_panels(words: Any, panels: Panels, packed_bytes: int) -> int:
    """Replace the packing of B by packed panels, or by decoding panels of codes; return the bytes of packed B."""
    if panels.unpack:
        words[J.PACK_B], words[J.B_COL_STRIDE], words[J.B_ROW_STRIDE] = panels.unpack
        return packed_bytes
    words[J.B_PACKED] = panels.address
    words[J.PACK_TASKS] -= words[J.PACK_B_TASKS]
    words[J.PACK_B_TASKS] = words[J.B_TASK_STRIP_BYTES] = 0
    return 0


def _execute_blocks(job: Job, arguments: Arguments, panels: Panels | None) -> bool:
    a, b, out, c, bias, alpha, beta = arguments[:7]
    n, done = job.shape[1], True

    def at(x: Any, first: int, stride: int) -> Any:
        return None if x is None else _Memory(x.address + first * job.words.get(stride, 0))

    for first in range(0, n, job.block_columns):
        right = at(a if job.transposed else b, first, J.B_COL_STRIDE)
        left = b if job.transposed else a
        given: Any = (
            *((right, left) if job.transposed else (left, right)), at(out, first, J.OUT_COL_STRIDE),
            at(c, first, J.C_COL_STRIDE), at(bias, first, J.BIAS_COL_STRIDE), alpha, beta,
        )  # fmt: skip
        part = panels and panels.from_column(first)
        done &= execute(block_of(job, min(job.block_columns, n - first)), None, Arguments(*given), part)
    return done


#: Multiplications per product from which threads share each product of a batch instead of the batch.
_LARGE = 1 << 25


class Batch(NamedTuple):
    """The matrices of a batch."""

    matrices: stacks.Matrices  # of a, b, out and c
    #: Precomputed offsets in bytes, shape (count, 4), or None.
    offsets: Any
    batch_count: int
    is_shared: bool  # whether several threads are used
    is_streamed: bool  # whether a result that begins at a cache line is written with non-temporal stores
    dense_bytes: tuple[int, int]  # of a and b
    checks_range: bool  # whether a product whose a or b must be scaled makes the batch incomplete


def prepare(
    micro_kernel: MicroKernel,
    layout: GemmLayout,
    rounding: str,
    problem: GemmProblem | None = None,
    find: FindPanels | None = None,
    *,
    checks_range: bool = False,
) -> functools.partial[Any] | None:
    """Return the function that runs the products of a layout, with the result of :func:`gemm`.

    It is None for a batch of products that are each large enough for several threads, unless codes are decoded. With
    ``checks_range`` a batch is incomplete if float16's range requires scaling of one of its float32 matrices.
    """
    c = bias = activation = None
    has_alpha = False
    if problem is not None:
        layout, c = _with_addend(problem, layout)
        activation, has_alpha = problem.activation, problem.has_alpha
        if problem.bias is not None:
            bias = problem.bias.dtype.label, problem.bias.strides[0]
    a, b, out = (matrix_of(x) for x in (layout.a, layout.b, layout.out))
    if find is not None and problem is not None and problem.b.blocks:
        b = Operand(b.dtype, 0, 0)  # its codes are packed without strides
    job = job_of(
        micro_kernel, layout.m, layout.n, layout.k, a, b, out, rounding,
        None if c is None else matrix_of(c), bias, activation, has_alpha,
    )  # fmt: skip
    if job.transposed:  # the panels of b are not those of its transpose
        find = None
    count = layout.batch_count
    if count == 1:
        return functools.partial(execute, job, find)
    each = layout.m * layout.n * layout.k * job.kernels.parts_a * job.kernels.parts_b
    if (each >= _LARGE or job.stream_bytes) and not (find and problem and problem.b.blocks):
        return None
    job = dataclasses.replace(job, may_be_short=False, block_columns=0, blockings={})
    matrices = layout.a, layout.b, layout.out, c
    offsets = stacks.offsets_of(matrices) if count <= stacks.KEPT else None
    is_shared = count * each >= micro_kernel.shared_from
    dense = _dense_bytes(layout.a), _dense_bytes(layout.b)
    batch = Batch(matrices, offsets, count, is_shared, _is_streamed(job, layout), dense, checks_range)
    return functools.partial(execute_batch, job, batch, find)


def _is_streamed(job: Job, layout: GemmLayout) -> bool:
    """Whether the result is large, and its rows begin at cache lines if the result does."""
    item = layout.out.dtype.itemsize
    strides = job.words[J.OUT_ROW_STRIDE], *(item * x for x in layout.out.batch_strides)
    is_large = layout.batch_count * layout.m * layout.n * item > STREAM_BYTES
    return is_large and job.words[J.OUT_COL_STRIDE] == item and not any(x % 64 for x in strides)


#: Largest matrix that is prefetched while the previous product runs.
_PREFETCHED = 64 << 10


def _dense_bytes(stack: MatrixStack) -> int:
    """Return the bytes of a small matrix without gaps, which can be prefetched in memory order; 0 for others."""
    extent = 1 + (stack.rows - 1) * stack.row_stride + (stack.cols - 1) * stack.col_stride
    nbytes = stack.rows * stack.cols * stack.dtype.itemsize
    return nbytes if extent == stack.rows * stack.cols and nbytes <= _PREFETCHED else 0


def _with_addend(problem: GemmProblem, layout: GemmLayout) -> tuple[GemmLayout, MatrixStack | None]:
    """Return a layout, collapsed only if the addend can be collapsed too, and the addend's matrices."""
    if problem.c is None or not problem.has_beta:
        return layout, None
    c = addend_layout(problem.c, problem.a, problem.b, layout)
    if c is None:
        layout = stacked_layout(problem.a, problem.b, problem.out, layout.out.dtype)
        c = addend_layout(problem.c, problem.a, problem.b, layout)
    return layout, c


def execute_batch(job: Job, batch: Batch, find: FindPanels | None, arguments: Arguments) -> bool:
    """Run the products of a batch, each in one thread; return whether all are complete."""
    panels = None
    if find is not None and isinstance(arguments.b, PreparedView):
        panels = find(arguments.b)
        if panels is not None and job.kernels.parts_b > 1 and not all(panels.finite):
            return False
    if panels is not None:
        arguments = arguments._replace(b=_Memory(0))  # type: ignore[arg-type]  # its offsets are those of the panels
    each: int = imported("lowprec.backends.cpu.packed.macro_kernel:batch_kernel")()
    blocking = job.blockings.get(1) or job.blocking(1)
    words = Words.from_buffer_copy(blocking.words)
    alpha, beta = arguments.alpha.real, arguments.beta.real
    words[J.ALPHA], words[J.BETA] = float_bits(alpha), float_bits(beta)
    words[J.BIAS] = 0 if arguments.bias is None else arguments.bias.address
    words[J.STREAM] = int(batch.is_streamed and not arguments.out.address % 64)
    table = stacks.addresses_of(batch.matrices, arguments, batch.offsets)
    a, b = (J.B, J.A) if job.transposed else (J.A, J.B)
    of_batch = _BatchWords()
    of_batch[J.BATCH_JOB] = ctypes.addressof(words)
    of_batch[J.BATCH_TABLE], of_batch[J.BATCH_COUNT] = data_pointer(table), batch.batch_count
    of_batch[J.BATCH_FIELD_A], of_batch[J.BATCH_FIELD_B] = a, b
    of_batch[J.BATCH_BYTES_A], of_batch[J.BATCH_BYTES_B] = batch.dense_bytes
    of_batch[J.BATCH_SCRATCH] = _JOB_BYTES + blocking.packed_bytes
    if panels is not None:
        table[:, 1] = panels.addresses(table[:, 1])
        of_batch[J.BATCH_BYTES_B] = 0
        _use_panels(words, panels, 0)
        if panels.unpack is None:  # no product packs: all have the same b, the null address
            of_batch[J.BATCH_FIELD_B] = J.B_PACKED
    checks_range = batch.checks_range and panels is None
    if checks_range:
        of_batch[J.BATCH_EXTREMA] = casting.kernels().extrema_address()
    nbytes = _JOB_BYTES + blocking.packed_bytes + blocking.workspace_bytes
    workers = min(threads.num_threads(), batch.batch_count) if batch.is_shared else 1
    with buffers.borrow(workers * nbytes) as memory:
        team.run(each, ctypes.addressof(of_batch), workers, memory, nbytes)
    if checks_range and scaling.needs_scaling(table[:, :2]).any():
        return False
    return not of_batch[J.BATCH_NOT_FINITE]
