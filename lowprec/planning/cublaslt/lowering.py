"""From a plan to cuBLASLt's arguments: element types, column-major layouts, transposes, epilogue, packing.

cuBLASLt's matrices are column-major. A row-major result is the column-major product of the transposes,
``D^T = B^T A^T``: ``b`` is the first operand, and a bias per column of the result is one per row of D^T, as the
epilogues require. Source: the cuBLAS documentation, ``cublasLtMatmul()`` (tables of element types, epilogues, and the
requirements of the int8, FP8 and FP4 kernels).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from lowprec.formats import BLOCK_FORMATS, DType
from lowprec.modes import row
from lowprec.planning.activations import ACTIVATIONS
from lowprec.planning.cublaslt.calls import (
    BLOCK_CODES,
    PACKED,
    BlockCodes,
    ComplexAs,
    CublasLtCall,
    LtMatrix,
    Op,
    Packing,
    split_batches,
)
from lowprec.planning.cublaslt.scale_modes import fp4_units_multiply, scale_modes
from lowprec.planning.layout import GemmLayout, MatrixStack, OperandSpec, addend_layout
from lowprec.planning.plan import GemmPlan
from lowprec.planning.problem import GemmProblem
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.planning.tensor_cores import BLOCK_SCALES_SINCE
from lowprec.recipes import Rule
from lowprec.util.strides import contiguous_strides

#: Types of D for which bias and activation are fused.
_FUSES = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})

_ALIGNMENT_BYTES = 16

_Name = Literal["a", "b"]

#: Steps of m and n, and of k, in block-scaled products. The documentation of cuBLAS allows more shapes than it computes
#: (vllm issue 4691, nvmath-python issue 52).
_BLOCKED_STEP, _BLOCKED_K_STEP = 16, 32

#: Rows to which int8 operands are padded: cuBLASLt has no algorithm for few rows (PyTorch's ``_int_mm`` needs 17).
_PADDED_ROWS = 32


def reads_k_contiguous(data: DType) -> bool:
    """Whether cuBLASLt's kernels for this type need both operands contiguous along k and aligned to 16 bytes."""
    return data.bits == 8


def reason_to_widen(plan: GemmPlan) -> Reason | None:
    """Return the reason why block-scaled operands are widened; None if there are none, or cuBLASLt multiplies them.

    Each is read in place, contiguous along k, whose last block is padded with zeros.
    """
    operands, layout = (plan.problem.a, plan.problem.b), plan.layout
    a, b = (x.blocks if x.blocks and not x.dtype.is_float8 else None for x in operands)
    if not (a or b):
        return None
    if not (a and b and a.format == b.format in BLOCK_CODES):
        names = [blocks.format if blocks else x.dtype for x, blocks in zip(operands, (a, b), strict=True)]
        return Reason.of(ReasonKind.OTHER_BLOCKS, a=names[0], b=names[1], formats=" or ".join(BLOCK_CODES))
    if (plan.capabilities.compute_capability or (0, 0)) < BLOCK_SCALES_SINCE:
        return Reason.of(ReasonKind.NO_BLOCK_SCALES)
    along_k = a.axis == -1 and b.axis == -min(len(operands[1].shape), 2)
    if not along_k or layout.batch_count > 1 or len(plan.schedule) > 1:
        return Reason.of(ReasonKind.NOT_ONE_PRODUCT_OF_BLOCKS)
    if layout.m % _BLOCKED_STEP or layout.n % _BLOCKED_STEP or _block_extent(layout.k, a.format) % _BLOCKED_K_STEP:
        return Reason.of(ReasonKind.BLOCK_EXTENTS, data=a.format, step=_BLOCKED_STEP, k_step=_BLOCKED_K_STEP)
    return None


def _block_extent(k: int, name: str) -> int:
    block = BLOCK_FORMATS[name].block
    return -(-k // block) * block


def _padded(extent: int, dtype: DType) -> int:
    step = max(_ALIGNMENT_BYTES // dtype.itemsize, 1)
    return -(-extent // step) * step


def _matrix(stack: MatrixStack, batch_stride: int, codes: BlockCodes | None = None) -> LtMatrix:
    assert stack.leading_dimension is not None
    rows, cols = stack.rows, stack.cols
    stored = (cols, rows) if stack.order == "row" else (rows, cols)
    return LtMatrix(stack.dtype, *stored, stack.leading_dimension, batch_stride, codes)


class _Inputs(NamedTuple):
    """A plan, and the values derived from it that all steps of lowering use."""

    plan: GemmPlan
    problem: GemmProblem
    layout: GemmLayout
    data: DType  # element type of the multiplied matrices
    summed_in: DType  # type of the sums, alpha and beta
    as_real: bool  # complex operands are multiplied as real matrices of twice the extents
    k_contiguous: bool
    rows: int  # of the product
    aligned: bool
    addend: MatrixStack | None
    codes: BlockCodes | None  # of block-scaled operands, or of operands that are quantised to NVFP4
    scale_modes: tuple[str, str] | None  # of ``a`` and ``b`` that are quantised to FP8
    gemm_ex: bool

    def rule(self, name: _Name) -> Rule | None:
        """Return how an operand is quantised, None if it is not."""
        return self.plan.quantized.rules[name == "b"] if self.plan.quantized else None

    @property
    def kernels(self) -> str | DType:
        return self.codes.format if self.codes else self.data


def _inputs(plan: GemmPlan, aligned: bool, pad_rows: bool, widen: bool, gemm_ex: bool) -> _Inputs:
    problem, layout, data = plan.problem, plan.layout, plan.multiplied_dtype
    codes = modes = None
    if plan.quantized and data.is_float8:
        modes = scale_modes(plan.quantized.rules, layout, plan.capabilities.compute_capability)
        if widen:  # to a type of all devices
            in_blocks = modes is not None and "VEC128_32F" in modes
            data, modes = DType.FLOAT32 if in_blocks else DType.BFLOAT16, None
    elif plan.quantized and not widen and len(plan.schedule) == 1:
        fp4 = fp4_units_multiply(plan.quantized.rules, layout, plan.capabilities.compute_capability)
        codes = BLOCK_CODES["nvfp4"] if fp4 else None
    if aligned and not widen and problem.a.blocks and reason_to_widen(plan) is None:
        codes = BLOCK_CODES.get(problem.a.blocks.format)
    as_real = plan.compute_dtype.is_complex and not data.is_complex
    k_contiguous = codes is not None or reads_k_contiguous(data)
    c = addend_layout(problem.c, problem.a, problem.b, layout) if problem.has_beta and problem.c else None
    c = c if c and c.blas_expressible else None
    c_fits = not problem.has_beta or (c is not None and _by_column(c).order == "col")
    if c_fits and not (k_contiguous or as_real or problem.bias is not None):
        # As row-major matrices, single columns have leading dimension 1, which excludes all 16-byte accesses.
        layout = replace(layout, b=_by_column(layout.b), out=_by_column(layout.out))
    if c is not None and layout.out.order == "col":
        c = _by_column(c)
    rows = max(layout.m, _PADDED_ROWS) if pad_rows and data is DType.INT8 else layout.m
    summed_in = DType.FLOAT32 if as_real else DType.INT32 if data is DType.INT8 else plan.accumulator
    return _Inputs(
        plan, problem, layout, data, summed_in, as_real, k_contiguous, rows, aligned, c, codes, modes, gemm_ex
    )


def lower(
    plan: GemmPlan, *, aligned: bool = True, fuse: bool = True, pad_rows: bool = False, widen: bool = False,
    gemm_ex: bool = False,
) -> CublasLtCall:  # fmt: skip
    """Return the arguments of cuBLASLt for a plan with a non-empty result and ``k`` > 0.

    ``aligned``: the pointers of a bias, and of operands that are read contiguous along k, are multiples of 16 bytes.
    ``fuse``: cuBLASLt may apply the epilogue. ``pad_rows``: int8 operands are padded to 32 rows. ``widen``:
    block-scaled operands are widened. ``gemm_ex``: cuBLAS multiplies packed operands.
    """
    inputs = _inputs(plan, aligned, pad_rows, widen or gemm_ex, gemm_ex)
    problem, layout = inputs.problem, inputs.layout
    (a, pack_a), (b, pack_b) = _operand(inputs, "a"), _operand(inputs, "b")
    staged = tuple(_reasons_to_stage(inputs, pack_a, pack_b))
    if (gemm_ex or not fuse) and not staged and (problem.has_beta or problem.bias or problem.activation):
        staged = (Reason.of(ReasonKind.NO_FUSED_ALGORITHM),)
    c, d = (None, _temporary(inputs, pack_b)) if staged else (inputs.addend, _result(inputs))
    swapped = d.order == "row"
    first, second = (b, a) if swapped else (a, b)
    strides, runs = split_batches(layout.batch_shape, [x.batch_strides for x in (first, second, c or d, d)])
    call = CublasLtCall(
        compute_type=plan.cublas_compute_type,
        scale_dtype=inputs.summed_in,
        swapped=swapped,
        op_first=_op(first, swapped),
        op_second=_op(second, swapped),
        first=_matrix(first, strides[0], inputs.codes),
        second=_matrix(second, strides[1], inputs.codes),
        d=_matrix(d, strides[3]),
        c=_matrix(c, strides[2]) if c else None,
        batch_count=runs[0].matrices,
        offsets=runs[0].offsets,  # type: ignore[arg-type]  # four each, by construction
        epilogue="DEFAULT" if staged else _epilogue(problem),
        pack_a=pack_a,
        pack_b=pack_b,
        staged=staged,
        gemm_ex=gemm_ex,
    )
    for matrices, offsets in runs[1:]:
        rest = replace(call, batch_count=matrices, offsets=offsets)  # type: ignore[arg-type]
        return replace(call, rest=rest)
    return call


def _op(operand: MatrixStack, swapped: bool) -> Op:
    return "N" if (operand.order == "row") is swapped else "T"


def _epilogue(problem: GemmProblem) -> str:
    activation = ACTIVATIONS[problem.activation].fused if problem.activation else ""
    return "_".join(filter(None, (activation, "BIAS" if problem.bias else ""))) or "DEFAULT"


def _operand(inputs: _Inputs, name: _Name) -> tuple[MatrixStack, Packing | None]:
    stack = inputs.layout.a if name == "a" else inputs.layout.b
    if inputs.codes:
        k, batch = _block_extent(inputs.layout.k, inputs.codes.format), inputs.layout.batch_shape
        packing, rows = None, stack.rows if name == "a" else stack.cols
        if inputs.rule(name):
            packing, _ = _pack(inputs, stack, name, Reason.of(ReasonKind.QUANTIZED), 1)
            rows, k = _padded(rows, DType.INT8), k + -k % _BLOCKED_K_STEP
            packing = replace(packing, dtype=DType.INT8, leading_dimension=k // 2, padded_rows=rows)
            packing = replace(packing, scale_mode=inputs.codes.scale_mode)
        codes = MatrixStack(inputs.data, rows, k, k, 1, batch, (0,) * len(batch), "row", k)
        return (codes if name == "a" else replace(codes.transposed, order="col", leading_dimension=k)), packing
    parts = inputs.plan.split[name == "b"]
    reason = _reason_to_pack(inputs, stack, name, parts)
    if reason is None and inputs.gemm_ex:
        reason = Reason.of(ReasonKind.FOR_GEMM_EX)
    if reason is None:
        return stack, None
    pack, transposed = _pack(inputs, stack, name, reason, parts)
    # Packed matrices are row-major; a packed transpose makes the operand column-major.
    leading, batch = pack.line_stride, inputs.layout.batch_shape
    rows = pack.rows if pack.parts > 1 else pack.padded_rows
    cols = leading if inputs.k_contiguous else pack.source.cols * PACKED[pack.complex_as][1]
    strides = contiguous_strides(batch, pack.matrix_stride) if pack.source.batch_shape else (0,) * len(batch)
    packed = MatrixStack(pack.dtype, rows, cols, leading, 1, batch, strides, "row", leading)
    return (replace(packed.transposed, order="col", leading_dimension=leading) if transposed else packed), pack


def _reason_to_pack(inputs: _Inputs, stack: MatrixStack, name: _Name, parts: int) -> Reason | None:
    """Return the reason to pack an operand, None if cuBLASLt can read it in place."""
    dtype = stack.dtype
    if inputs.rule(name):
        return Reason.of(ReasonKind.QUANTIZED)
    if dtype is not inputs.data and not (inputs.k_contiguous and reads_k_contiguous(dtype)):
        return Reason.of(ReasonKind.OTHER_DTYPE, dtype=dtype, data=inputs.data)
    if parts > 1:
        return Reason.of(ReasonKind.SEVERAL_PARTS)
    if not stack.blas_expressible:
        return Reason.of(ReasonKind.STRIDES)
    if not inputs.k_contiguous:
        return None
    if stack.order != ("row" if name == "a" else "col"):
        return Reason.of(ReasonKind.INNER_CONTIGUOUS, data=inputs.data)
    step = _ALIGNMENT_BYTES
    extents = [inputs.layout.k, stack.leading_dimension or 0, *stack.batch_strides]
    if name == "b":
        extents.append(inputs.layout.n)
    if not inputs.aligned or any(x % step for x in extents):
        return Reason.of(ReasonKind.READ_IN_STEPS, data=inputs.data, step=step)
    if name == "a" and inputs.rows != inputs.layout.m:
        return Reason.of(ReasonKind.PADDED_ROWS, data=inputs.data, rows=inputs.rows)
    return None


def _pack(inputs: _Inputs, stack: MatrixStack, name: _Name, reason: Reason, parts: int) -> tuple[Packing, bool]:
    """Return the packing of an operand, and whether it is transposed."""
    rule, scale_mode = inputs.rule(name), inputs.scale_modes[name == "b"] if inputs.scale_modes else ""
    # Scales of blocks are multiplied in, unless cuBLASLt applies them.
    scales = rule is not None and (bool(scale_mode) or rule.has_tensor_scale or rule.scaling == "vector")
    scaled = inputs.plan.scaled[name == "b"] or scales
    complex_as: ComplexAs = "no"
    if inputs.as_real:
        complex_as = "pairs" if name == "a" else "rotated"
    inner_last = inputs.k_contiguous or scaled or inputs.as_real or rule is not None
    transposed = name == "b" if inner_last else stack.order == "col"
    source = stack.transposed if transposed else stack
    lines, elements = PACKED[complex_as]
    rows, cols = source.rows * lines, source.cols * elements
    # The operands may have two different 8-bit types, which cuBLASLt multiplies unchanged.
    keeps_dtype = inputs.k_contiguous and reads_k_contiguous(stack.dtype)
    dtype_written = stack.dtype if keeps_dtype else inputs.data
    if rule and inputs.data.is_float8 and rule.elements == "e5m2":
        dtype_written = DType.FLOAT8_E5M2
    padded_rows = max(rows, inputs.rows) if name == "a" and inputs.k_contiguous else rows
    side_by_side = parts > 1 and transposed is (name == "b")
    if (name == "b" and inputs.k_contiguous) or (parts > 1 and not side_by_side):
        padded_rows = _padded(rows, dtype_written)
    # The powers of two differ between the products of a batch, so a scaled matrix is packed for each.
    if not any(stack.batch_strides) and (rule or not scaled):
        source = replace(source, batch_shape=(), batch_strides=())
    scheme, split = row(inputs.plan.scheme), parts > 1
    leading = _padded(cols, dtype_written)
    if scale_mode == "VEC32_UE8M0":
        leading += -leading % _BLOCKED_K_STEP
    packing = Packing(
        source, dtype_written, leading, padded_rows, scaled, complex_as,
        parts, scheme.part_exponent if split else 0, summed=parts > scheme.parts,
        as_tf32=split and scheme.uses_tf32, side_by_side=side_by_side, descending=split and name == "a",
        rule=rule, scale_mode=scale_mode, reasons=(reason,),
    )  # fmt: skip
    return packing, transposed


def _by_column(stack: MatrixStack) -> MatrixStack:
    """Return matrices that are one contiguous column as column-major matrices; others unchanged."""
    if stack.cols == 1 and stack.rows > 1 and stack.leading_dimension == 1:
        return replace(stack, order="col", leading_dimension=stack.rows)
    return stack


def _result(inputs: _Inputs) -> MatrixStack:
    """Return the result's matrices, as real numbers if complex operands are multiplied as real ones."""
    out = inputs.layout.out
    if not inputs.as_real:
        return out
    # A complex number is two real ones side by side.
    leading = 2 * (out.leading_dimension or 1)
    strides = tuple(2 * s for s in out.batch_strides)
    return MatrixStack(DType.FLOAT32, out.rows, 2 * out.cols, leading, 1, out.batch_shape, strides, "row", leading)


def _temporary(inputs: _Inputs, pack_b: Packing | None) -> MatrixStack:
    """Return the temporary matrices of a staged product, row-major and contiguous."""
    columns = inputs.layout.n * (2 if inputs.as_real else 1)
    if pack_b and inputs.k_contiguous:
        columns = pack_b.padded_rows
    leading = _padded(columns, inputs.summed_in)
    rows, batch = inputs.rows, inputs.layout.batch_shape
    strides = contiguous_strides(batch, rows * leading)
    return MatrixStack(inputs.summed_in, rows, columns, leading, 1, batch, strides, "row", leading)


def _reasons_to_stage(inputs: _Inputs, pack_a: Packing | None, pack_b: Packing | None) -> Iterator[Reason]:
    """Yield the reasons for which cuBLASLt cannot write the result itself."""
    problem, out = inputs.problem, inputs.layout.out
    products, data = len(inputs.plan.schedule), inputs.data
    if products > 1:
        yield Reason.of(ReasonKind.SEVERAL_PRODUCTS, products=products)
    writes = [d for d in data.results if not d.is_float8] if data.bits <= 16 else [data]
    if inputs.plan.out_dtype not in writes and not inputs.as_real:
        yield Reason.of(ReasonKind.NOT_WRITTEN_AS, data=inputs.kernels, out=inputs.plan.out_dtype)
    if not out.blas_expressible:
        yield Reason.of(ReasonKind.RESULT_STRIDES)
    if inputs.k_contiguous and not (inputs.aligned and _has_aligned_strides(out)):
        yield Reason.of(ReasonKind.WRITTEN_IN_STEPS, data=inputs.kernels, step=_ALIGNMENT_BYTES)
    if any(pack and pack.scaled and (not pack.scale_mode or pack.factor_words) for pack in (pack_a, pack_b)):
        yield Reason.of(ReasonKind.SCALED_OPERANDS)
    if pack_b and inputs.k_contiguous and pack_b.padded_rows != pack_b.rows:
        yield Reason.of(ReasonKind.PADDED_COLUMNS, step=_ALIGNMENT_BYTES)
    if inputs.rows != inputs.layout.m:
        yield Reason.of(ReasonKind.PADDED_ROWS, data=data, rows=inputs.rows)
    if inputs.k_contiguous and out.order == "col":
        yield Reason.of(ReasonKind.ROWS_ONLY, data=inputs.kernels)
    if inputs.as_real and (out.order != "row" or problem.has_alpha or problem.has_beta or problem.bias):
        yield Reason.of(ReasonKind.REAL_PRODUCT)
    yield from _reasons_of_epilogue(inputs)


def _has_aligned_strides(stack: MatrixStack) -> bool:
    """Whether leading dimension and batch strides are multiples of 16 bytes."""
    distances = [stack.leading_dimension or 0, *stack.batch_strides]
    return not any(x * stack.dtype.itemsize % _ALIGNMENT_BYTES for x in distances)


def _reasons_of_epilogue(inputs: _Inputs) -> Iterator[Reason]:
    problem, out, c = inputs.problem, inputs.layout.out, inputs.addend
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
        yield Reason.of(ReasonKind.ACTIVATION_NOT_FUSED, activation=activation, out=inputs.plan.out_dtype)


def _fuses_bias(inputs: _Inputs, bias: OperandSpec) -> bool:
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
