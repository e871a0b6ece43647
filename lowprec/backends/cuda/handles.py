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


class HandlePool:
    """Handles of one library; ``create`` returns a new one on the current device. All steps are atomic.

    ``reset`` sets the initial state of a handle, which may be that of a finished thread.
    """

    def __init__(
        self, create: Callable[[], int], reset: Callable[[int], None] | None = None
    ) -> None:
        self._create = create
        self._reset = reset
        #: All handles, in order of creation, with their devices.
        self.devices: dict[int, int] = {}
        self._free: dict[int, list[int]] = defaultdict(list)
        self._local = threading.local()

    def handle(self, device: int, stream: int = LEGACY_STREAM) -> int:
        """Return this thread's handle on ``device``, which is current; none is created during a capture."""
        lease = getattr(self._local, "lease", None)
        if lease is None:
            lease = _Lease(self._free)
            self._local.lease = lease
        handle = lease.get(device)
        if handle is None:
            handle = self._unused(device, stream)
            lease[device] = handle
        return handle

    def _unused(self, device: int, stream: int) -> int:
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
        if self._reset is not None:
            self._reset(handle)
        return handle


_cublas_lt = HandlePool(bindings.create_handle)

#: Return this thread's cuBLASLt handle on the current device.
handle = _cublas_lt.handle

_streams = HandlePool(runtime.create_stream)


@contextlib.contextmanager
def library_stream(device: int, stream: int) -> Iterator[int]:
    """Yield a stream for a library, which may not accept the numbers of default streams; order it with ``stream``."""
    if stream != PER_THREAD_STREAM:
        yield 0 if stream == LEGACY_STREAM else stream
        return
    where = Device(2, device)
    own = _streams.handle(device, stream)
    memory.order(stream, own, where)
    try:
        yield own
    finally:
        memory.order(own, stream, where)
