"""The time of a product on a GPU: an event before it, one after it, and the time between them once it is asked for.

Recording an event queues a mark in the stream and waits for nothing. Events are reused, since creating one costs more
than recording it. Source: the CUDA Runtime API reference, *Event Management*: recording an event again replaces what it
stood for.
"""

from __future__ import annotations

from typing import Any

from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.libraries import libraries
from lowprec.backends.cuda.runtime import call

#: Events that nobody uses at the moment, by the runtime, which tests exchange, and the device.
_idle: dict[tuple[Any, int], list[Any]] = {}


class EventStopwatch:
    """Two events around a product, the first of them recorded now, on the current device.

    They are idle again once nobody is left to read the time. A product that is captured into a CUDA graph does not run,
    so it has no events and no time.
    """

    __slots__ = ("_device", "_events", "_idle", "_is_captured", "_stopped", "stream")

    def __init__(self, device: int, stream: int) -> None:
        self._idle = _idle.setdefault((libraries().runtime, device), [])
        self._events: list[Any] = []
        self._device = device
        self._is_captured = runtime.is_capturing(stream)
        self._stopped = False
        self.stream = stream
        self._mark()

    def _mark(self) -> None:
        if self._is_captured:
            return
        # The caller's device need not be the array's, and 1 means the default stream of the current one.
        with runtime.on_device(self._device):
            try:
                event = self._idle.pop()
            except IndexError:
                event = runtime.create_event(timing=True)
            self._events.append(event)
            call("cudaEventRecord", event, self.stream)

    def stop(self) -> None:
        """Record the second one."""
        self._mark()
        self._stopped = True

    def abandon(self) -> None:
        """Leave the events to others."""
        events, self._events = self._events, []
        self._idle.extend(events)

    @property
    def has_begun(self) -> bool:
        """Whether the device has reached the product."""
        with runtime.relaxed_capture():
            return runtime.event_is_done(self._events[0])

    def elapsed_ms(self) -> float | None:
        """Wait for the product and return its time; None if there is none."""
        if not self._stopped or not self._events:
            return None
        start, end = self._events
        runtime.wait_for_event(end)
        return float(call("cudaEventElapsedTime", start, end))

    def __del__(self) -> None:
        self.abandon()
