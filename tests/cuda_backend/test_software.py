"""The software CUDA itself: memory, streams, events, captures, kernels, arrays; misuse is noticed."""

import gc
import threading

import numpy as np
import pytest

from lowprec.arrays.dlpack import import_array
from lowprec.backends.cuda import compiling
from lowprec.errors import BackendError
from software_cuda import Refusal, compiler
from software_cuda.runtime import host_bytes

NON_BLOCKING, LEGACY = 1, 1


def value(found):
    """Return the value of a call that succeeded."""
    assert found[0] == 0, found[0]
    return found[1] if len(found) > 1 else None


def refused(found, name):
    """Check that a call returned this error and no value."""
    assert found[0].name == name
    assert all(x is None for x in found[1:])


def allocate(cuda, nbytes=16):
    return int(value(cuda.runtime.cudaMalloc(nbytes)))


def stream(cuda, flags=NON_BLOCKING):
    return int(value(cuda.runtime.cudaStreamCreateWithFlags(flags)))


def event(cuda, flags=2):
    """Return a new event, by default one without time."""
    return value(cuda.runtime.cudaEventCreateWithFlags(flags))


def record(cuda, on):
    """Return a new event, recorded on a stream."""
    mark = event(cuda)
    value(cuda.runtime.cudaEventRecord(mark, on))
    return mark


def peek(cuda, address, count=4):
    """Return numbers of a device as they are now, whatever is queued."""
    return cuda.runtime.memory.at(address, 4 * count, None, "peek").view(np.float32).tolist()


def write(cuda, address, number, on):
    """Queue the writing of four numbers."""
    values = np.full(4, number, np.float32)
    value(cuda.runtime.cudaMemcpyAsync(address, values.ctypes.data, values.nbytes, 4, on))


def copy(cuda, target, source, on):
    """Queue a copy of four numbers."""
    value(cuda.runtime.cudaMemcpyAsync(target, source, 16, 4, on))


def synchronize(cuda, on):
    value(cuda.runtime.cudaStreamSynchronize(on))


# -- memory ---------------------------------------------------------------------------------------


def test_memory_is_aligned_poisoned_counted_and_limited(cuda):
    first, second = allocate(cuda, 100), allocate(cuda, 1)
    assert first % 256 == second % 256 == 0
    assert np.isnan(peek(cuda, first)).all()
    assert (cuda.live()["blocks"], cuda.live()["bytes"]) == (2, 101)
    cuda.runtime.memory.limits[0] = 200
    refused(cuda.runtime.cudaMalloc(100), "cudaErrorMemoryAllocation")
    assert cuda.runtime.memory.used[0] == 101
    for address in (first, second):
        value(cuda.runtime.cudaFree(address))
    assert cuda.live()["blocks"] == cuda.live()["bytes"] == 0
    allocate(cuda, 100)


@pytest.mark.parametrize(
    ("offset", "nbytes", "words"),
    [(0, 65, "over the end"), (60, 8, "over the end"), (-4, 4, "nothing is allocated"), (64, 1, "nothing")],
)  # fmt: skip
def test_an_illegal_address_is_an_error_that_stays(cuda, offset, nbytes, words):
    value(cuda.runtime.cudaMemsetAsync(allocate(cuda, 64) + offset, 0, nbytes, LEGACY))
    refused(cuda.runtime.cudaStreamSynchronize(LEGACY), "cudaErrorIllegalAddress")
    refused(cuda.runtime.cudaMalloc(8), "cudaErrorIllegalAddress")
    assert words in cuda.faults.pop()
    # The other device works.
    value(cuda.runtime.cudaSetDevice(1))
    allocate(cuda)


def test_the_use_of_freed_memory_is_noticed(cuda):
    address, target, on = allocate(cuda), allocate(cuda), stream(cuda)
    write(cuda, address, 1.0, on)
    copy(cuda, target, address, on)
    value(cuda.runtime.cudaFree(address))  # waits for the device
    assert peek(cuda, target) == [1.0] * 4
    assert np.isnan(host_bytes(address, 16).view(np.float32)).all()
    refused(cuda.runtime.cudaFree(address), "cudaErrorInvalidValue")
    assert "not allocated" in cuda.faults.pop()
    value(cuda.runtime.cudaMemsetAsync(address, 0, 16, LEGACY))
    refused(cuda.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert "was freed" in cuda.faults.pop()


def test_memory_of_another_device_is_not_accessible(cuda):
    address = allocate(cuda)
    value(cuda.runtime.cudaSetDevice(1))
    value(cuda.runtime.cudaMemsetAsync(address, 0, 16, LEGACY))
    refused(cuda.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert "is on device 0, not on 1" in cuda.faults.pop()


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("order", ["lazy", "all", 0])
def test_a_missing_wait_changes_the_result(cuda, order, joined):
    """A reader that does not wait for the writer finds poison, or what a later writer has written."""
    cuda.runtime.scheduler.use(order)
    poisoned = overwritten = 0
    for _ in range(8):
        source, early, late = (allocate(cuda) for _ in range(3))
        first, second = stream(cuda), stream(cuda)
        write(cuda, source, 2.0, first)
        if joined:
            value(cuda.runtime.cudaStreamWaitEvent(second, record(cuda, first), 0))
        copy(cuda, early, source, second)
        synchronize(cuda, second)
        poisoned += peek(cuda, early) != [2.0] * 4
        synchronize(cuda, first)
        copy(cuda, late, source, first)
        if joined:
            value(cuda.runtime.cudaStreamWaitEvent(second, record(cuda, first), 0))
        write(cuda, source, 5.0, second)
        synchronize(cuda, second)
        synchronize(cuda, first)
        overwritten += peek(cuda, late) != [2.0] * 4
    assert (bool(poisoned), bool(overwritten)) == (not joined, not joined)


@pytest.mark.parametrize(("flags", "ordered"), [(0, True), (NON_BLOCKING, False)])
def test_the_legacy_stream_and_blocking_streams_wait_for_each_other(cuda, flags, ordered):
    a, b, c, other = allocate(cuda), allocate(cuda), allocate(cuda), stream(cuda, flags)
    write(cuda, b, 0.0, other)
    synchronize(cuda, other)  # so that it is the other stream's turn
    write(cuda, a, 1.0, other)
    copy(cuda, b, a, LEGACY)
    copy(cuda, c, b, other)
    synchronize(cuda, other)
    assert (peek(cuda, c) == [1.0] * 4) is ordered


def test_invalid_handles_are_refused(cuda):
    mark = event(cuda)
    value(cuda.runtime.cudaEventDestroy(mark))
    refused(cuda.runtime.cudaStreamSynchronize(77), "cudaErrorInvalidResourceHandle")
    refused(cuda.runtime.cudaEventQuery(mark), "cudaErrorInvalidResourceHandle")
    assert [x.split(" ", 1)[1] for x in cuda.faults] == ["is no stream", "is no event"]
    cuda.faults.clear()
    value(cuda.runtime.cudaSetDevice(1))
    refused(cuda.runtime.cudaSetDevice(2), "cudaErrorInvalidDevice")
    mark = event(cuda)
    value(cuda.runtime.cudaSetDevice(0))
    refused(cuda.runtime.cudaEventRecord(mark, stream(cuda)), "cudaErrorInvalidResourceHandle")


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


# -- capture --------------------------------------------------------------------------------------


def test_streams_join_a_capture_and_must_be_joined_to_it(cuda):
    first, second, back = stream(cuda), stream(cuda), event(cuda)
    for joined, error in ((False, "cudaErrorStreamCaptureUnjoined"), (True, "cudaErrorStreamCaptureInvalidated")):
        cuda.runtime.begin_capture(first)
        value(cuda.runtime.cudaStreamWaitEvent(second, record(cuda, first), 0))
        value(cuda.runtime.cudaMemsetAsync(allocate_relaxed(cuda), 0, 16, second))
        if joined:
            value(cuda.runtime.cudaEventRecord(back, second))
            value(cuda.runtime.cudaStreamWaitEvent(first, back, 0))
            refused(cuda.runtime.cudaEventQuery(back), "cudaErrorCapturedEvent")
        with pytest.raises(Refusal, match=error):
            cuda.runtime.end_capture(first)


def allocate_relaxed(cuda):
    """Allocate during a capture, in the mode that allows it."""
    modes = cuda.runtime.cudaStreamCaptureMode
    before = value(cuda.runtime.cudaThreadExchangeStreamCaptureMode(modes.cudaStreamCaptureModeRelaxed))
    address = allocate(cuda)
    value(cuda.runtime.cudaThreadExchangeStreamCaptureMode(before))
    assert before == modes.cudaStreamCaptureModeGlobal
    return address


@pytest.mark.parametrize(
    ("forbidden", "name"),
    [
        (lambda runtime, on, mark: runtime.cudaMalloc(8), "cudaErrorStreamCaptureUnsupported"),
        (lambda runtime, on, mark: runtime.cudaStreamSynchronize(on), "cudaErrorStreamCaptureUnsupported"),
        (lambda runtime, on, mark: runtime.cudaStreamSynchronize(LEGACY), "cudaErrorStreamCaptureUnsupported"),
        (lambda runtime, on, mark: runtime.cudaMemsetAsync(256, 0, 4, LEGACY), "cudaErrorStreamCaptureImplicit"),
        (lambda runtime, on, mark: runtime.cudaEventQuery(mark), "cudaErrorStreamCaptureUnsupported"),
        (lambda runtime, on, mark: runtime.cudaDeviceSynchronize(), "cudaErrorStreamCaptureUnsupported"),
        (lambda runtime, on, mark: runtime.cudaStreamWaitEvent(on, mark, 0), "cudaErrorStreamCaptureIsolation"),
    ],
)  # fmt: skip
def test_captures_forbid_calls(cuda, forbidden, name):
    on, mark = stream(cuda, 0), record(cuda, stream(cuda))
    cuda.runtime.begin_capture(on)
    refused(forbidden(cuda.runtime, on, mark), name)
    refused(cuda.runtime.cudaEventRecord(mark, on), "cudaErrorStreamCaptureInvalidated")
    with pytest.raises(Refusal, match="cudaErrorStreamCaptureInvalidated"):
        cuda.runtime.end_capture(on)
    cuda.faults.clear()


@pytest.mark.parametrize(("mode", "allowed"), [("Global", False), ("ThreadLocal", True), ("Relaxed", True)])
def test_capture_modes(cuda, mode, allowed):
    on = stream(cuda)
    cuda.runtime.begin_capture(on, mode)
    assert (in_a_thread(lambda: cuda.runtime.cudaMalloc(8))[0] == 0) is allowed
    allocate_relaxed(cuda)
    wanted = cuda.runtime.cudaMemPoolProps()
    wanted.allocType = cuda.runtime.cudaMemAllocationType.cudaMemAllocationTypePinned
    wanted.location.type = cuda.runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    refused(cuda.runtime.cudaMemPoolCreate(wanted), "cudaErrorStreamCaptureUnsupported")
    cuda.faults.clear()


# -- kernels --------------------------------------------------------------------------------------

KERNELS = """
extern "C" __global__ void twice(const float* x, float* y, long long n, double by)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = (float)(x[i] * by);
}
extern "C" __global__ void backwards(const float* x, float* y, long long n)
{
    __shared__ float held[64];
    held[threadIdx.x] = threadIdx.x < n ? x[threadIdx.x] : 0;
#ifndef RACE
    __syncthreads();
#endif
    if (threadIdx.x < n) y[threadIdx.x] = held[n - 1 - threadIdx.x];
}
extern "C" __global__ void wide(const float* x, float* y)
{
    struct alignas(16) Four { float items[4]; };
    *(Four*)y = *(const Four*)x;
}
"""

needs_compiler = pytest.mark.skipif(compiler() is None, reason="g++ is not installed")


@pytest.fixture
def launching(software, monkeypatch):
    """The software CUDA in use by lowprec, which launches the kernels of this file."""
    macros = lambda given: "".join(f"#define {name} {value}\n" for name, value in given)  # noqa: E731
    monkeypatch.setattr(compiling, "source_text", lambda _, definitions: macros(definitions) + KERNELS)
    return software.software


def launch(name, x, y, *rest, grid=1, block=32, device=0, **defined):
    made = compiling.Launch(name, "", defined, device, grid, (block,), 2, rest[:1], len(rest[1:]))
    made(LEGACY, x, y, *rest[1:])


def two_arrays(cuda, count=64):
    x, y = (allocate(cuda, 4 * count) for _ in range(2))
    numbers = np.arange(count, dtype=np.float32)
    cuda.runtime.memory.at(x, numbers.nbytes, 0, "")[:] = numbers.view(np.uint8)
    return x, y


@needs_compiler
@pytest.mark.parametrize("races", [False, True])
def test_threads_wait_at_barriers(launching, races):
    x, y = two_arrays(launching)
    launch("backwards", x, y, 50, block=64, **({"RACE": 1} if races else {}))
    value(launching.runtime.cudaDeviceSynchronize())
    assert (peek(launching, y, 50) == list(range(49, -1, -1))) is not races


@needs_compiler
@pytest.mark.parametrize(
    ("name", "offsets", "words"),
    [
        ("twice", (4 * 30, 0), "illegal read of 4 bytes"),
        ("twice", (0, 4 * 30), "illegal write of 4 bytes"),
        ("twice", (0, -4), "illegal write of 4 bytes"),
        ("wide", (4, 0), "misaligned"),
    ],
)
def test_illegal_accesses_of_kernels(launching, name, offsets, words):
    x, y = two_arrays(launching)
    launch("wide", x + 16, y, block=1)
    value(launching.runtime.cudaDeviceSynchronize())
    assert peek(launching, y) == [4.0, 5.0, 6.0, 7.0]
    rest = (40, 1.0) if name == "twice" else ()
    launch(name, x + offsets[0], y + offsets[1], *rest, grid=2)
    refused(launching.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert words in launching.faults.pop()
    launching.forgive()


@needs_compiler
def test_kernels_do_not_access_other_devices_and_freed_memory(launching):
    x, y = two_arrays(launching)
    value(launching.runtime.cudaSetDevice(1))
    launch("wide", x, y, block=1, device=1)
    refused(launching.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert "kernel wide: illegal" in launching.faults.pop()
    value(launching.runtime.cudaSetDevice(0))
    value(launching.runtime.cudaFree(y))
    launch("backwards", x, y, 1, block=2)
    refused(launching.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert "illegal write" in launching.faults.pop()
    launching.forgive()


@needs_compiler
def test_launches_that_the_driver_refuses(launching):
    x, y = two_arrays(launching)
    with pytest.raises(BackendError, match="kernel twice cannot be launched: CUDA_ERROR_INVALID_VALUE"):
        launch("twice", x, y, 1, 2.0, block=2048)
    with pytest.raises(TypeError, match="kernel twice takes 4 arguments"):
        launch("twice", x, y, 1)


# -- arrays ---------------------------------------------------------------------------------------


def test_arrays_are_ready_on_the_stream_of_the_consumer(cuda):
    on, numbers = stream(cuda), np.ones(4, np.float32)
    for consumer, synchronized, ready in ((on, on, True), (None, on, False), (-1, on, False), (None, LEGACY, True)):
        array = cuda.array(numbers)
        view = import_array(array, consumer)
        synchronize(cuda, synchronized)
        assert (peek(cuda, view.address) == [1.0] * 4) is ready, consumer
    with pytest.raises(BufferError, match="stream 0 is not allowed"):
        array.__dlpack__(stream=0)


def test_memory_of_an_unreachable_array_is_freed(cuda):
    on = stream(cuda)
    array = cuda.array(np.ones(4, np.float32))
    view, target = import_array(array, on), allocate(cuda)
    copy(cuda, target, view.address, on)
    del array, view
    gc.collect()
    refused(cuda.runtime.cudaStreamSynchronize(on), "cudaErrorIllegalAddress")
    assert "was freed" in cuda.faults.pop()
