"""``rtol``: the cheapest mode whose guaranteed bound is small enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, nan
from numbers import Real

from lowprec.errors import ModeError, UnsupportedError, quoted
from lowprec.modes import MathMode, available_modes
from lowprec.planning.kernels import Capabilities, format_name
from lowprec.planning.plan import Candidate, GemmPlan
from lowprec.planning.planner import PLAN_CACHE_SIZE, plan_gemm
from lowprec.planning.problem import GemmProblem
from lowprec.planning.reasons import Reason, Why


@dataclass(frozen=True, slots=True)
class Selection:
    """The mode that ``rtol`` chose, and all that were considered, the cheapest first."""

    mode: MathMode
    candidates: tuple[Candidate, ...]


def check_rtol(rtol: object) -> float:
    """Return ``rtol`` as a float; raise ModeError if it is not a positive finite number."""
    value = nan
    if not isinstance(rtol, bool) and isinstance(rtol, Real):
        with suppress(OverflowError):
            value = float(rtol)
    if not (isfinite(value) and value > 0):
        raise ModeError(f"rtol must be a positive finite number, got {quoted(rtol)}")
    return value


def select_mode(
    problem: GemmProblem,
    capabilities: Capabilities,
    rtol: float,
    excluded: frozenset[MathMode] = frozenset(),
) -> Selection:
    """Return the cheapest mode on this device whose guaranteed relative error is at most ``rtol``.

    That is ``|C - AB| / (|A| |B|)`` in the Frobenius norm. The environment forbids the modes in ``excluded``. Raises
    ModeError if ``rtol`` is no positive finite number, or no mode meets it; the message lists the bounds.
    """
    return _select(problem, capabilities, check_rtol(rtol), excluded)


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def _select(
    problem: GemmProblem, capabilities: Capabilities, rtol: float, excluded: frozenset[MathMode]
) -> Selection:
    plans = list(_plans(problem, capabilities))
    costs = {plan.mode: expected_cost(plan) for plan in plans}
    # sorted is stable: among equals the table's order decides, which begins with fp32.
    plans.sort(key=lambda plan: costs[plan.mode])
    chosen: MathMode | None = None
    candidates = []
    for plan in plans:
        why = _unsupported_reason(plan, rtol, excluded)
        accepted = why is None and chosen is None
        if accepted:
            chosen, why = plan.mode, Reason.of(Why.CHEAPEST)
        elif why is None:
            why = Reason.of(Why.NO_CHEAPER, chosen=chosen)
        candidates.append(
            Candidate(plan.mode, plan.bound.relative, costs[plan.mode], accepted, why)
        )
    if chosen is None:
        raise ModeError(_no_mode(rtol, candidates, plans[0]))
    return Selection(chosen, tuple(candidates))


def _plans(problem: GemmProblem, capabilities: Capabilities) -> Iterator[GemmPlan]:
    """Yield a plan for each mode to weigh: those that the device runs, or one for all where modes do not act."""
    first = plan_gemm(problem, capabilities, MathMode.FP32)
    for mode in available_modes() if first.mode_has_effect else (MathMode.FP32,):
        with suppress(UnsupportedError):
            yield plan_gemm(problem, capabilities, mode)


def _unsupported_reason(
    plan: GemmPlan, rtol: float, excluded: frozenset[MathMode]
) -> Reason | None:
    """Return why a mode cannot be taken, None if it can."""
    if plan.mode in excluded:
        return Reason.of(Why.EXCLUDED)
    if plan.bound.relative > rtol:
        return Reason.of(Why.BOUND_TOO_LARGE, rtol=rtol)
    if not plan.bound.unconditional:
        return Reason.of(Why.BOUND_NEEDS_RANGE, condition=plan.bound.condition)
    return None


def _no_mode(rtol: float, candidates: list[Candidate], plan: GemmPlan) -> str:
    bounds = ", ".join(f"{c.mode} {c.bound:.3g}" for c in candidates)
    dtype = "complex128" if plan.compute_dtype.is_complex else "float64"
    return (
        f"no math mode guarantees rtol = {rtol:.3g} for {plan.compute_dtype} operands at k = {plan.layout.k}; "
        f"bounds: {bounds}. Use a larger rtol or {dtype} operands"
    )


def expected_cost(plan: GemmPlan) -> float:
    """Return the expected time in units of FP32 on the device: the kernel's, and rounding the operands.

    An element of ``a`` takes part in 2 n flops, one of ``b`` in 2 m. Only single precision has candidates that round.
    """
    row, layout = plan.kernel_row, plan.layout
    each = plan.capabilities.cost_per_flop(row, format_name(plan.operand_format))
    cost = each * len(plan.schedule)
    if plan.call is not None:
        # What is rewritten before and after the call is written and read.
        moved = 2 * sum(copy.nbytes for copy in plan.copies)
        return cost + moved * row.cost_per_byte / plan.flops
    if any(plan.rounded) and layout.m and layout.n:
        cost += row.cost_per_element * (1 / (2 * layout.m) + 1 / (2 * layout.n))
    return cost
