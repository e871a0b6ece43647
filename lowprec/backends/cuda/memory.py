"""Memory and streams of NVIDIA GPUs for temporary buffers and results of JAX; see ``arrays.device_memory``.

Each device has one pool with stream-ordered allocation; allocations during a capture become part of the graph. The call
that allocated temporary memory frees it on the same stream. Other memory is freed together with many others, after a
wait for the streams that may use it: freeing does not wait. Finalisers do not call CUDA; they record the memory for the
next call. Source: the CUDA Runtime API reference, *Stream Ordered Memory Allocator* and *Event Management*, and the
CUDA C++ Programming Guide, *Graph Memory Nodes*.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from lowprec.arrays import Device
from lowprec.arrays.device_memory import LEGACY_STREAM, PER_THREAD_STREAM, UNKNOWN_STREAM
from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.libraries import libraries, loaded
from lowprec.backends.cuda.runtime import call
from lowprec.backends.cuda.waiting import Waiter
from lowprec.errors import BackendError, DeviceMemoryError, LowprecError
from lowprec.policy.environment import PEER_ACCESS

#: Limit of unused memory in a device's pool, and of dead blocks that are not freed yet: the larger of these bytes and
#: this fraction (1/16) of the device's memory.
_LIMIT_BYTES = 128 << 20
_LIMIT_SHARE = 16

#: Largest number of dead blocks.
_MAX_DEAD = 4096

#: Largest number of products of a stream that keep their operands alive; the next one waits for the first.
_MAX_KEPT = 64

#: Address and bytes of a dead block, and the streams that may use it; a plain tuple, which exists until Python exits.
_Dead: TypeAlias = tuple[int, int, set[int]]


class Block:
    """Memory of a device for the work of a stream, freed on that stream at the end of a ``with`` block.

    Blocks that are finalised otherwise, and those that are not ``stream_ordered``, are recorded by their pool.
    """

    def __init__(self, nbytes: int, stream: int, pool: _Pool, *, stream_ordered: bool) -> None:
        self.address = 0
        self.nbytes = nbytes
        self._stream = stream if stream_ordered else None
        self._streams = {_known(stream)}
        self._pool = pool

    def used_on(self, stream: int) -> None:
        """Free the memory only after the work that is then queued on this stream."""
        self._streams.add(_known(stream))

    def __enter__(self) -> int:
        return self.address

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._stream is None:
            return
        address = self.address
        self.address = 0  # first: an error may be one of earlier work, and the memory is freed
        try:
            call("cudaFreeAsync", address, self._stream)
        except BackendError:
            if kind is None:
                raise

    def __del__(self) -> None:
        # May run in any thread, inside any call, and during interpreter exit.
        if self.address:
            self._pool.note((self.address, self.nbytes, self._streams))


def _known(stream: int) -> int:
    """Return the stream if it is the same one in every thread, otherwise UNKNOWN_STREAM."""
    if stream == LEGACY_STREAM or stream > PER_THREAD_STREAM:
        return stream
    return UNKNOWN_STREAM


class _Pool:
    """Memory and events of one device, and the objects kept alive for its work. The device is current in all calls.

    There is no lock: containers change by atomic operations, and each object is released by the thread that removed it.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._limit = max(_LIMIT_BYTES, runtime.properties(device).memory_bytes // _LIMIT_SHARE)
        self._pool = runtime.create_pool(device, self._limit)
        self._dead: deque[_Dead] = deque()
        self._dead_bytes = 0  # approximate, if several threads change it
        #: Streams of temporary memory since the last :meth:`release`.
        self._streams: set[int] = set()
        self.events: list[Any] = []
        #: By stream and number: events, and the objects in use until each.
        self._kept: dict[int, dict[int, tuple[Any, Sequence[Any]]]] = {}
        self._numbers = itertools.count()
        #: Objects in use without an event yet.
        self.held: dict[int, Sequence[Any]] = {}
        self._captured: list[Sequence[Any]] = []
        #: lowprec's stream.
        self.stream = runtime.create_stream()
        #: The number 1 in device memory; threads that create one at the same time use the first.
        self.ones: list[Block] = []

    def allocate(self, nbytes: int, stream: int, *, is_temporary: bool) -> Block:
        """Return memory; raise DeviceMemoryError if there is too little after unused memory has been freed."""
        pool = self._pool
        if pool is None or not is_temporary:
            is_captured = runtime.is_capturing(stream)
            if not is_captured:
                self._collect(self._limit)
            elif is_temporary:
                raise BackendError(
                    f"cuda:{self._device} has no stream-ordered allocation (cudaDevAttrMemoryPoolsSupported is 0), so "
                    "a product that needs temporary memory cannot be captured into a graph there"
                )
            # In a capture, memory of a pool would belong to the graph and be freed before the array; and other devices
            # cannot access it.
            if is_captured or PEER_ACCESS.current():
                pool = None
        block = Block(nbytes, stream, self, stream_ordered=pool is not None)
        self._streams.add(_known(stream))
        try:
            block.address = runtime.allocate(nbytes, pool, stream)
        except DeviceMemoryError:
            if runtime.is_capturing(stream):  # another allocation would be part of the graph
                raise
            release()
            block.address = runtime.allocate(nbytes, pool, stream)
        return block

    def note(self, block: _Dead) -> None:
        """Record a dead block."""
        self._dead.append(block)
        self._dead_bytes += block[1]

    def _collect(self, limit: int) -> None:
        """Free dead blocks after the work of their streams, if they exceed a limit; a negative one frees all."""
        if self._dead_bytes <= limit and len(self._dead) <= _MAX_DEAD:
            return
        # Blocks that are recorded from here on may still be in use after the wait.
        dead: list[_Dead] = []
        self._dead_bytes = 0
        with contextlib.suppress(IndexError):
            while True:
                dead.append(self._dead.popleft())
        streams = set().union(*(x[-1] for x in dead))
        if limit < 0:
            streams |= self._streams
        captured = streams
        try:
            captured = self._wait_for(streams)
        finally:
            while dead:
                block = dead.pop()
                if block[-1] & captured:
                    self.note(block)
                else:
                    # the next call raises the error of a lost device
                    with contextlib.suppress(BackendError):
                        runtime.free(block[0])

    def _wait_for(self, streams: set[int]) -> set[int]:
        """Wait for the queued work of streams; return those that were not waited for, because of a capture."""
        known = streams - {UNKNOWN_STREAM}
        events = []
        try:
            captured = {x for x in known if runtime.is_capturing(x)}
            for stream in known - captured:
                events.append(self.recorded(stream))
        except BackendError:  # a stream was destroyed
            streams = {UNKNOWN_STREAM}
            captured = set()
        try:
            for event in events:
                runtime.wait_for_event(event)
        finally:
            self.events += events
        if UNKNOWN_STREAM in streams and not captured:
            runtime.wait_for_device()
        if captured:
            captured.add(UNKNOWN_STREAM)
        return captured

    def recorded(self, stream: int) -> Any:
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
        """Keep objects in :attr:`held` alive until the queued work of a stream is done."""
        events = []
        if runtime.is_capturing(stream):  # the graph reads them at every launch
            self._captured.append(owners)
        else:
            queue = self._kept.setdefault(stream, {})
            queue[next(self._numbers)] = (self.recorded(stream), owners)
            events = [event for event, _ in queue.copy().values()]
        self.held.pop(id(owners), None)
        if len(events) > _MAX_KEPT:
            runtime.wait_for_event(events[0])
        self.release_finished()

    def _is_keeping(self) -> bool:
        return any(list(self._kept.values()))

    def release_finished(self) -> bool:
        if not self._is_keeping():
            return False
        done = []  # released at the end, because it runs code of other libraries
        with runtime.relaxed_capture():
            for queue in list(self._kept.values()):
                for number, (event, _) in queue.copy().items():
                    if not runtime.event_is_done(event):
                        break
                    if finished := queue.pop(number, None):  # None: another thread has released it
                        done.append(finished)
                        self.events.append(event)
        return self._is_keeping()

    def wait(self) -> None:
        """Wait for all work that uses kept objects, and release them."""
        for queue in list(self._kept.values()):
            for event, _ in queue.copy().values():
                runtime.wait_for_event(event)
        self.release_finished()

    def release(self) -> None:
        failed = list(self.held)  # objects of failed calls have no event
        self.wait()
        self._collect(-1)
        self._streams.clear()
        for key in failed:
            self.held.pop(key, None)
        with runtime.relaxed_capture():
            if self._pool is not None:
                call("cudaMemPoolTrimTo", self._pool, 0)
            call("cudaDeviceGraphMemTrim", self._device)


#: By runtime module, which tests replace, and device.
_pools: dict[tuple[Any, int], _Pool] = {}


def _pool(device: int, stream: int = LEGACY_STREAM) -> _Pool:
    """Return a device's pool; none is created while the stream is being captured."""
    key = (libraries().runtime, device)
    pool = _pools.get(key)
    if pool is None:
        with runtime.on_device(device), runtime.relaxed_capture():
            runtime.refuse_capture(stream, "lowprec's memory pool")
            pool = _pools.setdefault(key, _Pool(device))
    return pool


def _each(do: Callable[[_Pool], Any]) -> list[Any]:
    current = getattr(loaded(), "runtime", None)
    results = []
    for (module, device), pool in list(_pools.items()):
        if module is current:
            with runtime.on_device(device):
                results.append(do(pool))
    return results


def temporary(nbytes: int, device: int, stream: int) -> Block:
    """Return memory, aligned to 256 bytes, for a ``with`` block that queues work on a stream of the current device."""
    return _pool(device, stream).allocate(nbytes, stream, is_temporary=True)


def allocate(nbytes: int, device: Device, stream: int) -> Block:
    """Return new memory for an array and work on a stream, aligned to 256 bytes or more; also for 0 bytes."""
    with runtime.on_device(device.index):
        return _pool(device.index, stream).allocate(nbytes, stream, is_temporary=False)


def one(device: Device) -> int:
    """Return the address of a float32 with the value 1 in the memory of a device."""
    pool = _pool(device.index)
    if not pool.ones:
        value = np.ones(1, np.float32)
        stream = own_stream(device)
        block = allocate(value.nbytes, device, stream)
        copy(value.ctypes.data, block.address, value.nbytes, device, stream)
        synchronize(stream, device)
        pool.ones.append(block)
    return pool.ones[0].address


def own_stream(device: Device) -> int:
    """Return lowprec's stream of a device, which does not wait for the default stream."""
    return _pool(device.index).stream


def order(before: int, after: int, device: Device) -> None:
    """Make later work of stream ``after`` wait for the queued work of stream ``before``; the host does not wait."""
    if before == after:
        return
    with runtime.on_device(device.index):  # 1 is the default stream of the current device
        pool = _pool(device.index, before)
        event = pool.recorded(before)
        try:
            call("cudaStreamWaitEvent", after, event, 0)
        finally:
            pool.events.append(event)  # reusable: the stream waits for the event as recorded before


def synchronize(stream: int, device: Device) -> None:
    """Block the host until the queued work of a stream is done."""
    with runtime.on_device(device.index), runtime.relaxed_capture():
        call("cudaStreamSynchronize", stream)


def check_captures(streams: Sequence[int], device: Device) -> None:
    """Raise BackendError if ordering these streams of a device would invalidate a capture."""
    try:
        runtime.properties(device.index)
    except LowprecError:  # reported by the product; viewing an array needs no device
        return
    with runtime.on_device(device.index):
        captured = {x != LEGACY_STREAM and runtime.is_capturing(x) for x in streams}
        ends = len(captured) > 1 or (
            LEGACY_STREAM in streams and runtime.is_capturing(LEGACY_STREAM)
        )
    if ends:
        raise BackendError(
            "this would invalidate the capture of a CUDA graph: it orders streams of several libraries, or the legacy "
            "default stream, which are not all being captured; convert the arrays to the library of a before "
            "capturing, for example with torch.from_dlpack(array)"
        )


def copy(source: int, target: int, nbytes: int, device: Device, stream: int) -> None:
    """Queue a copy between two addresses, of the device or the host, on a stream."""
    with runtime.on_device(device.index):
        runtime.copy_async(target, source, nbytes, stream)


def hold(owners: Sequence[Any], device: Device) -> None:
    """Keep objects alive before work that uses them, in case an interrupt prevents the call of :func:`keep`."""
    _pool(device.index).held[id(owners)] = owners


def keep(owners: Sequence[Any], stream: int, device: Device) -> None:
    """Keep objects alive until the queued work of a stream is done; objects of a captured stream are never released."""
    hold(owners, device)
    with runtime.on_device(device.index):
        _pool(device.index).keep(owners, stream)
    _waiter.wake()


def release_finished() -> bool:
    """Release the objects of finished work; return whether others are kept."""
    return any(_each(_Pool.release_finished))


def release() -> None:
    """Free the unused memory of all GPUs, after the work queued there is done."""
    _each(_Pool.release)


_waiter = Waiter(release_finished)


@atexit.register
def _wait_at_exit() -> None:
    """Release arrays of other libraries at exit, before these libraries are shut down."""
    _waiter.stop()
    with contextlib.suppress(LowprecError):
        _each(_Pool.wait)
