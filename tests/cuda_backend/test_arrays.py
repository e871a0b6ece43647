"""Arrays in device memory on streams that run late: what is not ordered, or is let go too early, is read as garbage.

The runtime is the software one, which runs queued work only when somebody waits for it. A product is stood for by
copies, so that what an operand held at that moment is what is found in the result. The libraries are stand-ins with
streams and an allocator of their own; no framework is at work here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from lowprec.arrays import ArrayView, Device, libraries, library_of
from lowprec.arrays.base import Library
from lowprec.arrays.device_memory import DeviceArray
from lowprec.arrays.dlpack import export, view_of_capsule
from lowprec.arrays.view import memory_at
from lowprec.backends import Arguments
from lowprec.backends.cuda import memory, runtime
from lowprec.backends.cuda.libraries import Libraries, use
from lowprec.core import streams
from lowprec.core.arguments import PLAIN
from lowprec.errors import BackendError
from lowprec.formats import DType
from software_cuda.driver import Driver
from software_cuda.recorder import Recorder
from software_cuda.runtime import DeviceModel, Runtime

GPU = Device(2, 0)
N = 64
GARBAGE = np.full(N, -1, np.float32)


class Gpu:
    """Two software GPUs with streams of their own for the libraries."""

    def __init__(self, software: Runtime, recorder: Recorder) -> None:
        self.runtime = software
        self.recorder = recorder
        self.first = int(runtime.call("cudaStreamCreateWithFlags", 1))
        self.second = int(runtime.call("cudaStreamCreateWithFlags", 1))

    def write(self, address: int, values: np.ndarray, stream: int) -> None:
        """Queue the writing of values, as they are now."""
        runtime.copy_async(address, values.ctypes.data, values.nbytes, stream)

    def read(self, address: int, stream: int, count: int = N) -> np.ndarray:
        """What a reader on a stream finds, when nothing runs that it does not wait for."""
        values = np.zeros(count, np.float32)
        runtime.copy_async(values.ctypes.data, address, values.nbytes, stream)
        return values


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    recorder = Recorder()
    software = Runtime(recorder, [DeviceModel(), DeviceModel()], "lazy")
    before = use(Libraries(None, None, software, None, Driver(recorder, software)))
    yield Gpu(software, recorder)
    software.drain()
    memory.release()
    faults = list(recorder.faults)
    use(before)
    assert faults == []


def numbers(start: int) -> np.ndarray:
    return np.arange(start, start + N, dtype=np.float32)


class Tenancy:
    """Memory that its library gives to someone else, who writes to it at once, when the last holder lets go."""

    def __init__(self, gpu: Gpu, address: int, stream: int) -> None:
        self.gpu = gpu
        self.address = address
        self.stream = stream

    def __del__(self) -> None:
        self.gpu.write(self.address, GARBAGE, self.stream)


class Foreign:
    """An array of a library with a stream and an allocator of its own, exported as DLPack asks for."""

    def __init__(self, gpu: Gpu, values: np.ndarray, stream: int) -> None:
        self.stream = stream
        self.address = runtime.allocate(values.nbytes)
        self.tenancy = Tenancy(gpu, self.address, stream)
        self.shape = values.shape
        gpu.write(self.address, values, stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int, max_version: Any = None) -> object:
        if stream != self.stream:
            event = runtime.create_event()
            runtime.call("cudaEventRecord", event, self.stream)
            runtime.call("cudaStreamWaitEvent", stream, event, 0)
            runtime.call("cudaEventDestroy", event)
        elements = np.ndarray(self.shape, np.float32, memory_at(self.address, self.tenancy))
        return export(elements, DType.FLOAT32, max_version, device=GPU)


class Streamed(Foreign):
    """An array of a library that is known by name and tells its stream."""


class StreamedLibrary(Library):
    """Allocates by its own stream, as torch and CuPy do."""

    name = "streamed"

    def __init__(self, stream: int) -> None:
        self.stream = stream

    def view(self, array: Any) -> ArrayView:
        return ArrayView(DType.FLOAT32, array.shape, (1,), GPU, array.tenancy, False, array.address)

    def allocate(self, *_: Any) -> Any:
        raise AssertionError("results are allocated by the tests")

    def current_stream(self, device: Device) -> int:
        return self.stream


@pytest.fixture
def streamed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> StreamedLibrary:
    library = StreamedLibrary(gpu.first)
    monkeypatch.setitem(libraries._BY_TYPE, Streamed, library)
    return library


def join_both(arguments: Arguments) -> None:
    """Stands for a product: the result is a, then b."""
    a, b, out, stream = arguments.a, arguments.b, arguments.out, arguments.stream
    runtime.copy_async(out.address, a.address, a.nbytes, stream)
    runtime.copy_async(out.address + a.nbytes, b.address, b.nbytes, stream)


def run(a: Any, b: Any, execute: Any = join_both) -> tuple[DeviceArray, int]:
    """Run the product of two arrays; the result, and the stream on which it was computed."""
    x, y = (library_of(array).view(array) for array in (a, b))
    stream = library_of(a).current_stream(GPU) or 0
    result = DeviceArray((2 * N,), DType.FLOAT32, GPU, stream)
    arguments = PLAIN.arguments(x, y, result.view(), stream)
    streams.run(execute, arguments, library_of(a), (a, b, None, None, None, None, None))
    return result, stream


def address_of(array: DeviceArray) -> int:
    return array.view().address


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", ["None", "1", "2", "other", "own"])
def test_a_consumer_reads_a_result_once_it_is_there(gpu: Gpu, consumer: str) -> None:
    producer = memory.own_stream(GPU)
    array = DeviceArray((N,), DType.FLOAT32, GPU, producer)
    gpu.write(address_of(array), numbers(5), producer)
    stream = {"None": None, "1": 1, "2": 2, "other": gpu.second, "own": producer}[consumer]
    view = view_of_capsule(array.__dlpack__(stream=stream))
    assert view.device == GPU
    np.testing.assert_array_equal(gpu.read(view.address, stream or 1), numbers(5))


def test_a_consumer_that_names_no_stream_may_read_on_any(gpu: Gpu) -> None:
    """By the standard it means the legacy default stream, for which this reader's stream does not wait."""
    producer = memory.own_stream(GPU)
    array = DeviceArray((N,), DType.FLOAT32, GPU, producer)
    gpu.write(address_of(array), numbers(5), producer)
    view = view_of_capsule(array.__dlpack__())
    np.testing.assert_array_equal(gpu.read(view.address, gpu.second), numbers(5))


def test_a_consumer_that_does_not_wait_reads_too_early(gpu: Gpu) -> None:
    """It asked for it. This also shows that the tests here would notice a wait that is missing."""
    producer = memory.own_stream(GPU)
    array = DeviceArray((N,), DType.FLOAT32, GPU, producer)
    runtime.call("cudaStreamSynchronize", producer)  # the memory is there
    gpu.write(address_of(array), numbers(5), producer)
    array.__dlpack__(stream=-1)
    assert np.isnan(gpu.read(address_of(array), gpu.second)).all()


def test_a_copy_for_a_consumer_comes_after_the_work(gpu: Gpu) -> None:
    producer = memory.own_stream(GPU)
    array = DeviceArray((N,), DType.FLOAT32, GPU, producer)
    gpu.write(address_of(array), numbers(5), producer)
    view = view_of_capsule(array.__dlpack__(stream=gpu.second, copy=True, max_version=(1, 0)))
    gpu.write(address_of(array), numbers(9), producer)
    runtime.call("cudaStreamSynchronize", producer)
    assert view.copied
    np.testing.assert_array_equal(gpu.read(view.address, gpu.second), numbers(5))


def test_an_export_that_cannot_wait_is_refused(gpu: Gpu) -> None:
    array = DeviceArray((N,), DType.FLOAT32, GPU, memory.own_stream(GPU))
    with gpu.recorder.fail("cudaStreamWaitEvent"), pytest.raises(BackendError, match="cudaStreamWaitEvent failed"):
        array.__dlpack__(stream=gpu.second)


def test_memory_that_a_consumer_has_had_is_not_written_under_it(gpu: Gpu) -> None:
    """The consumer lets go while its own work is still queued, as a library does whose streams order its memory."""
    producer = memory.own_stream(GPU)
    array = DeviceArray((N,), DType.FLOAT32, GPU, producer)
    gpu.write(address_of(array), numbers(5), producer)
    view = view_of_capsule(array.__dlpack__(stream=gpu.second))
    target = runtime.allocate(view.nbytes)
    runtime.copy_async(target, view.address, view.nbytes, gpu.second)  # queued, not run
    del array, view
    gc.collect()
    again = DeviceArray((N,), DType.FLOAT32, GPU, producer)
    gpu.write(address_of(again), GARBAGE, producer)
    runtime.call("cudaStreamSynchronize", producer)
    np.testing.assert_array_equal(gpu.read(target, gpu.second), numbers(5))


# -- operands -------------------------------------------------------------------------------------


def test_operands_known_only_by_dlpack_are_held_until_they_were_read(gpu: Gpu) -> None:
    a, b = Foreign(gpu, numbers(0), gpu.first), Foreign(gpu, numbers(100), gpu.second)
    result, stream = run(a, b)
    assert stream == 1
    first, second = a.stream, b.stream
    del a, b  # their libraries give the memory away as soon as nobody holds it
    gc.collect()
    memory.release_finished()
    runtime.call("cudaStreamSynchronize", first)
    runtime.call("cudaStreamSynchronize", second)
    both = np.concatenate([numbers(0), numbers(100)])
    np.testing.assert_array_equal(gpu.read(address_of(result), stream, 2 * N), both)


def test_held_operands_are_let_go_when_they_were_read(gpu: Gpu) -> None:
    a = Foreign(gpu, numbers(0), gpu.first)
    address = a.address
    result, stream = run(a, a)
    del a
    gc.collect()
    runtime.call("cudaStreamSynchronize", stream)
    memory.release_finished()
    np.testing.assert_array_equal(gpu.read(address, gpu.first), GARBAGE)
    assert result.shape == (2 * N,)


def test_another_librarys_stream_is_waited_for(gpu: Gpu, streamed: StreamedLibrary) -> None:
    a = Streamed(gpu, numbers(0), gpu.first)
    b = DeviceArray((N,), DType.FLOAT32, GPU, 1)
    gpu.write(address_of(b), numbers(100), 1)
    result, stream = run(a, b)
    assert stream == gpu.first
    both = np.concatenate([numbers(0), numbers(100)])
    np.testing.assert_array_equal(gpu.read(address_of(result), stream, 2 * N), both)


def test_another_librarys_stream_waits_afterwards(gpu: Gpu, streamed: StreamedLibrary) -> None:
    a = Streamed(gpu, numbers(0), gpu.first)
    b = DeviceArray((N,), DType.FLOAT32, GPU, 1)
    gpu.write(address_of(b), numbers(100), 1)
    result, stream = run(a, b)
    # Whoever owns b may write it now, on the stream of its library.
    gpu.write(address_of(b), GARBAGE, 1)
    runtime.call("cudaStreamSynchronize", 1)
    both = np.concatenate([numbers(0), numbers(100)])
    np.testing.assert_array_equal(gpu.read(address_of(result), stream, 2 * N), both)


def test_a_result_on_the_first_operands_stream_reaches_the_other_library(gpu: Gpu, streamed: StreamedLibrary) -> None:
    a = DeviceArray((N,), DType.FLOAT32, GPU, 1)
    gpu.write(address_of(a), numbers(0), 1)
    b = Streamed(gpu, numbers(100), gpu.first)
    result, stream = run(a, b)
    assert stream == 1
    both = np.concatenate([numbers(0), numbers(100)])
    np.testing.assert_array_equal(gpu.read(address_of(result), gpu.first, 2 * N), both)


def test_a_product_that_fails_half_way_has_read_what_it_read(gpu: Gpu, streamed: StreamedLibrary) -> None:
    """One copy is queued, then it fails: the operand that the copy reads must still be held, and be waited for."""

    def fails(arguments: Arguments) -> None:
        join_both(arguments)
        kept.append(arguments.out)
        raise BackendError("the second half failed")

    kept: list[ArrayView] = []
    a = Streamed(gpu, numbers(0), gpu.first)
    b = Foreign(gpu, numbers(100), gpu.second)
    with pytest.raises(BackendError, match="the second half failed"):
        run(a, b, fails)
    del b
    gc.collect()
    runtime.call("cudaStreamSynchronize", gpu.second)
    (out,) = kept
    both = np.concatenate([numbers(0), numbers(100)])
    np.testing.assert_array_equal(gpu.read(out.address, gpu.first, 2 * N), both)


#: How many calls of the runtime a product makes that joins two streams and holds an operand, and one that only holds.
CALLS = {Streamed: 19, Foreign: 10}


def failures() -> Iterator[Any]:
    for kind, count in CALLS.items():
        for at in range(1, count + 1):
            yield pytest.param(kind, at, id=f"{kind.__name__}-{at}")


@pytest.mark.parametrize("kind", list(CALLS))
def test_the_calls_that_may_fail(gpu: Gpu, streamed: StreamedLibrary, kind: type[Foreign]) -> None:
    a, b = kind(gpu, numbers(0), gpu.first), Foreign(gpu, numbers(100), gpu.second)
    x, y = library_of(a).view(a), library_of(b).view(b)
    result = DeviceArray((2 * N,), DType.FLOAT32, GPU, gpu.first)
    gpu.recorder.calls.clear()
    arrays = (a, b, None, None, None, None, None)
    stream = library_of(a).current_stream(GPU) or 0
    arguments = PLAIN.arguments(x, y, result.view(), stream)
    streams.run(join_both, arguments, library_of(a), arrays)
    assert len(gpu.recorder.calls) == CALLS[kind], gpu.recorder.calls


@pytest.mark.parametrize(("kind", "at"), list(failures()))
def test_any_call_may_fail(gpu: Gpu, streamed: StreamedLibrary, kind: type[Foreign], at: int) -> None:
    """Whichever call of the runtime fails, the operands of what was queued are held, and the next call works."""
    a, b = kind(gpu, numbers(0), gpu.first), Foreign(gpu, numbers(100), gpu.second)
    x, y = library_of(a).view(a), library_of(b).view(b)
    stream = library_of(a).current_stream(GPU) or 0
    result = DeviceArray((2 * N,), DType.FLOAT32, GPU, stream)
    arrays = (a, b, None, None, None, None, None)
    both = np.concatenate([numbers(0), numbers(100)])
    arguments = PLAIN.arguments(x, y, result.view(), stream)
    with gpu.recorder.fail("*", at=at) as failure:
        try:
            streams.run(join_both, arguments, library_of(a), arrays)
            raised = False
        except BackendError:
            raised = True
    assert failure.happened
    del arguments, arrays, b, y
    gc.collect()
    runtime.call("cudaStreamSynchronize", gpu.second)
    found = gpu.read(address_of(result), stream, 2 * N)
    if raised:
        # Each half was read in time, or never.
        assert set(found[~np.isnan(found)]) <= set(both)
    else:
        np.testing.assert_array_equal(found, both)
    b = Foreign(gpu, numbers(100), gpu.second)
    again, stream = run(a, b)
    np.testing.assert_array_equal(gpu.read(address_of(again), stream, 2 * N), both)


# -- graphs ---------------------------------------------------------------------------------------


def test_a_captured_product_can_be_run_again(gpu: Gpu, streamed: StreamedLibrary) -> None:
    a, b = Streamed(gpu, numbers(0), gpu.first), Streamed(gpu, numbers(100), gpu.first)
    result = DeviceArray((2 * N,), DType.FLOAT32, GPU, gpu.first)
    arrays = (a, b, None, None, None, None, None)
    x, y = streamed.view(a), streamed.view(b)
    runtime.call("cudaStreamSynchronize", gpu.first)
    gpu.runtime.begin_capture(gpu.first)
    scratch = memory.allocate(100, GPU, gpu.first)
    scratch_address = scratch.address
    arguments = PLAIN.arguments(x, y, result.view(), gpu.first)
    streams.run(join_both, arguments, streamed, arrays)
    del scratch
    graph = gpu.runtime.end_capture(gpu.first)
    assert memory.allocate(100, GPU, gpu.first).address != scratch_address
    for start in (7, 9):
        gpu.write(a.address, numbers(start), gpu.first)
        graph.replay()
        both = np.concatenate([numbers(start), numbers(100)])
        np.testing.assert_array_equal(gpu.read(address_of(result), gpu.first, 2 * N), both)


def test_another_stream_is_captured_along(gpu: Gpu) -> None:
    memory.order(gpu.first, gpu.second, GPU)
    gpu.runtime.begin_capture(gpu.first)
    memory.order(gpu.first, gpu.second, GPU)
    assert runtime.is_capturing(gpu.second)
    memory.order(gpu.second, gpu.first, GPU)
    gpu.runtime.end_capture(gpu.first)
    assert not runtime.is_capturing(gpu.second)
    memory.order(gpu.first, gpu.second, GPU)  # the event of the graph serves again
    gpu.runtime.drain()


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal"])
def test_arrays_that_died_are_given_back_with_another_threads_capture(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Waiting for the device by cudaDeviceSynchronize would end the capture."""
    monkeypatch.setattr(memory._pool(GPU.index), "_limit", 3000)
    with ThreadPoolExecutor(1) as other:
        other.submit(gpu.runtime.begin_capture, gpu.first, mode).result()
        for _ in range(5):
            memory.allocate(1000, GPU, gpu.second)
        assert gpu.recorder.calls.count("runtime.cudaFree") == 1 + 4
        memory.release()
        assert gpu.recorder.calls.count("runtime.cudaFree") == 1 + 4 + 1 + 1
        other.submit(gpu.runtime.end_capture, gpu.first).result()  # raises if it was invalidated


def test_another_threads_capture_is_not_disturbed(gpu: Gpu) -> None:
    """Reusing, freeing and asking for events go on beside a capture in the strictest mode."""
    owner = Foreign(gpu, numbers(0), gpu.second)
    memory.keep([owner.tenancy], gpu.second, GPU)
    gpu.runtime.begin_capture(gpu.first, "Global")
    memory.allocate(1000, GPU, gpu.second)
    memory.release_finished()
    memory.keep([object()], gpu.second, GPU)
    gpu.runtime.end_capture(gpu.first)
