"""The mode that ``rtol=`` selects."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from lowprec import policy
from lowprec.backends import backend_of
from lowprec.core.arguments import check_devices, spec_of
from lowprec.errors import ModeError
from lowprec.modes import (
    TABLE,
    BoundName,
    MathMode,
    Mode,
    ModeLike,
    ModeSource,
    ResolvedMode,
    parse_mode,
)
from lowprec.planning import (
    Candidate,
    Capabilities,
    GemmPlan,
    GemmProblem,
    Reason,
    ReasonKind,
    plan_gemm,
)
from lowprec.planning.selection import BOUNDS, check_bound, check_rtol, select_mode

if TYPE_CHECKING:
    from lowprec.core.call import Call

_TF32_MODES = frozenset(row.mode for row in TABLE if row.uses_tf32)


def mode_of(
    call: Call,
    math_mode: ModeLike | None,
    rtol: float | None,
    bound: BoundName | None,
    capabilities: Capabilities | None = None,
) -> tuple[ResolvedMode, tuple[Candidate, ...]]:
    """Return the mode of a product, and all candidates if ``rtol`` selects it and none is imposed."""
    if rtol is None and bound is None:
        return policy.resolve(math_mode), ()
    bound = check_bound(bound or "guaranteed")
    if rtol is None:
        raise ModeError(f"bound={bound!r} needs rtol=; pass both")
    rtol = check_rtol(rtol)
    if math_mode is not None:
        raise ModeError(
            f"rtol={rtol} and math_mode={str(parse_mode(math_mode))!r} exclude each other; pass one of them"
        )
    imposed = policy.overriding_mode()
    if imposed is not None:
        return imposed, ()
    x = call.x
    y = call.y
    check_devices(call.options.views(x, y))
    problem = call.options.problem(spec_of(x), spec_of(y))
    capabilities = capabilities or backend_of(x.device).capabilities(x.device)
    selection = select_mode(problem, capabilities, rtol, _excluded(), bound)
    links = getattr(call.a, "numblocks", (1,))[-1]  # Dask adds this number of products
    if links <= 1:
        links = getattr(call.b, "numblocks", (1,))[-2:][0]
    if links > 1:
        selection = _within_chain(links, selection, problem, capabilities, rtol, bound)
    mode, candidates = selection
    return policy.restrict(mode, ModeSource.RTOL), candidates


def _excluded() -> frozenset[Mode]:
    if policy.environment.snapshot().tf32_off:
        return _TF32_MODES
    return frozenset()


def _within_chain(
    links: int,
    whole: tuple[Mode, tuple[Candidate, ...]],
    problem: GemmProblem,
    capabilities: Capabilities,
    rtol: float,
    bound: BoundName,
) -> tuple[Mode, tuple[Candidate, ...]]:
    """Return the selection for products of chunks of k that are added up in the accumulator's type.

    |C - AB| <= (e + g (1 + e)) |A||B|, with e the error of a partial product relative to its |A||B|, and g that of the
    summation, in any order: by Cauchy and Schwarz, the chunks' |A||B| add up to at most the whole one. A chain of n
    products has n roundings: g = n u / (1 - n u).
    """
    dtype = plan_gemm(problem, capabilities, MathMode.FP32).compute_dtype
    if dtype.accumulator.format is None:
        return whole  # sums of integers are exact
    u = dtype.accumulator.format.unit_roundoff
    growth = links * u / (1 - links * u)
    with suppress(ModeError):
        rest = check_rtol((rtol - growth) / (1 + growth))
        return select_mode(problem, capabilities, rest, _excluded(), bound)
    # FP64 sums are rounded once, however many chunks there are.
    _, candidates = whole
    bounds = {c.mode: c.bound for c in candidates}
    if bounds.get(MathMode.FP64, inf) <= rtol:
        return MathMode.FP64, candidates
    raise ModeError(
        f"no math mode keeps rtol = {rtol:.3g} where {dtype} products of {links} chunks along k are added up, which "
        f"adds {growth:.3g}; use a larger rtol or fewer chunks along k"
    )


def other_choice(rtol: float | None, bound: BoundName | None, planned: GemmPlan) -> Reason:
    """Return which bound ``rtol`` limits, and the mode that the other bound would choose."""
    used = bound or "guaranteed"
    rtol = check_rtol(rtol)
    choice = "no mode"
    (other,) = set(BOUNDS) - {used}
    with suppress(ModeError):
        _, candidates = select_mode(planned.problem, planned.capabilities, rtol, _excluded(), other)
        chosen = next(x for x in candidates if x.accepted)
        choice = f"{chosen.mode}, whose bound is {chosen.bound:.2g}"
    return Reason.of(ReasonKind.TOLERANCE, bound=used, rtol=rtol, other=other, choice=choice)
