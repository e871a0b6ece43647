"""Arrays in the memory of a device whose provider is a stand-in: its memory is the host's, its streams are a diary.

What is tested is what lowprec itself does with DLPack's streams, devices and life times.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from lowprec.arrays import CPU, NUMPY_DTYPES, Device, DLPackArray, device_memory, library_of
from lowprec.arrays.device_memory import DeviceArray, is_served, provider, register
from lowprec.arrays.dlpack import _open, view_of_capsule
from lowprec.errors import ArrayError, BackendError, DeviceError
from lowprec.formats import DType

GPU = Device(2, 1)
OWN_STREAM = 0x5000
ALL_DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=str)


class Block:
    """Host memory in place of a device's."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(max(nbytes, 1), np.uint8)
        self.address = self.bytes.ctypes.data
        self.streams: list[int] = []

    def used_on(self, stream: int) -> None:
        self.streams.append(stream)


class Memory:
    """A provider that writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.blocks: list[weakref.ref[Block]] = []

    def allocate(self, nbytes: int, device: Device, stream: int) -> Block:
        self.calls.append(("allocate", nbytes, device, stream))
        block = Block(nbytes)
        self.blocks.append(weakref.ref(block))
        return block

    def check_captures(self, streams: Any, device: Device) -> None:
        """Nothing is captured here."""

    def own_stream(self, device: Device) -> int:
        return OWN_STREAM + device.index

    def order(self, before: int, after: int, device: Device) -> None:
        self.calls.append(("order", before, after, device))

    def synchronize(self, stream: int, device: Device) -> None:
        self.calls.append(("synchronize", stream, device))

    def copy(self, source: int, target: int, nbytes: int, device: Device, stream: int) -> None:
        self.calls.append(("copy", nbytes, device, stream))
        from_bytes = (ctypes.c_char * nbytes).from_address(source)
        (ctypes.c_char * nbytes).from_address(target)[:] = from_bytes[:]

    def keep(self, owners: Any, stream: int, device: Device) -> None:
        self.calls.append(("keep", list(owners), stream, device))

    def orders(self) -> list[tuple[int, int]]:
        return [(call[1], call[2]) for call in self.calls if call[0] == "order"]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    stand_in = Memory()
    monkeypatch.setitem(device_memory._loaders, GPU.type, lambda: stand_in)
    return stand_in


def device_array(values: np.ndarray, stream: int = 7) -> DeviceArray:
    """An array on the device with these elements."""
    dtype = library_of(values).view(values).dtype
    array = DeviceArray(values.shape, dtype, GPU, stream)
    array._memory[...] = values
    return array


def sample(dtype: DType, shape: tuple[int, ...] = (5, 3)) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(NUMPY_DTYPES[dtype])


# -- the register ---------------------------------------------------------------------------------


def test_a_provider_is_loaded_with_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_loaders", {})
    loads = []
    register(2, lambda: loads.append("first") or Memory())  # type: ignore[func-returns-value,arg-type,return-value]
    assert is_served(GPU)
    assert loads == []
    assert provider(GPU) is provider(Device(2, 0))
    assert loads == ["first"]
    register(2, lambda: loads.append("second") or Memory())  # type: ignore[func-returns-value,arg-type,return-value]
    provider(GPU)
    assert loads == ["first", "second"]


def test_a_device_without_a_provider_is_refused() -> None:
    assert not is_served(Device(10, 0))
    with pytest.raises(DeviceError, match=r"lowprec cannot allocate the result on rocm:0"):
        provider(Device(10, 0))


# -- an array on a device -------------------------------------------------------------------------


def test_attributes_of_an_array_on_a_device(memory: Memory) -> None:
    array = device_array(sample(DType.BFLOAT16))
    assert isinstance(array, DLPackArray)
    assert (array.shape, array.ndim, array.size, array.dtype) == ((5, 3), 2, 15, "bfloat16")
    assert (array.device, array.stream, array.__dlpack_device__()) == (GPU, 7, (2, 1))
    assert repr(array) == "DLPackArray(shape=(5, 3), dtype='bfloat16', device='cuda:1')"
    assert memory.calls == [("allocate", 30, GPU, 7)]


def test_numpy_is_reported_the_way_out(memory: Memory) -> None:
    array = device_array(sample(DType.FLOAT32))
    for read in (np.asarray, np.array, lambda x: x.memory, lambda x: np.asarray(x, copy=False)):
        with pytest.raises(ArrayError, match=r"on cuda:1, where NumPy cannot .*torch\.from_dlpack"):
            read(array)


@ALL_DTYPES
@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 3)])
@pytest.mark.parametrize("shape", [(5, 3), (), (0, 3), (2, 3, 4)], ids=str)
def test_capsules_of_every_type_and_shape(
    memory: Memory, dtype: DType, max_version: Any, shape: tuple[int, ...]
) -> None:
    array = device_array(sample(dtype, shape))
    capsule = array.__dlpack__(max_version=max_version)
    assert ("versioned" in repr(capsule)) == (max_version is not None and max_version[0] >= 1)
    view = view_of_capsule(capsule)
    assert (view.dtype, view.shape, view.device) == (dtype, shape, GPU)
    assert (view.strides, view.address) == (array.view().strides, array._block.address)
    assert not view.read_only
    assert view.copied is None


@pytest.mark.parametrize("stream", [0, -2, 1.5, "1", True])
def test_streams_that_dlpack_does_not_have_are_refused(memory: Memory, stream: Any) -> None:
    array = device_array(sample(DType.FLOAT32))
    with pytest.raises(BufferError, match="stream must be None, -1"):
        array.__dlpack__(stream=stream)


def test_another_device_is_refused(memory: Memory) -> None:
    array = device_array(sample(DType.FLOAT32))
    array.__dlpack__(dl_device=(2, 1))
    for device in ((1, 0), (2, 0)):
        with pytest.raises(BufferError, match="on cuda:1 and is not exported to device"):
            array.__dlpack__(dl_device=device)


def test_a_copy_is_made_on_the_producers_stream(memory: Memory) -> None:
    values = sample(DType.FLOAT16)
    array = device_array(values)
    view = view_of_capsule(array.__dlpack__(copy=True, max_version=(1, 0), stream=9))
    assert view.copied == "the array's library exported a copy"
    assert view.address != array._block.address
    assert memory.calls[1:] == [("allocate", 30, GPU, 7), ("copy", 30, GPU, 7), ("order", 7, 9, GPU)]
    _, twin = memory.blocks
    block = twin()
    assert block is not None
    assert block.bytes.tobytes() == values.tobytes()


def test_an_export_keeps_the_block_until_its_consumer_is_done(memory: Memory) -> None:
    array = device_array(sample(DType.FLOAT8_E5M2))
    capsule = array.__dlpack__()
    (block,) = memory.blocks
    del array
    gc.collect()
    assert block() is not None
    del capsule
    gc.collect()
    assert block() is None


def test_a_wait_that_fails_leaves_no_capsule_behind(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise BackendError("the stream is gone")

    array = device_array(sample(DType.FLOAT32))
    (block,) = memory.blocks
    monkeypatch.setattr(memory, "order", fail)
    with pytest.raises(BackendError, match="the stream is gone"):
        array.__dlpack__(stream=9)
    del array
    gc.collect()
    assert block() is None


# -- known only by DLPack -------------------------------------------------------------------------


class Producer:
    """An array of an unknown library, on any kind of device."""

    def __init__(self, values: np.ndarray, where: tuple[int, int]) -> None:
        self.array = DLPackArray(values)
        self.where = where
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.where

    def __dlpack__(self, **keywords: Any) -> object:
        self.streams.append(keywords.pop("stream", "none given"))
        capsule = self.array.__dlpack__(**keywords)
        tensor, _ = _open(capsule)
        tensor.device_type, tensor.device_id = self.where
        return capsule


@pytest.mark.parametrize(
    ("kind", "device", "stream"),
    [(2, GPU, 1), (13, GPU, 1), (1, CPU, "none given"), (3, CPU, "none given")],
    ids=["cuda", "managed", "host", "pinned"],
)
def test_dlpack_arrays_are_asked_for_the_stream_of_their_device(kind: int, device: Device, stream: Any) -> None:
    producer = Producer(sample(DType.FLOAT32), (kind, 1 if kind in (2, 13) else 0))
    library = library_of(producer)
    view = library.view(producer)
    assert view.device == device
    assert producer.streams == [stream]
    assert library.writable_view(producer).address == view.address
    assert library.keeps_owners


def test_a_device_that_is_not_reported_is_a_refusal() -> None:
    class Shy:
        def __dlpack__(self, **_: Any) -> object:
            raise AssertionError

        def __dlpack_device__(self) -> tuple[int, int]:
            raise BufferError("somewhere")

    with pytest.raises(ArrayError, match="Shy cannot be exported by DLPack: somewhere"):
        library_of(Shy()).view(Shy())


def test_results_known_only_by_dlpack_stay_on_the_device(memory: Memory) -> None:
    producer = Producer(sample(DType.FLOAT32), (2, 1))
    library = library_of(producer)
    view = library.allocate((5, 3), DType.BFLOAT16, GPU, producer)
    assert (view.device, view.strides, view.dtype) == (GPU, (3, 1), DType.BFLOAT16)
    result = library.wrap(view.owner, producer)
    assert type(result) is DeviceArray
    assert result.stream == library.current_stream(GPU) == 1
    assert library.view(result).owner is result
    assert memory.orders() == []


def test_an_array_of_another_stream_comes_in_behind_it(memory: Memory) -> None:
    array = device_array(sample(DType.FLOAT32), stream=7)
    assert library_of(array).view(array).owner is array
    assert memory.orders() == [(7, 1)]
