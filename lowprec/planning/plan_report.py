"""``PlanReport``: what :func:`lowprec.plan` returns, a plan with its reasons, as text, HTML, a figure and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowprec import plotting
from lowprec.architectures import Emulated
from lowprec.errors import UnsupportedError
from lowprec.modes import ResolvedMode
from lowprec.planning.costs import Roofline, roofline
from lowprec.planning.kernels import Capabilities, KernelRow
from lowprec.planning.plan import GemmPlan
from lowprec.planning.reasons import Reason
from lowprec.planning.rendering import Row, advise, becomes, epilogue_rows, layout_rows, title
from lowprec.planning.selection import Candidate
from lowprec.report import Report
from lowprec.util.plain import plain
from lowprec.util.tables import Table

_PREDICTION = (
    "no device was queried, so the algorithm and its units are unknown; "
    "peak rate and bandwidth from the {source}"
)


@dataclass(frozen=True, repr=False, kw_only=True)
class PlanReport(GemmPlan, Report):
    """The execution plan of a product, with the reasons for it; ``print`` shows a table."""

    resolved: ResolvedMode  # the mode with its source
    candidates: tuple[Candidate, ...]  # modes considered for ``rtol``
    tolerance: Reason | None  # the bound that ``rtol`` limits, and the choice by the other bound
    # why the packed ``b`` is kept or not; None if ``b`` is not prepared
    prepared: Reason | None = None
    # how the zeros of ``b`` are used; None if ``b`` is not prepared as sparse
    sparsity: Reason | None = None
    # cuBLASLt's description of its algorithm; empty without a GPU
    algorithm: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, plan: GemmPlan, **filled: Any) -> PlanReport:
        """Return the report on a plan; ``filled`` are the other fields, and replacements of the plan's own."""
        fields = {name: getattr(plan, name) for name in GemmPlan.__match_args__}
        return cls(**fields | filled)

    @property
    def roofline(self) -> Roofline | None:
        """Least time by the device's peak rate and bandwidth; None if unknown."""
        return roofline(self)

    @property
    def advice(self) -> tuple[Reason, ...]:
        """Advice on the speed of this product."""
        return advise(self)

    @property
    def a_becomes(self) -> str:
        """Description of ``a`` as multiplied."""
        return becomes(self, "a")

    @property
    def b_becomes(self) -> str:
        """Description of ``b`` as multiplied."""
        return becomes(self, "b")

    _width = 80
    _gap = "\n\n"

    def tables(self) -> Iterator[Table]:
        """Yield a table of the plan, and one of the candidates if ``rtol`` chose the mode."""
        yield Table(title(self), ("", ""), list(_rows(self)))
        if self.candidates:
            rows = []
            for c in self.candidates:
                verdict = str(c.why)
                if c.accepted:
                    verdict = f"taken: {verdict}"
                rows.append((str(c.mode), f"{c.bound:.2e}", f"{c.cost:.2f}", verdict))
            columns = ("mode", ">bound", ">cost", "verdict")
            yield Table(
                "candidates, the cheapest first (cost: expected time, relative to fp32)",
                columns,
                rows,
                ("cost",),
            )

    def __repr__(self) -> str:
        runs = f"mode {self.mode}, kernel {self.kernel} on {self.capabilities.device}"
        return (
            f"<PlanReport {title(self)},\n {runs}, error at most {self.bound.relative:.3g} |A| |B|>"
        )

    def to_dict(self) -> dict[str, Any]:
        texts = (Reason, KernelRow)
        result: dict[str, Any] = plain(self, texts)
        return result | {name: plain(getattr(self, name), texts) for name in _DERIVED}

    def figure(self) -> Any:
        """Return the bounds of the modes that ``rtol`` considered by their speed; without ``rtol``, the roofline.

        Without ``rtol`` and where the device's peak rates are unknown, as on CPUs, it is an UnsupportedError.
        """
        if self.roofline is None and not self.candidates:
            raise UnsupportedError(
                f"the peak rates of {self.capabilities.name} are unknown: plan for a GPU, as device='h200', or with "
                "rtol="
            )
        return _figure(self)


def _rows(plan: PlanReport) -> Iterator[Row]:
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
    products = str(plan.products)
    if plan.parts > 1:
        products += f", each operand in {plan.parts} parts"
    yield "products", products
    if plan.k_chunk < plan.layout.k:
        yield (
            "k chunk",
            f"{plan.k_chunk}: chunks of the leading product, added in {plan.accumulator}",
        )
    yield "kernel", f"{plan.kernel}: {plan.kernel_reason}"
    yield "compute type", plan.compute_type
    yield from plan.algorithm
    for text in plan.fallbacks:
        yield "fallback", text
    yield from layout_rows(plan)
    yield from epilogue_rows(plan)
    if not plan.copies:
        yield "copies", "none"
    for copy in plan.copies:
        yield "copy", f"{copy.operand}, {_quantity(copy.nbytes, 'B')}: {copy.reason}"
    flops = _quantity(plan.flops, "flop")
    moved = _quantity(plan.bytes_moved, "B")
    yield "work", f"{flops}, {moved} moved, {plan.arithmetic_intensity:.3g} flop/B"
    if plan.roofline:
        yield "roofline", _roofline(plan.roofline, plan.capabilities)
    yield from _bound_rows(plan)
    for reason in plan.advice:
        yield "advice", str(reason)


def _roofline(least: Roofline, capabilities: Capabilities) -> str:
    rewriting = ""
    if least.rewriting:
        rewriting = f", then {_duration(least.rewriting)} for the copies"
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


def _mode_rows(plan: PlanReport) -> Iterator[Row]:
    resolved = plan.resolved
    if plan.runs_as is not plan.mode:
        yield "scheme", f"{plan.runs_as}"
    asked = ""
    if resolved.requested:
        asked = f", {resolved.requested} was requested"
    yield "mode", f"{plan.mode}, from {resolved.source}{asked}"
    for reason in resolved.reasons:
        yield "because", reason
    if plan.tolerance:
        yield "rtol", str(plan.tolerance)
    if plan.note:
        yield "note", plan.note
    if resolved.emulates:
        yield "emulates", _emulates(plan, resolved.emulates)


def _emulates(plan: PlanReport, architecture: Emulated) -> str:
    if plan.kernel_row.imitates:
        return f"{architecture.label}'s tensor cores"
    return (
        f"nothing here: {architecture.label}'s tensor cores are emulated on the CPU for float16, bfloat16 and TF32 "
        "operands"
    )


def _bound_rows(plan: PlanReport) -> Iterator[Row]:
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


def _quantity(value: float, unit: str) -> str:
    power = 1e15
    for prefix in "PTGMk":
        if value >= power:
            return f"{value / power:.3g} {prefix}{unit}"
        power /= 1e3
    return f"{value:.3g} {unit}"


#: Properties of a plan that its dictionary contains in addition to the fields.
_DERIVED = (
    "out_shape", "flops", "bytes_moved", "bound", "advice", "kernel", "kernel_reason", "compute_type", "note",
    "a_becomes", "b_becomes", "fallbacks", "k_chunk",
    "parts", "products", "arithmetic_intensity", "roofline",
)  # fmt: skip


def _figure(plan: PlanReport) -> Any:
    figure, ((panel,),) = plotting.figure(4.6)
    if plan.candidates:
        _draw_candidates(panel, plan)
    elif plan.roofline:
        x = plan.arithmetic_intensity
        _roofs(panel, plan.capabilities, x)
        name = f"{plan.mode}, bound {plan.bound.relative:.0e}"
        plotting.points(panel, {name: (x, plan.flops / plan.roofline.seconds / 1e12)})
        panel.set(xlabel="flop per byte of operands and result", ylabel="TFLOP/s, at most")
        panel.xaxis.set_major_formatter("{x:.4g}")
    panel.set_title(
        f"{plan.capabilities.name}: m {plan.layout.m}, n {plan.layout.n}, k {plan.layout.k}, {plan.mode}"
    )
    plotting.legend(figure, panel, loc="outside right upper", ncols=1)
    return figure


def _draw_candidates(panel: Any, plan: PlanReport) -> None:
    """Draw the bounds of the modes that ``rtol`` considered by their speed, by the roofline if it is known."""
    if plan.roofline is None:
        label = "expected speed, relative to fp32"
        speeds = {str(c.mode): (1 / c.cost, c.bound) for c in plan.candidates if c.cost}
    else:
        label = "TFLOP/s, at most"
        rates = {c: plan.flops / c.seconds / 1e12 for c in plan.candidates if c.seconds}
        speeds = {str(c.mode): (rate, c.bound) for c, rate in rates.items()}
        own = plan.flops / plan.roofline.seconds / 1e12
        speeds.setdefault(str(plan.mode), (own, plan.bound.relative))
    plotting.points(panel, speeds)
    panel.set(xlabel=label, ylabel="bound of the error / (|A| |B|)")


def _roofs(panel: Any, capabilities: Capabilities, x: float) -> None:
    """Draw the peak rate of each number format, below that of the memory."""
    bandwidth = capabilities.bytes_per_second / 1e12
    names: dict[float, list[str]] = {}
    for name, rate in capabilities.peak_tflops:
        names.setdefault(rate, []).append(name)
    left = min(x, min(names) / bandwidth) / 4
    right = 4 * max(x, max(names) / bandwidth)
    for rate in sorted(names):
        bend = rate / bandwidth
        panel.plot(
            [left, bend, right], [bandwidth * left, rate, rate], color=plotting.INK, alpha=0.6
        )
        text = ", ".join(names[rate])
        panel.annotate(text, (right, rate), ha="right", va="bottom", fontsize=7)
