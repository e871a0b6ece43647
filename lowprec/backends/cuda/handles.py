"""Handles of NVIDIA's libraries, and streams, one per thread and device, created at first use.

They are never destroyed, because that would synchronise the device; the handles of a finished thread are reused.
Source: the cuBLAS documentation on thread safety.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator

from lowprec.arrays import Device
from lowprec.arrays.device_memory import LEGACY_STREAM, PER_THREAD_STREAM
from lowprec.backends.cuda import bindings, memory, runtime
from lowprec.errors import DeviceMemoryError


class _Lease(dict[int, int]):
    """The handles of one thread by device, returned to the pool when the thread ends."""

    def __init__(self, free: dict[int, list[int]]) -> None:
        self._free = free

    def __del__(self) -> None:
        for device, handle in self.items():
            self._free[device].append(handle)


class _Local(threading.local):
    def __init__(self, free: dict[int, list[int]]) -> None:
        self.handles = _Lease(free)


class HandlePool:
    """Handles of one library; ``create`` returns a new one on the current device. All steps are atomic."""

    def __init__(self, create: Callable[[], int]) -> None:
        self._create = create
        #: All handles, in order of creation, with their devices.
        self.devices: dict[int, int] = {}
        self._free: dict[int, list[int]] = defaultdict(list)
        self._local = _Local(self._free)

    def handle(self, device: int, stream: int = LEGACY_STREAM) -> int:
        """Return this thread's handle on ``device``, which is current; none is created during a capture."""
        handles = self._local.handles
        leased = handles.get(device)
        return leased if leased is not None else self._lease(device, stream, handles)

    def _lease(self, device: int, stream: int, handles: _Lease) -> int:
        try:
            handle = self._free[device].pop()
        except IndexError:
            runtime.refuse_capture(stream, "a handle of this thread")
            with runtime.relaxed_capture():
                try:
                    handle = self._create()
                except DeviceMemoryError:
                    memory.release()
                    handle = self._create()
            self.devices[handle] = device
        leased = handles.setdefault(device, handle)
        if leased != handle:  # a signal handler has created one meanwhile
            self._free[device].append(handle)
        return leased


_cublas_lt = HandlePool(bindings.create_handle)

#: Return this thread's cuBLASLt handle on the current device.
handle = _cublas_lt.handle


def device_of(handle: int) -> int:
    return _cublas_lt.devices[handle]


_streams = HandlePool(runtime.create_stream)


@contextlib.contextmanager
def stream_of_thread(handle: int) -> Iterator[int]:
    """Yield a stream for work in the order of this thread's default stream, whose number libraries may not accept."""
    device = Device(2, device_of(handle))
    stream = _streams.handle(device.index, PER_THREAD_STREAM)
    memory.order(PER_THREAD_STREAM, stream, device)
    try:
        yield stream
    finally:
        memory.order(stream, PER_THREAD_STREAM, device)
