"""A plan as cuBLASLt's arguments: element types, column-major layouts, transposes, epilogue, and operands to pack.

cuBLASLt's matrices are column-major. A row-major result is the column-major product of the transposes,
``D^T = B^T A^T``: ``b`` is the first operand, and a bias per column of the result is one per row of D^T, as the
epilogues require. Source: the cuBLAS documentation, ``cublasLtMatmul()`` (tables of element types, epilogues, and the
requirements of the int8 and FP8 kernels).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from lowprec.formats import DType
from lowprec.planning.batches import split_batches
from lowprec.planning.calls import ComplexAs, CublasLtCall, LtMatrix, Op, Pack
from lowprec.planning.layout import GemmLayout, MatrixStack, OperandSpec, addend_layout
from lowprec.planning.plan import GemmPlan
from lowprec.planning.problem import Activation, GemmProblem
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.util.strides import contiguous_strides

#: Types of D on which bias and activation are fused.
_FUSES = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})

#: Those that are epilogues of cuBLASLt, by the same names; a kernel of our own applies any other.
_FUSED_ACTIVATIONS = frozenset({Activation.RELU, Activation.GELU})

_ALIGNMENT_BYTES = 16

#: Rows with which int8 kernels are found that there are not for fewer (PyTorch's ``_int_mm`` asks for 17 and more).
_PADDED_ROWS = 32


def reads_k_contiguous(data: DType) -> bool:
    """Whether kernels for this type need both operands contiguous along k and aligned to 16 bytes throughout."""
    return data.bits == 8


def _writes(data: DType) -> tuple[DType, ...]:
    return data.results if data.bits <= 16 else (data,)


def _padded(extent: int, dtype: DType) -> int:
    step = max(_ALIGNMENT_BYTES // dtype.itemsize, 1)
    return -(-extent // step) * step


class _Operand(NamedTuple):
    """An operand as cuBLASLt reads it, packed where ``pack`` is not None."""

    stack: MatrixStack
    pack: Pack | None = None


def _matrix(stack: MatrixStack, batch_stride: int) -> LtMatrix:
    assert stack.leading_dimension is not None
    rows, cols = stack.rows, stack.cols
    stored = (cols, rows) if stack.order == "row" else (rows, cols)
    return LtMatrix(stack.dtype, *stored, stack.leading_dimension, batch_stride)


class _Terms(NamedTuple):
    plan: GemmPlan
    problem: GemmProblem
    layout: GemmLayout
    data: DType  # of the multiplied numbers, complex64 where they stay complex
    summed_in: DType  # of the sums, and of alpha and beta
    as_real: bool  # whether complex operands are multiplied as real matrices of twice the extents
    k_contiguous: bool
    rows: int  # of the product
    aligned: bool
    addend: MatrixStack | None


def _terms(plan: GemmPlan, aligned: bool, pad_rows: bool) -> _Terms:
    problem, layout, data = plan.problem, plan.layout, plan.multiplied_dtype
    as_real, k_contiguous = (plan.compute_dtype.is_complex and not data.is_complex, reads_k_contiguous(data))
    c = _addend(plan)
    follows = not problem.has_beta or (c is not None and _by_column(c).order == "col")
    if follows and not (k_contiguous or as_real or problem.bias is not None):
        # As a row-major matrix, one column has a leading dimension of 1 and a product of one row, for which no
        # algorithm reads 16 bytes at once.
        layout = replace(layout, b=_by_column(layout.b), out=_by_column(layout.out))
    if c is not None and layout.out.order == "col":
        c = _by_column(c)
    rows = max(layout.m, _PADDED_ROWS) if pad_rows and data is DType.INT8 else layout.m
    summed_in = DType.FLOAT32 if as_real else plan.accumulator
    return _Terms(plan, problem, layout, data, summed_in, as_real, k_contiguous, rows, aligned, c)


def lower(plan: GemmPlan, *, aligned: bool = True, fuse: bool = True, pad_rows: bool = False) -> CublasLtCall:
    """Return the arguments of cuBLASLt for a plan whose result has elements and whose ``k`` is not 0.

    ``aligned``: the pointers that must be (see :func:`reads_k_contiguous`, and that of a bias) are multiples of 16
    bytes; ``fuse``: the call itself may add and activate; ``pad_rows``: products of int8 have at least 32 rows.
    """
    terms = _terms(plan, aligned, pad_rows)
    problem, layout = terms.problem, terms.layout
    a, b = _operand(terms, "a"), _operand(terms, "b")
    staged = tuple(_reasons_to_stage(terms, a, b))
    if not (fuse or staged) and (problem.has_beta or problem.bias or problem.activation):
        staged = (Reason.of(ReasonKind.NO_FUSED_ALGORITHM),)
    c, d = (None, _temporary(terms, b)) if staged else (terms.addend, _result(terms))
    swapped = d.order == "row"
    first, second = (b.stack, a.stack) if swapped else (a.stack, b.stack)
    stacks = [first, second, *([c] if c else []), d]
    batches = split_batches(layout.batch_shape, [x.batch_strides for x in stacks])
    strides = batches.strides if c else (*batches.strides[:2], 0, batches.strides[2])
    offsets = tuple(o if c else (*o[:2], 0, o[2]) for o in batches.offsets)
    return CublasLtCall(
        compute_type=plan.cublas_compute_type,
        scale_dtype=terms.summed_in,
        swapped=swapped,
        op_first=_op(first, swapped),
        op_second=_op(second, swapped),
        first=_matrix(first, strides[0]),
        second=_matrix(second, strides[1]),
        d=_matrix(d, strides[3]),
        c=_matrix(c, strides[2]) if c else None,
        batch_count=batches.count,
        offsets=offsets,  # type: ignore[arg-type]  # four each, by construction
        epilogue="DEFAULT" if staged else _epilogue(problem),
        pack_a=a.pack,
        pack_b=b.pack,
        staged=staged,
    )


def _op(operand: MatrixStack, swapped: bool) -> Op:
    return "N" if (operand.order == "row") is swapped else "T"


def _epilogue(problem: GemmProblem) -> str:
    activation = problem.activation.name if problem.activation else ""
    return "_".join(filter(None, (activation, "BIAS" if problem.bias else ""))) or "DEFAULT"


def _operand(terms: _Terms, name: Literal["a", "b"]) -> _Operand:
    stack = terms.layout.a if name == "a" else terms.layout.b
    parts = terms.plan.split[name == "b"]
    reason = _reason_to_pack(terms, stack, name, parts)
    if reason is None:
        return _Operand(stack)
    pack = _pack(terms, stack, name, reason, parts)
    # Packed matrices are row-major; if they are transposes, the operand is column-major.
    rows, cols, leading = pack.padded_rows, pack.cols, pack.line_stride
    if terms.k_contiguous:
        cols = leading
    if pack.parts > 1:
        rows = pack.rows
    order: Literal["row", "col"] = "col" if pack.transposed else "row"
    extents = (cols, rows) if pack.transposed else (rows, cols)
    steps = (1, leading) if pack.transposed else (leading, 1)
    batch = terms.layout.batch_shape
    strides = (0,) * len(batch)
    if pack.batch_shape:
        strides = contiguous_strides(pack.batch_shape, pack.matrix_stride)
    written = MatrixStack(pack.dtype, *extents, *steps, batch, strides, order, leading)
    return _Operand(written, pack)


def _reason_to_pack(terms: _Terms, stack: MatrixStack, name: Literal["a", "b"], parts: int) -> Reason | None:
    """Return why an operand cannot be read in place, None if it can."""
    dtype = stack.dtype
    if dtype is not terms.data and not (terms.k_contiguous and reads_k_contiguous(dtype)):
        return Reason.of(ReasonKind.OTHER_DTYPE, dtype=dtype, data=terms.data)
    if parts > 1:
        return Reason.of(ReasonKind.SEVERAL_PARTS)
    if not stack.blas_expressible:
        return Reason.of(ReasonKind.STRIDES)
    if not terms.k_contiguous:
        return None
    if stack.order != ("row" if name == "a" else "col"):
        return Reason.of(ReasonKind.INNER_CONTIGUOUS, data=terms.data)
    step = _ALIGNMENT_BYTES
    extents = [terms.layout.k, stack.leading_dimension or 0, *stack.batch_strides]
    if name == "b":
        extents.append(terms.layout.n)
    if not terms.aligned or any(x % step for x in extents):
        return Reason.of(ReasonKind.READ_IN_STEPS, data=terms.data, step=step)
    if name == "a" and terms.rows != terms.layout.m:
        return Reason.of(ReasonKind.PADDED_ROWS, data=terms.data, rows=terms.rows)
    return None


def _pack(terms: _Terms, stack: MatrixStack, name: Literal["a", "b"], reason: Reason, parts: int) -> Pack:
    scaled = terms.plan.scaled[name == "b"]
    complex_as: ComplexAs = "no"
    if terms.as_real:
        complex_as = "pairs" if name == "a" else "rotated"
    inner_last = terms.k_contiguous or scaled or terms.as_real
    transposed = name == "b" if inner_last else stack.order == "col"
    rows, cols = (stack.cols, stack.rows) if transposed else (stack.rows, stack.cols)
    if terms.as_real:
        rows, cols = rows * (2 if name == "b" else 1), cols * 2
    # The 8-bit types may be mixed: each operand keeps its own.
    keeps_dtype = terms.k_contiguous and reads_k_contiguous(stack.dtype)
    dtype_written = stack.dtype if keeps_dtype else terms.data
    padded_rows = max(rows, terms.rows) if name == "a" and terms.k_contiguous else rows
    side_by_side = parts > 1 and transposed is (name == "b")
    if (name == "b" and terms.k_contiguous) or (parts > 1 and not side_by_side):
        padded_rows = _padded(rows, dtype_written)
    # Powers of two are kept per product, so that scaled matrices are not shared.
    shared = not any(stack.batch_strides) and not scaled
    batch = () if shared else terms.layout.batch_shape
    leading = _padded(cols, dtype_written)
    return Pack(
        dtype_written, transposed, rows, cols, leading, padded_rows, batch, scaled, complex_as, reason,
        parts, side_by_side,
    )  # fmt: skip


def _by_column(stack: MatrixStack) -> MatrixStack:
    """Return matrices of one contiguous column as column-major, all others as they are."""
    if stack.cols == 1 and stack.rows > 1 and stack.leading_dimension == 1:
        return replace(stack, order="col", leading_dimension=stack.rows)
    return stack


def _addend(plan: GemmPlan) -> MatrixStack | None:
    problem, layout = plan.problem, plan.layout
    if not problem.has_beta or problem.c is None:
        return None
    c = addend_layout(problem.c, problem.a, problem.b, layout)
    return c if c is not None and c.blas_expressible else None


def _result(terms: _Terms) -> MatrixStack:
    """Return the caller's array, as real numbers where the product is one of real numbers."""
    out = terms.layout.out
    if not terms.as_real:
        return out
    # A complex number is two real ones side by side.
    leading = 2 * (out.leading_dimension or 1)
    strides = tuple(2 * s for s in out.batch_strides)
    return MatrixStack(DType.FLOAT32, out.rows, 2 * out.cols, leading, 1, out.batch_shape, strides, "row", leading)


def _temporary(terms: _Terms, b: _Operand) -> MatrixStack:
    """Return the temporary matrices of a staged product, one after another and row-major."""
    columns = terms.layout.n * (2 if terms.as_real else 1)
    if b.pack and terms.k_contiguous:
        columns = b.pack.padded_rows
    leading = _padded(columns, terms.summed_in)
    rows, batch = terms.rows, terms.layout.batch_shape
    strides = contiguous_strides(batch, rows * leading)
    return MatrixStack(terms.summed_in, rows, columns, leading, 1, batch, strides, "row", leading)


def _reasons_to_stage(terms: _Terms, a: _Operand, b: _Operand) -> Iterator[Reason]:
    """Yield why cuBLASLt cannot write the result itself."""
    problem, out = terms.problem, terms.layout.out
    products = len(terms.plan.schedule)
    if products > 1:
        yield Reason.of(ReasonKind.SEVERAL_PRODUCTS, products=products)
    if terms.plan.out_dtype not in _writes(terms.data) and not terms.as_real:
        yield Reason.of(ReasonKind.NOT_WRITTEN_AS, data=terms.data, out=terms.plan.out_dtype)
    if not out.blas_expressible:
        yield Reason.of(ReasonKind.RESULT_STRIDES)
    if terms.k_contiguous and not (terms.aligned and _in_steps(out)):
        yield Reason.of(ReasonKind.WRITTEN_IN_STEPS, data=terms.data, step=_ALIGNMENT_BYTES)
    if any(x.pack is not None and x.pack.scaled for x in (a, b)):
        yield Reason.of(ReasonKind.SCALED_OPERANDS)
    if b.pack and terms.k_contiguous and b.pack.padded_rows != b.pack.rows:
        yield Reason.of(ReasonKind.PADDED_COLUMNS, step=_ALIGNMENT_BYTES)
    if terms.rows != terms.layout.m:
        yield Reason.of(ReasonKind.PADDED_ROWS, data=terms.data, rows=terms.rows)
    if terms.k_contiguous and out.order == "col":
        yield Reason.of(ReasonKind.ROWS_ONLY, data=terms.data)
    if terms.as_real and (out.order != "row" or problem.has_alpha or problem.has_beta or problem.bias):
        yield Reason.of(ReasonKind.REAL_PRODUCT)
    yield from _reasons_of_epilogue(terms)


def _in_steps(stack: MatrixStack) -> bool:
    """Whether the distances between columns and between matrices are multiples of 16 bytes."""
    distances = [stack.leading_dimension or 0, *stack.batch_strides]
    return not any(x * stack.dtype.itemsize % _ALIGNMENT_BYTES for x in distances)


def _reasons_of_epilogue(terms: _Terms) -> Iterator[Reason]:
    problem, out, c = terms.problem, terms.layout.out, terms.addend
    if problem.has_beta:
        fits = c is not None and c.dtype is terms.plan.out_dtype and c.order == out.order
        if c is not None and terms.k_contiguous:
            fits = fits and _in_steps(c)
        if not fits:
            yield Reason.of(ReasonKind.ADDEND_DIFFERS)
    if problem.bias is not None and not _fuses_bias(terms, problem.bias):
        yield Reason.of(ReasonKind.BIAS_NOT_FUSED)
    activation = problem.activation
    if activation and (activation not in _FUSED_ACTIVATIONS or terms.plan.out_dtype not in _FUSES):
        yield Reason.of(ReasonKind.ACTIVATION_NOT_FUSED, activation=activation, out=terms.plan.out_dtype)


def _fuses_bias(terms: _Terms, bias: OperandSpec) -> bool:
    return (
        terms.plan.out_dtype in _FUSES
        and not (terms.k_contiguous and terms.plan.out_dtype is DType.FLOAT32)
        and bias.dtype is terms.plan.out_dtype
        and terms.layout.out.order == "row"
        and bias.strides == (1,)
        and terms.aligned
    )
