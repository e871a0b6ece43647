"""Arrays on the software devices, for tests: other libraries' arrays as lowprec sees them.

Source of the rules for streams: the Array API standard, ``__dlpack__``.
"""

import numpy as np

from lowprec.arrays import Device
from lowprec.arrays.dlpack import export, import_array
from lowprec.arrays.view import NUMPY_DTYPES, memory_at
from software_cuda.streams import Stream

_DTYPES = {numpy_dtype: d for d, numpy_dtype in NUMPY_DTYPES.items()}
_LEGACY, _NO_SYNCHRONISATION = 1, -1


class Tenancy:
    """Memory of an array, freed as soon as it is unreachable, or in the order of ``stream``."""

    def __init__(self, runtime, device, nbytes, stream=None):
        with runtime.lock:
            self.address = runtime.memory.allocate(device, max(nbytes, 1))
            assert self.address, "the device has not that much memory"
            self._block = runtime.memory.find(self.address)
        self._runtime = runtime
        self._stream = stream

    def __del__(self):
        runtime, block, stream = self._runtime, self._block, self._stream
        if stream is None:
            runtime.memory.drop(block)
        else:
            with runtime.lock:
                runtime.scheduler.enqueue(stream, "give back", lambda: runtime.memory.drop(block))


def span(values):
    """Return the offsets in bytes, from the first element, of the lowest byte and of the end of the highest."""
    if not values.size:
        return 0, 0
    ends = [s * (n - 1) for s, n in zip(values.strides, values.shape, strict=True)]
    first, last = sum(min(x, 0) for x in ends), sum(max(x, 0) for x in ends)
    return first, last + values.itemsize


class DeviceArray:
    """An array of a library that is known by DLPack alone, with the strides of ``values``; gaps are poisoned.

    The values are written by work on a new stream, so a reader that does not wait for it finds poison.
    """

    def __init__(self, runtime, values, *, device=0):
        values = np.asarray(values)
        self.runtime = runtime
        self.device = device
        self.producer = new_stream(runtime, device)
        self.memory = _on_device(runtime, values, device)
        fill(runtime, self.producer, self.memory, values)

    def __dlpack_device__(self):
        return (2, self.device)

    def __dlpack__(self, *, stream=None, max_version=None):
        make_wait(self.runtime, self.producer, self.device, stream)
        return capsule(self.memory, self.device, max_version)

    def to_numpy(self):
        """Return the elements once the producer's stream and the legacy default stream are done."""
        self.runtime.wait_for(self.producer)
        self.runtime.wait_for(self.runtime.stream_of(self.device, _LEGACY))
        return checked(self.runtime, self.memory, self.device).copy()


def new_stream(runtime, device):
    """Return a new stream of another library, which is not counted among lowprec's."""
    found = Stream(0, device, blocking=False)
    runtime.scheduler.streams.append(found)
    return found


def make_wait(runtime, producer, device, consumer):
    """Make the consumer's stream wait as the standard requires; raises BufferError if it is not allowed for CUDA."""
    if consumer is None:
        consumer = _LEGACY
    if type(consumer) is not int or consumer == 0 or consumer < _NO_SYNCHRONISATION:
        raise BufferError(f"stream {consumer!r} is not allowed for CUDA")
    if consumer == _NO_SYNCHRONISATION:
        return
    after = runtime.stream_of(device, consumer)
    if after.device != device:
        raise BufferError(f"the consumer's stream is device {after.device}'s")
    runtime.join(producer, after)


def _on_device(runtime, values, device, stream=None):
    """Return an array like this one on memory of a device."""
    first, end = span(values)
    home = Tenancy(runtime, device, end - first, stream)
    return np.ndarray(
        values.shape, values.dtype, memory_at(home.address, home), -first, values.strides
    )


def empty(runtime, shape, dtype, device, stream):
    """Return a row-major array on memory of a device, freed in the order of a stream."""
    return _on_device(runtime, np.ndarray(shape, dtype, memory_at(256, None)), device, stream)


def fill(runtime, stream, memory, values):
    """Queue the writing of values, which are read now."""
    values = values.copy()
    device = stream.device

    def write():
        if memory.size:
            target = checked(runtime, memory, device)
            target[...] = values

    with runtime.lock:
        runtime.enqueue(stream, "write", write, 0.01)


def checked(runtime, memory, device):
    """Return an array on the memory of a device for reading and writing; raises Fault if it is not allocated."""
    if not memory.size:
        return np.empty(memory.shape, memory.dtype)
    first, end = span(memory)
    data = runtime.memory.at(memory.ctypes.data + first, end - first, device, "array")
    return np.ndarray(memory.shape, memory.dtype, data, -first, memory.strides)


def capsule(memory, device, max_version):
    """Return a DLPack capsule of an array on a device."""
    return export(memory, _DTYPES[memory.dtype], max_version, device=Device(2, device))


def read(runtime, array):
    """Return the elements of an array with DLPack, for a reader that waits for no more than DLPack requires."""
    _, index = array.__dlpack_device__()
    stream = new_stream(runtime, index)
    view = import_array(array, runtime.give_handle(stream))
    runtime.wait_for(stream)
    dtype = NUMPY_DTYPES[view.dtype]
    strides = [s * dtype.itemsize for s in view.strides]
    first = view.extent()[0] if view.size else view.address
    memory = np.ndarray(view.shape, dtype, memory_at(first, view), view.address - first, strides)
    return checked(runtime, memory, index).copy()
