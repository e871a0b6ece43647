"""Speed against error of every mode, and the modes on the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import real_input
import samples
import timing

import lowprec

SIZES = (1024, 2048)
QUICK_SIZES = (64,)
ROUNDS = 9
#: Seconds after which no new round begins.
BUDGET_S = 120.0


def front(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Return the names of the points (speed, error) on the Pareto front: none is faster with at most the error.

    Examples
    --------
    >>> sorted(front({"a": (1.0, 1e-7), "b": (2.0, 1e-3), "c": (1.5, 1e-2), "d": (0.5, 1e-7)}))
    ['a', 'b']
    """
    return {
        name
        for name, (speed, error) in points.items()
        if not any(s >= speed and e <= error and (s, e) != (speed, error) for s, e in points.values())
    }


def measure(n: int, seed: int, *, rounds: int = ROUNDS) -> Sequence[dict[str, Any]]:
    """Return one row per mode for products of n x n of N(0, 1): speed over ``fp32``, and the error."""
    rng = np.random.default_rng([seed, n])
    sets = [[samples.DISTRIBUTIONS["normal"](rng, (n, n)) for _ in "ab"] for _ in range(3)]
    a, b = sets[0]
    i, j = (rng.choice(n, min(samples.SAMPLED, n), replace=False) for _ in range(2))
    exact = samples.product(a[i], b[:, j])
    plans = {mode: lowprec.plan(a, b, math_mode=mode) for mode in real_input.MODES}
    errors = {}
    for mode, plan in plans.items():
        found = lowprec.matmul(a, b, math_mode=mode)[i][:, j]
        errors[mode] = samples.judge(found, a[i], b[:, j], plan, exact)
    variants = {mode: lambda number, mode=mode: lowprec.matmul(*sets[number], math_mode=mode) for mode in plans}
    taken = timing.interleave(variants, rounds=rounds, sets=len(sets), seed=seed, budget_s=BUDGET_S)
    speeds = {mode: timing.speed_ratio(taken["fp32"], taken[mode]) for mode in plans}
    best = front({m: (speeds[m]["median"], errors[m].normalised) for m in plans})
    return [
        {
            "n": n,
            "mode": mode,
            "kernel": str(plan.kernel),
            "seconds": timing.summary(taken[mode]),
            "rounds": len(taken[mode]),
            "speed": speeds[mode],
            "normalised": errors[mode].normalised,
            "of_bound": errors[mode].of_bound,
            "on_front": mode in best,
        }
        for mode, plan in plans.items()
    ]
