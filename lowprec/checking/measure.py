"""Comparable times: variants take turns in one process, and medians decide.

Slow phases of a machine affect all variants alike when they take turns. Each timed call follows an untimed one of the
same variant, because caches hold another variant's data. Operands are rotated, so that
none is in the cache.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

#: A median of fewer is no median.
MIN_ROUNDS = 3
#: Rounds where none are given: so many, and more while a spread is above the largest that counts as small.
USUAL_ROUNDS, SMALL_SPREAD = 7, 0.1

#: The clock and the call of a closure cost a microsecond; short calls are repeated until this much is timed.
_SHORTEST_SAMPLE = 1e-3
_MOST_CALLS_PER_SAMPLE = 200

#: Sets of operands that are rotated, and the bytes that they may take together.
_MOST_SETS, _MOST_BYTES = 3, 2**28

#: Of the CPUs: others' work that is felt.
_BUSY_SHARE = 0.25


class Load(NamedTuple):
    """How busy a machine was."""

    average: float | None  #: Processes that ran or waited to run, over the last minute; None where not counted.
    cpus: int

    @property
    def remark(self) -> str:
        """What to know about times that were measured meanwhile; empty if nothing."""
        if self.average is None or self.average <= _BUSY_SHARE * self.cpus:
            return ""
        return (
            f"the machine is busy (load average {self.average:.1f} on {self.cpus} CPUs before the first product): "
            "times and ratios are disturbed, and marked ~"
        )


def load() -> Load:
    """Return how busy the machine is, to be asked before anything of one's own runs."""
    try:
        average = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has none
        average = None
    return Load(average, os.cpu_count() or 1)


@dataclass(frozen=True)
class Timing:
    """The measurements of one variant."""

    samples: tuple[float, ...]  #: Seconds per call, one of each round.

    @property
    def median(self) -> float:
        """Seconds per call."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float | None:
        """Half the interquartile range of the samples, relative to their median; None for a single one."""
        if len(self.samples) < 2 or not self.median:
            return None
        low, _, high = statistics.quantiles(self.samples, method="inclusive")
        return (high - low) / 2 / self.median

    @property
    def is_noisy(self) -> bool:
        """Whether the samples spread too widely for their median to be repeatable."""
        return (self.spread or 0.0) > SMALL_SPREAD

    def speedup_over(self, other: Timing) -> float:
        """Return the median of the ratios of each round, in which both ran next to each other."""
        pairs = zip(other.samples, self.samples, strict=True)
        return statistics.median(theirs / mine for theirs, mine in pairs)


def take_turns(
    variants: Mapping[str, Callable[[int], Any]],
    rounds: int | None,
    *,
    budget: float,
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, Timing]:
    """Time each variant once per round, in changing order; the argument of a variant selects its operands.

    Without a number of rounds there are ``USUAL_ROUNDS``, and more until no spread is above ``SMALL_SPREAD``. No new
    round begins ``budget`` seconds after the first, once ``MIN_ROUNDS`` are done; ``step`` is called with the number
    of a round before each of these.
    """
    names, planned = list(variants), rounds or USUAL_ROUNDS
    samples: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    while True:
        number = len(samples[names[0]])
        timings = {name: Timing(tuple(taken)) for name, taken in samples.items()}
        repeats = rounds is None and any(timing.is_noisy for timing in timings.values())
        is_late = number >= MIN_ROUNDS and time.perf_counter() - begin > budget
        if is_late or (number >= planned and not repeats):
            return timings
        if number < planned:
            step(f"round {number + 1}")
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(_sample(variants[name], number))


def _sample(call: Callable[[int], Any], number: int) -> float:
    clock = time.perf_counter
    start = clock()
    call(number)
    calls = min(max(1, int(_SHORTEST_SAMPLE / max(clock() - start, 1e-9))), _MOST_CALLS_PER_SAMPLE)
    start = clock()
    for i in range(calls):
        call(number + 1 + i)
    return (clock() - start) / calls


def rotation(nbytes: int) -> int:
    """Return how many sets of operands of this size to rotate: caches hold small ones, memory few large ones."""
    return max(1, min(_MOST_SETS, math.floor(_MOST_BYTES / max(nbytes, 1))))
