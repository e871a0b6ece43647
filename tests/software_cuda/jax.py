"""The parts of JAX on GPUs that lowprec uses: arrays that are computed late, on unknown streams.

Buffers and streams are as in JAX's own client (PJRT): work on a device runs on a compute stream of the client's; memory
is freed in the order of that stream, as soon as neither an array nor a DLPack capsule holds it; a buffer that a
capsule holds cannot be donated. Source: ``jax.dlpack`` and the array class of JAX 0.10, the DLPack protocol.
"""

import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from lowprec.arrays.dlpack import view_of_capsule
from lowprec.arrays.view import NUMPY_DTYPES, memory_at
from lowprec.util.strides import contiguous_strides
from software_cuda.arrays import capsule, checked, empty, new_stream
from software_cuda.streams import nothing

_CUDA = 2


class Jax(ModuleType):
    """Replaces ``jax``.

    ``has_streams`` is whether the client can wait for, and be waited for by, other libraries' streams, as that of CUDA
    can. One that cannot passes no stream to a producer.
    """

    __version__ = "0.10"

    def __init__(self, runtime, *, has_streams=True):
        super().__init__("jax")
        self.runtime = runtime
        self.has_streams = has_streams
        self.Array = type("Array", (_Array,), {"jax": self})
        self.core = SimpleNamespace(Tracer=type("Tracer", (), {}))
        self.config = SimpleNamespace(jax_enable_x64=False)
        self.dlpack = SimpleNamespace(from_dlpack=self._from_dlpack)
        self._gpus = [_Device(self, index) for index in range(len(runtime.devices))]

    def asarray(self, values, device=None):
        """Return an array that the compute stream of the device has yet to write; committed if a device is named."""
        values = np.array(values, order="C")
        found = self._gpus[device or 0]
        buffer = found.empty(values.shape, values.dtype)
        found.compute(lambda: values, [], buffer)
        return self._array(buffer, found, committed=device is not None)

    def add(self, x, number):
        device = x.device
        buffer = device.empty(x.shape, x.dtype)
        operand, one = x.buffer.unheld(), x.dtype.type(number)
        device.compute(lambda: device.read(operand) + one, [x.buffer], buffer)
        return self._array(buffer, device, committed=x.committed)

    def donate(self, x):
        """Delete ``x``; return whether its memory could be reused. JAX silently copies memory that is held outside."""
        buffer, x.buffer = x.buffer, _Deleted()
        return not buffer.is_held

    def asnumpy(self, x):
        """Return a copy in host memory, once the array is computed."""
        x.block_until_ready()
        return x.device.read(x.buffer.memory)

    def _array(self, buffer, device, *, committed):
        return self.Array(buffer.memory.dtype, device, [buffer], committed=committed)

    def _from_dlpack(self, array):
        """Adopt what an array exports, on its own device, which it is then committed to."""
        assert hasattr(array, "__dlpack__"), "a raw capsule names no device"
        kind, index = array.__dlpack_device__()
        assert kind == _CUDA, "copies between devices are not modelled"
        device = self._gpus[index]
        stream = device.handle_for_others if self.has_streams else None
        view = view_of_capsule(array.__dlpack__(stream=stream))
        assert view.strides == contiguous_strides(view.shape), "only row-major arrays are adopted"
        dtype = NUMPY_DTYPES[view.dtype]
        memory = np.ndarray(view.shape, dtype, memory_at(view.address, view))
        # Ready in the order of the stream that was passed; without one, JAX assumes that it is ready now.
        ready = None
        if stream is not None:
            with self.runtime.lock:
                ready = self.runtime.enqueue(
                    self.runtime.stream_of(index, stream), "record", nothing
                )
        return self._array(_Buffer(memory, ready), device, committed=True)


class _Device:
    """A GPU of the client, with a stream on which it computes, and one that it passes to others."""

    platform = "gpu"

    def __init__(self, jax, index):
        self.jax = jax
        self.id = index
        self.computing = new_stream(jax.runtime, index)
        self.handle_for_others = jax.runtime.give_handle(new_stream(jax.runtime, index))

    def empty(self, shape, dtype):
        """Return new memory, freed in the order of the compute stream."""
        memory = empty(self.jax.runtime, shape, dtype, self.id, self.computing)
        return _Buffer(memory)

    def compute(self, function, operands, result):
        """Queue the writing of a result. What is queued holds no memory: the order of the stream protects it."""
        runtime, target = self.jax.runtime, result.unheld()
        after = [x.ready for x in operands if x.ready is not None]

        def write():
            if target.size:
                checked(runtime, target, self.id)[...] = function()

        with runtime.lock:
            result.ready = runtime.enqueue(self.computing, "compute", write, 0.01, after)

    def read(self, memory):
        return checked(self.jax.runtime, memory, self.id).copy()


class _Buffer:
    """Memory of a device, when it is ready, and how many capsules hold it."""

    def __init__(self, memory, ready=None):
        self.memory = memory
        self.ready = ready
        self.holds: list[None] = []
        self.free = threading.Event()  # set when the last capsule is destroyed

    @property
    def is_held(self):
        return bool(self.holds)

    def unheld(self):
        """Return the memory without keeping it alive."""
        x = self.memory
        return np.ndarray(x.shape, x.dtype, memory_at(x.ctypes.data, None))

    def held(self):
        """Return the memory, counted as held outside while it is reachable."""
        x = self.memory
        return np.ndarray(x.shape, x.dtype, memory_at(x.ctypes.data, _Hold(self)))


class _Hold:
    """Counted as a holder of a buffer for as long as it lives."""

    def __init__(self, buffer):
        self._buffer = buffer
        buffer.holds.append(None)
        buffer.free.clear()

    def __del__(self):
        buffer = self._buffer
        buffer.holds.pop()
        if not buffer.holds:
            buffer.free.set()


class _Deleted:
    """Replaces a buffer that was donated."""

    def __getattr__(self, name):
        raise RuntimeError("Array has been deleted.")


class _Array:
    """An array on one device; made as JAX's own is, of a buffer or of another array."""

    jax: Jax

    def __init__(self, aval, sharding, arrays, *, committed, _skip_checks=False):
        (buffer,) = arrays
        self.buffer: Any = getattr(buffer, "buffer", buffer)
        self.aval = aval
        self.sharding = self.device = sharding
        self.committed = committed

    @property
    def dtype(self):
        return np.dtype(self.aval)

    @property
    def shape(self):
        return self.buffer.memory.shape

    def block_until_ready(self):
        runtime, ready = self.jax.runtime, self.buffer.ready
        with runtime.lock:
            if ready is not None:
                runtime.wait([ready])
        return self

    def __dlpack_device__(self):
        return (_CUDA, self.device.id)

    def __dlpack__(self, *, stream=None, max_version=None):
        runtime, ready = self.jax.runtime, self.buffer.ready
        if stream is None:
            self.block_until_ready()
        elif not self.jax.has_streams:
            raise RuntimeError(
                "UNIMPLEMENTED: WaitUntilBufferReadyOnStream is only implemented for GPU."
            )
        elif ready is not None:
            with runtime.lock:
                consumer = runtime.stream_of(self.device.id, stream)
                runtime.enqueue(consumer, "wait", nothing, after=[ready])
        return capsule(self.buffer.held(), self.device.id, None)
