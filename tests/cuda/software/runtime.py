"""A software CUDA runtime: the functions of ``cuda.bindings.runtime`` that lowprec calls, on host memory.

Sources: the CUDA Runtime API reference (which call may return which error, what synchronises), and for capture the CUDA
C++ Programming Guide, *Creating a Graph Using Stream Capture*, with ``cudaThreadExchangeStreamCaptureMode``.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import runtime as real

from cuda.software.memory import Memory
from cuda.software.recorder import Fault, Part, Recorder, gives_back
from cuda.software.streams import Capture, Event, Op, Policy, Scheduler, Stream

Status = real.cudaError_t
_GLOBAL = int(real.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal)
_RELAXED = int(real.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)

_HOST_CALL_MS = 0.001


@dataclass(frozen=True)
class DeviceModel:
    """What a device is.

    Parameters
    ----------
    name : str
    capability : tuple of int
    memory_bytes, multiprocessors, clock_khz : int
    """

    name: str = "Software GPU"
    capability: tuple[int, int] = (9, 0)
    memory_bytes: int = 1 << 30
    multiprocessors: int = 132
    clock_khz: int = 1_980_000


class Refusal(Exception):
    """A call returns an error."""

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self.status = status


def api(
    values: int = 0, *, unsafe: bool = False, always: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method a function of the runtime: it returns a status and ``values`` values.

    Parameters
    ----------
    values : int
    unsafe : bool
        Whether it is forbidden while this or another thread captures, unless the thread's mode allows it.
    always : bool
        Whether it works after an error that sticks to the device.
    """

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        name = method.__name__

        @functools.wraps(method)
        def call(self: Runtime, *arguments: Any) -> tuple[Any, ...]:
            plan = self.recorder.called(self.part, name)
            with self.lock:
                self.scheduler.clock_ms += _HOST_CALL_MS
                try:
                    if plan is not None:
                        if gives_back(name):
                            method(self, *arguments)
                        raise Refusal(plan.status or _FAILURES.get(name, Status.cudaErrorUnknown))
                    if not always:
                        self.check_sticky()
                    if unsafe:
                        self.check_unsafe(name)
                    result = method(self, *arguments)
                    if not always:
                        self.check_sticky()
                except Refusal as refusal:
                    self.last_error = refusal.status
                    return (refusal.status, *[None] * values)
            return (Status.cudaSuccess, *([result] if values else []))

        return call

    return mark


#: Errors that a test provokes without saying which.
_FAILURES = {
    "cudaMalloc": Status.cudaErrorMemoryAllocation,
    "cudaEventCreateWithFlags": Status.cudaErrorMemoryAllocation,
    "cudaStreamCreateWithFlags": Status.cudaErrorMemoryAllocation,
    "cudaGetDeviceCount": Status.cudaErrorNoDevice,
}


class Runtime(Part):
    """Stands for ``cuda.bindings.runtime``.

    Parameters
    ----------
    recorder : Recorder
    devices : sequence of DeviceModel
    order : "lazy", "all" or int
        See :data:`cuda.software.streams.Policy`.
    """

    def __init__(
        self, recorder: Recorder, devices: Sequence[DeviceModel], order: Policy = "lazy"
    ) -> None:
        super().__init__("runtime", real, recorder)
        self.lock = threading.RLock()
        self.devices = tuple(devices)
        self.memory = Memory([x.memory_bytes for x in devices])
        self.scheduler = Scheduler(order)
        self.last_error = Status.cudaSuccess
        self.sticky: dict[int, Any] = {}
        self.captures: list[Capture] = []
        self._thread = threading.local()
        self._handles = itertools.count(0x51000000, 0x40)
        self._streams: dict[int, Stream] = {}
        self._foreign: dict[int, Stream] = {}
        self._defaults: dict[tuple[int, int, int], Stream] = {}
        self._events: dict[int, Event] = {}
        for device in range(len(devices)):
            self._default_stream(device, 1)

    def failed(self, function: str, status: Any) -> Any:
        raise AssertionError("errors of the runtime are returned by api()")

    # -- rules ------------------------------------------------------------------------------------

    @property
    def device(self) -> int:
        """The current device of this thread."""
        return getattr(self._thread, "device", 0)

    def check_sticky(self) -> None:
        """Refuse everything on a device whose memory was misused."""
        if self.device in self.sticky:
            raise Refusal(self.sticky[self.device])

    def check_unsafe(self, name: str) -> None:
        """Refuse what might synchronise while work is being captured."""
        mode = getattr(self._thread, "mode", _GLOBAL)
        if mode == _RELAXED:
            return
        for capture in self.captures:
            own = capture.thread == threading.get_ident() and capture.mode != _RELAXED
            others = mode == _GLOBAL and capture.mode == _GLOBAL
            if own or others:
                capture.is_invalid = True
                self.recorder.faults.append(f"{name} during a capture that it invalidates")
                raise Refusal(Status.cudaErrorStreamCaptureUnsupported)

    def _default_stream(self, device: int, handle: int) -> Stream:
        """Return the legacy default stream, or that of this thread."""
        key = (device, handle, threading.get_ident() if handle == 2 else 0)
        found = self._defaults.get(key)
        if found is None:
            found = Stream(handle, device, blocking=handle == 2, is_legacy=handle == 1)
            self._defaults[key] = found
            self.scheduler.streams.append(found)
        return found

    def stream(self, handle: Any, *, current: bool = False) -> Stream:
        """Return a stream by its handle.

        Parameters
        ----------
        handle : int or cudaStream_t
        current : bool
            Whether it must belong to the current device.
        """
        number = int(handle)
        if number in (0, 1, 2):
            return self._default_stream(self.device, number or 1)
        found = self._streams.get(number) or self._foreign.get(number)
        if found is None:
            self.recorder.faults.append(f"{number:#x} is no stream")
            raise Refusal(Status.cudaErrorInvalidResourceHandle)
        if current and found.device != self.device:
            raise Refusal(Status.cudaErrorInvalidResourceHandle)
        return found

    def event(self, handle: Any) -> Event:
        """Return an event by its handle."""
        found = self._events.get(int(handle))
        if found is None:
            self.recorder.faults.append(f"{int(handle):#x} is no event")
            raise Refusal(Status.cudaErrorInvalidResourceHandle)
        return found

    # -- work -------------------------------------------------------------------------------------

    def enqueue(
        self,
        stream: Stream,
        label: str,
        run: Callable[[], None],
        cost_ms: float = 0.0,
        after: Sequence[Op] = (),
    ) -> Op:
        """Queue work that may fault."""
        self._check_capture(stream)
        device = stream.device

        def guarded() -> None:
            if device in self.sticky:
                return
            try:
                run()
            except Fault as fault:
                self.fault(device, f"{label}: {fault}")

        return self.scheduler.enqueue(stream, label, guarded, cost_ms, after)

    def fault(self, device: int, words: str) -> None:
        """Note that a device is lost, as after a real fault."""
        self.recorder.faults.append(words)
        self.sticky[device] = Status.cudaErrorIllegalAddress

    def _check_capture(self, stream: Stream) -> None:
        if stream.capture is not None and stream.capture.is_invalid:
            raise Refusal(Status.cudaErrorStreamCaptureInvalidated)
        if stream.is_legacy:
            for capture in self.captures:
                if any(x.blocking and x.device == stream.device for x in capture.tails):
                    capture.is_invalid = True
                    raise Refusal(Status.cudaErrorStreamCaptureImplicit)

    def _wait(self, targets: list[Op]) -> None:
        self.scheduler.drain(targets)
        finish = max((x.finish_ms for x in targets), default=0.0)
        self.scheduler.clock_ms = max(self.scheduler.clock_ms, finish)

    def stream_of(self, device: int, handle: int) -> Stream:
        """Return a stream by its handle; 1 is the legacy default stream of the device."""
        return self._default_stream(device, 1) if handle in (0, 1) else self.stream(handle)

    def give_handle(self, stream: Stream) -> int:
        """Make another library's stream known by a handle; it is not counted among those that are alive."""
        with self.lock:
            stream.handle = next(self._handles)
            self._foreign[stream.handle] = stream
            return stream.handle

    def take_handle(self, handle: int) -> None:
        """Forget a handle that was given."""
        self._foreign.pop(handle, None)

    def join(self, before: Stream, after: Stream) -> None:
        """Have a stream wait for what another holds now, as another library would with an event."""
        with self.lock:
            if before is after:
                return
            mark = self.enqueue(before, "record", _nothing)
            self.enqueue(after, "wait", _nothing, after=[mark])

    def wait_for(self, stream: Stream) -> None:
        """Wait for the work of a stream and for nothing else, as another library would."""
        with self.lock:
            if stream.tail is not None:
                self._wait([stream.tail])

    def drain(self) -> None:
        """Run everything that is queued on all devices."""
        with self.lock:
            self.scheduler.drain()

    def pending(self) -> list[str]:
        """Return what is queued and did not run."""
        return [op.label for x in self.scheduler.streams for op in x.queue]

    # -- capture, for tests -----------------------------------------------------------------------

    def begin_capture(self, stream: int, mode: str = "Global") -> None:
        """Capture the work of a stream from now on; ``mode`` is "Global", "ThreadLocal" or "Relaxed"."""
        with self.lock:
            found = self.stream(stream)
            assert not found.is_legacy, "the legacy default stream cannot be captured"
            assert found.capture is None, "it is being captured already"
            number = int(getattr(real.cudaStreamCaptureMode, f"cudaStreamCaptureMode{mode}"))
            found.capture = Capture(found, number, threading.get_ident())
            self.captures.append(found.capture)

    def end_capture(self, stream: int) -> Graph:
        """Return what was captured.

        Raises
        ------
        Refusal
            If a call has invalidated the capture, or a stream that was forked did not come back.
        """
        with self.lock:
            capture = self.stream(stream).capture
            assert capture is not None, "it is not being captured"
            assert capture.origin is self.stream(stream), "another stream began the capture"
            self.captures.remove(capture)
            for x in capture.tails:
                x.capture = None
            if capture.is_invalid:
                raise Refusal(Status.cudaErrorStreamCaptureInvalidated)
            if not capture.is_joined():
                raise Refusal(Status.cudaErrorStreamCaptureUnjoined)
            return Graph(self, capture.ops, capture.origin)

    # -- devices ----------------------------------------------------------------------------------

    @api(1, always=True)
    def cudaGetDeviceCount(self) -> int:
        return len(self.devices)

    @api(1, always=True)
    def cudaGetDevice(self) -> int:
        return self.device

    @api(always=True)
    def cudaSetDevice(self, device: int) -> None:
        self._model(device)
        self._thread.device = device

    def _model(self, device: int) -> DeviceModel:
        if not 0 <= device < len(self.devices):
            raise Refusal(Status.cudaErrorInvalidDevice)
        return self.devices[device]

    @api(1)
    def cudaGetDeviceProperties(self, device: int) -> Any:
        model, found = self._model(device), real.cudaDeviceProp()
        found.name = model.name.encode().ljust(256, b"\0")
        found.major, found.minor = model.capability
        found.totalGlobalMem = model.memory_bytes
        found.multiProcessorCount = model.multiprocessors
        return found

    @api(1)
    def cudaDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        model, names = self._model(device), real.cudaDeviceAttr
        return {
            names.cudaDevAttrClockRate: model.clock_khz,
            names.cudaDevAttrMultiProcessorCount: model.multiprocessors,
            names.cudaDevAttrComputeCapabilityMajor: model.capability[0],
            names.cudaDevAttrComputeCapabilityMinor: model.capability[1],
        }[attribute]

    @api(1, always=True)
    def cudaDriverGetVersion(self) -> int:
        return 13000

    @api(1, always=True)
    def cudaRuntimeGetVersion(self) -> int:
        return 13000

    @api()
    def cudaDeviceSynchronize(self) -> None:
        device = self.device
        for capture in self.captures:
            if any(x.device == device for x in capture.tails):
                capture.is_invalid = True
                raise Refusal(Status.cudaErrorStreamCaptureUnsupported)
        self._wait([op for x in self.scheduler.streams if x.device == device for op in x.queue])

    # -- memory -----------------------------------------------------------------------------------

    @api(1, unsafe=True)
    def cudaMalloc(self, nbytes: int) -> int:
        if not nbytes:
            return 0
        address = self.memory.allocate(self.device, int(nbytes))
        if not address:
            raise Refusal(Status.cudaErrorMemoryAllocation)
        return address

    @api(unsafe=True)
    def cudaFree(self, address: int) -> None:
        if not address:
            return
        self._wait([op for x in self.scheduler.streams for op in x.queue])
        if not self.memory.free(int(address)):
            self.recorder.faults.append(f"cudaFree of {int(address):#x}, which is not allocated")
            raise Refusal(Status.cudaErrorInvalidValue)

    def cudaMemGetInfo(self) -> tuple[Any, ...]:
        status, free = self._free_bytes()
        return status, free, self.devices[self.device].memory_bytes

    @api(1)
    def _free_bytes(self) -> int:
        return self.memory.limits[self.device] - self.memory.used[self.device]

    @api()
    def cudaMemcpyAsync(
        self, target: int, source: int, nbytes: int, kind: Any, stream: Any
    ) -> None:
        found = self.stream(stream)
        to_host = self.memory.find(int(target)) is None
        from_host = self.memory.find(int(source)) is None
        allowed = {(0, 0): (3, 4), (0, 1): (1, 4), (1, 0): (2, 4), (1, 1): (0, 4)}
        if int(kind) not in allowed[to_host, from_host]:
            raise Refusal(Status.cudaErrorInvalidValue)
        # Pageable memory of the host is read before the call returns, and is written by then.
        early = host_bytes(int(source), nbytes).copy() if from_host else None

        def copy() -> None:
            data = early
            if data is None:
                data = self.memory.at(int(source), nbytes, None, "copy from")
            if to_host:
                host_bytes(int(target), nbytes)[:] = data
            else:
                self.memory.at(int(target), nbytes, None, "copy to")[:] = data

        op = self.enqueue(found, "cudaMemcpyAsync", copy, 0.002 + nbytes / 2e9)
        if to_host and op.capture is None:
            self._wait([op])

    @api()
    def cudaMemsetAsync(self, address: int, value: int, nbytes: int, stream: Any) -> None:
        found = self.stream(stream)

        def fill() -> None:
            self.memory.at(int(address), nbytes, found.device, "cudaMemsetAsync")[:] = value & 0xFF

        self.enqueue(found, "cudaMemsetAsync", fill, 0.002)

    # -- streams ----------------------------------------------------------------------------------

    @api(1)
    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        if flags not in (0, int(real.cudaStreamNonBlocking)):
            raise Refusal(Status.cudaErrorInvalidValue)
        handle = next(self._handles)
        found = Stream(handle, self.device, blocking=not flags)
        self._streams[handle] = found
        self.scheduler.streams.append(found)
        return real.cudaStream_t(handle)

    @api()
    def cudaStreamDestroy(self, stream: Any) -> None:
        if int(stream) in (0, 1, 2):
            raise Refusal(Status.cudaErrorInvalidResourceHandle)
        found = self.stream(stream)
        if found.capture is not None:
            found.capture.is_invalid = True
        # What is queued still runs.
        del self._streams[found.handle]

    @api()
    def cudaStreamSynchronize(self, stream: Any) -> None:
        found = self.stream(stream)
        if found.capture is not None:
            found.capture.is_invalid = True
            raise Refusal(Status.cudaErrorStreamCaptureUnsupported)
        self.check_unsafe("cudaStreamSynchronize")
        if found.is_legacy:
            self._check_capture(found)
            others = [x for x in self.scheduler.streams if x.device == found.device and x.blocking]
            self._wait([x.tail for x in (found, *others) if x.tail is not None])
        elif found.tail is not None:
            self._wait([found.tail])

    @api(1)
    def cudaStreamIsCapturing(self, stream: Any) -> Any:
        found, names = self.stream(stream), real.cudaStreamCaptureStatus
        if found.is_legacy:
            self._check_capture(found)
        if found.capture is None:
            return names.cudaStreamCaptureStatusNone
        if found.capture.is_invalid:
            return names.cudaStreamCaptureStatusInvalidated
        return names.cudaStreamCaptureStatusActive

    @api(1)
    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before = getattr(self._thread, "mode", _GLOBAL)
        self._thread.mode = int(mode)
        return real.cudaStreamCaptureMode(before)

    @api()
    def cudaStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> None:
        found, mark = self.stream(stream), self.event(event).op
        self._check_capture(found)
        if mark is None:
            return
        capture = found.capture
        if mark.capture is None:
            if capture is not None:
                capture.is_invalid = True
                raise Refusal(Status.cudaErrorStreamCaptureIsolation)
            self.enqueue(found, "wait", _nothing, after=[mark])
            return
        if mark.capture not in self.captures:
            raise Refusal(Status.cudaErrorCapturedEvent)
        if capture is None:
            found.capture = mark.capture
            mark.capture.tails[found] = None
        elif capture is not mark.capture:
            raise Refusal(Status.cudaErrorStreamCaptureMerge)
        self.enqueue(found, "wait", _nothing, after=[mark])

    # -- events -----------------------------------------------------------------------------------

    @api(1)
    def cudaEventCreateWithFlags(self, flags: int) -> Any:
        if flags & ~7:
            raise Refusal(Status.cudaErrorInvalidValue)
        handle = next(self._handles)
        timing = not flags & int(real.cudaEventDisableTiming)
        self._events[handle] = Event(handle, self.device, timing=timing)
        return real.cudaEvent_t(handle)

    @api()
    def cudaEventDestroy(self, event: Any) -> None:
        del self._events[self.event(event).handle]

    @api()
    def cudaEventRecord(self, event: Any, stream: Any) -> None:
        found, target = self.stream(stream), self.event(event)
        if target.device != found.device:
            raise Refusal(Status.cudaErrorInvalidResourceHandle)
        target.op = self.enqueue(found, "record", _nothing, 0.0001)

    @api()
    def cudaEventQuery(self, event: Any) -> None:
        mark = self._mark(event, "cudaEventQuery")
        if mark is None or mark.done:
            return
        # Time goes by while somebody asks again and again.
        self.scheduler.advance(mark)
        raise Refusal(Status.cudaErrorNotReady)

    @api()
    def cudaEventSynchronize(self, event: Any) -> None:
        mark = self._mark(event, "cudaEventSynchronize")
        if mark is not None:
            self._wait([mark])

    def _mark(self, event: Any, name: str) -> Op | None:
        mark = self.event(event).op
        if mark is not None and mark.capture is not None:
            mark.capture.is_invalid = True
            raise Refusal(Status.cudaErrorCapturedEvent)
        self.check_unsafe(name)
        return mark

    @api(1)
    def cudaEventElapsedTime(self, start: Any, end: Any) -> float:
        first, last = self.event(start), self.event(end)
        marks = (first.op, last.op)
        if not (first.timing and last.timing) or any(x is None or x.capture for x in marks):
            raise Refusal(Status.cudaErrorInvalidResourceHandle)
        if not all(x is not None and x.done for x in marks):
            raise Refusal(Status.cudaErrorNotReady)
        return float(np.float32(last.op.finish_ms - first.op.finish_ms))  # type: ignore[union-attr]

    # -- errors -----------------------------------------------------------------------------------

    @api(1, always=True)
    def cudaGetErrorString(self, status: Any) -> bytes:
        return real.cudaGetErrorString(status)[1]

    def cudaGetLastError(self) -> tuple[Any]:
        self.recorder.called(self.part, "cudaGetLastError")
        error = self.sticky.get(self.device, self.last_error)
        self.last_error = Status.cudaSuccess
        return (error,)

    def live(self) -> dict[str, int]:
        """Return how many objects of each kind there are."""
        return {
            "blocks": len(self.memory.live()),
            "bytes": sum(self.memory.used),
            "streams": len(self._streams),
            "events": len(self._events),
        }


class Graph:
    """Captured work, which may run any number of times."""

    def __init__(self, runtime: Runtime, ops: list[Op], origin: Stream) -> None:
        self._runtime = runtime
        self._ops = ops
        self._origin = origin

    @property
    def labels(self) -> list[str]:
        """What was captured, without waits and records."""
        return [op.label for op in self._ops if op.label not in ("wait", "record")]

    def replay(self, stream: int | None = None) -> None:
        """Queue the work on a stream, by default on that which was captured."""
        runtime = self._runtime
        with runtime.lock:
            found = self._origin if stream is None else runtime.stream(stream)
            runtime.scheduler.replay(self._ops, found)


def host_bytes(address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes of the host as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _nothing() -> None:
    pass
