"""``rtol``: the cheapest mode whose guaranteed bound is small enough."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, nan
from numbers import Real

from lowprec.errors import ModeError, quoted
from lowprec.modes import MathMode, available_modes
from lowprec.planning.bounds import SINGLE_PRECISION
from lowprec.planning.kernels import Capabilities, Kernel, flops_per_conversion
from lowprec.planning.plan import PLAN_CACHE_SIZE, Candidate, GemmPlan, plan_gemm
from lowprec.planning.problem import GemmProblem

__all__ = ["COST_PER_FLOP", "Selection", "check_rtol", "select_mode"]

#: Time per flop of the product against numpy.matmul on float32: ratios that bench_gemm.py measured on two threads of a
#: CPU with AMX, 2048 x 2048 matrices, less the packing.
COST_PER_FLOP: dict[Kernel, float] = {
    Kernel.AMX_BF16: 0.09,
    Kernel.AMX_BF16_PAIR: 0.35,
    Kernel.AMX_INT8: 0.06,
    Kernel.MKL: 1.0,
    Kernel.NUMPY: 1.0,
    Kernel.CUBLASLT: 1.0,
}

#: The same for cuBLASLt by mode, FP32 on the same device as the unit: published rates of a GH200 at 8192 (FP32 51.4,
#: TF32 403 TFLOP/s), and twice the TF32 rate for 16-bit data, as the data sheets of all capabilities have it.
COST_ON_TENSOR_CORES: dict[MathMode, float] = {
    MathMode.TF32: 51.4 / 403,
    MathMode.BF16: 51.4 / 806,
    MathMode.FP16: 51.4 / 806,
}


@dataclass(frozen=True, slots=True)
class Selection:
    """The mode that ``rtol`` chose, and all that were considered, the cheapest first."""

    mode: MathMode
    candidates: tuple[Candidate, ...]


def check_rtol(rtol: object) -> float:
    """Return ``rtol`` as a float.

    Raises
    ------
    ModeError
        If it is not a positive finite number.

    Examples
    --------
    >>> check_rtol(1e-5)
    1e-05
    """
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

    Parameters
    ----------
    problem : GemmProblem
    capabilities : Capabilities
    rtol : float
        Largest ``|C - AB| / (|A| |B|)`` in the Frobenius norm.
    excluded : frozenset of MathMode
        Modes that the environment forbids.

    Raises
    ------
    ModeError
        If ``rtol`` is no positive finite number, or no mode meets it; the message lists the bounds.

    Examples
    --------
    >>> from lowprec.formats import DType
    >>> from lowprec.planning.layout import OperandSpec
    >>> square = OperandSpec.contiguous(DType.FLOAT32, (1024, 1024))
    >>> amx = Capabilities("cpu", "any", amx_bf16=True, numba=True)
    >>> select_mode(GemmProblem(square, square), amx, 1e-2).mode
    <MathMode.BF16: 'bf16'>
    """
    return _select(problem, capabilities, check_rtol(rtol), excluded)


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def _select(
    problem: GemmProblem, capabilities: Capabilities, rtol: float, excluded: frozenset[MathMode]
) -> Selection:
    plans = [plan_gemm(problem, capabilities, mode) for mode in _modes_for(problem, capabilities)]
    costs = {plan.mode: expected_cost(plan) for plan in plans}
    # sorted is stable: among equals the table's order decides, which begins with fp32.
    plans.sort(key=lambda plan: costs[plan.mode])
    chosen: MathMode | None = None
    candidates = []
    for plan in plans:
        why = _objection(plan, rtol, excluded)
        accepted = not why and chosen is None
        if accepted:
            chosen, why = plan.mode, "the cheapest whose bound is within rtol"
        elif not why:
            why = f"no cheaper than {chosen}"
        candidates.append(
            Candidate(plan.mode, plan.bound.relative, costs[plan.mode], accepted, why)
        )
    if chosen is None:
        raise ModeError(_no_mode(rtol, candidates, plans[0]))
    return Selection(chosen, tuple(candidates))


def _modes_for(problem: GemmProblem, capabilities: Capabilities) -> tuple[MathMode, ...]:
    """Return the modes to weigh: all of them in single precision, else the one that stands for all."""
    if plan_gemm(problem, capabilities, MathMode.FP32).compute_dtype in SINGLE_PRECISION:
        return available_modes()
    return (MathMode.FP32,)


def _objection(plan: GemmPlan, rtol: float, excluded: frozenset[MathMode]) -> str:
    """Return why a mode cannot be taken, empty if it can."""
    if plan.mode in excluded:
        return "excluded by the environment"
    if plan.bound.relative > rtol:
        return f"its bound exceeds rtol = {rtol:.3g}"
    if not plan.bound.unconditional:
        return f"its bound depends on the data's range: {plan.bound.condition}"
    return ""


def _no_mode(rtol: float, candidates: list[Candidate], plan: GemmPlan) -> str:
    bounds = ", ".join(f"{c.mode} {c.bound:.3g}" for c in candidates)
    dtype = "complex128" if plan.compute_dtype.is_complex else "float64"
    return (
        f"no math mode guarantees rtol = {rtol:.3g} for {plan.compute_dtype} operands at k = {plan.layout.k}; "
        f"bounds: {bounds}. Use a larger rtol or {dtype} operands"
    )


# FP32 flops that a GPU does while it moves one byte: 51.4 TFLOP/s over 4 TB/s, the GH200 of the table above.
_FLOPS_PER_BYTE_MOVED = 13.0


def _rewriting(plan: GemmPlan) -> float:
    """Return the cost of what is rewritten before and after a call of cuBLASLt: each byte is written and read."""
    moved = 2 * sum(copy.nbytes for copy in plan.copies)
    return moved * _FLOPS_PER_BYTE_MOVED / plan.flops


def expected_cost(plan: GemmPlan) -> float:
    """Return the expected time in units of numpy.matmul on float32: the kernel's, and rounding the operands.

    An element of ``a`` takes part in 2 n flops, one of ``b`` in 2 m. Only single precision has candidates that round.
    """
    cost = COST_PER_FLOP[plan.kernel]
    if plan.call is not None:
        return COST_ON_TENSOR_CORES.get(plan.mode, cost) + _rewriting(plan)
    layout = plan.layout
    rounds = plan.mode not in (MathMode.FP32, MathMode.FP32_PEDANTIC)
    if rounds and layout.m and layout.n:
        cost += flops_per_conversion(plan.kernel) * (1 / (2 * layout.m) + 1 / (2 * layout.n))
    return cost
