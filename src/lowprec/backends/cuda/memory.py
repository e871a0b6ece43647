"""Memory, streams and waiting on NVIDIA GPUs, for what lowprec brings itself: results for JAX, temporary buffers.

``cudaMalloc`` takes up to a millisecond and ``cudaFree`` waits for the whole device, so blocks are kept when they
die and reused. A block dies on the host while its stream may still work on it; the next one on the same stream may
have it at once, because that stream does things one after the other. No block changes its stream.

Two kinds of blocks are treated apart. One that was *shared*, which another library has had as an array of its own, may
be in use on streams that nobody here knows: it is reused only after the whole device was waited for, which is done once
for many of them. One that was allocated while its stream was being captured belongs to a CUDA graph, which may run at
any later time: it is never reused and never freed.

This module is a provider of :mod:`lowprec.arrays.device_memory`. A finaliser calls no function of CUDA: it leaves a
note for the next call. Source: the CUDA Runtime API reference, *Stream synchronization behavior* and *Event
Management*.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from lowprec.arrays import Device
from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.libraries import libraries
from lowprec.backends.cuda.waiting import Waiter
from lowprec.errors import DeviceMemoryError, LowprecError

#: What a device may hold unused, and as much again of what was shared.
_LIMIT_BYTES = 256 << 20
_LIMIT_SHARE = 16

#: Sizes are rounded up to a multiple of this, and to 8 sizes for each power of two.
_GRANULE = 512
_SIZES_LOG2 = 3

#: How many products of a stream may hold their operands; the next one waits for the first.
_MAX_KEPT = 64


class _Returned(NamedTuple):
    """A block that died."""

    stream: int
    nbytes: int
    address: int
    shared: bool


class Block:
    """Memory of a device for the work of one stream, given back when this object dies.

    ``returned`` takes the note of its death; None for memory that is never used again.
    """

    __slots__ = ("__weakref__", "_returned", "_shared", "address", "nbytes", "stream")

    def __init__(
        self, address: int, nbytes: int, stream: int, returned: deque[_Returned] | None
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.stream = stream
        self._shared = False
        self._returned = returned

    def share(self) -> None:
        """Tell that another library has the memory now: streams that lowprec does not know may use it."""
        self._shared = True

    def __del__(self, _note: type[_Returned] = _Returned) -> None:
        # Runs in any thread, inside any other call, and while the interpreter ends: appending is all it does.
        if self._returned is not None:
            self._returned.append(_note(self.stream, self.nbytes, self.address, self._shared))


class _Pool:
    """Unused blocks and events of one device, and what its work needs alive. The device is current in all calls."""

    def __init__(self, device: int) -> None:
        self._limit = max(_LIMIT_BYTES, runtime.properties(device).memory_bytes // _LIMIT_SHARE)
        # A signal handler may come in the midst of a step, in the thread that holds the lock, and take a block too.
        self._lock = threading.RLock()
        self._returned: deque[_Returned] = deque()
        # By stream and size; the one that was used last comes last.
        self._unused: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        self._unused_bytes = 0
        self._shared: list[_Returned] = []
        self._shared_bytes = 0
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

    def allocate(self, nbytes: int, stream: int) -> Block:
        size = _rounded(nbytes)
        if runtime.is_capturing(stream):
            return Block(runtime.allocate(size), size, stream, None)
        with self._lock:
            if self._returned:
                self._collect()
            found = self._take(size, stream)
        return Block(found or self._new(size), size, stream, self._returned)

    def _take(self, size: int, stream: int) -> int:
        """Return the address of an unused block, 0 if there is none."""
        key = (stream, size)
        addresses = self._unused.get(key)
        found = addresses.pop() if addresses else 0
        if not found:
            return 0
        self._unused_bytes -= size
        self._unused.move_to_end(key)
        return found

    def _put(self, block: _Returned) -> None:
        key = (block.stream, block.nbytes)
        self._unused.setdefault(key, []).append(block.address)
        self._unused_bytes += block.nbytes
        self._unused.move_to_end(key)

    def _collect(self) -> None:
        """Sort the blocks that died since the last call, and give back what is too much."""
        while block := self._returned.popleft() if self._returned else None:
            if block.shared:
                self._shared.append(block)
                self._shared_bytes += block.nbytes
            else:
                self._put(block)
        if self._shared_bytes > self._limit:
            self._reclaim()
        self._trim(self._limit)

    def _reclaim(self) -> None:
        """Wait for the device, after which nobody uses the shared blocks."""
        # What is shared from here on is not what is waited for.
        shared, self._shared, self._shared_bytes = self._shared, [], 0
        try:
            runtime.synchronize_device()
        except BaseException:
            self._shared += shared
            raise
        for block in shared:
            self._put(block)

    def _trim(self, limit: int) -> None:
        """Free blocks, those first that were not used for longest, until no more than ``limit`` bytes are unused."""
        if self._unused_bytes <= limit:
            return
        # Count again: an interrupt may have come between a block and its bytes.
        self._unused_bytes = sum(size * len(x) for (_, size), x in self._unused.items())
        for key, addresses in list(self._unused.items()):
            while self._unused_bytes > limit and (address := addresses.pop() if addresses else 0):
                self._unused_bytes -= key[1]
                runtime.free(address)

    def _new(self, size: int) -> int:
        try:
            return runtime.allocate(size)
        except DeviceMemoryError:
            if not self._free_unused():
                raise
        return runtime.allocate(size)

    def _free_unused(self) -> bool:
        """Free all that is unused; return whether anything was."""
        with self._lock:
            self._collect()
            if self._shared:
                self._reclaim()
            had = self._unused_bytes > 0
            self._trim(0)
        return had

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
        """Give back all memory and events that nobody uses."""
        self.wait()
        if self.held:  # by calls that failed, so that no event tells when their work is done
            runtime.synchronize_device()
            self.held.clear()
        self._free_unused()
        while self._events:
            runtime.destroy_event(self._events.pop())


#: By the runtime, which tests exchange, and the device.
_pools: dict[tuple[Any, int], _Pool] = {}


def _pool(device: Device) -> _Pool:
    key = (libraries().runtime, device.index)
    found = _pools.get(key)
    if found is None:
        found = _pools.setdefault(key, _Pool(device.index))
    return found


def _rounded(nbytes: int) -> int:
    """Return the size of the block that holds ``nbytes``: at most an eighth more, or the smallest size there is.

    Examples
    --------
    >>> _rounded(0), _rounded(513), _rounded(1_000_000), _rounded(1 << 30) == 1 << 30
    (512, 1024, 1048576, True)
    """
    step = max(_GRANULE, (1 << (nbytes - 1).bit_length()) >> (_SIZES_LOG2 + 1)) if nbytes else 1
    return max(_GRANULE, -(-nbytes // step) * step)


def allocate(nbytes: int, device: Device, stream: int) -> Block:
    """Return new memory for work on a stream, aligned to 256 bytes or more; 0 bytes have an address, too.

    While the stream is being captured the memory is new and stays allocated for good: the graph may run at any time.

    Raises
    ------
    DeviceMemoryError
        If the device has not that much left, with all unused blocks given back.
    """
    pool = _pool(device)
    if runtime.current_device() == device.index:
        return pool.allocate(nbytes, stream)
    with runtime.on_device(device.index):
        return pool.allocate(nbytes, stream)


def own_stream(device: Device) -> int:
    """Return lowprec's own stream of a device: always the same, and none that waits for the default stream."""
    pool = _pool(device)
    if pool.stream is not None:
        return pool.stream
    with runtime.on_device(device.index):
        return pool.own_stream()


def order(before: int, after: int, device: Device) -> None:
    """Have later work of stream ``after`` wait for what stream ``before`` holds now. The host waits for nothing."""
    if before == after:
        return
    pool = _pool(device)
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
    _pool(device).held[id(owners)] = owners


def keep(owners: Sequence[Any], stream: int, device: Device) -> None:
    """Hold objects until the work that a stream of a device holds now is done.

    They are let go by a thread that waits for the work, or by a later call of this function. More than 64 calls that
    are still at work make the host wait for the first. While the stream is being captured, the objects stay for good.
    If this raises, nothing tells when the work is done, and they stay until :func:`release`.
    """
    pool = _pool(device)
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
    """Give back all memory and events that nobody uses; blocks that are still alive stay good."""
    for device, pool in _current_pools():
        with runtime.on_device(device):
            pool.release()


def _current_pools() -> list[tuple[int, _Pool]]:
    current = libraries().runtime
    return [(device, pool) for (owner, device), pool in list(_pools.items()) if owner is current]


def _look() -> bool:
    """Let go of what is done, in a thread of lowprec's own; return whether there is more to wait for."""
    more = False
    for device, pool in _current_pools():
        if pool.is_keeping():
            runtime.use_device(device)
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
