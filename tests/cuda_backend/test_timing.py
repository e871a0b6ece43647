"""Timing events: recorded around a product, read late, and never lost."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

import lowprec
from cuda_backend.cuda_reset import release_timing_events
from cuda_backend.device_fixture import SoftwareGpu
from lowprec.backends.cuda import measuring as timing
from lowprec.backends.cuda.libraries import Libraries, use
from lowprec.backends.cuda.runtime import on_device
from lowprec.errors import BackendError
from software_cuda.driver import DeviceDriver

STREAM, CAPTURED, BROKEN = 7, 8, 9


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidResourceHandle = 400
    cudaErrorStreamCaptureImplicit = 906


class CaptureStatus(IntEnum):
    cudaStreamCaptureStatusNone = 0
    cudaStreamCaptureStatusActive = 1


class CaptureMode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeRelaxed = 2


class Event:
    """An event: the device it belongs to, and when it was recorded and waited for."""

    def __init__(self, device: int, timing: bool) -> None:
        self.device = device
        self.timing = timing
        self.recorded_at: float | None = None
        self.done = False


class Runtime:
    """The functions of CUDA's runtime that have to do with events, on a clock that each recording moves on by 1 ms."""

    cudaError_t = Status
    cudaStreamCaptureStatus = CaptureStatus
    cudaStreamCaptureMode = CaptureMode
    cudaEventDefault = 0
    cudaEventDisableTiming = 2

    def __init__(self) -> None:
        self.device = 0
        self.clock_ms = 0.0
        self.alive: list[Event] = []
        self.created = 0
        self.mode = CaptureMode.cudaStreamCaptureModeGlobal

    def cudaGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return Status.cudaSuccess, b"in words"

    def cudaGetLastError(self) -> tuple[Status]:
        return (Status.cudaSuccess,)

    def cudaGetDevice(self) -> tuple[Status, int]:
        return Status.cudaSuccess, self.device

    def cudaSetDevice(self, device: int) -> tuple[Status]:
        self.device = device
        return (Status.cudaSuccess,)

    def cudaStreamIsCapturing(self, stream: int) -> tuple[Status, CaptureStatus]:
        return Status.cudaSuccess, CaptureStatus(int(stream == CAPTURED))

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Status, Event]:
        self.created += 1
        self.alive.append(Event(self.device, not flags & self.cudaEventDisableTiming))
        return Status.cudaSuccess, self.alive[-1]

    def cudaEventDestroy(self, event: Event) -> tuple[Status]:
        self.alive.remove(event)
        return (Status.cudaSuccess,)

    def cudaEventRecord(self, event: Event, stream: int) -> tuple[Status]:
        assert event in self.alive
        assert stream != CAPTURED, "an event was captured"
        assert event.device == self.device, "the default stream is that of the current device"
        if stream == BROKEN:
            return (Status.cudaErrorInvalidResourceHandle,)
        self.clock_ms += 1.0
        event.recorded_at, event.done = self.clock_ms, False
        return (Status.cudaSuccess,)

    def cudaThreadExchangeStreamCaptureMode(self, mode: CaptureMode) -> tuple[Status, CaptureMode]:
        before, self.mode = self.mode, mode
        return Status.cudaSuccess, before

    def cudaEventSynchronize(self, event: Event) -> tuple[Status]:
        assert self.mode is CaptureMode.cudaStreamCaptureModeRelaxed
        assert event in self.alive
        event.done = True
        return (Status.cudaSuccess,)

    def cudaEventElapsedTime(self, start: Event, end: Event) -> tuple[Status, float]:
        ready = end.done and start.timing and end.timing
        if not ready or start.recorded_at is None or end.recorded_at is None:
            return Status.cudaErrorInvalidResourceHandle, 0.0
        return Status.cudaSuccess, end.recorded_at - start.recorded_at


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    fake: Any = Runtime()
    before = use(Libraries(None, None, fake, None, DeviceDriver(fake)))
    yield fake
    release_timing_events()
    use(before)
    timing._idle.clear()
    assert fake.alive == [], "events were lost"


def test_time_is_that_between_the_events(runtime: Runtime) -> None:
    watch = timing.EventStopwatch(0, STREAM)
    runtime.clock_ms += 12.0
    watch.stop()
    runtime.clock_ms += 5.0
    assert not any(event.done for event in runtime.alive), "recording waits for nothing"
    assert watch.stream == STREAM
    assert watch.elapsed_ms() == 13.0


def test_events_belong_to_the_device_and_the_thread_keeps_its_own(runtime: Runtime) -> None:
    with on_device(3):  # the caller's, while the product is queued
        watch = timing.EventStopwatch(3, STREAM)
    watch.stop()
    assert watch.elapsed_ms() == 1.0
    assert {event.device for event in runtime.alive} == {3}
    assert runtime.device == 0


def test_unreachable_events_are_used_again(runtime: Runtime) -> None:
    for _ in range(5):
        watch = timing.EventStopwatch(0, STREAM)
        watch.stop()
        assert watch.elapsed_ms() == 1.0
        del watch
        gc.collect()
    assert runtime.created == 2
    both = [timing.EventStopwatch(0, STREAM), timing.EventStopwatch(0, STREAM)]
    for watch in both:
        watch.stop()
    assert [watch.elapsed_ms() for watch in both] == [2.0, 2.0]
    assert runtime.created == 4


def test_time_can_be_read_again_but_not_before_the_end(runtime: Runtime) -> None:
    watch = timing.EventStopwatch(0, STREAM)
    assert watch.elapsed_ms() is None
    watch.stop()
    assert watch.elapsed_ms() == 1.0
    # Events that were given back by now would tell the time of this one.
    timing.EventStopwatch(0, STREAM).stop()
    assert watch.elapsed_ms() == 1.0


@pytest.mark.parametrize("stopped", [False, True])
def test_unread_events_of_a_product_come_back(runtime: Runtime, stopped: bool) -> None:
    watch = timing.EventStopwatch(0, STREAM)
    if stopped:
        watch.stop()
    del watch
    gc.collect()
    release_timing_events()
    assert runtime.alive == []


def test_events_of_a_product_that_failed_come_back_once(runtime: Runtime) -> None:
    watch = timing.EventStopwatch(0, STREAM)
    watch.abandon()
    watch.abandon()
    del watch
    first, second = timing.EventStopwatch(0, STREAM), timing.EventStopwatch(0, STREAM)
    assert runtime.created == 2, "one event came back twice, or none"
    del first, second


def test_an_event_that_cannot_be_recorded_comes_back(runtime: Runtime) -> None:
    with pytest.raises(BackendError, match="cudaEventRecord failed with cudaErrorInvalidResource"):
        timing.EventStopwatch(0, BROKEN)
    gc.collect()
    release_timing_events()
    assert runtime.created == 1
    assert runtime.alive == []


def test_events_come_back_where_the_time_cannot_be_read(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: Event) -> tuple[Status]:
        return (Status.cudaErrorInvalidResourceHandle,)

    watch = timing.EventStopwatch(0, STREAM)
    watch.stop()
    monkeypatch.setattr(runtime, "cudaEventSynchronize", fail)
    with pytest.raises(BackendError, match="cudaEventSynchronize"):
        watch.elapsed_ms()
    del watch
    gc.collect()
    release_timing_events()
    assert runtime.alive == []


def test_a_captured_product_has_no_time_and_no_event(runtime: Runtime) -> None:
    watch = timing.EventStopwatch(0, CAPTURED)
    watch.stop()
    watch.abandon()
    assert watch.elapsed_ms() is None
    assert watch.stream == CAPTURED
    assert runtime.created == 0


def test_devices_do_not_share_events(runtime: Runtime) -> None:
    timing.EventStopwatch(0, STREAM).abandon()
    with on_device(1):
        timing.EventStopwatch(1, STREAM).abandon()
    assert [event.device for event in runtime.alive] == [0, 1]


def test_a_product_on_another_device_has_its_time(software: SoftwareGpu) -> None:
    x = software.put(np.eye(16, dtype=np.float32), 1)
    with lowprec.profile() as timed:
        lowprec.matmul(x, x)
    (record,) = timed.records
    assert record.error is None
    assert record.elapsed_ms is not None
