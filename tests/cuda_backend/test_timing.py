"""Timing events: recorded around a product, read late, and never lost."""

import gc

import numpy as np
import pytest

import lowprec
from lowprec.backends.cuda.autotune import EventStopwatch
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


def test_unreachable_events_are_used_again(cuda, stream):
    for abandoned in (0, 1, 2):
        watch = EventStopwatch(0, stream)
        watch.stop()
        for _ in range(abandoned):
            watch.abandon()
        del watch
        gc.collect()
    assert created(cuda) == 2
    both = [EventStopwatch(0, stream), EventStopwatch(0, stream)]
    for watch in both:
        watch.stop()
    assert all(watch.elapsed_ms() is not None for watch in both)
    assert created(cuda) == 4, "one event was returned twice, or none"


@pytest.mark.parametrize("function", ["cudaEventRecord", "cudaEventSynchronize"])
def test_events_are_returned_after_a_failure(cuda, stream, function):
    """At the end none may be left."""

    def measure():
        watch = EventStopwatch(0, stream)
        watch.stop()
        watch.elapsed_ms()

    with cuda.fail(function), pytest.raises(BackendError, match=f"{function} failed"):
        measure()


def test_a_captured_product_has_no_time_and_no_event(cuda, stream):
    cuda.runtime.begin_capture(stream)
    watch = EventStopwatch(0, stream)
    watch.stop()
    watch.abandon()
    cuda.runtime.end_capture(stream)
    assert watch.elapsed_ms() is None
    assert watch.stream == stream
    assert created(cuda) == 0


def test_products_on_several_devices_have_their_times(software):
    for device in (1, 0):
        x = software.put(np.eye(16, dtype=np.float32), device)
        with lowprec.profile() as timed:
            lowprec.matmul(x, x)
        (record,) = timed.records
        assert record.error is None
        assert record.elapsed_ms is not None
        del record, timed
        gc.collect()  # the events are used again
