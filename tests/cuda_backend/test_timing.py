"""Timing events: recorded around a product, read late, and never lost."""

import gc

import numpy as np
import pytest

import lowprec
from cuda_backend.cuda_reset import release_timing_events
from lowprec.backends.cuda.autotune import EventStopwatch
from lowprec.backends.cuda.runtime import on_device
from lowprec.errors import BackendError

#: The host's time for a call, which elapses between two records.
CALLS_MS = 0.02


@pytest.fixture
def cuda(software):
    return software.software


@pytest.fixture
def stream(cuda):
    return int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])


def created(cuda):
    return cuda.count("cudaEventCreateWithFlags")


def alive_after_release(cuda):
    """Return how many events exist once those that stopwatches have returned are destroyed."""
    gc.collect()
    release_timing_events()
    return cuda.live()["events"]


def test_elapsed_time_is_between_the_events(cuda, stream):
    watch = EventStopwatch(0, stream)
    assert watch.elapsed_ms() is None
    cuda.runtime.scheduler.clock_ms += 12.0
    watch.stop()
    cuda.runtime.scheduler.clock_ms += 5.0
    assert watch.stream == stream
    assert watch.elapsed_ms() == pytest.approx(12.0, abs=CALLS_MS)
    EventStopwatch(0, stream).stop()  # reusing the events would change the time
    assert watch.elapsed_ms() == pytest.approx(12.0, abs=CALLS_MS)


def test_events_belong_to_the_device_and_the_thread_keeps_its_own(cuda):
    with on_device(1):  # the caller's, while the product is queued
        watch = EventStopwatch(1, 1)
    watch.stop()
    assert watch.elapsed_ms() == pytest.approx(0.0, abs=CALLS_MS)
    assert [x.device for x in cuda.runtime.events.values()] == [1, 1]
    assert cuda.runtime.device == 0
    del watch
    EventStopwatch(0, 1).abandon()  # devices do not share events
    assert created(cuda) == 3


def test_unreachable_events_are_used_again(cuda, stream):
    for _ in range(5):
        watch = EventStopwatch(0, stream)
        watch.stop()
        del watch
        gc.collect()
    assert created(cuda) == 2
    both = [EventStopwatch(0, stream), EventStopwatch(0, stream)]
    for watch in both:
        watch.stop()
    assert all(watch.elapsed_ms() is not None for watch in both)
    assert created(cuda) == 4


def test_events_of_a_failed_product_are_returned_once(cuda, stream):
    watch = EventStopwatch(0, stream)
    watch.abandon()
    watch.abandon()
    del watch
    first, second = EventStopwatch(0, stream), EventStopwatch(0, stream)
    assert created(cuda) == 2, "one event was returned twice, or none"
    del first, second


@pytest.mark.parametrize("function", ["cudaEventRecord", "cudaEventSynchronize"])
def test_events_are_returned_after_a_failure(cuda, stream, function):
    def measure():
        watch = EventStopwatch(0, stream)
        watch.stop()
        return watch.elapsed_ms()

    with cuda.fail(function), pytest.raises(BackendError, match=f"{function} failed"):
        measure()
    assert alive_after_release(cuda) == 0


def test_a_captured_product_has_no_time_and_no_event(cuda, stream):
    cuda.runtime.begin_capture(stream)
    watch = EventStopwatch(0, stream)
    watch.stop()
    watch.abandon()
    cuda.runtime.end_capture(stream)
    assert watch.elapsed_ms() is None
    assert watch.stream == stream
    assert created(cuda) == 0


def test_a_product_on_another_device_has_its_time(software):
    x = software.put(np.eye(16, dtype=np.float32), 1)
    with lowprec.profile() as timed:
        lowprec.matmul(x, x)
    (record,) = timed.records
    assert record.error is None
    assert record.elapsed_ms is not None
