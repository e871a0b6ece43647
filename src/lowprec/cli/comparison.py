"""The math modes side by side on the same operands: time, error, bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lowprec import dispatch, explain
from lowprec.cli.accuracy import Errors, Reference
from lowprec.cli.files import Array
from lowprec.cli.measure import Timing, take_turns
from lowprec.modes import MathMode, available_modes
from lowprec.planning import GemmPlan

__all__ = ["Case", "Row", "Variant", "compare", "variants_of"]

Pair = tuple[Array, Array]


@dataclass(frozen=True)
class Case:
    """Operands on which modes are compared.

    Parameters
    ----------
    name, words : str
        For people.
    sets : list of pairs of numpy.ndarray
        Operands of one kind that take turns; errors are those of the first pair.
    """

    name: str
    words: str
    sets: list[Pair]


@dataclass(frozen=True)
class Variant:
    """One way to multiply a case's operands.

    Parameters
    ----------
    name : str
    sets : list of pairs of numpy.ndarray
    mode : MathMode or None
        None: the operands' element type decides.
    """

    name: str
    sets: list[Pair]
    mode: MathMode | None

    def __call__(self, number: int) -> Array:
        """Multiply one of the pairs."""
        a, b = self.sets[number % len(self.sets)]
        result: Array = dispatch.matmul(a, b, math_mode=self.mode)
        return result

    def plan(self) -> GemmPlan:
        """Return how that runs."""
        return explain.plan(*self.sets[0], math_mode=self.mode)


@dataclass(frozen=True)
class Row:
    """What came out for one variant.

    Parameters
    ----------
    name : str
    plan : GemmPlan
    timing : Timing
    speedup : float
        Over the first variant.
    errors : Errors
    """

    name: str
    plan: GemmPlan
    timing: Timing
    speedup: float
    errors: Errors


def variants_of(case: Case, modes: Sequence[MathMode] | None = None) -> list[Variant]:
    """Return what to compare on these operands, the baseline first: float32 in mode ``fp32``.

    Operands on which no mode acts (16-bit, int8) are compared with the same values held in float32, which is what one
    would multiply without lowprec.
    """
    a, b = case.sets[0]
    if explain.plan(a, b).mode_has_effect:
        chosen = dict.fromkeys((MathMode.FP32, *(available_modes() if modes is None else modes)))
        return [Variant(str(mode), case.sets, mode) for mode in chosen]
    copies = [(x.astype(np.float32), y.astype(np.float32)) for x, y in case.sets]
    stored = a.dtype.name if a.dtype == b.dtype else f"{a.dtype.name}, {b.dtype.name}"
    return [Variant("float32 copies", copies, MathMode.FP32), Variant(stored, case.sets, None)]


def compare(
    case: Case,
    variants: Sequence[Variant],
    *,
    rounds: int,
    budget: float,
    step: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """Yield what comes out for each variant.

    Parameters
    ----------
    case : Case
    variants : sequence of Variant
        The baseline first.
    rounds : int
        Samples of each one's time.
    budget : float
        Seconds after which no new round of samples begins.
    step : callable
        Called with a few words before each of ``len(variants) + rounds`` steps.
    """
    reference = Reference(*case.sets[0])
    plans, errors = {}, {}
    # Before anything is timed: the first product of a kind loads libraries and compiles.
    for variant in variants:
        step(variant.name)
        plans[variant.name] = variant.plan()
        result = np.asarray(variant(0))
        errors[variant.name] = reference.compare(result, plans[variant.name])
    timings = take_turns(
        {v.name: v for v in variants},
        rounds,
        budget=budget,
        spinning=[name for name, plan in plans.items() if plan.kernel == "numpy"],
        step=step,
    )
    baseline = timings[variants[0].name]
    for name, timing in timings.items():
        yield Row(name, plans[name], timing, timing.speedup_over(baseline), errors[name])
