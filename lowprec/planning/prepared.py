"""Whether a product keeps the packed ``b`` of a prepared operand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowprec.formats import BFLOAT16, FLOAT16, DType
from lowprec.modes import MathMode
from lowprec.planning.reasons import Reason, ReasonKind

if TYPE_CHECKING:
    from lowprec.planning.layout import GemmLayout
    from lowprec.planning.plan import GemmPlan


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


def _reason_kind(plan: GemmPlan, prepared_for: str) -> ReasonKind:
    kernel = plan.kernel_row
    if plan.problem.b.blocks is not None:
        in_columns = plan.layout.out.row_stride == 1 and plan.layout.out.col_stride != 1
        along_k = plan.problem.b.dtype.is_float8 or plan.problem.b.blocks.axis == -min(2, len(plan.problem.b.shape))
        reads = kernel.decodes_b and along_k and plan.flops and not (in_columns or plan.compute_dtype.is_complex)
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
