"""Arrays on the software devices, for tests: what other libraries' arrays look like to lowprec.

Source of the rules for streams: the Array API standard, ``__dlpack__``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowprec.arrays import Device
from lowprec.arrays.dlpack import export, import_array
from lowprec.arrays.view import NUMPY_DTYPES, memory_at
from software_cuda.memory import Allocation
from software_cuda.runtime import Runtime
from software_cuda.streams import Stream

_DTYPES = {numpy_dtype: d for d, numpy_dtype in NUMPY_DTYPES.items()}
_LEGACY, _NO_SYNCHRONISATION = 1, -1


class Tenancy:
    """Memory of an array, which goes to somebody else the moment that nobody holds it.

    Parameters
    ----------
    runtime : Runtime
    device, nbytes : int
    stream : Stream or None
        On which it is given back, after the work that the stream holds then; None for at once.
    """

    def __init__(self, runtime: Runtime, device: int, nbytes: int, stream: Stream | None = None) -> None:
        with runtime.lock:
            self.address = runtime.memory.allocate(device, max(nbytes, 1))
            assert self.address, "the device has not that much memory"
            found = runtime.memory.find(self.address)
        assert found is not None
        self._block: Allocation = found
        self._runtime = runtime
        self._stream = stream

    def __del__(self) -> None:
        runtime, block, stream = self._runtime, self._block, self._stream
        if stream is None:
            runtime.memory.drop(block)
        else:
            with runtime.lock:
                runtime.scheduler.enqueue(stream, "give back", lambda: runtime.memory.drop(block))


def span(values: NDArray[Any]) -> tuple[int, int]:
    """Return the first byte of an array, from its first element, and the one after the last."""
    if not values.size:
        return 0, 0
    ends = [s * (n - 1) for s, n in zip(values.strides, values.shape, strict=True)]
    first, last = sum(min(x, 0) for x in ends), sum(max(x, 0) for x in ends)
    return first, last + values.itemsize


class DeviceArray:
    """An array of which nothing is known but DLPack.

    Its memory has the strides of the values; bytes between them are poisoned. The values are written by work that is
    queued on the producer's stream, so whoever reads them without waiting for it finds poison.

    Parameters
    ----------
    runtime : Runtime
    values : array_like
        Of NumPy, with the types of ml_dtypes.
    device : int
    stream : int or None
        The producer's, by default a new one that does not wait for the default stream.
    offset_bytes : int
        From an aligned address.
    read_only : bool
        As exports of version 1 tell it.
    """

    def __init__(
        self,
        runtime: Runtime,
        values: Any,
        *,
        device: int = 0,
        stream: int | None = None,
        offset_bytes: int = 0,
        read_only: bool = False,
    ) -> None:
        values = np.asarray(values)
        self.runtime = runtime
        self.device = device
        self.producer = new_stream(runtime, device) if stream is None else runtime.stream_of(device, stream)
        self.memory = _on_device(runtime, values, device, offset_bytes)
        self.memory.flags.writeable = not read_only
        fill(runtime, self.producer, self.memory, values)

    @property
    def address(self) -> int:
        """Of the element with all indices zero."""
        return self.memory.ctypes.data

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("copies are not modelled")
        make_wait(self.runtime, self.producer, self.device, stream)
        return capsule(self.memory, self.device, max_version)

    def to_numpy(self) -> NDArray[Any]:
        """Return the elements once the producer's stream and the legacy default stream are done."""
        self.runtime.wait_for(self.producer)
        self.runtime.wait_for(self.runtime.stream_of(self.device, _LEGACY))
        return checked(self.runtime, self.memory, self.device).copy()


def new_stream(runtime: Runtime, device: int) -> Stream:
    """Return a new stream of another library's, which is not counted among lowprec's."""
    found = Stream(0, device, blocking=False)
    runtime.scheduler.streams.append(found)
    return found


def make_wait(runtime: Runtime, producer: Stream, device: int, consumer: Any) -> None:
    """Do what the standard asks of a producer for the stream that a consumer names.

    Raises
    ------
    BufferError
        If it is none that the standard allows for CUDA.
    """
    if consumer is None:
        consumer = _LEGACY
    if type(consumer) is not int or consumer == 0 or consumer < _NO_SYNCHRONISATION:
        raise BufferError(f"stream {consumer!r} is not allowed for CUDA")
    if consumer == _NO_SYNCHRONISATION:
        return
    after = runtime.stream_of(device, consumer)
    if after.device != device:
        raise BufferError(f"the consumer's stream is device {after.device}'s")
    if after.capture is not None and producer.capture is not after.capture:
        after.capture.is_invalid = True
        raise BufferError("a stream that is being captured cannot wait for work outside")
    runtime.join(producer, after)


def _on_device(
    runtime: Runtime, values: NDArray[Any], device: int, offset_bytes: int = 0, stream: Stream | None = None
) -> NDArray[Any]:
    """Return an array like this one on memory of a device."""
    first, end = span(values)
    home = Tenancy(runtime, device, end - first + offset_bytes, stream)
    buffer = memory_at(home.address + offset_bytes, home)
    return np.ndarray(values.shape, values.dtype, buffer, -first, values.strides)


def empty(runtime: Runtime, shape: tuple[int, ...], dtype: Any, device: int, stream: Stream) -> NDArray[Any]:
    """Return a row-major array on memory of a device, given back in the order of a stream."""
    like: NDArray[Any] = np.ndarray(shape, dtype, memory_at(256, None))
    return _on_device(runtime, like, device, 0, stream)


def fill(runtime: Runtime, stream: Stream, memory: NDArray[Any], values: NDArray[Any]) -> None:
    """Queue the writing of values, which are read now."""
    values = values.copy()
    device = stream.device

    def write() -> None:
        if memory.size:
            target = checked(runtime, memory, device)
            target.flags.writeable = True
            target[...] = values

    with runtime.lock:
        runtime.enqueue(stream, "write", write, 0.01)


def checked(runtime: Runtime, memory: NDArray[Any], device: int) -> NDArray[Any]:
    """Return an array on the memory of a device for reading and writing.

    Raises
    ------
    Fault
        If the memory is not allocated.
    """
    if not memory.size:
        return np.empty(memory.shape, memory.dtype)
    first, end = span(memory)
    data = runtime.memory.at(memory.ctypes.data + first, end - first, device, "array")
    return np.ndarray(memory.shape, memory.dtype, data, -first, memory.strides)


def capsule(memory: NDArray[Any], device: int, max_version: tuple[int, int] | None) -> object:
    """Return a DLPack capsule of an array on a device."""
    return export(memory, _DTYPES[memory.dtype], max_version, device=Device(2, device))


def read(runtime: Runtime, array: Any) -> NDArray[Any]:
    """Return the elements of an array that has DLPack, waiting for no more than DLPack makes the reader wait."""
    kind, index = array.__dlpack_device__()
    assert kind == 2, "the array is not on a device"
    reader = _Reader(runtime, index)
    view = import_array(array, reader.handle)
    runtime.wait_for(reader.stream)
    if not view.size:
        return np.empty(view.shape, NUMPY_DTYPES[view.dtype])
    first, end = view.extent()
    data = runtime.memory.at(first, end - first, index, "array")
    strides = [s * view.dtype.itemsize for s in view.strides]
    dtype = NUMPY_DTYPES[view.dtype]
    return np.ndarray(view.shape, dtype, data, view.address - first, strides).copy()


class _Reader:
    """A stream of the reader's own, which has a handle for as long as it lives."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        self.stream = new_stream(runtime, device)
        self.handle = runtime.give_handle(self.stream)
        self._runtime = runtime

    def __del__(self) -> None:
        self._runtime.take_handle(self.handle)
