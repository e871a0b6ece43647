"""The operands of a cuBLASLt call: read in place, packed, or as codes; with the reasons to pack them."""

from __future__ import annotations

from dataclasses import replace

from lowprec.formats import BlockFormat, DType
from lowprec.modes import row
from lowprec.planning.cublaslt.calls import PACKED, STEP_BYTES, ComplexAs, Packing
from lowprec.planning.layout import MatrixStack, stacked_layout
from lowprec.planning.lowering.inputs import (
    BLOCKED_K_STEP,
    Inputs,
    Name,
    multiple,
    padded,
    reads_k_contiguous,
)
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.recipes import Rule
from lowprec.util.strides import contiguous_strides

#: Modes of the scales of blocks of FP8.
_FLOAT8_BLOCKS = ("VEC32_UE8M0", "VEC128_32F", "BLK128x128_32F")


def lowered_operand(inputs: Inputs, name: Name) -> tuple[MatrixStack, Packing | None]:
    stack = inputs.layout.a if name == "a" else inputs.layout.b
    if inputs.codes:
        return _codes(inputs, inputs.codes, name)
    parts = inputs.plan.split[name == "b"]
    reason = _reason_to_pack(inputs, stack, name, parts)
    if reason is None:
        return stack, None
    pack, transposed = _pack(inputs, stack, name, reason, parts)
    # Packed matrices are row-major; a packed transpose makes the operand column-major.
    leading = pack.line_stride
    batch = inputs.layout.batch_shape
    rows = pack.rows if pack.parts > 1 else pack.padded_rows
    cols = leading
    if not inputs.k_contiguous:
        cols = pack.source.cols * PACKED[pack.complex_as][1]
    if pack.source.batch_shape:
        strides = contiguous_strides(batch, pack.matrix_stride)
    else:
        strides = (0,) * len(batch)
    packed = MatrixStack(pack.dtype, rows, cols, leading, 1, batch, strides, "row", leading)
    if transposed:
        packed = _as_columns(packed)
    return packed, pack


def _as_columns(packed: MatrixStack) -> MatrixStack:
    """Return the transpose of row-major matrices."""
    return replace(packed.transposed, order="col", leading_dimension=packed.leading_dimension)


def _codes(inputs: Inputs, fmt: BlockFormat, name: Name) -> tuple[MatrixStack, Packing | None]:
    """Return an operand as rows of codes along k, and their packing if they are quantised or padded."""
    stack = inputs.layout.a
    rows = stack.rows
    if name == "b":
        stack = inputs.layout.b
        rows = stack.cols
    batch = inputs.layout.batch_shape
    stored = multiple(inputs.layout.k, fmt.block)
    k = multiple(stored, BLOCKED_K_STEP[fmt.bits])
    packing = None
    if inputs.rule(name):
        reason = Reason.of(ReasonKind.QUANTIZED)
        packing, _ = _pack(inputs, stack, name, reason, 1)
        rows = padded(rows, DType.INT8)
        packing = replace(
            packing,
            dtype=DType.INT8,
            leading_dimension=k // 2,
            padded_rows=rows,
            scale_mode=fmt.scale_mode,
        )
    elif k != stored:
        source = MatrixStack.of(DType.INT8, rows, stored, stored, 1)
        reason = Reason.of(ReasonKind.PADDED_K, data=fmt.name, step=BLOCKED_K_STEP[fmt.bits])
        packing = Packing(source, DType.INT8, k, rows, reasons=(reason,))
    strides = (0,) * len(batch)
    codes = MatrixStack(inputs.data, rows, k, k, 1, batch, strides, "row", k)
    if name == "b":
        codes = _as_columns(codes)
    return codes, packing


def _reason_to_pack(inputs: Inputs, stack: MatrixStack, name: Name, parts: int) -> Reason | None:
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
    step = STEP_BYTES
    extents = [inputs.layout.k, stack.leading_dimension or 0, *stack.batch_strides]
    if name == "b":
        extents.append(inputs.layout.n)
    if not inputs.aligned or any(x % step for x in extents):
        return Reason.of(ReasonKind.READ_IN_STEPS, data=inputs.data, step=step)
    if name == "a" and inputs.rows != inputs.layout.m:
        return Reason.of(ReasonKind.PADDED_ROWS, data=inputs.data, rows=inputs.rows)
    return None


def _pack(
    inputs: Inputs, stack: MatrixStack, name: Name, reason: Reason, parts: int
) -> tuple[Packing, bool]:
    """Return the packing of an operand, and whether it is transposed."""
    rule = inputs.rule(name)
    scale_mode = inputs.scale_mode(name)
    scaled = _is_scaled(inputs, name)
    transposed = stack.order == "col"
    if inputs.k_contiguous or scaled or inputs.as_real or rule is not None:
        transposed = name == "b"
    source = stack.transposed if transposed else stack
    # The powers of two differ between the products of a batch, so a scaled matrix is packed for each.
    numbers = _numbers(inputs, stack, name)
    if not any(numbers) and (rule or not scaled):
        numbers = ()
        source = replace(source, batch_shape=(), batch_strides=())
    complex_as: ComplexAs = "no"
    if inputs.as_real:
        complex_as = "pairs" if name == "a" else "rotated"
    lines, elements = PACKED[complex_as]
    dtype = _packed_dtype(inputs, stack, rule)
    leading = padded(source.cols * elements, dtype)
    if scale_mode in _FLOAT8_BLOCKS:
        leading = multiple(leading, BLOCKED_K_STEP[8])
    side_by_side = parts > 1 and transposed is (name == "b")
    rows = source.rows * lines
    if (name == "b" and inputs.k_contiguous) or (parts > 1 and not side_by_side):
        rows = padded(rows, dtype)
    elif name == "a" and inputs.k_contiguous:
        rows = max(rows, inputs.rows)
    packing = Packing(
        source, dtype, leading, rows, scaled, complex_as,
        rule=rule, scale_mode=scale_mode, reasons=(reason,), numbers=numbers,
    )  # fmt: skip
    if parts > 1:
        packing = _split(packing, inputs, name, parts, side_by_side)
    return packing, transposed


def _is_scaled(inputs: Inputs, name: Name) -> bool:
    """Whether packed numbers have scales; those of blocks are multiplied in, unless cuBLASLt applies them."""
    rule = inputs.rule(name)
    if inputs.plan.scaled[name == "b"] or rule is None:
        return inputs.plan.scaled[name == "b"]
    return bool(inputs.scale_mode(name)) or rule.has_tensor_scale or rule.scaling == "vector"


def _numbers(inputs: Inputs, stack: MatrixStack, name: Name) -> tuple[int, ...]:
    """Return strides of the batch that are not 0 along axes of the array, each number of which has own random bits."""
    rule = inputs.rule(name)
    if (
        not stack.batch_strides
        or rule is None
        or not rule.is_stochastic
        or not inputs.plan.quantized
    ):
        return stack.batch_strides
    rounded = inputs.plan.quantized.inner.problem
    layout = stacked_layout(rounded.a, rounded.b)
    return (layout.b if name == "b" else layout.a).batch_strides


def _packed_dtype(inputs: Inputs, stack: MatrixStack, rule: Rule | None) -> DType:
    """Return the element type of a packed operand."""
    if rule and inputs.data.is_float8 and rule.elements == "e5m2":
        return DType.FLOAT8_E5M2
    # The operands may have two different 8-bit types, which cuBLASLt multiplies unchanged.
    if inputs.k_contiguous and reads_k_contiguous(stack.dtype):
        return stack.dtype
    return inputs.data


def _split(packing: Packing, inputs: Inputs, name: Name, parts: int, side_by_side: bool) -> Packing:
    """Return the packing of an operand in several parts."""
    scheme = row(inputs.plan.runs_as)
    return replace(
        packing,
        parts=parts,
        part_exponent=scheme.part_exponent,
        summed=parts > scheme.parts,
        as_tf32=scheme.uses_tf32,
        side_by_side=side_by_side,
        descending=name == "a",
    )
