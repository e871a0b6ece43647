"""The time of calls on a GPU, by turns: with the host out of the way, and as a caller meets it.

A small product takes the GPU less time than its call takes the host. So the GPU's own time is taken with the calls
queued behind a kernel that waits: when that ends, all are there. Medians and ratios are those of `timing`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import timing

from gpu.parts import short

#: Seconds of one sample, and the most calls in it.
_SAMPLE_S, _MOST_REPEATS = 2e-3, 100
#: Where the GPU takes this many times as long as the host, the host is never in the way.
_HOST_MARGIN = 3.0
_CLOCK_HZ = 2e9


@dataclass(frozen=True)
class Variant:
    """One way to do a thing: a call by the number of the operand set, and switches, set outside of what is timed."""

    call: Callable[[int], Any]
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


class EventClock:
    """Takes the time of a GPU by CUDA events of torch's on its current stream."""

    device = "cuda"

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def wait(self) -> None:
        """Wait for all work."""
        self._cuda.synchronize()

    def time(self, work: Callable[[], None], behind_s: float) -> float:
        """Return the seconds that the device takes for the work, queued behind a pause of the device."""
        start, end = self._events
        if behind_s > 0:
            self._cuda._sleep(int(behind_s * _CLOCK_HZ))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


class HostClock:
    """The same for calls that are done when they return."""

    device = "cpu"

    def wait(self) -> None:
        """Return at once."""

    def time(self, work: Callable[[], None], behind_s: float) -> float:
        """Return the seconds of the work."""
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


Clock = EventClock | HostClock


@dataclass
class Contest:
    """What was measured, by variant.

    Seconds per call, one per round, of the device alone and with the host's share where that is the longer one
    (`eager_s`); seconds for which a call keeps the host busy; what does not run, and why.
    """

    device_s: dict[str, list[float]] = field(default_factory=dict)
    eager_s: dict[str, list[float]] = field(default_factory=dict)
    host_s: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def speed(self, name: str) -> dict[str, dict[str, float]]:
        """Return how many times as fast as each other variant one is, by the device's time."""
        mine = self.device_s.get(name)
        return {
            other: timing.speed_ratio(theirs, mine)
            for other, theirs in self.device_s.items()
            if mine is not None and other != name
        }


@dataclass(frozen=True)
class _Prepared:
    """A variant that is warm: calls per sample, the pause of the device that hides the host, and the host's time."""

    variant: Variant
    repeats: int
    behind_s: float
    host_s: float

    def sample(self, clock: Clock, first: int, sets: int, behind_s: float) -> float:
        """Return the seconds per call, beginning with an operand set."""

        def work() -> None:
            for number in range(first, first + self.repeats):
                self.variant.call(number % sets)

        with self.variant.around():
            return clock.time(work, behind_s) / self.repeats


def contest(
    variants: Mapping[str, Variant], clock: Clock, *, sets: int, rounds: int = 15, budget_s: float = 1.0, seed: int = 0
) -> Contest:
    """Time variants by turns on operand sets that take turns; rounds, budget and seed as for `timing.take_turns`."""
    made = Contest()
    ready: dict[str, _Prepared] = {}
    for name, variant in variants.items():
        try:
            ready[name] = _prepare(variant, clock, sets)
        except Exception as error:  # noqa: BLE001 - a library that cannot do it is not compared
            made.errors[name] = short(error)
    made.host_s = {name: entry.host_s for name, entry in ready.items()}
    at = 0

    def sample(name: str, _: int) -> tuple[float, float]:
        nonlocal at
        if name in made.errors:
            return math.nan, math.nan
        entry = ready[name]
        try:
            taken = entry.sample(clock, at, sets, entry.behind_s)
            eager = entry.sample(clock, at, sets, 0.0) if entry.behind_s else taken
        except Exception as error:  # noqa: BLE001 - one that fails on its way does not spoil the others
            made.errors[name] = short(error)
            return math.nan, math.nan
        at += entry.repeats
        return taken, eager

    every = timing.take_turns(list(ready), sample, rounds=rounds, seed=seed, budget_s=budget_s)
    samples = {name: taken for name, taken in every.items() if name not in made.errors}
    made.device_s = {name: [device for device, _ in taken] for name, taken in samples.items()}
    made.eager_s = {name: [eager for _, eager in taken] for name, taken in samples.items()}
    return made


def _prepare(variant: Variant, clock: Clock, sets: int) -> _Prepared:
    """Warm a variant up and find out how to time it."""
    with variant.around():
        for number in range(2):
            variant.call(number % sets)
        clock.wait()
        begin = time.perf_counter()
        variant.call(0)
        host = time.perf_counter() - begin
        clock.wait()
        once = clock.time(lambda: variant.call(1 % sets), 0.0)
    repeats = max(1, min(_MOST_REPEATS, int(_SAMPLE_S / max(once, 1e-6))))
    hidden = once < _HOST_MARGIN * host
    return _Prepared(variant, repeats, (repeats * host * 1.5 + 1e-4) if hidden else 0.0, host)
