"""Whether a product keeps its packed form of a prepared operand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowprec.formats import BFLOAT16, FLOAT16, DType
from lowprec.modes import MathMode
from lowprec.planning.reasons import Reason, ReasonKind

if TYPE_CHECKING:
    from lowprec.planning.layout import GemmLayout
    from lowprec.planning.plan import GemmPlan


def kept_modes(plan: GemmPlan) -> frozenset[str]:
    """Return the modes: if ``b`` was prepared for one, a product of this plan keeps its packed form."""
    if _why(plan, plan.mode) is not ReasonKind.KEPT:
        return frozenset()
    return frozenset((plan.mode,) if plan.mode_has_effect else MathMode)


def prepared_reason(plan: GemmPlan, prepared_for: str) -> Reason:
    """Return the same as a reason, why or why not."""
    return Reason.of(_why(plan, prepared_for), kernel=plan.kernel, mode=plan.mode, prepared=prepared_for)


def multiplies_b(layout: GemmLayout) -> bool:
    """Whether of a matrix and a few vectors ``b`` is the matrix."""
    return layout.n > layout.m


def _why(plan: GemmPlan, prepared_for: str) -> ReasonKind:
    kernel = plan.kernel_row
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
        # Kept where b is a matrix that takes half the bytes to read once it is rounded.
        halves = plan.problem.b.dtype is DType.FLOAT32 and plan.operand_format in (BFLOAT16, FLOAT16)
        return ReasonKind.KEPT if halves and multiplies_b(plan.layout) else ReasonKind.NOT_KEPT
    rewrites = plan.call.pack_b if plan.call else _converts_b(plan)
    return ReasonKind.KEPT if rewrites else ReasonKind.NOTHING_TO_KEEP


def _converts_b(plan: GemmPlan) -> bool:
    if not plan.flops or plan.compute_dtype is DType.INT8:
        return False
    rounds = plan.mode_has_effect and plan.operand_format is not plan.accumulator.format
    return rounds or plan.problem.b.dtype is not plan.accumulator
