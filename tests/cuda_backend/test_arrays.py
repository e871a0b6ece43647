"""Results in device memory on streams that run late: without the right order they are read as garbage."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lowprec.arrays import Device
from lowprec.arrays.device_memory import DeviceArray
from lowprec.arrays.dlpack import view_of_capsule
from lowprec.backends.cuda import memory, runtime
from lowprec.errors import ArrayError
from lowprec.formats import DType

GPU = Device(2, 0)
NUMBERS = np.arange(64, dtype=np.float32)


@pytest.fixture
def cuda(software):
    return software.software


def stream(cuda):
    return int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])


def new_result(on):
    return DeviceArray(NUMBERS.shape, DType.FLOAT32, GPU, on)


@pytest.mark.parametrize("consumer", ["None", "default", "1", "2", "other", "own", "-1"])
def test_a_consumer_reads_a_result_once_it_is_written(cuda, consumer):
    producer, other = memory.own_stream(GPU), stream(cuda)
    array, found = new_result(producer), np.zeros_like(NUMBERS)
    runtime.copy_async(array.view().address, NUMBERS.ctypes.data, NUMBERS.nbytes, producer)
    on = {"1": 1, "2": 2, "other": other, "own": producer, "-1": -1}.get(consumer)
    view = view_of_capsule(
        array.__dlpack__() if consumer == "default" else array.__dlpack__(stream=on)
    )
    assert view.device == GPU
    # A consumer that names no stream may read on any, also on one that does not wait for the default stream; one that
    # wants no synchronisation reads where the result is written.
    reader = {None: other, -1: producer}.get(on, on)
    runtime.copy_async(found.ctypes.data, view.address, found.nbytes, reader)
    np.testing.assert_array_equal(found, NUMBERS)


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal"])
def test_memory_and_objects_are_released_while_another_thread_captures(cuda, monkeypatch, mode):
    """A synchronisation of the device would end the capture."""
    first, second = stream(cuda), stream(cuda)
    monkeypatch.setattr(memory._pool(GPU.index), "_limit", 3000)
    operand = NUMBERS.copy()
    alive = weakref.ref(operand)
    with ThreadPoolExecutor(1) as other:
        other.submit(cuda.runtime.begin_capture, first, mode).result()
        memory.keep([operand], second, GPU)
        del operand
        for _ in range(5):
            memory.allocate(1000, GPU, second)
        assert cuda.count("cudaFree") == 4
        memory.release()
        assert cuda.count("cudaFree") == 4 + 1
        assert alive() is None
        other.submit(cuda.runtime.end_capture, first).result()  # raises if it was invalidated


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
    assert repr(array) == "DLPackArray(shape=(64,), dtype='float32', device='cuda:0')"
