"""Whether a product keeps the packed ``b`` of a prepared operand, and whether it uses the zeros of a sparse one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowprec.formats import DType
from lowprec.modes import MathMode, Mode
from lowprec.planning.reasons import Reason, ReasonKind

if TYPE_CHECKING:
    from lowprec.planning.cublaslt.calls import CublasLtCall
    from lowprec.planning.plan import GemmPlan

_SPARSE_UNITS_SINCE = (8, 0)
#: cuSPARSELt's result by type of its operands.
_SPARSE_RESULTS = {DType.FLOAT16: DType.FLOAT16, DType.BFLOAT16: DType.BFLOAT16, DType.INT8: DType.INT32}
#: Extents and leading dimensions of sparse and of dense matrices are multiples of these.
_SPARSE_BYTES, _DENSE_BYTES = 32, 16


_ALL_MODES: frozenset[Mode] = frozenset(MathMode)


def kept_modes(plan: GemmPlan) -> frozenset[Mode]:
    """Return the modes of :func:`lowprec.prepare` for which a product of this plan keeps its packed ``b``."""
    if _reason_kind(plan, plan.mode) is not ReasonKind.KEPT:
        return frozenset()
    return frozenset((plan.mode,)) if plan.mode_has_effect else _ALL_MODES


def reads_codes_of_b(plan: GemmPlan) -> bool:
    return plan.problem.b.blocks is not None and _reason_kind(plan, plan.mode) is ReasonKind.CODES_READ


def prepared_reason(plan: GemmPlan, prepared_for: Mode) -> Reason:
    """Return the reason why the packed ``b`` is kept or not."""
    return Reason.of(_reason_kind(plan, prepared_for), kernel=plan.kernel, mode=plan.mode, prepared=prepared_for)


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


def _reason_kind(plan: GemmPlan, prepared_for: Mode) -> ReasonKind:
    if plan.quantized:
        if plan.quantized.rules[1] is None:
            return _reason_kind(plan.quantized.inner, plan.quantized.inner.mode)
        return ReasonKind.KEPT if plan.mode == prepared_for else ReasonKind.PREPARED_FOR_ANOTHER_MODE
    kernel, b = plan.kernel_row, plan.problem.b
    if plan.call and plan.call.first.codes:
        return ReasonKind.SCALES_KEPT
    if b.blocks is not None or (b.dtype.is_float8 and kernel.decodes_b):
        along_k = b.dtype.is_float8 or (b.blocks is not None and b.blocks.axis == -min(2, len(b.shape)))
        # Widened numbers are rounded, and complex products read planes.
        widens = plan.rounded[1] or plan.compute_dtype.is_complex or (b.blocks and b.blocks.row.has_float_scales)
        decodes = kernel.decodes_b and (b.dtype.is_float8 or (b.blocks and b.blocks.format in kernel.decodes_b))
        reads = decodes and along_k and plan.flops and not widens
        return ReasonKind.CODES_READ if reads else ReasonKind.NOT_KEPT
    if plan.mode_has_effect and plan.mode != prepared_for:
        return ReasonKind.PREPARED_FOR_ANOTHER_MODE
    if not kernel.keeps_b:
        return ReasonKind.NOT_KEPT
    if plan.call:
        rewrites = plan.call.pack_b is not None
    elif kernel.packs:
        rewrites = plan.flops > 0
    else:
        rounds = plan.mode_has_effect and plan.operand_format is not plan.accumulator.format
        converts = rounds or b.dtype is not plan.accumulator
        rewrites = converts and plan.flops > 0 and plan.compute_dtype is not DType.INT8
    return ReasonKind.KEPT if rewrites else ReasonKind.NOTHING_TO_KEEP
