"""Results and operands in device memory on streams that run late: without the right order they are read as garbage.

A product is replaced by copies, so that the result has what the operands held at that moment.
"""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lowprec.arrays import Device, device_memory, library_of
from lowprec.arrays.device_memory import DeviceArray
from lowprec.arrays.dlpack import view_of_capsule
from lowprec.backends.cuda import memory, runtime
from lowprec.core import streams
from lowprec.core.arguments import PLAIN
from lowprec.errors import ArrayError, BackendError, DeviceError
from lowprec.formats import DType

GPU = Device(2, 0)
N = 64
BOTH = np.concatenate([np.arange(N), np.arange(100, 100 + N)]).astype(np.float32)
FIRST, SECOND = BOTH[:N], BOTH[N:]


@pytest.fixture
def cuda(software):
    return software.software


def stream(cuda):
    return int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])


def write(address, values, on):
    """Queue the writing of values, as they are now."""
    runtime.copy_async(address, values.ctypes.data, values.nbytes, on)


def read(address, on, size=N):
    """Return what a reader on a stream finds when only its own work has run."""
    values = np.zeros(size, np.float32)
    runtime.copy_async(values.ctypes.data, address, values.nbytes, on)
    return values


def synchronize(on):
    runtime.call("cudaStreamSynchronize", on)


def new_result(on, size=N):
    return DeviceArray((size,), DType.FLOAT32, GPU, on)


def address_of(array):
    return array.view().address


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", ["None", "default", "1", "2", "other", "own"])
def test_a_consumer_reads_a_result_once_it_is_written(cuda, consumer):
    producer, other = memory.own_stream(GPU), stream(cuda)
    array = new_result(producer)
    write(address_of(array), FIRST, producer)
    on = {"None": None, "default": None, "1": 1, "2": 2, "other": other, "own": producer}[consumer]
    view = view_of_capsule(array.__dlpack__() if consumer == "default" else array.__dlpack__(stream=on))
    assert view.device == GPU
    # A consumer that names no stream may read on any, also on one that does not wait for the default stream.
    np.testing.assert_array_equal(read(view.address, on or other), FIRST)


def test_a_consumer_that_does_not_wait_reads_too_early(cuda):
    """As requested by stream -1; so a missing wait would be noticed by these tests."""
    producer = memory.own_stream(GPU)
    array = new_result(producer)
    synchronize(producer)  # the memory is allocated
    write(address_of(array), FIRST, producer)
    array.__dlpack__(stream=-1)
    assert np.isnan(read(address_of(array), stream(cuda))).all()


# -- operands -------------------------------------------------------------------------------------


def join_both(arguments):
    """Replaces a product: the result is a, then b."""
    a, b, out, on = arguments.a, arguments.b, arguments.out, arguments.stream
    runtime.copy_async(out.address, a.address, a.nbytes, on)
    runtime.copy_async(out.address + a.nbytes, b.address, b.nbytes, on)


def run(a, b, result, execute=join_both):
    x, y = (library_of(array).view(array) for array in (a, b))
    arguments = PLAIN.arguments(x, y, result.view(), result.stream)
    streams.run(execute, arguments, library_of(a), (a, b, None, None, None, None, None))


def test_operands_of_a_product_that_fails_half_way_are_held(cuda, cupy):
    def fails(arguments):
        join_both(arguments)
        raise BackendError("the second half failed")

    with cupy.cuda.Stream() as own:
        a, b, result = cupy.asarray(FIRST), cuda.array(SECOND), new_result(own.ptr, 2 * N)
        producer = b.producer
        with pytest.raises(BackendError, match="the second half failed"):
            run(a, b, result, fails)
        del b
        gc.collect()
        cuda.runtime.wait_for(producer)
        np.testing.assert_array_equal(read(address_of(result), own.ptr, 2 * N), BOTH)


# -- captures -------------------------------------------------------------------------------------


def test_another_stream_is_captured_along(cuda):
    first, second = stream(cuda), stream(cuda)
    memory.order(first, second, GPU)
    cuda.runtime.begin_capture(first)
    memory.order(first, second, GPU)
    assert runtime.is_capturing(second)
    memory.order(second, first, GPU)
    cuda.runtime.end_capture(first)
    assert not runtime.is_capturing(second)
    memory.order(first, second, GPU)  # the event of the graph is used again


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal"])
def test_memory_is_freed_while_another_thread_captures(cuda, monkeypatch, mode):
    """A synchronisation of the device would end the capture."""
    first, second = stream(cuda), stream(cuda)
    monkeypatch.setattr(memory._pool(GPU.index), "_limit", 3000)
    with ThreadPoolExecutor(1) as other:
        other.submit(cuda.runtime.begin_capture, first, mode).result()
        for _ in range(5):
            memory.allocate(1000, GPU, second)
        assert cuda.count("cudaFree") == 4
        memory.release()
        assert cuda.count("cudaFree") == 4 + 1
        other.submit(cuda.runtime.end_capture, first).result()  # raises if it was invalidated


def test_objects_are_held_and_released_during_a_capture(cuda):
    """In the strictest mode, and on another stream."""
    first, second = stream(cuda), stream(cuda)
    kept = [SECOND.copy(), SECOND.copy()]
    alive = [weakref.ref(x) for x in kept]
    memory.keep([kept.pop()], second, GPU)
    cuda.runtime.begin_capture(first, "Global")
    memory.allocate(1000, GPU, second)
    memory.release_finished()
    memory.keep([kept.pop()], second, GPU)
    cuda.runtime.end_capture(first)
    synchronize(second)
    assert not memory.release_finished()
    assert all(x() is None for x in alive)


# -- DLPack ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [0, -2, 1.5, "1", True])
def test_streams_that_dlpack_lacks_are_refused(cuda, on):
    with pytest.raises(BufferError, match="stream must be None, -1"):
        new_result(1).__dlpack__(stream=on)


def test_an_array_is_exported_to_its_device_alone(cuda):
    array = new_result(1)
    array.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="on cuda:0 and is not exported to device"):
        array.__dlpack__(dl_device=(1, 0))
    for read_by_numpy in (np.asarray, lambda x: x.memory):
        with pytest.raises(ArrayError, match=r"on cuda:0, where NumPy cannot .*torch\.from_dlpack"):
            read_by_numpy(array)
    assert repr(array) == f"DLPackArray(shape=({N},), dtype='float32', device='cuda:0')"


def test_devices_without_memory_for_results_are_refused():
    class Shy:
        def __dlpack__(self, **_):
            raise AssertionError

        def __dlpack_device__(self):
            raise BufferError("somewhere")

    with pytest.raises(ArrayError, match="Shy cannot be exported by DLPack: somewhere"):
        library_of(Shy()).view(Shy())
    with pytest.raises(DeviceError, match=r"lowprec cannot allocate the result on rocm:0"):
        device_memory.provider(Device(10, 0))
