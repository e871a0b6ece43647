"""Handles of NVIDIA's libraries, one per thread and device, and cuBLASLt's workspaces, one per handle and stream.

Both are made on first use and kept: destroying a handle waits for the whole device. A thread that ends leaves its
handles to the next one. Source: the cuBLAS documentation on thread safety and on workspaces.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from lowprec.backends.cuda import bindings, runtime

#: Of all libraries.
_pools: list[HandlePool] = []


class _Lease:
    """The handles of one thread, given back when it ends."""

    __slots__ = ("generation", "handles", "pool")

    def __init__(self, pool: HandlePool) -> None:
        self.handles: dict[int, int] = {}
        self.pool = pool
        self.generation = pool.generation

    def __del__(self) -> None:
        # At the end of the process the module may be half gone, and then nothing is left to give back to.
        with contextlib.suppress(Exception):
            self.pool.give_back(self)


class _Local(threading.local):
    lease: _Lease | None = None


class HandlePool:
    """Handles of one library; ``create`` returns a new one on the current device.

    Without a lock, which the end of a thread, a signal handler or a fork could find taken: each step is atomic.
    """

    def __init__(self, create: Callable[[], int], destroy: Callable[[int], None]) -> None:
        self._create = create
        self._destroy = destroy
        self._local = _Local()
        self._free: dict[int, list[int]] = {}
        self._devices: dict[int, int] = {}
        #: Counts resets, so that a thread does not use what was destroyed.
        self.generation = 0
        _pools.append(self)

    def handle(self, device: int) -> int:
        """Return this thread's handle on the current device, which is ``device``."""
        lease = self._local.lease
        if lease is not None and lease.generation == self.generation:
            found = lease.handles.get(device)
            if found is not None:
                return found
        return self._lease(device)

    def _lease(self, device: int) -> int:
        lease = self._local.lease
        if lease is None or lease.generation != self.generation:
            lease = self._local.lease = _Lease(self)
        free = self._free.setdefault(device, [])
        try:
            found = free.pop()
        except IndexError:
            with runtime.relaxed_capture():
                found = self._create()
            self._devices[found] = device
        kept = lease.handles.setdefault(device, found)
        if kept != found:  # a signal handler has multiplied meanwhile
            free.append(found)
        return kept

    def give_back(self, lease: _Lease) -> None:
        """Leave the handles of a thread that ended to other threads."""
        if lease.generation == self.generation:
            for device, found in lease.handles.items():
                self._free.setdefault(device, []).append(found)

    def handles(self) -> tuple[int, ...]:
        """Return all handles, in the order in which they were made."""
        return tuple(self._devices)

    def reset(self) -> None:
        """Destroy all handles; no thread may be using one."""
        self.generation += 1
        devices = dict(self._devices)
        self._free.clear()
        self._devices.clear()
        for found, device in devices.items():
            with runtime.on_device(device):
                self._destroy(found)


_cublas_lt = HandlePool(bindings.create_handle, bindings.destroy_handle)

#: This thread's cuBLASLt handle on a device, the current one.
handle = _cublas_lt.handle


# -- workspaces -----------------------------------------------------------------------------------

#: Address and bytes by handle and stream.
_workspaces: dict[tuple[int, int], tuple[int, int]] = {}
#: All addresses that were ever handed out, with their device.
_allocated: list[tuple[int, int]] = []


def workspace(owner: int, stream: int, nbytes: int) -> int:
    """Return the address of at least ``nbytes`` of temporary memory for a handle's work on a stream; 0 for none.

    The memory is on the current device, and stays until :func:`reset`.
    """
    if not nbytes:
        return 0
    if runtime.is_capturing(stream):
        # Graphs may run side by side, beside other work and at any later time: each product of one has memory of its
        # own, for good.
        return runtime.allocate(nbytes)
    found = _workspaces.get((owner, stream))
    if found is None or found[1] < nbytes:
        # One that is outgrown is not freed: work that uses it may be queued.
        device = runtime.current_device()
        found = (runtime.allocate(nbytes), nbytes)
        _allocated.append((device, found[0]))
        _workspaces[owner, stream] = found
    return found[0]


def reset() -> None:
    """Destroy all handles and workspaces; no thread may be using one."""
    allocated = list(_allocated)
    _workspaces.clear()
    _allocated.clear()
    for device, address in allocated:
        with runtime.on_device(device):
            runtime.free(address)
    for pool in _pools:
        pool.reset()
