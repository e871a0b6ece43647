"""A plan as a text table for people and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any

from lowprec.tables import Table, html, plain_text

if TYPE_CHECKING:
    from lowprec.planning.layout import OperandLayout, OperandSpec
    from lowprec.planning.plan import Candidate, GemmPlan

__all__ = ["title", "to_dict", "to_html", "to_text"]

WIDTH = 100

Row = tuple[str, str]


def to_text(plan: GemmPlan) -> str:
    """Return the plan as a table of two columns, no wider than 100 characters."""
    return plain_text(_table(plan), wrap=WIDTH)


def to_html(plan: GemmPlan) -> str:
    """Return the plan as a table for a notebook."""
    return html(_table(plan))


def _table(plan: GemmPlan) -> Table:
    return Table(title(plan), ("", ""), list(_rows(plan)))


def title(plan: GemmPlan) -> str:
    """Return the product in one line: element types and shapes."""
    problem = plan.problem
    result = f"{plan.out_dtype} {_shape(plan.out_shape)}"
    return f"{_spec(problem.a)} @ {_spec(problem.b)} -> {result}"


def _rows(plan: GemmPlan) -> Iterator[Row]:
    """Yield the table's rows in the order of the questions: which mode, what runs, at what cost, how exact."""
    yield "device", f"{plan.capabilities.device}: {plan.capabilities.name}"
    yield from _mode_rows(plan)
    yield "a becomes", plan.a_becomes
    yield "b becomes", plan.b_becomes
    yield "products", _products(plan)
    yield "kernel", f"{plan.kernel}: {plan.kernel_reason}"
    yield "compute type", plan.compute_type
    yield from plan.algorithm
    for fallback in plan.fallbacks:
        yield "fallback", fallback
    yield from _layout_rows(plan)
    yield from _epilogue_rows(plan)
    if not plan.copies:
        yield "copies", "none"
    for copy in plan.copies:
        yield "copy", f"{copy.operand}, {_quantity(copy.nbytes, 'B')}: {copy.reason}"
    yield (
        "work",
        (
            f"{_quantity(plan.flops, 'flop')}, {_quantity(plan.bytes_moved, 'B')} moved, "
            f"{plan.arithmetic_intensity:.3g} flop/B"
        ),
    )
    yield from _bound_rows(plan)
    for candidate in plan.candidates:
        yield "candidate", _candidate(candidate)
    for sentence in plan.advice:
        yield "advice", sentence


def _mode_rows(plan: GemmPlan) -> Iterator[Row]:
    resolved = plan.resolved
    if resolved is None:
        yield "mode", str(plan.mode)
    else:
        asked = f", {resolved.requested} was asked for" if resolved.requested else ""
        yield "mode", f"{plan.mode}, from {resolved.source}{asked}"
        for reason in resolved.reasons:
            yield "because", reason
    if plan.note:
        yield "note", plan.note


def _products(plan: GemmPlan) -> str:
    if plan.parts == 1:
        return str(plan.products)
    return f"{plan.products}, each operand in {plan.parts} parts"


def _layout_rows(plan: GemmPlan) -> Iterator[Row]:
    layout = plan.layout
    batch = (
        f", batch {layout.batch_count} {_shape(layout.batch_shape)}" if layout.batch_shape else ""
    )
    collapsed = ", the batch as rows of one product" if layout.collapsed else ""
    yield "layout", f"m {layout.m}, n {layout.n}, k {layout.k}{batch}{collapsed}"
    for name, operand in (("a", layout.a), ("b", layout.b), ("out", layout.out)):
        yield f"  {name}", _operand(operand)


def _operand(operand: OperandLayout) -> str:
    """Return order, leading dimension and batch step, or the strides where BLAS has no words for them."""
    if operand.order is None:
        text = f"strides {operand.row_stride}, {operand.col_stride}"
    else:
        text = (
            f"{operand.order}-major, leading dimension {operand.leading_dimension}, op {operand.op}"
        )
    if not operand.batch_strides:
        return text
    if operand.batch_stride is None:
        return f"{text}, batch strides {_shape(operand.batch_strides)}"
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
    if bound.absolute:
        yield "underflow", bound.absolute
    yield "provided", bound.condition


def _candidate(candidate: Candidate) -> str:
    mark = "taken" if candidate.accepted else "passed over"
    return f"{candidate.mode}, bound {candidate.bound:.3g}, cost {candidate.cost:.3g}, {mark}: {candidate.why}"


def _spec(spec: OperandSpec) -> str:
    return f"{spec.dtype} {_shape(spec.shape)}"


def _shape(shape: tuple[int, ...]) -> str:
    """Return a shape as the field writes it.

    Examples
    --------
    >>> _shape((2, 3)), _shape((2,)), _shape(())
    ('(2, 3)', '(2,)', '()')
    """
    return str(tuple(shape))


def _quantity(value: float, unit: str) -> str:
    """Return a number with its decimal prefix.

    Examples
    --------
    >>> _quantity(17179869184, "flop"), _quantity(12, "B")
    ('17.2 Gflop', '12 B')
    """
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def to_dict(plan: GemmPlan) -> dict[str, Any]:
    """Return the plan as plain values: dictionaries, lists, strings, numbers, booleans and None.

    A bound that is infinite becomes None, because JSON has no infinity.
    """
    result: dict[str, Any] = _plain(plan)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
