"""The time of a product on a GPU: an event before it, one after it, and the time between them once it is asked for.

Recording an event queues a mark in the stream and waits for nothing. Events are reused, since creating one costs more
than recording it. Source: the CUDA Runtime API reference, *Event Management*: recording an event again replaces what it
stood for.
"""

from __future__ import annotations

from typing import Any

from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.libraries import libraries, loaded
from lowprec.backends.execution import Stopwatch


class EventPool:
    """Timing events of one device that nobody uses at the moment."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._idle: list[Any] = []

    def take(self) -> Any:
        """Return an event, a new one where none is idle; the device is current."""
        try:
            return self._idle.pop()
        except IndexError:
            return runtime.create_event(timing=True)

    def give(self, events: list[Any]) -> None:
        """Take events back."""
        self._idle.extend(events)

    def release(self) -> None:
        """Destroy the idle events."""
        while self._idle:
            runtime.destroy_event(self._idle.pop())


class _EventStopwatch:
    """Two events around a product; they go back to their pool once nobody is left to read the time."""

    __slots__ = ("_events", "_pool", "_stopped", "stream")

    def __init__(self, pool: EventPool, stream: int) -> None:
        self._pool = pool
        self._events: list[Any] = []
        self._stopped = False
        self.stream = stream
        self._mark()

    def _mark(self) -> None:
        # The caller's device need not be the array's, and 1 means the default stream of the current one.
        with runtime.on_device(self._pool.device):
            event = self._pool.take()
            self._events.append(event)
            runtime.record_event(event, self.stream)

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
        runtime.synchronize_event(end)
        return runtime.elapsed_ms(start, end)

    def __del__(self) -> None:
        self.abandon()


class _Captured:
    """For a product that was captured into a CUDA graph: it did not run, so it has no time."""

    __slots__ = ("stream",)

    def __init__(self, stream: int) -> None:
        self.stream = stream

    def stop(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def elapsed_ms(self) -> None:
        return None


#: By the runtime, which tests exchange, and the device.
_pools: dict[tuple[Any, int], EventPool] = {}


def stopwatch(device: int, stream: int) -> Stopwatch:
    """Start to take the time of what a stream of a device does from now on; none while it is being captured."""
    if runtime.is_capturing(stream):
        return _Captured(stream)
    key = libraries().runtime, device
    return _EventStopwatch(_pools.get(key) or _pools.setdefault(key, EventPool(device)), stream)


def release() -> None:
    """Destroy all events that nobody uses."""
    found = loaded()
    for (owner, _), pool in list(_pools.items()):
        if found is not None and owner is found.runtime:
            pool.release()
