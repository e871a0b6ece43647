"""The time of a product on a GPU, measured by two events.

Recording an event does not wait. Events are reused, since creating one costs more than recording it. Source: the CUDA
Runtime API reference, *Event Management*.
"""

from __future__ import annotations

from typing import Any

from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.libraries import libraries
from lowprec.backends.cuda.runtime import call

#: Unused events by the runtime, which tests replace, and the device.
_idle: dict[tuple[Any, int], list[Any]] = {}


class EventStopwatch:
    """Two events around a product, the first of them recorded now, on the current device.

    They are reused once this object is destroyed. A product that is captured into a CUDA graph does not run, so it has
    no events and no time.
    """

    __slots__ = ("_device", "_events", "_idle", "stream")

    def __init__(self, device: int, stream: int) -> None:
        self._idle = _idle.setdefault((libraries().runtime, device), [])
        self._events: list[Any] = []
        self._device = device
        self.stream = stream
        if not runtime.is_capturing(stream):
            self._record()

    def _record(self) -> None:
        # The caller's device need not be the array's, and stream 1 is the default one of the current device.
        with runtime.on_device(self._device):
            try:
                event = self._idle.pop()
            except IndexError:
                event = runtime.create_event(timing=True)
            self._events.append(event)
            call("cudaEventRecord", event, self.stream)

    def stop(self) -> None:
        """Record the second event."""
        if self._events:
            self._record()

    def abandon(self) -> None:
        """Release the events."""
        events, self._events = self._events, []
        self._idle.extend(events)

    @property
    def has_begun(self) -> bool:
        """Whether the device has reached the product."""
        with runtime.relaxed_capture():
            return runtime.event_is_done(self._events[0])

    def elapsed_ms(self) -> float | None:
        """Wait for the product and return its time; None if there is none."""
        if len(self._events) < 2:
            return None
        start, end = self._events
        runtime.wait_for_event(end)
        return float(call("cudaEventElapsedTime", start, end))

    def __del__(self) -> None:
        self.abandon()
