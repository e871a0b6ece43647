"""Whether a product keeps the packed ``b`` of a prepared operand, and whether it uses the zeros of a sparse one."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec.formats import DType
from lowprec.modes import MathMode, Mode
from lowprec.planning.cublaslt.calls import STEP_BYTES, CublasLtCall
from lowprec.planning.plan import GemmPlan
from lowprec.planning.reasons import Reason, ReasonKind

_SPARSE_UNITS_SINCE = (8, 0)
#: cuSPARSELt's result by type of its operands.
_SPARSE_RESULTS = {
    DType.FLOAT16: DType.FLOAT16,
    DType.BFLOAT16: DType.BFLOAT16,
    DType.INT8: DType.INT32,
}
#: Extents and leading dimensions of a sparse matrix are multiples of this, those of dense ones of ``STEP_BYTES``.
_SPARSE_BYTES = 32


_ALL_MODES: frozenset[Mode] = frozenset(MathMode)


def kept_modes(plan: GemmPlan) -> frozenset[Mode]:
    """Return the modes in which a prepared ``b`` stays packed."""
    if _reason_kind(plan, plan.mode) is not ReasonKind.KEPT:
        return frozenset()
    if plan.quantized and plan.quantized.rules[1] is None:
        return kept_modes(plan.quantized.inner)
    if plan.mode_has_effect:
        return frozenset((plan.mode,))
    return _ALL_MODES


def reads_codes_of_b(plan: GemmPlan) -> bool:
    return (
        plan.problem.b.blocks is not None and _reason_kind(plan, plan.mode) is ReasonKind.CODES_READ
    )


def prepared_reason(plan: GemmPlan, prepared_for: Mode) -> Reason:
    """Return the reason why the packed ``b`` is kept or not."""
    kind = _reason_kind(plan, prepared_for)
    return Reason.of(kind, kernel=plan.kernel, mode=plan.mode, prepared=prepared_for)


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
    first = call.first
    second = call.second
    d = call.d
    is_one = call.swapped and len(plan.schedule) == len(call.offsets) == call.batch_count == 1
    is_plain = call.epilogue in ("DEFAULT", "BIAS") and call.c in (None, d)
    if not is_one or not is_plain:
        yield Reason.of(ReasonKind.SPARSE_CALLS)
    if call.pack_b is not None:
        yield Reason.of(ReasonKind.SPARSE_PACKED)
    if first.dtype is not second.dtype or _SPARSE_RESULTS.get(first.dtype) is not d.dtype:
        yield Reason.of(ReasonKind.SPARSE_TYPES, a=second.dtype, b=first.dtype, out=d.dtype)
    matrices = (
        ("b", first, call.op_first, _SPARSE_BYTES),
        ("a", second, call.op_second, STEP_BYTES),
        ("out", d, "N", STEP_BYTES),
    )
    for name, x, op, nbytes in matrices:
        step = nbytes // x.dtype.itemsize
        leading = x.leading_dimension
        if op == "N":
            shape = (x.cols, x.rows)
        else:
            shape = (x.rows, x.cols)
        if any(size % step for size in (*shape, leading)):
            yield Reason.of(
                ReasonKind.SPARSE_EXTENTS, name=name, step=step, shape=shape, leading=leading
            )


def _reason_kind(plan: GemmPlan, prepared_for: Mode) -> ReasonKind:
    is_for_mode = plan.mode == prepared_for
    if plan.quantized:
        (_, rule_of_b), inner, k_piece, _ = plan.quantized
        if rule_of_b is not None:
            return ReasonKind.KEPT if is_for_mode else ReasonKind.PREPARED_FOR_ANOTHER_MODE
        if k_piece:
            return ReasonKind.NOT_KEPT
        return _reason_kind(inner, inner.mode)
    kernel = plan.kernel_row
    b = plan.problem.b
    if plan.call and plan.call.first.codes:
        return ReasonKind.SCALES_KEPT
    if b.blocks is not None or (b.dtype.is_float8 and kernel.decodes_b):
        return ReasonKind.CODES_READ if _reads_codes(plan) else ReasonKind.NOT_KEPT
    if plan.mode_has_effect and not is_for_mode:
        return ReasonKind.PREPARED_FOR_ANOTHER_MODE
    if not kernel.keeps_b:
        return ReasonKind.NOT_KEPT
    return ReasonKind.KEPT if _rewrites_b(plan) else ReasonKind.NOTHING_TO_KEEP


def _reads_codes(plan: GemmPlan) -> bool:
    """Whether the kernel reads the codes of ``b``, which then have scales along k or none."""
    # Widened numbers are rounded, and complex products read planes.
    if plan.rounded[1] or plan.compute_dtype.is_complex or not plan.flops:
        return False
    b = plan.problem.b
    formats = plan.kernel_row.decodes_b
    if b.dtype.is_float8 or b.blocks is None:
        return bool(formats)
    return b.blocks.format in formats and b.blocks.axis == -min(2, len(b.shape))


def _rewrites_b(plan: GemmPlan) -> bool:
    """Whether a product writes ``b`` to new memory, as another type or in another order."""
    if plan.call:
        return plan.call.pack_b is not None
    if not plan.flops:
        return False
    if plan.kernel_row.packs:
        return True
    rounds = plan.mode_has_effect and plan.operand_format is not plan.accumulator.format
    converts = rounds or plan.problem.b.dtype is not plan.accumulator
    return converts and plan.compute_dtype is not DType.INT8
