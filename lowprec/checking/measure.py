"""Comparable times: variants take turns in one process, and medians decide.

Slow phases of the machine then affect all variants alike. Each timed call follows an untimed one of the same variant,
since the caches hold another variant's data. Operands are rotated, so that none is in the cache.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Fewest samples for a median.
MIN_ROUNDS = 3
#: Default number of rounds; more are run while a spread is above ``SMALL_SPREAD``.
USUAL_ROUNDS = 7
SMALL_SPREAD = 0.1

#: Shortest timed interval, in seconds, by repetition: the clock and a closure cost a microsecond.
_SHORTEST_SAMPLE = 1e-3
_MOST_CALLS_PER_SAMPLE = 200

#: Idle threads of NumPy's OpenBLAS spin for 0.1 s on an EPYC Zen 5, and slow down the threads of the next variant.
SPIN_SECONDS = 0.15

#: Most sets of operands in rotation, and most bytes of all sets.
_MOST_SETS = 3
_MOST_BYTES = 2**28

#: Share of the CPUs used by other processes above which times are disturbed.
_BUSY_SHARE = 0.25


class Load(NamedTuple):
    """How busy a machine was.

    >>> Load(average=0.5, cpus=2).remark
    ''
    """

    #: Processes that ran or waited to run, over the last minute; None where not counted.
    average: float | None
    cpus: int

    @property
    def remark(self) -> str:
        """Warning about times measured under this load; empty if it is low."""
        if self.average is None or self.average <= _BUSY_SHARE * self.cpus:
            return ""
        load = f"load average {self.average:.1f} on {self.cpus} CPUs"
        return f"the machine is busy ({load}): times and ratios are disturbed"


def load() -> Load:
    """Return the load of the machine; call it before this process does any work."""
    try:
        average = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has none
        average = None
    return Load(average, os.cpu_count() or 1)


@dataclass(frozen=True)
class Timing:
    """The measurements of one variant.

    >>> Timing((2.0, 1.0, 3.0)).median
    2.0
    """

    samples: tuple[float, ...]  #: Seconds per call, one of each round.

    @property
    def median(self) -> float:
        """Seconds per call."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float | None:
        """Half the interquartile range over the median; None for a single sample."""
        if len(self.samples) < 2 or not self.median:
            return None
        low, _, high = statistics.quantiles(self.samples, method="inclusive")
        return (high - low) / 2 / self.median

    @property
    def is_noisy(self) -> bool:
        """Whether the samples spread too widely for their median to be repeatable."""
        return (self.spread or 0.0) > SMALL_SPREAD

    def speedup_over(self, other: Timing) -> float:
        """Return the median over rounds of the ratio of times of one round."""
        pairs = zip(other.samples, self.samples, strict=True)
        return statistics.median(theirs / mine for theirs, mine in pairs)


def take_turns(
    variants: Mapping[str, Callable[[int], Any]],
    rounds: int | None,
    *,
    budget: float,
    step: Callable[[str], None] = lambda _: None,
    spinning: Collection[str] = (),
) -> dict[str, Timing]:
    """Time each variant once per round, in changing order; a variant's argument selects its operands.

    By default there are ``USUAL_ROUNDS``, and more until no spread is above ``SMALL_SPREAD``. After ``MIN_ROUNDS``, no
    round begins later than ``budget`` seconds after the first. ``step`` receives the number of each round before it.
    A variant that is not in ``spinning`` is preceded by a pause of ``SPIN_SECONDS`` if it follows one that is, or the
    caller's own products.
    """
    names = list(variants)
    planned = rounds or USUAL_ROUNDS
    samples: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    spins = True
    while True:
        number = len(samples[names[0]])
        timings = {name: Timing(tuple(values)) for name, values in samples.items()}
        repeats = rounds is None and any(timing.is_noisy for timing in timings.values())
        is_late = number >= MIN_ROUNDS and time.perf_counter() - begin > budget
        if is_late or (number >= planned and not repeats):
            return timings
        if number < planned:
            step(f"round {number + 1}")
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if spins and name not in spinning:
                time.sleep(SPIN_SECONDS)
            samples[name].append(_sample(variants[name], number))
            spins = name in spinning


def _sample(call: Callable[[int], Any], number: int) -> float:
    clock = time.perf_counter
    start = clock()
    call(number)
    once = max(clock() - start, 1e-9)
    calls = min(max(1, int(_SHORTEST_SAMPLE / once)), _MOST_CALLS_PER_SAMPLE)
    start = clock()
    for i in range(calls):
        call(number + 1 + i)
    return (clock() - start) / calls


def rotation(nbytes: int) -> int:
    """Return the number of sets of operands of this size: small ones would fit the caches, large ones fill memory."""
    fitting = math.floor(_MOST_BYTES / max(nbytes, 1))
    return max(1, min(_MOST_SETS, fitting))
