"""Memory, streams and waiting on NVIDIA GPUs, for what lowprec brings itself: results for JAX, temporary buffers.

All of it comes from one pool per device, in the order of a stream: CUDA itself knows which stream may have what another
gave back, and makes allocations part of a graph that is being captured. Temporary memory goes back in the order of its
stream, by the call that took it. A result that another library has had may be in use on streams that nobody here knows:
when it dies, it waits until the whole device was waited for, which is done once for many of them.

This module is a provider of :mod:`lowprec.arrays.device_memory`. A finaliser calls no function of CUDA: it leaves a
note for the next call. Source: the CUDA Runtime API reference, *Stream Ordered Memory Allocator*, *Stream
synchronization behavior* and *Event Management*, and the CUDA C++ Programming Guide, *Graph Memory Nodes*.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from lowprec.arrays import Device
from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.libraries import libraries, loaded
from lowprec.backends.cuda.waiting import Waiter
from lowprec.errors import BackendError, DeviceMemoryError, LowprecError

#: What a device's pool may keep unused, and as much again of results that died: the larger of bytes and share.
_LIMIT_BYTES = 128 << 20
_LIMIT_SHARE = 32

#: How many results that died may wait, however small they are.
_MAX_DEAD = 4096

#: How many products of a stream may hold their operands; the next one waits for the first.
_MAX_KEPT = 64


class Block:
    """Memory of a device for the work of one stream, which goes back in its order at the end of a ``with`` block.

    What dies otherwise is noted in ``dead``. ``stream`` is None for memory of no pool, which is always given back so.
    """

    __slots__ = ("__weakref__", "_dead", "_stream", "address", "nbytes")

    def __init__(self, nbytes: int, stream: int | None, dead: deque[tuple[int, int]]) -> None:
        self.address = 0
        self.nbytes = nbytes
        self._stream = stream
        self._dead = dead

    def __enter__(self) -> int:
        return self.address

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._stream is None:
            return
        # First of all, so that nothing is given back twice.
        address, self.address = self.address, 0
        try:
            runtime.free_async(address, self._stream)
        except BackendError:
            self.address = address
            if kind is None:
                raise

    def __del__(self) -> None:
        # Runs in any thread, inside any other call, and while the interpreter ends: appending is all it does.
        if self.address:
            self._dead.append((self.address, self.nbytes))


class _Pool:
    """Memory and events of one device, and what its work needs alive. The device is current in all calls."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._limit = max(_LIMIT_BYTES, runtime.properties(device).memory_bytes // _LIMIT_SHARE)
        self._pool = runtime.create_pool(device, self._limit)
        # A signal handler may come in the midst of a step, in the thread that holds the lock, and take a block too.
        self._lock = threading.RLock()
        #: What died: addresses and bytes as finalisers note them, and what was read of these notes.
        self._noted: deque[tuple[int, int]] = deque()
        self._dead: list[int] = []
        self._dead_bytes = 0
        self._events: list[Any] = []
        self._kept: dict[int, deque[tuple[Any, Sequence[Any]]]] = {}
        # What is in use, without an event that will tell how long: for good, unless one comes.
        self.held: dict[int, Sequence[Any]] = {}
        self._captured: list[Sequence[Any]] = []
        self.stream: int | None = None

    def renew_lock(self) -> None:
        """Forget who held the lock."""
        self._lock = threading.RLock()

    # -- memory -----------------------------------------------------------------------------------

    def temporary(self, nbytes: int, stream: int) -> Block:
        if self._pool is not None:
            return self._new(nbytes, stream, ordered=True)
        if runtime.is_capturing(stream):
            raise BackendError(
                f"cuda:{self._device} allocates no memory in the order of streams (cudaDevAttrMemoryPoolsSupported is "
                "0), so a product that needs temporary memory cannot be captured into a graph there"
            )
        return self.allocate(nbytes, stream)

    def allocate(self, nbytes: int, stream: int) -> Block:
        if self._noted:
            self._collect(self._limit)
        # What is allocated while capturing would be the graph's, and gone before the array is.
        ordered = self._pool is not None and not runtime.is_capturing(stream)
        return self._new(nbytes, stream, ordered=ordered)

    def _new(self, nbytes: int, stream: int, *, ordered: bool) -> Block:
        block = Block(nbytes, stream if ordered else None, self._noted)
        pool = self._pool if ordered else None
        try:
            block.address = runtime.allocate(nbytes, pool, stream)
        except DeviceMemoryError:
            if runtime.is_capturing(stream):  # whoever waits for the device then ends the capture
                raise
            release()
            block.address = runtime.allocate(nbytes, pool, stream)
        return block

    def _collect(self, limit: int) -> None:
        """Give back what died, if that is more than a limit, once nobody uses it: after waiting for the device."""
        with self._lock:
            with contextlib.suppress(IndexError):
                while True:
                    address, nbytes = self._noted.popleft()
                    self._dead.append(address)
                    self._dead_bytes += nbytes
            if self._dead_bytes <= limit and len(self._dead) <= _MAX_DEAD:
                return
            # What dies from here on is not what is waited for.
            dead, self._dead, self._dead_bytes = self._dead, [], 0
            try:
                runtime.synchronize_device()
            except BaseException:
                self._dead += dead
                raise
            while dead:
                # What is wrong with a lost device the next call tells.
                with contextlib.suppress(BackendError):
                    runtime.free(dead.pop())

    # -- order ------------------------------------------------------------------------------------

    def own_stream(self) -> int:
        with self._lock:
            if self.stream is None:
                made = runtime.create_stream()
                if self.stream is None:  # no signal handler was here meanwhile
                    self.stream = made
            return self.stream

    def order(self, before: int, after: int) -> None:
        event = self._recorded(before)
        try:
            runtime.wait_event(after, event)
        finally:
            # A wait means the mark that the event had when it was queued, so the event is free again.
            self._events.append(event)

    def _recorded(self, stream: int) -> Any:
        """Return an event that stands for the work which a stream holds now."""
        try:
            event = self._events.pop()
        except IndexError:
            event = runtime.create_event()
        try:
            runtime.record_event(event, stream)
        except BaseException:
            self._events.append(event)
            raise
        return event

    # -- what is held -----------------------------------------------------------------------------

    def keep(self, owners: Sequence[Any], stream: int) -> None:
        """Hold what :attr:`held` holds already until the work of a stream is done."""
        if runtime.is_capturing(stream):  # the graph reads them whenever it runs
            self._captured.append(owners)
            self.held.pop(id(owners), None)
            return
        event = self._recorded(stream)
        with self._lock:
            queue = self._kept.setdefault(stream, deque())
            queue.append((event, owners))
            first = queue[0][0] if len(queue) > _MAX_KEPT else None
        self.held.pop(id(owners), None)
        if first is not None:
            runtime.synchronize_event(first)
        self.release_finished()

    def is_keeping(self) -> bool:
        """Whether something is held for work that was queued."""
        return any(list(self._kept.values()))

    def release_finished(self) -> None:
        """Let go of what the work that is done by now has needed."""
        if not self.is_keeping():
            return
        done = []
        # Inside the lock nothing is let go: that runs other libraries' code.
        with self._lock, runtime.relaxed_capture():
            for queue in list(self._kept.values()):
                while queue:
                    first = queue[0]
                    if not runtime.event_is_done(first[0]):
                        break
                    # A signal handler may have let go of it meanwhile.
                    if queue and queue[0] is first and queue.popleft():
                        self._events.append(first[0])
                        done.append(first[1])

    def wait(self) -> None:
        """Wait for all work that needs something alive, and let go of it."""
        for queue in list(self._kept.values()):
            for event, _ in list(queue):
                runtime.synchronize_event(event)
        self.release_finished()

    def release(self) -> None:
        """Give back all memory that nobody uses."""
        held = list(
            self.held
        )  # by calls that failed, so that no event tells when their work is done
        self.wait()
        self._collect(-1)
        for key in held:
            self.held.pop(key, None)
        runtime.trim(self._pool, self._device)

    def reset(self) -> None:
        """Give back the events, too; nobody may be waiting for one."""
        self.release()
        while self._events:
            runtime.destroy_event(self._events.pop())


#: By the runtime, which tests exchange, and the device.
_pools: dict[tuple[Any, int], _Pool] = {}


def _pool(device: int) -> _Pool:
    key = (libraries().runtime, device)
    found = _pools.get(key)
    if found is None:
        with runtime.on_device(device):
            found = _pools.setdefault(key, _Pool(device))
    return found


def temporary(nbytes: int, device: int, stream: int) -> Block:
    """Return memory for a ``with`` block that queues work on a stream of the device, which is the current one.

    It is aligned to 256 bytes or more. While the stream is being captured, the graph allocates and frees it when it
    runs.

    Raises
    ------
    DeviceMemoryError
        If the device has not that much left, with all that lowprec does not use given back.
    BackendError
        If the stream is being captured, and the device has no memory pools.
    """
    return _pool(device).temporary(nbytes, stream)


def allocate(nbytes: int, device: Device, stream: int) -> Block:
    """Return new memory for an array, for work on a stream, aligned to 256 bytes or more; also for 0 bytes.

    Raises
    ------
    DeviceMemoryError
        If the device has not that much left, with all that lowprec does not use given back.
    """
    with runtime.on_device(device.index):
        return _pool(device.index).allocate(nbytes, stream)


def own_stream(device: Device) -> int:
    """Return lowprec's own stream of a device: always the same, and none that waits for the default stream."""
    pool = _pool(device.index)
    if pool.stream is not None:
        return pool.stream
    with runtime.on_device(device.index):
        return pool.own_stream()


def order(before: int, after: int, device: Device) -> None:
    """Have later work of stream ``after`` wait for what stream ``before`` holds now. The host waits for nothing."""
    if before == after:
        return
    pool = _pool(device.index)
    with runtime.on_device(device.index):  # 1 means the default stream of the current device
        pool.order(before, after)


def synchronize(stream: int, device: Device) -> None:
    """Wait on the host for what a stream holds now."""
    with runtime.on_device(device.index), runtime.relaxed_capture():
        runtime.synchronize_stream(stream)


def copy(source: int, target: int, nbytes: int, device: Device, stream: int) -> None:
    """Copy bytes between two addresses of the device, in the order of a stream."""
    if nbytes:
        with runtime.on_device(device.index):
            runtime.copy_async(target, source, nbytes, stream)


def hold(owners: Sequence[Any], device: Device) -> None:
    """Hold objects that work is about to need: an interrupt may come between the work and :func:`keep`."""
    _pool(device.index).held[id(owners)] = owners


def keep(owners: Sequence[Any], stream: int, device: Device) -> None:
    """Hold objects until the work that a stream of a device holds now is done.

    They are let go by a thread that waits for the work, or by a later call of this function. More than 64 calls that
    are still at work make the host wait for the first. While the stream is being captured, the objects stay for good.
    If this raises, nothing tells when the work is done, and they stay until :func:`release`.
    """
    pool = _pool(device.index)
    pool.held[id(owners)] = owners
    with runtime.on_device(device.index):
        pool.keep(owners, stream)
    _waiter.wake()


def release_finished() -> None:
    """Let go of everything that :func:`keep` holds for work which is done."""
    for device, pool in _current_pools():
        with runtime.on_device(device):
            pool.release_finished()


def release() -> None:
    """Give back all memory that nobody uses; blocks that are still alive stay good."""
    for device, pool in _current_pools():
        with runtime.on_device(device):
            pool.release()


def reset() -> None:
    """Give back events as well; no product may be running."""
    for device, pool in _current_pools():
        with runtime.on_device(device):
            pool.reset()


def _current_pools() -> list[tuple[int, _Pool]]:
    found = loaded()
    if found is None:
        return []
    return [(n, pool) for (owner, n), pool in list(_pools.items()) if owner is found.runtime]


def _look() -> bool:
    """Let go of what is done, in a thread of lowprec's own; return whether there is more to wait for."""
    more = False
    for device, pool in _current_pools():
        if pool.is_keeping():
            with runtime.on_device(device):
                pool.release_finished()
            more = more or pool.is_keeping()
    return more


_waiter = Waiter(_look)


def _after_fork() -> None:
    """Free the locks in a child: the thread that may have held one is not there."""
    for pool in _pools.values():
        pool.renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _wait_at_exit() -> None:
    """Let go of other libraries' arrays while these libraries are whole."""
    _waiter.stop()
    if _pools:
        with contextlib.suppress(LowprecError):
            for device, pool in _current_pools():
                with runtime.on_device(device):
                    pool.wait()
