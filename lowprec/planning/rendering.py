"""A plan as a text table and as values for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from lowprec.modes import row
from lowprec.planning.costs import Roofline
from lowprec.planning.kernels import KernelRow
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.util.plain import finite
from lowprec.util.tables import Table, html, plain_text

if TYPE_CHECKING:
    from lowprec.architectures import Architecture
    from lowprec.planning.kernels import Capabilities
    from lowprec.planning.layout import MatrixStack, OperandSpec
    from lowprec.planning.plan import GemmPlan

#: Tensor cores are fastest if the contiguous dimension is a multiple of this number of bytes.
ALIGNMENT_BYTES = 16

#: Products with a dimension of at most this are memory-bound.
SMALL_DIMENSION = 128


#: Bits per element on tensor cores; float32 and float64 have no preferred alignment.
_TENSOR_CORE_BITS = {"float16": 16, "bfloat16": 16, "tf32": 32}


def advise(plan: GemmPlan) -> tuple[Reason, ...]:
    layout, capabilities, fmt, call = plan.layout, plan.capabilities, plan.operand_format, plan.call
    m, n, k = layout.m, layout.n, layout.k
    if 0 in (m, n, k):
        return ()
    advice = []
    bits = 8 if fmt is None else _TENSOR_CORE_BITS.get(fmt.name)
    sizes = (("m", m), ("n", n), ("k", k))
    if bits and capabilities.compute_capability is not None:
        step = ALIGNMENT_BYTES * 8 // bits
        if misaligned := tuple(f"{name} = {size}" for name, size in sizes if size % step):
            advice.append(Reason.of(ReasonKind.MISALIGNED, dimensions=misaligned, step=step, bits=bits))
    if small := tuple(f"{name} = {size}" for name, size in sizes if size <= SMALL_DIMENSION):
        advice.append(Reason.of(ReasonKind.SMALL_DIMENSIONS, dimensions=small, most=SMALL_DIMENSION))
    elif (intensity := plan.arithmetic_intensity) < capabilities.flops_per_byte:
        advice.append(Reason.of(ReasonKind.LOW_INTENSITY, intensity=intensity, device=capabilities.flops_per_byte))
    converts = any(plan.rounded) and (call is None or call.pack_a or call.pack_b)
    # An element of ``a`` is used n times, one of ``b`` m times, two flops each.
    if converts and plan.kernel_row.cost_per_element * (1 / (2 * n) + 1 / (2 * m)) > 1:
        advice.append(Reason.of(ReasonKind.ROUNDING_COSTS_MORE))
    return tuple(advice)


WIDTH = 80

Row = tuple[str, str]

_PREDICTION = (
    "no device was queried, so the algorithm and its units are unknown; peak rate and bandwidth from the {source}"
)


def to_text(plan: GemmPlan) -> str:
    return "\n\n".join(plain_text(table, WIDTH) for table in tables(plan))


def to_repr(plan: GemmPlan) -> str:
    runs = f"mode {plan.mode}, kernel {plan.kernel} on {plan.capabilities.device}"
    return f"<GemmPlan {title(plan)},\n {runs}, error at most {plan.bound.relative:.3g} |A| |B|>"


def to_html(plan: GemmPlan) -> str:
    return "".join(map(html, tables(plan)))


def tables(plan: GemmPlan) -> Iterator[Table]:
    """Yield a table of the plan, and one of the candidates if ``rtol`` chose the mode."""
    yield Table(title(plan), ("", ""), list(_rows(plan)))
    if plan.candidates:
        rows = [
            (str(c.mode), f"{c.bound:.2e}", f"{c.cost:.2f}", f"taken: {c.why}" if c.accepted else str(c.why))
            for c in plan.candidates
        ]
        columns = ("mode", ">bound", ">cost", "verdict")
        yield Table("candidates, the cheapest first (cost: expected time, relative to fp32)", columns, rows, ("cost",))


def title(plan: GemmPlan) -> str:
    """Return the product in one line: element types and shapes."""
    return f"{_spec(plan.problem.a)} @ {_spec(plan.problem.b)} -> {plan.out_dtype} {plan.out_shape}"


def _rows(plan: GemmPlan) -> Iterator[Row]:
    yield "device", f"{plan.capabilities.device}: {plan.capabilities.name}"
    if plan.capabilities.predicted:
        yield "prediction", _PREDICTION.format(source=plan.capabilities.source)
    yield from _mode_rows(plan)
    yield "a becomes", plan.a_becomes
    yield "b becomes", plan.b_becomes
    if plan.prepared:
        yield "prepared", str(plan.prepared)
    if plan.sparsity:
        yield "sparsity", f"2:4: {plan.sparsity}"
    yield "products", f"{plan.products}" + (f", each operand in {plan.parts} parts" if plan.parts > 1 else "")
    if plan.k_chunk < plan.layout.k:
        yield ("k chunk", f"{plan.k_chunk}: chunks of the leading product, added in {plan.accumulator}")
    yield "kernel", f"{plan.kernel}: {plan.kernel_reason}"
    yield "compute type", plan.compute_type
    yield from plan.algorithm
    for text in plan.fallbacks:
        yield "fallback", text
    yield from _layout_rows(plan)
    yield from _epilogue_rows(plan)
    if not plan.copies:
        yield "copies", "none"
    for copy in plan.copies:
        yield "copy", f"{copy.operand}, {_quantity(copy.nbytes, 'B')}: {copy.reason}"
    flops, moved = _quantity(plan.flops, "flop"), _quantity(plan.bytes_moved, "B")
    yield "work", f"{flops}, {moved} moved, {plan.arithmetic_intensity:.3g} flop/B"
    if plan.roofline:
        yield "roofline", _roofline(plan.roofline, plan.capabilities)
    yield from _bound_rows(plan)
    for reason in plan.advice:
        yield "advice", str(reason)


def _roofline(least: Roofline, capabilities: Capabilities) -> str:
    rewriting = f", then {_duration(least.rewriting)} for the copies" if least.rewriting else ""
    return (
        f"at least {_duration(least.seconds)}: arithmetic {_duration(least.arithmetic)} "
        f"({least.tflops:.4g} TFLOP/s, {least.units}), memory {_duration(least.memory)} in parallel "
        f"({_quantity(capabilities.bytes_per_second, 'B')}/s){rewriting}"
    )


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _mode_rows(plan: GemmPlan) -> Iterator[Row]:
    resolved = plan.resolved
    if plan.scheme is not plan.mode:
        yield "scheme", f"{plan.scheme}"
    if resolved is None:
        yield "mode", str(plan.mode)
    else:
        asked = f", {resolved.requested} was requested" if resolved.requested else ""
        yield "mode", f"{plan.mode}, from {resolved.source}{asked}"
        for reason in resolved.reasons:
            yield "because", reason
    if plan.tolerance:
        yield "rtol", str(plan.tolerance)
    if plan.note:
        yield "note", plan.note
    if resolved and resolved.emulates:
        yield "emulates", _emulates(plan, resolved.emulates)


def _emulates(plan: GemmPlan, architecture: Architecture) -> str:
    if plan.kernel_row.emulates:
        return f"{architecture.label}'s tensor cores"
    return (
        f"nothing here: {architecture.label}'s tensor cores are emulated on the CPU for float16, bfloat16 and TF32 "
        "operands"
    )


def _layout_rows(plan: GemmPlan) -> Iterator[Row]:
    layout = plan.layout
    batch = f", batch {layout.batch_count} {layout.batch_shape}" if layout.batch_shape else ""
    collapsed = ", the batch as rows of one product" if layout.collapsed else ""
    yield "layout", f"m {layout.m}, n {layout.n}, k {layout.k}{batch}{collapsed}"
    for name, operand in (("a", layout.a), ("b", layout.b), ("out", layout.out)):
        yield f"  {name}", _operand(operand)


def _operand(operand: MatrixStack) -> str:
    if operand.order is None:
        text = f"strides {operand.row_stride}, {operand.col_stride}"
    else:
        text = f"{operand.order}-major, leading dimension {operand.leading_dimension}, op {operand.op}"
    if not operand.batch_strides:
        return text
    if operand.batch_stride is None:
        return f"{text}, batch strides {operand.batch_strides}"
    if operand.batch_stride == 0:
        return f"{text}, the same for every batch"
    return f"{text}, batch stride {operand.batch_stride}"


def _epilogue_rows(plan: GemmPlan) -> Iterator[Row]:
    problem = plan.problem
    terms = ["alpha"] if problem.has_alpha else []
    if problem.has_beta and problem.c:
        terms.append(f"beta c ({_spec(problem.c)})")
    if problem.bias:
        terms.append(f"bias ({_spec(problem.bias)})")
    if problem.activation:
        terms.append(str(problem.activation))
    if terms:
        yield "epilogue", ", ".join(terms)


def _bound_rows(plan: GemmPlan) -> Iterator[Row]:
    bound = plan.bound
    if bound.relative == 0:
        yield "error", "none: the product is exact"
    else:
        yield "error", f"at most {bound.relative:.3g} |A| |B| (Frobenius norms)"
        yield "because", bound.formula
        probable = f"at most {bound.probable:.3g}, with probability {bound.probability}"
        yield "probably", f"{probable}, for rounding errors of mean zero"
    if bound.absolute:
        yield "underflow", bound.absolute
    yield "provided", bound.condition


def _spec(spec: OperandSpec) -> str:
    return f"{spec.blocks.format if spec.blocks else spec.dtype} {spec.shape}"


def _quantity(value: float, unit: str) -> str:
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


#: Properties of a plan that its dictionary contains in addition to the fields.
_DERIVED = (
    "bytes_moved", "bound", "advice", "kernel", "kernel_reason", "compute_type", "note",
    "a_becomes", "b_becomes", "fallbacks", "k_chunk", "parts", "products", "arithmetic_intensity", "roofline",
)  # fmt: skip


def to_dict(plan: GemmPlan) -> dict[str, Any]:
    """Return the plan as values for JSON, which has no infinity: None instead."""
    result: dict[str, Any] = _plain(plan)
    return result | {name: _plain(getattr(plan, name)) for name in _DERIVED}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum | Reason | KernelRow):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple | frozenset):
        return [_plain(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]
    return finite(value)


def becomes(plan: GemmPlan, name: Literal["a", "b"]) -> str:
    operand = int(name == "b")
    dtype = (plan.problem.a, plan.problem.b)[operand].dtype
    pack = (plan.call.pack_a, plan.call.pack_b)[operand] if plan.call else None
    kernel = plan.kernel_row
    spec = (plan.problem.a, plan.problem.b)[operand]
    rule = plan.quantized.rules[operand] if plan.quantized else None
    if rule:
        assert plan.quantized is not None
        codes = plan.call.first.codes if plan.call else None
        return f"{rule}; multiplied as {codes.format if codes else plan.quantized.inner.compute_dtype}"
    if plan.rounded[operand]:
        text = row(plan.scheme).inputs
    elif spec.blocks and plan.call and plan.call.first.codes:
        text = f"{spec.blocks.format}, as it is"
    elif spec.blocks and not dtype.is_float8:
        text = f"{spec.blocks.format} values as {dtype}"
    elif dtype is plan.compute_dtype:
        text = f"{dtype}, as it is"
    else:
        text = f"{dtype} values, unchanged"
    if kernel.emulation:
        text = f"{dtype}, split by cuBLASLt into {kernel.part_format} parts"
    elif kernel.parts > 1:
        each = "each " if max(plan.split) > 1 else ""
        text += f", {each}as the exact sum of {kernel.parts} bfloat16 parts"
    elif kernel.holds_in:
        fmt, wide = plan.operand_format, kernel.holds_in.format
        text += f", held in {kernel.holds_in}" if fmt and wide and fmt.precision < wide.precision else ""
    if plan.scaled[operand]:
        text += f", each {'column' if operand else 'row'} scaled by a power of two"
    if pack and pack.complex_as != "no":
        text += ", as a real matrix of twice the extents"
    return text
