"""From a plan to cuBLASLt's arguments: element types, column-major layouts, transposes, epilogue, packing.

cuBLASLt's matrices are column-major. A row-major result is the column-major product of the transposes,
``D^T = B^T A^T``: ``b`` is the first operand, and a bias per column of the result is one per row of D^T, as the
epilogues require. Source: the cuBLAS documentation, ``cublasLtMatmul()`` (tables of element types, epilogues, and the
requirements of the int8, FP8 and FP4 kernels).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowprec.formats import BlockFormat, DType
from lowprec.planning.activations import ACTIVATIONS
from lowprec.planning.cublaslt.calls import (
    STEP_BYTES,
    CublasLtCall,
    LtMatrix,
    Op,
    Packing,
    split_batches,
)
from lowprec.planning.layout import MatrixStack, OperandSpec
from lowprec.planning.lowering.inputs import Inputs, inputs_of, padded
from lowprec.planning.lowering.operands import lowered_operand
from lowprec.planning.plan import GemmPlan
from lowprec.planning.problem import GemmProblem
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.util.strides import contiguous_strides

#: Types of D for which bias and activation are fused.
_FUSES = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


def lower(
    plan: GemmPlan,
    *,
    aligned: bool = True,
    fuse: bool = True,
    pad_rows: bool = False,
    widen: bool = False,
) -> CublasLtCall:
    """Return the arguments of cuBLASLt for a plan with a non-empty result and ``k`` > 0.

    ``aligned``: the pointers of a bias, and of operands that are read contiguous along k, are multiples of 16 bytes.
    ``fuse``: cuBLASLt may apply the epilogue. ``pad_rows``: int8 operands are padded to 32 rows. ``widen``:
    block-scaled operands are widened.
    """
    inputs = inputs_of(plan, aligned, pad_rows, widen)
    problem = inputs.problem
    a, pack_a = lowered_operand(inputs, "a")
    b, pack_b = lowered_operand(inputs, "b")
    staged = tuple(_reasons_to_stage(inputs, pack_a, pack_b))
    if not fuse and not staged and (problem.has_beta or problem.bias or problem.activation):
        staged = (Reason.of(ReasonKind.NO_FUSED_ALGORITHM),)
    if staged:
        c = None
        d = _temporary(inputs, pack_b)
    else:
        c = inputs.addend
        d = _result(inputs)
    return _call(inputs, {"a": (a, pack_a), "b": (b, pack_b)}, c, d, staged)


def _call(
    inputs: Inputs,
    operands: dict[str, tuple[MatrixStack, Packing | None]],
    c: MatrixStack | None,
    d: MatrixStack,
    staged: tuple[Reason, ...],
) -> CublasLtCall:
    """Return the call for operands, an addend and a result; a batch with a rest is two calls."""
    first, pack_a = operands["a"]
    second, pack_b = operands["b"]
    swapped = d.order == "row"
    if swapped:
        first, second = second, first
    stacks = [x.batch_strides for x in (first, second, c or d, d)]
    strides, runs = split_batches(inputs.layout.batch_shape, stacks)
    batch_count, offsets = runs[0]
    call = CublasLtCall(
        compute_type=inputs.plan.cublas_compute_type,
        scale_dtype=inputs.summed_in,
        swapped=swapped,
        op_first=_op(first, swapped),
        op_second=_op(second, swapped),
        first=_matrix(first, strides[0], inputs.codes),
        second=_matrix(second, strides[1], inputs.codes),
        d=_matrix(d, strides[3]),
        c=_matrix(c, strides[2]) if c else None,
        batch_count=batch_count,
        offsets=offsets,  # type: ignore[arg-type]  # four each, by construction
        epilogue="DEFAULT" if staged else _epilogue(inputs.problem),
        pack_a=pack_a,
        pack_b=pack_b,
        staged=staged,
    )
    for matrices, offsets in runs[1:]:
        rest = replace(call, batch_count=matrices, offsets=offsets)  # type: ignore[arg-type]
        return replace(call, rest=rest)
    return call


def _matrix(stack: MatrixStack, batch_stride: int, codes: BlockFormat | None = None) -> LtMatrix:
    assert stack.leading_dimension is not None
    rows = stack.rows
    cols = stack.cols
    if stack.order == "row":
        stored = (cols, rows)
    else:
        stored = (rows, cols)
    return LtMatrix(stack.dtype, *stored, stack.leading_dimension, batch_stride, codes)


def _op(operand: MatrixStack, swapped: bool) -> Op:
    return "N" if (operand.order == "row") is swapped else "T"


def _epilogue(problem: GemmProblem) -> str:
    names = []
    if problem.activation:
        names.append(ACTIVATIONS[problem.activation].fused)
    if problem.bias:
        names.append("BIAS")
    return "_".join(names) or "DEFAULT"


def _result(inputs: Inputs) -> MatrixStack:
    """Return the result's matrices, as real numbers if complex operands are multiplied as real ones."""
    out = inputs.layout.out
    if not inputs.as_real:
        return out
    # A complex number is two real ones side by side.
    leading = 2 * (out.leading_dimension or 1)
    strides = tuple(2 * s for s in out.batch_strides)
    return MatrixStack(
        DType.FLOAT32, out.rows, 2 * out.cols, leading, 1, out.batch_shape, strides, "row", leading
    )


def _temporary(inputs: Inputs, pack_b: Packing | None) -> MatrixStack:
    """Return the temporary matrices of a staged product, row-major and contiguous."""
    columns = inputs.layout.n * (2 if inputs.as_real else 1)
    if pack_b and inputs.k_contiguous:
        columns = pack_b.padded_rows
    leading = padded(columns, inputs.summed_in)
    rows = inputs.rows
    batch = inputs.layout.batch_shape
    strides = contiguous_strides(batch, rows * leading)
    return MatrixStack(inputs.summed_in, rows, columns, leading, 1, batch, strides, "row", leading)


def _reasons_to_stage(
    inputs: Inputs, pack_a: Packing | None, pack_b: Packing | None
) -> Iterator[Reason]:
    """Yield the reasons for which cuBLASLt cannot write the result itself."""
    problem = inputs.problem
    out = inputs.layout.out
    products = len(inputs.plan.schedule)
    data = inputs.data
    if products > 1:
        yield Reason.of(ReasonKind.SEVERAL_PRODUCTS, products=products)
    if data.bits <= 16:
        writes = [d for d in data.results if not d.is_float8]
    else:
        writes = [data]
    if inputs.plan.out_dtype not in writes and not inputs.as_real:
        yield Reason.of(ReasonKind.NOT_WRITTEN_AS, data=inputs.kernels, out=inputs.plan.out_dtype)
    if not out.blas_expressible:
        yield Reason.of(ReasonKind.RESULT_STRIDES)
    if inputs.k_contiguous and not (inputs.aligned and _has_aligned_strides(out)):
        yield Reason.of(ReasonKind.WRITTEN_IN_STEPS, data=inputs.kernels, step=STEP_BYTES)
    if any(pack and pack.has_factors for pack in (pack_a, pack_b)):
        yield Reason.of(ReasonKind.SCALED_OPERANDS)
    if pack_b and inputs.k_contiguous and pack_b.padded_rows != pack_b.rows:
        yield Reason.of(ReasonKind.PADDED_COLUMNS, step=STEP_BYTES)
    if inputs.rows != inputs.layout.m:
        yield Reason.of(ReasonKind.PADDED_ROWS, data=data, rows=inputs.rows)
    if inputs.k_contiguous and out.order == "col":
        yield Reason.of(ReasonKind.ROWS_ONLY, data=inputs.kernels)
    has_terms = problem.has_alpha or problem.has_beta or problem.bias is not None
    if inputs.as_real and (out.order != "row" or has_terms):
        yield Reason.of(ReasonKind.REAL_PRODUCT)
    yield from _reasons_of_epilogue(inputs)


def _has_aligned_strides(stack: MatrixStack) -> bool:
    """Whether leading dimension and batch strides are multiples of 16 bytes."""
    distances = [stack.leading_dimension or 0, *stack.batch_strides]
    return not any(x * stack.dtype.itemsize % STEP_BYTES for x in distances)


def _reasons_of_epilogue(inputs: Inputs) -> Iterator[Reason]:
    problem = inputs.problem
    out = inputs.layout.out
    c = inputs.addend
    if problem.has_beta:
        fits = c is not None and c.dtype is inputs.plan.out_dtype and c.order == out.order
        if c is not None and inputs.k_contiguous:
            fits = fits and _has_aligned_strides(c)
        if not fits:
            yield Reason.of(ReasonKind.ADDEND_DIFFERS)
    if problem.bias is not None and not _fuses_bias(inputs, problem.bias):
        yield Reason.of(ReasonKind.BIAS_NOT_FUSED)
    activation = problem.activation
    if activation and (not ACTIVATIONS[activation].fused or inputs.plan.out_dtype not in _FUSES):
        yield Reason.of(
            ReasonKind.ACTIVATION_NOT_FUSED, activation=activation, out=inputs.plan.out_dtype
        )


def _fuses_bias(inputs: Inputs, bias: OperandSpec) -> bool:
    return (
        inputs.plan.out_dtype in _FUSES
        and not (inputs.k_contiguous and inputs.plan.out_dtype is DType.FLOAT32)
        and bias.dtype is inputs.plan.out_dtype
        and inputs.layout.out.order == "row"
        and bias.strides == (1,)
        and inputs.aligned
        # cuBLASLt refuses a bias alone for FP4 operands (CUDALibrarySamples issue 303).
        and not (inputs.codes and inputs.codes.bits < 8 and not inputs.problem.activation)
    )
