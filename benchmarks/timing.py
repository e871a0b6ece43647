"""Interleaved timing of several variants, and its statistics. Standard library only."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

#: A variant receives the number of its operand set, and returns its result.
Variant = Callable[[int], Any]

#: Fewest rounds, for any budget.
MIN_ROUNDS = 3

#: Longer than the threads of an OpenMP runtime spin after a parallel region (GNU's: 3 to 5 ms on a 4 GHz processor).
#: On a machine with few cores they would take a core from the next variant.
SPIN_SECONDS = 0.01

Sample = TypeVar("Sample")


def take_turns(
    names: Sequence[str],
    sample: Callable[[str, int], Sample],
    *,
    rounds: int,
    seed: int = 0,
    budget_s: float = math.inf,
) -> dict[str, list[Sample]]:
    """Take one sample per name and round, each round in a new random order; the entries of one round belong together.

    `sample` gets a name and the number of the round, and returns seconds, or whatever belongs to one sample. After
    `budget_s` seconds no new round begins, once `MIN_ROUNDS` are done.
    """
    generator = random.Random(seed)
    order = list(names)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    begin = time.monotonic()
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            if number >= MIN_ROUNDS and time.monotonic() - begin > budget_s:
                break
            generator.shuffle(order)
            for name in order:
                samples[name].append(sample(name, number))
    finally:
        gc.enable()
    return samples


def interleave(
    variants: Mapping[str, Variant],
    *,
    rounds: int,
    sets: int = 1,
    seed: int = 0,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time calls in turns, on operand sets that take turns; return seconds per call as `take_turns` does.

    Each timed call comes right after an untimed one of the same variant, because the first call after a pause is
    slower. The untimed call works on the operand set before, so that the timed one does not find its operands in the
    cache. A pause before both ends the spinning of the threads of the variant before.
    """

    def sample(name: str, number: int) -> float:
        variant = variants[name]
        time.sleep(SPIN_SECONDS)
        variant((number - 1) % sets)
        start = clock()
        # The name keeps the result: freeing its memory is not part of the product.
        result = variant(number % sets)
        elapsed = clock() - start
        del result
        return elapsed

    for variant in variants.values():
        variant(0)
    return take_turns(list(variants), sample, rounds=rounds, seed=seed, budget_s=budget_s)


def repeat(
    timers: Mapping[str, timeit.Timer],
    *,
    calls: int,
    rounds: int,
    seed: int = 0,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Time short statements in turns; return seconds per execution as `take_turns` does.

    A sample is that many `calls`. It follows untimed executions of the same statement, and what `before` waits for.
    """

    def sample(name: str, _: int) -> float:
        timers[name].timeit(calls // 10 + 1)
        before()
        return timers[name].timeit(calls) / calls

    return take_turns(list(timers), sample, rounds=rounds, seed=seed)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles.

    Examples
    --------
    >>> summary([3.0, 1.0, 2.0, 5.0, 4.0])
    {'median': 3.0, 'q1': 2.0, 'q3': 4.0}
    """
    if len(values) == 1:
        return dict.fromkeys(("median", "q1", "q3"), values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def speed_ratio(baseline: Sequence[float], variant: Sequence[float]) -> dict[str, float]:
    """Return a variant's speed relative to the baseline: median and quartiles of the ratios by round.

    Examples
    --------
    >>> speed_ratio([2.0, 40.0, 6.0], [1.0, 10.0, 2.0])["median"]
    3.0
    """
    return summary([b / v for b, v in zip(baseline, variant, strict=True)])
