"""The parts of CuPy that lowprec uses: arrays, current streams, an allocator that is ordered on them.

Source: the CuPy reference (``cupy.ndarray``, ``cupy.cuda.Stream``, ``cupy.cuda.Device``, *Memory Management*).
"""

import contextlib
import functools
import math
import operator
import threading
from types import ModuleType, SimpleNamespace

import numpy as np

from software_cuda.arrays import capsule, checked, empty, fill, make_wait
from software_cuda.streams import Stream as RuntimeStream


class Cupy(ModuleType):
    __version__ = "14.0"

    def __init__(self, runtime):
        super().__init__("cupy")
        self.runtime = runtime
        self.local = threading.local()
        #: How often a number was read, which waits.
        self.waits = 0
        self.ndarray = type("ndarray", (_Array,), {"cupy": self})
        self.int8, self.transpose, self.reshape = np.int8, None, None
        self.isfinite, self.any, self.logical_or = (
            functools.partial(self.compute, f) for f in (np.isfinite, np.any, np.logical_or)
        )
        self.cuda = SimpleNamespace(
            Device=self.on_device,
            Stream=functools.partial(_Stream, self),
            get_current_stream=self.current,
            runtime=SimpleNamespace(is_hip=False),
        )

    def current(self, device=None):
        """Return the current stream of a device: the default one outside every ``with``."""
        index = self.runtime.device if device is None else device
        stack = self.streams(index)
        return stack[-1] if stack else self.cuda.Stream(null=True, device=index)

    def streams(self, device):
        """Return the streams of this thread's open ``with`` blocks, the innermost last."""
        return vars(self.local).setdefault(str(device), [])

    @contextlib.contextmanager
    def on_device(self, index):
        before = self.runtime.device
        self.runtime.cudaSetDevice(index)
        try:
            yield
        finally:
            self.runtime.cudaSetDevice(before)

    def empty(self, shape, dtype=float):
        """Return a new array on the current device; its memory is ordered on the current stream."""
        self.runtime.make_context()
        device = self.runtime.device
        memory, nbytes = self.runtime.memory, math.prod(shape) * np.dtype(dtype).itemsize
        if memory.used[device] + nbytes > memory.limits[device]:
            raise MemoryError(f"Out of memory allocating {nbytes} bytes")
        made = empty(self.runtime, shape, dtype, device, self.current().stream)
        return self.ndarray(made, device)

    def asarray(self, values):
        """Return a copy of host memory, row-major, written in the order of the current stream."""
        values = np.asarray(values)
        made = self.empty(values.shape, values.dtype)
        fill(self.runtime, self.current().stream, made.memory, values)
        return made

    def compute(self, function, *operands):
        """Return a new array with a function's values, computed by work on the current stream."""
        memory = [x.memory if isinstance(x, _Array) else x for x in operands]
        like = function(
            *(np.ones(x.shape, x.dtype) if isinstance(x, np.ndarray) else x for x in memory)
        )
        made, device = self.empty(np.shape(like), like.dtype), self.runtime.device
        target = made.memory

        def write():
            if target.size:
                read = [
                    checked(self.runtime, x, device) if isinstance(x, np.ndarray) else x
                    for x in memory
                ]
                with np.errstate(all="ignore"):
                    checked(self.runtime, target, device)[...] = function(*read)

        with self.runtime.lock:
            self.runtime.enqueue(self.current(device).stream, "compute", write, 0.01)
        return made

    def asnumpy(self, array):
        """Return a copy in host memory, after the work of the current stream."""
        self.current(array.device.id).synchronize()
        return checked(self.runtime, array.memory, array.device.id).copy()


class _Stream:
    def __init__(self, cupy, *, null=False, ptds=False, non_blocking=True, device=None):
        self.cupy, runtime = cupy, cupy.runtime
        self.device_id = runtime.device if device is None else device
        if null or ptds:
            self.ptr = 2 if ptds else 0  # per-thread default stream: another in each thread
            self.stream = runtime.stream_of(self.device_id, self.ptr)
        else:
            self.stream = RuntimeStream(0, self.device_id, blocking=not non_blocking)
            runtime.scheduler.streams.append(self.stream)
            self.ptr = runtime.give_handle(self.stream)

    def __enter__(self):
        self.cupy.streams(self.device_id).append(self)
        return self

    def __exit__(self, *_):
        self.cupy.streams(self.device_id).pop()

    def synchronize(self):
        self.cupy.runtime.wait_for(self.stream)


class _Array:
    """Views share memory, as slices and transposes do."""

    cupy: Cupy

    def __init__(self, memory, device):
        self.memory = memory
        self.device = SimpleNamespace(id=device)

    def __getattr__(self, name):
        if name not in ("dtype", "shape", "strides", "size", "nbytes", "flags"):
            raise AttributeError(name)
        return getattr(self.memory, name)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.memory.ctypes.data)

    @property
    def T(self):
        return type(self)(self.memory.T, self.device.id)

    def view(self, dtype):
        return type(self)(self.memory.view(dtype), self.device.id)

    def __bool__(self):
        """Wait for the current stream, as every read of a number does."""
        self.cupy.waits += 1
        return bool(self.cupy.asnumpy(self))

    def __mul__(self, other):
        return self.cupy.compute(operator.mul, self, other)

    def __invert__(self):
        return self.cupy.compute(operator.invert, self)

    def astype(self, dtype):
        return self.cupy.compute(lambda x: x.astype(dtype), self)

    def __setitem__(self, index, values):
        """Queue a copy on the current stream."""
        runtime, device = self.cupy.runtime, self.device.id
        target, source = self.memory[index], values.memory

        def write():
            if target.size:
                checked(runtime, target, device)[...] = checked(runtime, source, device)

        with runtime.lock:
            runtime.enqueue(self.cupy.current(device).stream, "copy", write, 0.01)

    def __getitem__(self, index):
        return type(self)(self.memory[index], self.device.id)

    def __dlpack_device__(self):
        return (2, self.device.id)

    def __dlpack__(self, *, stream=None, max_version=None):
        device = self.device.id
        make_wait(self.cupy.runtime, self.cupy.current(device).stream, device, stream)
        return capsule(self.memory, device, max_version)
