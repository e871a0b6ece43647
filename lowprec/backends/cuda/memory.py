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
from collections.abc import Callable, Sequence
from typing import Any

from lowprec.arrays import Device
from lowprec.arrays.device_memory import LEGACY_STREAM
from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.libraries import libraries, loaded
from lowprec.backends.cuda.runtime import call
from lowprec.backends.cuda.waiting import Waiter
from lowprec.errors import BackendError, DeviceMemoryError, LowprecError

#: What a device's pool may keep unused, and as much again of results that died: the larger of bytes and share.
_LIMIT_BYTES = 128 << 20
_LIMIT_SHARE = 16

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
            call("cudaFreeAsync", address, self._stream)
        except BackendError:
            if not self._was_captured():
                self.address = address
            if kind is None:
                raise

    def _was_captured(self) -> bool:
        """Whether a graph owns the memory: its address may be another allocation's once the capture has failed."""
        try:
            return runtime.is_capturing(self._stream or 0)
        except BackendError:
            return False

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
        self.lock = threading.RLock()
        #: What died: addresses and bytes as finalisers note them, and what was read of these notes.
        self._noted: deque[tuple[int, int]] = deque()
        self._dead: list[int] = []
        self._dead_bytes = 0
        self.events: list[Any] = []
        self._kept: dict[int, deque[tuple[Any, Sequence[Any]]]] = {}
        # What is in use, without an event that will tell how long: for good, unless one comes.
        self.held: dict[int, Sequence[Any]] = {}
        self._captured: list[Sequence[Any]] = []
        self.stream: int | None = None

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int, *, is_temporary: bool) -> Block:
        """Return memory; a DeviceMemoryError if there is none left when all that lowprec does not use is given back."""
        pool = self._pool
        if pool is None or not is_temporary:
            if not runtime.is_capturing(stream):
                self._collect(self._limit)
            elif is_temporary:
                raise BackendError(
                    f"cuda:{self._device} allocates no memory in the order of streams (cudaDevAttrMemoryPoolsSupported "
                    "is 0), so a product that needs temporary memory cannot be captured into a graph there"
                )
            else:
                pool = None  # what is allocated in order would be the graph's, and gone before the array is
        block = Block(nbytes, stream if pool is not None else None, self._noted)
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
        if limit >= 0 and not self._noted:
            return
        with self.lock:
            with contextlib.suppress(IndexError):
                while True:
                    address, nbytes = self._noted.popleft()
                    self._dead.append(address)
                    self._dead_bytes += nbytes
            if self._dead_bytes <= limit and len(self._dead) <= _MAX_DEAD:
                return
            # What dies from here on is not what is waited for.
            (dead, nbytes), self._dead, self._dead_bytes = (self._dead, self._dead_bytes), [], 0
            try:
                runtime.wait_for_device()
            except BaseException:
                self._dead += dead
                self._dead_bytes += nbytes
                raise
            while dead:
                # What is wrong with a lost device the next call tells.
                with contextlib.suppress(BackendError):
                    runtime.free(dead.pop())

    # -- what is held -----------------------------------------------------------------------------

    def recorded(self, stream: int) -> Any:
        """Return an event that stands for the work which a stream holds now."""
        try:
            event = self.events.pop()
        except IndexError:
            event = runtime.create_event()
        try:
            call("cudaEventRecord", event, stream)
        except BaseException:
            self.events.append(event)
            raise
        return event

    def keep(self, owners: Sequence[Any], stream: int) -> None:
        """Hold what :attr:`held` holds already until the work of a stream is done."""
        if runtime.is_capturing(stream):  # the graph reads them whenever it runs
            self._captured.append(owners)
            self.held.pop(id(owners), None)
            return
        event = self.recorded(stream)
        with self.lock:
            queue = self._kept.setdefault(stream, deque())
            queue.append((event, owners))
            first = queue[0][0] if len(queue) > _MAX_KEPT else None
        self.held.pop(id(owners), None)
        if first is not None:
            runtime.wait_for_event(first)
        self.release_finished()

    def _is_keeping(self) -> bool:
        return any(list(self._kept.values()))

    def release_finished(self) -> bool:
        """Let go of what the work that is done by now has needed; return whether more is held."""
        if not self._is_keeping():
            return False
        done = []
        # Inside the lock nothing is let go: that runs other libraries' code.
        with self.lock, runtime.relaxed_capture():
            for queue in list(self._kept.values()):
                while queue:
                    first = queue[0]
                    if not runtime.event_is_done(first[0]):
                        break
                    # A signal handler may have let go of it meanwhile.
                    if queue and queue[0] is first and queue.popleft():
                        self.events.append(first[0])
                        done.append(first[1])
        return self._is_keeping()

    def wait(self) -> None:
        """Wait for all work that needs something alive, and let go of it."""
        for queue in list(self._kept.values()):
            for event, _ in list(queue):
                runtime.wait_for_event(event)
        self.release_finished()

    def release(self) -> None:
        """Give back all memory that nobody uses."""
        failed = list(self.held)  # no event tells when the work of these calls is done
        self.wait()
        self._collect(-1)
        for key in failed:
            self.held.pop(key, None)
        with runtime.relaxed_capture():
            if self._pool is not None:
                call("cudaMemPoolTrimTo", self._pool, 0)
            call("cudaDeviceGraphMemTrim", self._device)


#: By the runtime, which tests exchange, and the device.
_pools: dict[tuple[Any, int], _Pool] = {}


def _pool(device: int, stream: int = LEGACY_STREAM) -> _Pool:
    """Return a device's pool; none is made while a stream is being captured."""
    key = (libraries().runtime, device)
    found = _pools.get(key)
    if found is None:
        with runtime.on_device(device), runtime.relaxed_capture():
            runtime.refuse_capture(stream, "lowprec's memory pool")
            found = _pools.setdefault(key, _Pool(device))
    return found


def _each(do: Callable[[_Pool], Any]) -> list[Any]:
    """Call a function with each pool, whose device is the current one then."""
    found, answers = loaded(), []
    for (owner, device), pool in list(_pools.items()):
        if found is not None and owner is found.runtime:
            with runtime.on_device(device):
                answers.append(do(pool))
    return answers


def temporary(nbytes: int, device: int, stream: int) -> Block:
    """Return memory, aligned to 256 bytes, for a ``with`` block that queues work on a stream of the current device."""
    return _pool(device, stream).allocate(nbytes, stream, is_temporary=True)


def allocate(nbytes: int, device: Device, stream: int) -> Block:
    """Return new memory for an array, for work on a stream, aligned to 256 bytes or more; also for 0 bytes."""
    with runtime.on_device(device.index):
        return _pool(device.index, stream).allocate(nbytes, stream, is_temporary=False)


def own_stream(device: Device) -> int:
    """Return lowprec's own stream of a device: always the same, and none that waits for the default stream."""
    pool = _pool(device.index)
    if pool.stream is None:
        with runtime.on_device(device.index), pool.lock:
            flags = libraries().runtime.cudaStreamNonBlocking
            made = pool.stream or int(call("cudaStreamCreateWithFlags", flags))
            pool.stream = pool.stream or made  # a signal handler may have been here meanwhile
    return pool.stream


def order(before: int, after: int, device: Device) -> None:
    """Have later work of stream ``after`` wait for what stream ``before`` holds now. The host waits for nothing."""
    if before == after:
        return
    with runtime.on_device(device.index):  # 1 means the default stream of the current device
        pool = _pool(device.index, before)
        event = pool.recorded(before)
        try:
            call("cudaStreamWaitEvent", after, event, 0)
        finally:
            # A wait means the mark that the event had when it was queued, so the event is free again.
            pool.events.append(event)


def synchronize(stream: int, device: Device) -> None:
    """Wait on the host for what a stream holds now."""
    with runtime.on_device(device.index), runtime.relaxed_capture():
        call("cudaStreamSynchronize", stream)


def check_captures(streams: Sequence[int], device: Device) -> None:
    """Raise a BackendError if work that joins these streams of a device would end a capture."""
    try:
        runtime.properties(device.index)
    except LowprecError:  # reported by the product; to view an array needs no device
        return
    with runtime.on_device(device.index):
        captured = {x != LEGACY_STREAM and runtime.is_capturing(x) for x in streams}
        ends = len(captured) > 1 or (
            LEGACY_STREAM in streams and runtime.is_capturing(LEGACY_STREAM)
        )
    if ends:
        raise BackendError(
            "this would end the capture of a CUDA graph: it joins streams of several libraries, or the legacy "
            "default stream, which are not all being captured; convert the arrays to the library of a before "
            "capturing, as by torch.from_dlpack(array)"
        )


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

    A thread, or a later call, lets go of them. While the stream is being captured, they stay for good; if this raises,
    until :func:`release`.
    """
    hold(owners, device)
    with runtime.on_device(device.index):
        _pool(device.index).keep(owners, stream)
    _waiter.wake()


def release_finished() -> bool:
    """Let go of everything that :func:`keep` holds for work which is done; return whether more is held."""
    return any(_each(_Pool.release_finished))


def release() -> None:
    """Give back all memory that nobody uses; blocks that are still alive stay good."""
    _each(_Pool.release)


_waiter = Waiter(release_finished)


def _renew_locks() -> None:
    # The thread that may have held one is not there in a child.
    for pool in _pools.values():
        pool.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


@atexit.register
def _wait_at_exit() -> None:
    """Let go of other libraries' arrays while these libraries are whole."""
    _waiter.stop()
    with contextlib.suppress(LowprecError):
        _each(_Pool.wait)
