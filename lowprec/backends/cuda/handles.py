"""Handles of NVIDIA's libraries, one per thread and device.

Handles are made on first use and never destroyed, which would wait for the whole device; a thread that ends leaves its
handles to the next one. Source: the cuBLAS documentation on thread safety.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

from lowprec.arrays.device_memory import LEGACY_STREAM
from lowprec.backends.cuda import bindings, memory, runtime
from lowprec.errors import DeviceMemoryError


class _Lease(dict[int, int]):
    """The handles of one thread by device, left to others when it ends."""

    def __init__(self, free: dict[int, list[int]]) -> None:
        self._free = free

    def __del__(self) -> None:
        for device, handle in self.items():
            self._free[device].append(handle)


class _Local(threading.local):
    def __init__(self, free: dict[int, list[int]]) -> None:
        self.handles = _Lease(free)


class HandlePool:
    """Handles of one library; ``create`` returns a new one on the current device.

    Without a lock, which the end of a thread, a signal handler or a fork could find taken: each step is atomic.
    """

    def __init__(self, create: Callable[[], int]) -> None:
        self._create = create
        #: All handles, in the order in which they were made, with their devices.
        self.devices: dict[int, int] = {}
        self._free: dict[int, list[int]] = defaultdict(list)
        self._local = _Local(self._free)

    def handle(self, device: int, stream: int = LEGACY_STREAM) -> int:
        """Return this thread's handle on the current device, ``device``; none is made while ``stream`` is captured."""
        handles = self._local.handles
        found = handles.get(device)
        return found if found is not None else self._lease(device, stream, handles)

    def _lease(self, device: int, stream: int, handles: _Lease) -> int:
        try:
            found = self._free[device].pop()
        except IndexError:
            runtime.refuse_capture(stream, "a handle of this thread")
            with runtime.relaxed_capture():
                found = self._new()
            self.devices[found] = device
        kept = handles.setdefault(device, found)
        if kept != found:  # a signal handler has multiplied meanwhile
            self._free[device].append(found)
        return kept

    def _new(self) -> int:
        try:
            return self._create()
        except DeviceMemoryError:
            memory.release()
            return self._create()


_cublas_lt = HandlePool(bindings.create_handle)

#: This thread's cuBLASLt handle on a device, the current one.
handle = _cublas_lt.handle


def device_of(owner: int) -> int:
    """Return the device of a cuBLASLt handle, without asking the driver."""
    return _cublas_lt.devices[owner]
