"""The figure of a plan: its roofline, or the bounds of its candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowprec import plotting
from lowprec.errors import UnsupportedError

if TYPE_CHECKING:
    from lowprec.planning.plan import GemmPlan


def draw(plan: GemmPlan, path: str) -> None:
    """Write the figure of a plan to a file."""
    if plan.roofline is None and not plan.candidates:
        raise UnsupportedError(
            f"the peak rates of {plan.capabilities.name} are unknown: plan for a GPU, as device='h200', or with rtol="
        )
    plotting.write(path, lambda: _figure(plan))


def _figure(plan: GemmPlan) -> Any:
    figure, ((panel,),) = plotting.figure(4.6)
    bounds = {str(c.mode): c.bound for c in plan.candidates} or {str(plan.mode): plan.bound.relative}
    if plan.roofline is None:
        speeds = {str(c.mode): 1 / c.cost for c in plan.candidates if c.cost}
        plotting.points(panel, {name: (speed, bounds[name]) for name, speed in speeds.items()})
        panel.set(xlabel="expected speed, relative to fp32", ylabel="bound of the error / (|A| |B|)")
    else:
        seconds = {str(c.mode): c.seconds for c in plan.candidates} | {str(plan.mode): plan.roofline.seconds}
        x, rates = plan.arithmetic_intensity, [(r, n) for n, r in plan.capabilities.peak_tflops]
        places = {name: (x, plan.flops / t / 1e12) for name, t in seconds.items() if t}
        _roofs(panel, plan.capabilities.bytes_per_second / 1e12, rates, x)
        plotting.points(panel, {f"{name}, bound {bounds[name]:.0e}": at for name, at in places.items()})
        panel.set(xlabel="flop per byte of operands and result", ylabel="TFLOP/s, at most")
        panel.xaxis.set_major_formatter("{x:.4g}")
    panel.set_title(f"{plan.capabilities.name}: m {plan.layout.m}, n {plan.layout.n}, k {plan.layout.k}, {plan.mode}")
    plotting.legend(figure, panel, loc="outside right upper", ncols=1)
    return figure


def _roofs(panel: Any, bandwidth: float, rates: list[tuple[float, str]], x: float) -> None:
    """Draw the peak rate of each number format, below that of the memory."""
    ends = [min(x, min(rates)[0] / bandwidth) / 4, 4 * max(x, max(rates)[0] / bandwidth)]
    for rate in sorted({rate for rate, _ in rates}):
        names = ", ".join(name for each, name in rates if each == rate)
        corners = (ends[0], bandwidth * ends[0]), (rate / bandwidth, rate), (ends[1], rate)
        panel.plot(*zip(*corners, strict=True), color=plotting.INK, alpha=0.6)
        panel.annotate(names, (ends[1], rate), ha="right", va="bottom", fontsize=7)
