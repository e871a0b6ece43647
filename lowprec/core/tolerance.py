"""``rtol=``: the cheapest mode within a tolerance, below the guard and the global override."""

from __future__ import annotations

from lowprec import policy
from lowprec.errors import ModeError
from lowprec.modes import TABLE, MathMode, ModeSource, ResolvedMode, parse_mode
from lowprec.planning import Bound, Candidate, Capabilities, GemmProblem, check_bound, check_rtol, select_mode

_TF32_MODES = frozenset(row.mode for row in TABLE if row.uses_tf32)


def mode_within(
    rtol: float | None,
    math_mode: str | MathMode | None,
    problem: GemmProblem,
    capabilities: Capabilities,
    bound: str | None = None,
) -> tuple[ResolvedMode, tuple[Candidate, ...]]:
    """Return the mode that ``rtol`` selects for a product on a device, and all candidates.

    Where the guard or ``LOWPREC_FORCE_MATH_MODE`` acts, it is their mode, without candidates. Raises ModeError if both
    ``rtol`` and ``math_mode`` are given, one is illegal, or no mode meets ``rtol``.
    """
    measure = Bound.GUARANTEED if bound is None else check_bound(bound)
    if rtol is None:
        raise ModeError(f"bound={str(measure)!r} says what rtol= is about; pass rtol=, too")
    rtol = check_rtol(rtol)
    if math_mode is not None:
        raise ModeError(
            f"rtol={rtol} and math_mode={str(parse_mode(math_mode))!r} exclude each other; pass one of them"
        )
    imposed = policy.overriding_mode()
    if imposed is not None:
        return imposed, ()
    excluded = _TF32_MODES if policy.environment.snapshot().tf32_off else frozenset()
    selection = select_mode(problem, capabilities, rtol, excluded, measure)
    return policy.finish(selection.mode, ModeSource.RTOL), selection.candidates
