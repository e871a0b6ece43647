"""The time of a product on a GPU, taken by events around it and read only when somebody asks.

Recording an event puts a mark into the stream and waits for nothing. Events are kept for the next product: creating
one costs more than recording it. Source: the CUDA Runtime API reference, *Event Management*; an event that was
recorded may be recorded anew at any time, which forgets the earlier mark.
"""

from __future__ import annotations

from typing import Any

from lowprec.backends.cuda import driver
from lowprec.backends.cuda.libraries import libraries
from lowprec.backends.execution import Stopwatch

__all__ = ["EventPool", "release", "stopwatch"]


class EventPool:
    """Timing events of one device that nobody uses at the moment.

    Parameters
    ----------
    device : int
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._idle: list[Any] = []

    def take(self) -> Any:
        """Return an event, a new one where none is idle."""
        try:
            return self._idle.pop()
        except IndexError:
            with driver.on_device(self._device):
                return driver.create_event(timing=True)

    def give(self, events: list[Any]) -> None:
        """Take events back."""
        self._idle.extend(events)

    def release(self) -> None:
        """Destroy the idle events."""
        while self._idle:
            driver.destroy_event(self._idle.pop())


class _EventStopwatch:
    """Two events around a product. They go back to their pool when nobody is left to read the time."""

    __slots__ = ("_events", "_pool", "_stopped", "stream")

    def __init__(self, pool: EventPool, stream: int) -> None:
        self._pool = pool
        self._events: list[Any] = []
        self._stopped = False
        self.stream = stream
        self._mark()

    def _mark(self) -> None:
        event = self._pool.take()
        self._events.append(event)
        driver.record_event(event, self.stream)

    def stop(self) -> None:
        self._mark()
        self._stopped = True

    def abandon(self) -> None:
        events, self._events = self._events, []
        self._pool.give(events)

    def elapsed_ms(self) -> float | None:
        if not self._stopped or not self._events:
            return None
        start, end = self._events
        driver.synchronize_event(end)
        return driver.elapsed_ms(start, end)

    def __del__(self) -> None:
        self.abandon()


class _Captured:
    """Stands for a product that was captured into a CUDA graph: it did not run, so it has no time."""

    __slots__ = ("stream",)

    def __init__(self, stream: int) -> None:
        self.stream = stream

    def stop(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def elapsed_ms(self) -> None:
        return None


# By the runtime too, so that tests may exchange it.
_pools: dict[tuple[Any, int], EventPool] = {}


def stopwatch(device: int, stream: int) -> Stopwatch:
    """Start to take the time of what a stream does from now on.

    Parameters
    ----------
    device : int
        Whose stream it is.
    stream : int

    Returns
    -------
    Stopwatch
        Without a time where the stream is being captured into a graph.
    """
    if driver.is_capturing(stream):
        return _Captured(stream)
    key = libraries().runtime, device
    return _EventStopwatch(_pools.get(key) or _pools.setdefault(key, EventPool(device)), stream)


def release() -> None:
    """Destroy all events that nobody uses."""
    for pool in list(_pools.values()):
        pool.release()
