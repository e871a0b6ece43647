"""The software CUDA itself: memory, streams, events, capture, kernels, arrays. What the hardware forbids is noticed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from software_cuda import DeviceModel, Refusal, Software
from software_cuda.probing import LEGACY, NON_BLOCKING, copy, event, peek, refused, stream, value, write
from software_cuda.runtime import host_bytes


@pytest.fixture
def cuda() -> Iterator[Software]:
    made = Software([DeviceModel(memory_bytes=1 << 20)] * 2, "lazy", 130100)
    yield made
    made.drain()
    assert made.faults == []


# -- memory ---------------------------------------------------------------------------------------


def test_memory_is_aligned_poisoned_and_counted(cuda: Software) -> None:
    first = value(cuda.runtime.cudaMalloc(100))
    second = value(cuda.runtime.cudaMalloc(1))
    assert first % 256 == second % 256 == 0
    assert 0 not in (first, second)
    assert np.isnan(peek(cuda, first)).all()
    assert cuda.live()["blocks"] == 2
    assert cuda.live()["bytes"] == 101
    value(cuda.runtime.cudaFree(first))
    value(cuda.runtime.cudaFree(second))
    assert cuda.live()["blocks"] == cuda.live()["bytes"] == 0


def test_memory_ends(cuda: Software) -> None:
    refused(cuda.runtime.cudaMalloc(2 << 20), "cudaErrorMemoryAllocation")
    first = value(cuda.runtime.cudaMalloc(1 << 19))
    value(cuda.runtime.cudaMalloc(1 << 19))
    refused(cuda.runtime.cudaMalloc(1), "cudaErrorMemoryAllocation")
    assert cuda.runtime.cudaMemGetInfo()[1:] == (0, 1 << 20)
    value(cuda.runtime.cudaFree(first))
    value(cuda.runtime.cudaMalloc(1))


@pytest.mark.parametrize(
    ("offset", "nbytes", "words"),
    [(0, 65, "over the end"), (60, 8, "over the end"), (-4, 4, "nothing is allocated"), (64, 1, "nothing")],
)  # fmt: skip
def test_an_illegal_address_is_an_error_that_stays(cuda: Software, offset: int, nbytes: int, words: str) -> None:
    address = value(cuda.runtime.cudaMalloc(64))
    value(cuda.runtime.cudaMemsetAsync(address + offset, 0, nbytes, LEGACY))
    refused(cuda.runtime.cudaStreamSynchronize(LEGACY), "cudaErrorIllegalAddress")
    refused(cuda.runtime.cudaMalloc(8), "cudaErrorIllegalAddress")
    assert words in cuda.faults.pop()
    # The other device is whole.
    value(cuda.runtime.cudaSetDevice(1))
    value(cuda.runtime.cudaMalloc(8))
    cuda.forgive()


def test_freed_memory_is_noticed(cuda: Software) -> None:
    address = value(cuda.runtime.cudaMalloc(64))
    write(cuda, address, 1.0, LEGACY)
    value(cuda.runtime.cudaFree(address))
    assert np.isnan(host_bytes(address, 64).view(np.float32)).all()
    refused(cuda.runtime.cudaFree(address), "cudaErrorInvalidValue")
    assert "not allocated" in cuda.faults.pop()
    value(cuda.runtime.cudaMemsetAsync(address, 0, 64, LEGACY))
    refused(cuda.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert "was freed" in cuda.faults.pop()


def test_freeing_waits_for_the_device(cuda: Software) -> None:
    source, target, on = (value(cuda.runtime.cudaMalloc(64)), value(cuda.runtime.cudaMalloc(64)), stream(cuda))
    write(cuda, source, 3.0, on)
    copy(cuda, target, source, on)
    value(cuda.runtime.cudaFree(source))
    assert peek(cuda, target) == [3.0] * 4


def test_memory_of_the_other_device(cuda: Software) -> None:
    address = value(cuda.runtime.cudaMalloc(64))
    value(cuda.runtime.cudaSetDevice(1))
    value(cuda.runtime.cudaMemsetAsync(address, 0, 64, LEGACY))
    refused(cuda.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert "is on device 0, not on 1" in cuda.faults.pop()


# -- streams --------------------------------------------------------------------------------------


def test_work_waits_for_synchronization(cuda: Software) -> None:
    address, on = value(cuda.runtime.cudaMalloc(16)), stream(cuda)
    write(cuda, address, 1.0, on)
    assert np.isnan(peek(cuda, address)).all()
    assert cuda.runtime.pending() == ["cudaMemcpyAsync"]
    value(cuda.runtime.cudaStreamSynchronize(stream(cuda)))
    assert np.isnan(peek(cuda, address)).all(), "another stream's work was waited for"
    value(cuda.runtime.cudaStreamSynchronize(on))
    assert peek(cuda, address) == [1.0] * 4


@pytest.mark.parametrize("joined", [False, True])
def test_a_missing_wait_gives_poison(cuda: Software, joined: bool) -> None:
    source, target = value(cuda.runtime.cudaMalloc(16)), value(cuda.runtime.cudaMalloc(16))
    first, second = stream(cuda), stream(cuda)
    write(cuda, source, 2.0, first)
    mark = event(cuda)
    value(cuda.runtime.cudaEventRecord(mark, first))
    if joined:
        value(cuda.runtime.cudaStreamWaitEvent(second, mark, 0))
    copy(cuda, target, source, second)
    value(cuda.runtime.cudaStreamSynchronize(second))
    assert (peek(cuda, target) == [2.0] * 4) is joined


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("order", ["lazy", "all", 0, 1, 2])
def test_a_missing_wait_lets_a_later_writer_come_first(cuda: Software, order: Any, joined: bool) -> None:
    """The reader is asked for last: in some order that the streams allow it comes too late."""
    cuda.runtime.scheduler.use(order)
    wrong = 0
    for _ in range(8):
        shared, target = value(cuda.runtime.cudaMalloc(16)), value(cuda.runtime.cudaMalloc(16))
        reader, writer = stream(cuda), stream(cuda)
        write(cuda, shared, 1.0, reader)
        value(cuda.runtime.cudaStreamSynchronize(reader))
        copy(cuda, target, shared, reader)
        if joined:
            mark = event(cuda)
            value(cuda.runtime.cudaEventRecord(mark, reader))
            value(cuda.runtime.cudaStreamWaitEvent(writer, mark, 0))
        write(cuda, shared, 5.0, writer)
        value(cuda.runtime.cudaStreamSynchronize(writer))
        value(cuda.runtime.cudaStreamSynchronize(reader))
        wrong += peek(cuda, target) != [1.0] * 4
    assert (wrong == 0) if joined else wrong


@pytest.mark.parametrize(("flags", "ordered"), [(0, True), (NON_BLOCKING, False)])
def test_the_legacy_stream_and_those_that_block_wait_for_each_other(cuda: Software, flags: int, ordered: bool) -> None:
    a, b = value(cuda.runtime.cudaMalloc(16)), value(cuda.runtime.cudaMalloc(16))
    other = stream(cuda, flags)
    write(cuda, b, 0.0, other)
    value(cuda.runtime.cudaStreamSynchronize(other))  # now it is the other one's turn
    write(cuda, a, 1.0, other)
    copy(cuda, b, a, LEGACY)
    c = value(cuda.runtime.cudaMalloc(16))
    copy(cuda, c, b, other)
    value(cuda.runtime.cudaStreamSynchronize(other))
    assert (peek(cuda, c) == [1.0] * 4) is ordered


def test_events_are_done_when_their_stream_came_there(cuda: Software) -> None:
    address, on, mark = value(cuda.runtime.cudaMalloc(16)), stream(cuda), event(cuda)
    value(cuda.runtime.cudaEventQuery(mark))  # never recorded
    write(cuda, address, 1.0, on)
    value(cuda.runtime.cudaEventRecord(mark, on))
    refused(cuda.runtime.cudaEventQuery(mark), "cudaErrorNotReady")
    assert cuda.runtime.cudaGetLastError()[0].name == "cudaErrorNotReady"
    value(cuda.runtime.cudaEventSynchronize(mark))
    value(cuda.runtime.cudaEventQuery(mark))
    assert peek(cuda, address) == [1.0] * 4


def test_time_goes_by_for_those_who_ask_again_and_again(cuda: Software) -> None:
    mark = event(cuda)
    value(cuda.runtime.cudaEventRecord(mark, LEGACY))
    for _ in range(5):
        if cuda.runtime.cudaEventQuery(mark)[0] == 0:
            break
    else:
        raise AssertionError("the event was never done")


def test_elapsed_time(cuda: Software) -> None:
    start, end, untimed = event(cuda, 0), event(cuda, 0), event(cuda, 2)
    address = value(cuda.runtime.cudaMalloc(1 << 16))
    for mark in (start, untimed, end):
        value(cuda.runtime.cudaEventRecord(mark, LEGACY))
        value(cuda.runtime.cudaMemcpyAsync(address, address, 1 << 16, 4, LEGACY))
    refused(cuda.runtime.cudaEventElapsedTime(start, end), "cudaErrorNotReady")
    value(cuda.runtime.cudaDeviceSynchronize())
    assert 0.001 < value(cuda.runtime.cudaEventElapsedTime(start, end)) < 10
    refused(cuda.runtime.cudaEventElapsedTime(start, untimed), "cudaErrorInvalidResourceHandle")


def test_handles_that_are_none(cuda: Software) -> None:
    on, mark = stream(cuda), event(cuda)
    value(cuda.runtime.cudaStreamDestroy(on))
    value(cuda.runtime.cudaEventDestroy(mark))
    refused(cuda.runtime.cudaStreamSynchronize(on), "cudaErrorInvalidResourceHandle")
    refused(cuda.runtime.cudaEventQuery(mark), "cudaErrorInvalidResourceHandle")
    assert [x.split(" ", 1)[1] for x in cuda.faults] == ["is no stream", "is no event"]
    cuda.faults.clear()
    value(cuda.runtime.cudaSetDevice(1))
    refused(cuda.runtime.cudaSetDevice(2), "cudaErrorInvalidDevice")
    first, mark = stream(cuda), event(cuda)
    value(cuda.runtime.cudaSetDevice(0))
    refused(cuda.runtime.cudaEventRecord(mark, stream(cuda)), "cudaErrorInvalidResourceHandle")
    value(cuda.runtime.cudaEventRecord(mark, first))


def test_the_current_device_is_the_threads(cuda: Software) -> None:
    value(cuda.runtime.cudaSetDevice(1))
    found = []
    thread = threading.Thread(target=lambda: found.append(value(cuda.runtime.cudaGetDevice())))
    thread.start()
    thread.join()
    assert found == [0]
    assert value(cuda.runtime.cudaGetDevice()) == 1


# -- capture --------------------------------------------------------------------------------------


def test_captured_work_runs_when_the_graph_does(cuda: Software) -> None:
    address, on = value(cuda.runtime.cudaMalloc(16)), stream(cuda)
    cuda.runtime.begin_capture(on)
    assert value(cuda.runtime.cudaStreamIsCapturing(on)).name == "cudaStreamCaptureStatusActive"
    value(cuda.runtime.cudaMemsetAsync(address, 0, 16, on))
    graph = cuda.runtime.end_capture(on)
    cuda.drain()
    assert np.isnan(peek(cuda, address)).all()
    for _ in range(2):
        write(cuda, address, 7.0, on)
        graph.replay()
        value(cuda.runtime.cudaStreamSynchronize(on))
        assert peek(cuda, address) == [0.0] * 4
    assert graph.labels == ["cudaMemsetAsync"]


def forked(cuda: Software, *, joined: bool) -> Any:
    """Capture work on two streams, the second of which comes back to the first only if it is told to."""
    first, second = stream(cuda), stream(cuda)
    there, back = event(cuda), event(cuda)
    address = value(cuda.runtime.cudaMalloc(16))
    cuda.runtime.begin_capture(first)
    value(cuda.runtime.cudaEventRecord(there, first))
    value(cuda.runtime.cudaStreamWaitEvent(second, there, 0))
    value(cuda.runtime.cudaMemsetAsync(address, 0, 16, second))
    if joined:
        value(cuda.runtime.cudaEventRecord(back, second))
        value(cuda.runtime.cudaStreamWaitEvent(first, back, 0))
    refused(cuda.runtime.cudaEventQuery(back), "cudaErrorCapturedEvent") if joined else None
    return first


def test_streams_join_a_capture_and_must_come_back(cuda: Software) -> None:
    with pytest.raises(Refusal, match="cudaErrorStreamCaptureUnjoined"):
        cuda.runtime.end_capture(forked(cuda, joined=False))
    first = forked(cuda, joined=True)
    with pytest.raises(Refusal, match="cudaErrorStreamCaptureInvalidated"):
        cuda.runtime.end_capture(first)  # its event was asked for


@pytest.mark.parametrize(
    ("forbidden", "name"),
    [
        (lambda cuda, on, mark: cuda.runtime.cudaMalloc(8), "cudaErrorStreamCaptureUnsupported"),
        (lambda cuda, on, mark: cuda.runtime.cudaStreamSynchronize(on), "cudaErrorStreamCaptureUnsupported"),
        (lambda cuda, on, mark: cuda.runtime.cudaEventQuery(mark), "cudaErrorStreamCaptureUnsupported"),
        (lambda cuda, on, mark: cuda.runtime.cudaDeviceSynchronize(), "cudaErrorStreamCaptureUnsupported"),
        (lambda cuda, on, mark: cuda.runtime.cudaStreamWaitEvent(on, mark, 0), "cudaErrorStreamCaptureIsolation"),
    ],
)  # fmt: skip
def test_captures_forbid_calls(cuda: Software, forbidden: Any, name: str) -> None:
    on, mark = stream(cuda), event(cuda)
    value(cuda.runtime.cudaEventRecord(mark, stream(cuda)))
    cuda.runtime.begin_capture(on)
    refused(forbidden(cuda, on, mark), name)
    refused(cuda.runtime.cudaEventRecord(mark, on), "cudaErrorStreamCaptureInvalidated")
    with pytest.raises(Refusal, match="cudaErrorStreamCaptureInvalidated"):
        cuda.runtime.end_capture(on)
    cuda.faults.clear()


@pytest.mark.parametrize(("captures", "allowed"), [("Global", False), ("ThreadLocal", True)])
def test_capture_modes(cuda: Software, captures: str, allowed: bool) -> None:
    on = stream(cuda)
    cuda.runtime.begin_capture(on, captures)
    found = []
    thread = threading.Thread(target=lambda: found.append(cuda.runtime.cudaMalloc(8)[0]))
    thread.start()
    thread.join()
    assert (found[0] == 0) is allowed
    cuda.faults.clear()
    modes = cuda.runtime.cudaStreamCaptureMode
    before = value(cuda.runtime.cudaThreadExchangeStreamCaptureMode(modes.cudaStreamCaptureModeRelaxed))
    value(cuda.runtime.cudaMalloc(8))
    value(cuda.runtime.cudaThreadExchangeStreamCaptureMode(before))
    assert before == modes.cudaStreamCaptureModeGlobal
    if allowed:
        cuda.runtime.end_capture(on)


def test_the_legacy_stream_cannot_wait_for_a_capture(cuda: Software) -> None:
    on = stream(cuda, 0)
    cuda.runtime.begin_capture(on)
    refused(cuda.runtime.cudaStreamSynchronize(LEGACY), "cudaErrorStreamCaptureUnsupported") or None
    with pytest.raises(Refusal, match="Invalidated"):
        cuda.runtime.end_capture(on)
    cuda.faults.clear()
    cuda.runtime.begin_capture(on)
    address = 256
    refused(cuda.runtime.cudaMemsetAsync(address, 0, 4, LEGACY), "cudaErrorStreamCaptureImplicit")
    with pytest.raises(Refusal, match="Invalidated"):
        cuda.runtime.end_capture(on)


# -- calls and failures ---------------------------------------------------------------------------


def test_calls_are_listed_and_made_to_fail(cuda: Software) -> None:
    address = value(cuda.runtime.cudaMalloc(8))
    assert cuda.calls == ["runtime.cudaMalloc"]
    with cuda.fail("cudaMalloc", at=2) as failure:
        value(cuda.runtime.cudaMalloc(8))
        refused(cuda.runtime.cudaMalloc(8), "cudaErrorMemoryAllocation")
        value(cuda.runtime.cudaMalloc(8))
    assert failure.happened
    assert cuda.count("cudaMalloc") == cuda.count("runtime.cudaMalloc") == 4
    with cuda.fail("*", status=cuda.runtime.cudaError_t.cudaErrorLaunchFailure):
        refused(cuda.runtime.cudaStreamCreateWithFlags(1), "cudaErrorLaunchFailure")
    with cuda.fail("runtime.cudaFree"):
        refused(cuda.runtime.cudaFree(address), "cudaErrorUnknown")
    assert cuda.live()["blocks"] == 2, "what is given back goes, whatever the call reports"


def test_missing_functions_are_missing(cuda: Software) -> None:
    with pytest.raises(AttributeError, match="the software runtime has no cudaMallocAsync"):
        _ = cuda.runtime.cudaMallocAsync
    assert cuda.runtime.cudaStreamNonBlocking == NON_BLOCKING
