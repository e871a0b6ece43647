"""Whether a product keeps the packed ``b`` of a prepared operand, and whether it uses the zeros of a sparse one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowprec.formats import BFLOAT16, FLOAT16, DType
from lowprec.modes import MathMode
from lowprec.planning.reasons import Reason, ReasonKind

if TYPE_CHECKING:
    from lowprec.planning.calls import CublasLtCall
    from lowprec.planning.layout import GemmLayout
    from lowprec.planning.plan import GemmPlan

_SPARSE_UNITS_SINCE = (8, 0)
#: cuSPARSELt's result by type of its operands.
_SPARSE_RESULTS = {DType.FLOAT16: DType.FLOAT16, DType.BFLOAT16: DType.BFLOAT16, DType.INT8: DType.INT32}
#: Extents and leading dimensions of sparse and of dense matrices are multiples of these.
_SPARSE_BYTES, _DENSE_BYTES = 32, 16


def kept_modes(plan: GemmPlan) -> frozenset[str]:
    """Return the modes of :func:`lowprec.prepare` for which a product of this plan keeps its packed ``b``."""
    if _reason_kind(plan, plan.mode) not in (ReasonKind.KEPT, ReasonKind.CODES_KEPT):
        return frozenset()
    return frozenset((plan.mode,) if plan.mode_has_effect and not plan.problem.b.blocks else MathMode)


def reads_codes_of_b(plan: GemmPlan) -> bool:
    """Whether the kernel reads the codes of ``b`` instead of widened numbers."""
    return _reason_kind(plan, plan.mode) is ReasonKind.CODES_KEPT


def prepared_reason(plan: GemmPlan, prepared_for: str) -> Reason:
    """Return the reason why the packed ``b`` is kept or not."""
    return Reason.of(_reason_kind(plan, prepared_for), kernel=plan.kernel, mode=plan.mode, prepared=prepared_for)


def multiplies_b(layout: GemmLayout) -> bool:
    """Whether ``b`` is the matrix in a product of a matrix and a few vectors."""
    return layout.n > layout.m


def sparse_reason(plan: GemmPlan, call: CublasLtCall | None = None) -> Reason:
    """Return how a product uses the zeros of a 2:4 sparse ``b``; ``call`` replaces the plan's own.

    cuSPARSELt multiplies the matrices of a call of cuBLASLt, with ``b`` as the first operand. Source: the cuSPARSELt
    documentation, ``cusparseLtStructuredDescriptorInit()`` and ``cusparseLtMatmulDescriptorInit()``.
    """
    call = call or plan.call
    if call is None:
        return Reason.of(ReasonKind.ZEROS_MULTIPLIED, kernel=plan.kernel)
    for why in _against_sparse(plan, call):
        return Reason.of(ReasonKind.DENSE_PRODUCT, why=why)
    # Half of the elements, and 2 bits for the position of each.
    return Reason.of(ReasonKind.SPARSE, share=0.5 + 0.125 / call.first.dtype.itemsize)


def _against_sparse(plan: GemmPlan, call: CublasLtCall) -> Iterator[Reason]:
    capability = plan.capabilities.compute_capability or _SPARSE_UNITS_SINCE
    if capability < _SPARSE_UNITS_SINCE:
        yield Reason.of(ReasonKind.NO_SPARSE_UNITS, capability="{}.{}".format(*capability))
    first, second, d = call.first, call.second, call.d
    is_one = call.swapped and len(plan.schedule) == len(call.offsets) == call.batch_count == 1
    if not is_one or call.epilogue not in ("DEFAULT", "BIAS") or call.c not in (None, d):
        yield Reason.of(ReasonKind.SPARSE_CALLS)
    if first.dtype is DType.FLOAT32:
        yield Reason.of(ReasonKind.SPARSE_FLOAT32)
    if first.dtype is not second.dtype or _SPARSE_RESULTS.get(first.dtype) is not d.dtype:
        yield Reason.of(ReasonKind.SPARSE_TYPES, a=second.dtype, b=first.dtype, out=d.dtype)
    matrices = (
        ("b", first, call.op_first, _SPARSE_BYTES), ("a", second, call.op_second, _DENSE_BYTES),
        ("out", d, "N", _DENSE_BYTES),
    )  # fmt: skip
    for name, x, op, nbytes in matrices:
        step, leading = nbytes // x.dtype.itemsize, x.leading_dimension
        shape = (x.cols, x.rows) if op == "N" else (x.rows, x.cols)
        if any(size % step for size in (*shape, leading)):
            yield Reason.of(ReasonKind.SPARSE_EXTENTS, name=name, step=step, shape=shape, leading=leading)


def _reason_kind(plan: GemmPlan, prepared_for: str) -> ReasonKind:
    kernel = plan.kernel_row
    if plan.call and plan.call.first.codes:
        return ReasonKind.SCALES_KEPT
    if plan.problem.b.blocks is not None:
        in_columns = plan.layout.out.row_stride == 1 and plan.layout.out.col_stride != 1
        along_k = plan.problem.b.dtype.is_float8 or plan.problem.b.blocks.axis == -min(2, len(plan.problem.b.shape))
        # Otherwise the product is not one job of the kernel.
        apart = plan.rounded[1] or plan.out_dtype.is_float8 or (plan.fallback and plan.problem.has_beta)
        reads = kernel.decodes_b and along_k and plan.flops
        reads = reads and not (in_columns or plan.compute_dtype.is_complex or apart)
        return ReasonKind.CODES_KEPT if reads else ReasonKind.NOT_KEPT
    if plan.mode_has_effect and plan.mode != prepared_for:
        return ReasonKind.PREPARED_FOR_ANOTHER_MODE
    if not kernel.keeps_b:
        return ReasonKind.NOT_KEPT
    if kernel.micro_kernel:
        out = plan.layout.out
        if out.row_stride == 1 and out.col_stride != 1:
            return ReasonKind.TRANSPOSED_RESULT
        return ReasonKind.KEPT if plan.flops else ReasonKind.NOTHING_TO_KEEP
    if kernel.vectors:
        # The rounded b is kept only if b is the matrix, and rounding halves its bytes.
        halves = plan.problem.b.dtype is DType.FLOAT32 and plan.operand_format in (BFLOAT16, FLOAT16)
        return ReasonKind.KEPT if halves and multiplies_b(plan.layout) else ReasonKind.NOT_KEPT
    if plan.call:
        rewrites = plan.call.pack_b is not None
    else:
        rounds = plan.mode_has_effect and plan.operand_format is not plan.accumulator.format
        converts = rounds or plan.problem.b.dtype is not plan.accumulator
        rewrites = converts and plan.flops > 0 and plan.compute_dtype is not DType.INT8
    return ReasonKind.KEPT if rewrites else ReasonKind.NOTHING_TO_KEEP
