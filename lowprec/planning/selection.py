"""``rtol=``: the cheapest mode whose error bound is within a tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from math import isfinite, nan
from numbers import Real
from typing import NamedTuple, get_args

from lowprec.errors import ModeError, UnsupportedError, quoted
from lowprec.modes import BoundName, MathMode, Mode, available_modes
from lowprec.planning.costs import expected_cost, roofline
from lowprec.planning.kernels import Capabilities
from lowprec.planning.plan import GemmPlan
from lowprec.planning.planner import PLAN_CACHE_SIZE, plan_gemm
from lowprec.planning.problem import GemmProblem
from lowprec.planning.reasons import Reason, ReasonKind

#: The bounds that are compared with ``rtol``: for all data, or with a stated probability, for rounding errors of mean
#: zero.
BOUNDS: tuple[BoundName, ...] = get_args(BoundName)


def check_bound(bound: BoundName) -> BoundName:
    """Return the bound; raise ModeError if there is none of this name."""
    if bound not in BOUNDS:
        raise ModeError(f"bound must be {' or '.join(map(repr, BOUNDS))}, got {quoted(bound)}")
    return bound


class Candidate(NamedTuple):
    """A mode that ``rtol`` considered."""

    mode: Mode
    bound: float  # of the relative error in the Frobenius norm, guaranteed or probable
    cost: float  # expected time, relative to fp32
    accepted: bool  # whether this is the mode that runs
    why: Reason
    seconds: float | None = None  # least time by the roofline, if known


def check_rtol(rtol: object) -> float:
    """Return ``rtol`` as a float; raise ModeError if it is not a positive finite number."""
    value = nan
    if not isinstance(rtol, bool) and isinstance(rtol, Real):
        with suppress(OverflowError):
            value = float(rtol)
    if not (isfinite(value) and value > 0):
        raise ModeError(f"rtol must be a positive finite number, got {quoted(rtol)}")
    return value


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def select_mode(
    problem: GemmProblem,
    capabilities: Capabilities,
    rtol: float,
    excluded: frozenset[Mode] = frozenset(),
    bound: BoundName = "guaranteed",
) -> tuple[Mode, tuple[Candidate, ...]]:
    """Return the cheapest mode whose bound of ``|C - AB| / (|A| |B|)`` (Frobenius norms) is at most ``rtol``.

    The candidates follow, the cheapest first. ``excluded`` are modes excluded by the environment. Raises ModeError,
    with all bounds, if no mode meets ``rtol``.
    """
    plans = list(_plans(problem, capabilities))
    costs = {plan.mode: expected_cost(plan) for plan in plans}
    # The sort is stable: equal costs keep the order of the table, which begins with fp32.
    by_cost = sorted(plans, key=lambda plan: costs[plan.mode])
    chosen: Mode | None = None
    candidates = []
    for plan in by_cost:
        size = plan.bound.relative if bound == "guaranteed" else plan.bound.probable
        why = _unsupported_reason(plan, size, rtol, excluded)
        accepted = why is None and chosen is None
        seconds = getattr(roofline(plan), "seconds", None)
        if accepted:
            chosen = plan.mode
            why = Reason.of(ReasonKind.CHEAPEST)
        elif why is None:
            why = Reason.of(ReasonKind.NO_CHEAPER, chosen=chosen)
        cost = costs[plan.mode]
        candidates.append(Candidate(plan.mode, size, cost, accepted, why, seconds))
    if chosen is None:
        sizes = {c.mode: c.bound for c in candidates}
        bounds = ", ".join(f"{plan.mode} {sizes[plan.mode]:.3g}" for plan in plans)
        verb = "guarantees" if bound == "guaranteed" else "probably keeps"
        dtype = plans[0].compute_dtype
        k = plans[0].layout.k
        raise ModeError(
            f"no math mode {verb} rtol = {rtol:.3g} for {dtype} operands at k = {k}; bounds: {bounds}. Use a larger "
            f"rtol or {'complex128' if dtype.is_complex else 'float64'} operands"
        )
    return chosen, tuple(candidates)


def _plans(problem: GemmProblem, capabilities: Capabilities) -> Iterator[GemmPlan]:
    first = plan_gemm(problem, capabilities, MathMode.FP32)
    for mode in available_modes() if first.mode_has_effect else (MathMode.FP32,):
        if mode in (MathMode.FP32_EMULATED, MathMode.FP64_EMULATED):
            continue  # the first runs as one of the other modes, the second acts on float64 alone
        with suppress(UnsupportedError):
            yield plan_gemm(problem, capabilities, mode)


def _unsupported_reason(
    plan: GemmPlan, bound: float, rtol: float, excluded: frozenset[Mode]
) -> Reason | None:
    if plan.mode in excluded:
        return Reason.of(ReasonKind.EXCLUDED)
    if bound > rtol:
        return Reason.of(ReasonKind.BOUND_TOO_LARGE, rtol=rtol)
    if not plan.bound.unconditional:
        return Reason.of(ReasonKind.BOUND_NEEDS_RANGE, condition=plan.bound.condition)
    return None
