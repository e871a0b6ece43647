"""Descriptions of a plan: its operands, its layout, its epilogue, and advice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from lowprec.modes import row
from lowprec.planning.layout import MatrixStack, OperandSpec
from lowprec.planning.plan import GemmPlan
from lowprec.planning.reasons import Reason, ReasonKind

Row = tuple[str, str]

#: Tensor cores are fastest if the contiguous dimension is a multiple of this number of bytes.
ALIGNMENT_BYTES = 16

#: Products with a dimension of at most this are memory-bound.
SMALL_DIMENSION = 128


#: Bits per element on tensor cores; float32 and float64 have no preferred alignment.
_TENSOR_CORE_BITS = {"float16": 16, "bfloat16": 16, "tf32": 32}


def advise(plan: GemmPlan) -> tuple[Reason, ...]:
    """Return advice on the speed of a product."""
    layout = plan.layout
    capabilities = plan.capabilities
    fmt = plan.operand_format
    call = plan.call
    m = layout.m
    n = layout.n
    k = layout.k
    if 0 in (m, n, k):
        return ()
    advice = []
    if fmt is None:
        bits = 8
    else:
        bits = _TENSOR_CORE_BITS.get(fmt.name, 0)
    sizes = (("m", m), ("n", n), ("k", k))
    if bits and capabilities.compute_capability is not None:
        step = ALIGNMENT_BYTES * 8 // bits
        if misaligned := tuple(f"{name} = {size}" for name, size in sizes if size % step):
            advice.append(
                Reason.of(ReasonKind.MISALIGNED, dimensions=misaligned, step=step, bits=bits)
            )
    if small := tuple(f"{name} = {size}" for name, size in sizes if size <= SMALL_DIMENSION):
        advice.append(
            Reason.of(ReasonKind.SMALL_DIMENSIONS, dimensions=small, most=SMALL_DIMENSION)
        )
    elif (intensity := plan.arithmetic_intensity) < capabilities.flops_per_byte:
        advice.append(
            Reason.of(
                ReasonKind.LOW_INTENSITY, intensity=intensity, device=capabilities.flops_per_byte
            )
        )
    converts = any(plan.rounded) and (call is None or call.pack_a or call.pack_b)
    # An element of ``a`` is used n times, one of ``b`` m times, two flops each.
    elements_per_flop = 1 / (2 * n) + 1 / (2 * m)
    if converts and plan.kernel_row.cost_per_element * elements_per_flop > 1:
        advice.append(Reason.of(ReasonKind.ROUNDING_COSTS_MORE))
    return tuple(advice)


def title(plan: GemmPlan) -> str:
    """Return the product in one line: element types and shapes."""
    return f"{_spec(plan.problem.a)} @ {_spec(plan.problem.b)} -> {plan.out_dtype} {plan.out_shape}"


def _spec(spec: OperandSpec) -> str:
    return f"{spec.blocks.format if spec.blocks else spec.dtype} {spec.shape}"


def layout_rows(plan: GemmPlan) -> Iterator[Row]:
    layout = plan.layout
    batch = ""
    if layout.batch_shape:
        batch = f", batch {layout.batch_count} {layout.batch_shape}"
    collapsed = ", the batch as rows of one product" if layout.collapsed else ""
    yield "layout", f"m {layout.m}, n {layout.n}, k {layout.k}{batch}{collapsed}"
    for name, operand in (("a", layout.a), ("b", layout.b), ("out", layout.out)):
        yield f"  {name}", _operand(operand)


def _operand(operand: MatrixStack) -> str:
    if operand.order is None:
        text = f"strides {operand.row_stride}, {operand.col_stride}"
    else:
        text = (
            f"{operand.order}-major, leading dimension {operand.leading_dimension}, op {operand.op}"
        )
    if not operand.batch_strides:
        return text
    if operand.batch_stride is None:
        return f"{text}, batch strides {operand.batch_strides}"
    if operand.batch_stride == 0:
        return f"{text}, the same for every batch"
    return f"{text}, batch stride {operand.batch_stride}"


def epilogue_rows(plan: GemmPlan) -> Iterator[Row]:
    problem = plan.problem
    if problem.has_alpha:
        terms = ["alpha"]
    else:
        terms = []
    if problem.has_beta and problem.c:
        terms.append(f"beta c ({_spec(problem.c)})")
    if problem.bias:
        terms.append(f"bias ({_spec(problem.bias)})")
    if problem.activation:
        terms.append(str(problem.activation))
    if terms:
        yield "epilogue", ", ".join(terms)


def becomes(plan: GemmPlan, name: Literal["a", "b"]) -> str:
    """Return the description of an operand as multiplied."""
    operand = int(name == "b")
    dtype = (plan.problem.a, plan.problem.b)[operand].dtype
    kernel = plan.kernel_row
    if plan.quantized and (rule := plan.quantized.rules[operand]):
        codes = plan.call.first.codes if plan.call else None
        if kernel.summation == "blocks":
            return f"{rule}; multiplied as integers, whose sums over a block are exact"
        return (
            f"{rule}; multiplied as {codes.name if codes else plan.quantized.inner.compute_dtype}"
        )
    text = _values(plan, operand)
    if kernel.cublas_emulation:
        text = f"{dtype}, split by cuBLASLt into {kernel.part_format} parts"
    elif kernel.parts > 1:
        each = "each " if max(plan.split) > 1 else ""
        text += f", {each}as the exact sum of {kernel.parts} bfloat16 parts"
    elif kernel.holds_in:
        fmt = plan.operand_format
        wide = kernel.holds_in.format
        if fmt and wide and fmt.precision < wide.precision:
            text += f", held in {kernel.holds_in}"
    if plan.scaled[operand]:
        text += f", each {'column' if operand else 'row'} scaled by a power of two"
    if plan.call:
        pack = (plan.call.pack_a, plan.call.pack_b)[operand]
        if pack and pack.complex_as != "no":
            text += ", as a real matrix of twice the extents"
    return text


def _values(plan: GemmPlan, operand: int) -> str:
    """Return the description of the numbers of an operand that is not quantised."""
    spec = (plan.problem.a, plan.problem.b)[operand]
    dtype = spec.dtype
    if plan.rounded[operand]:
        return row(plan.runs_as).inputs
    if spec.blocks and plan.call and plan.call.first.codes:
        return f"{spec.blocks.format}, as it is"
    if spec.blocks and not dtype.is_float8:
        return f"{spec.blocks.format} values as {dtype}"
    if dtype is plan.compute_dtype:
        return f"{dtype}, as it is"
    return f"{dtype} values, unchanged"
