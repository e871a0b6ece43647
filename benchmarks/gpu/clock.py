"""The time of calls on a GPU, by turns, with the host out of the way.

A small product takes the GPU less time than its call takes the host. The GPU's time is therefore measured with the
calls queued behind a kernel that waits. Medians and ratios are those of `timing`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import timing

from gpu.parts import short

#: Seconds of one sample, and the most calls in it.
_SAMPLE_S, _MOST_REPEATS = 2e-3, 100
#: Where the GPU takes this many times as long as the host, the host's time is hidden without a pause.
_HOST_MARGIN = 3.0


@dataclass(frozen=True)
class Variant:
    """A call by the number of the operand set, and switches, which are set outside of the timed part."""

    call: Callable[[int], Any]
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


class EventClock:
    """Measures the time of a GPU by CUDA events of PyTorch's on its current stream."""

    device = "cuda"

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def wait(self) -> None:
        self._cuda.synchronize()

    def time(self, work: Callable[[], None], behind_s: float) -> float:
        """Return the seconds that the device takes for the work, queued behind a pause of the device."""
        start, end = self._events
        if behind_s > 0:
            self._cuda._sleep(int(behind_s * 2e9))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


@dataclass
class Contest:
    """The measurements, by variant.

    Seconds per call of the device alone, one per round; seconds for which a call keeps the host busy; errors of the
    variants that do not run.
    """

    device_s: dict[str, list[float]] = field(default_factory=dict)
    host_s: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        return {name: timing.summary(samples)["median"] for name, samples in self.device_s.items()}

    def speed(self, name: str) -> dict[str, dict[str, float]]:
        """Return how many times as fast as each other variant one is, by the device's time."""
        if name not in self.device_s:
            return {}
        mine = self.device_s[name]
        others = {other: samples for other, samples in self.device_s.items() if other != name}
        return {other: timing.speed_ratio(theirs, mine) for other, theirs in others.items()}


@dataclass(frozen=True)
class _Warm:
    """A variant that has run: calls per sample, the pause of the device that hides the host, and the host's time."""

    variant: Variant
    repeats: int
    behind_s: float
    host_s: float

    def sample(self, clock: EventClock, numbers: Iterator[int]) -> float:
        """Return the seconds per call on the next operand sets."""

        def work() -> None:
            for number in itertools.islice(numbers, self.repeats):
                self.variant.call(number)

        with self.variant.around():
            return clock.time(work, self.behind_s) / self.repeats


def contest(
    variants: Mapping[str, Variant],
    clock: EventClock,
    *,
    sets: int = 1,
    rounds: int = 15,
    budget_s: float = 1.0,
    seed: int = 0,
) -> Contest:
    """Time variants by turns on operand sets that take turns; rounds, budget and seed as for `timing.take_turns`."""
    measured = Contest()
    ready: dict[str, _Warm] = {}
    for name, variant in variants.items():
        try:
            ready[name] = _warm(variant, clock, sets)
        except Exception as error:  # noqa: BLE001 - a library that fails is not compared
            measured.errors[name] = short(error)
    measured.host_s = {name: entry.host_s for name, entry in ready.items()}
    numbers = itertools.cycle(range(sets))

    def sample(name: str, _: int) -> float:
        if name not in measured.errors:
            try:
                return ready[name].sample(clock, numbers)
            except Exception as error:  # noqa: BLE001 - a late failure leaves the others
                measured.errors[name] = short(error)
        return math.nan

    samples = timing.take_turns(list(ready), sample, rounds=rounds, seed=seed, budget_s=budget_s)
    measured.device_s = {
        name: times for name, times in samples.items() if name not in measured.errors
    }
    return measured


def _warm(variant: Variant, clock: EventClock, sets: int) -> _Warm:
    """Run a variant, and determine how to time it."""
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
    is_hidden = once >= _HOST_MARGIN * host
    return _Warm(variant, repeats, 0.0 if is_hidden else repeats * host * 1.5 + 1e-4, host)
