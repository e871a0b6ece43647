"""The state of the software CUDA behind its functions: devices, streams, events, captures, and the rules between them.

Sources: the CUDA Runtime API reference (which function may return which error), and for capture the CUDA C++
Programming Guide, *Creating a Graph Using Stream Capture*, with ``cudaThreadExchangeStreamCaptureMode``.
"""

import functools
import itertools
import threading
from dataclasses import dataclass
from typing import Any

from cuda.bindings import runtime as real

from software_cuda.memory import Memory
from software_cuda.recorder import Fault, Part, Refusal
from software_cuda.streams import Capture, Event, Scheduler, Stream, nothing

Status = real.cudaError_t
GLOBAL = int(real.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal)
_RELAXED = int(real.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)

_HOST_CALL_MS = 0.001


@dataclass(frozen=True)
class DeviceModel:
    """The properties of a device."""

    name: str = "Software H200"
    capability: tuple[int, int] = (9, 0)
    memory_bytes: int = 1 << 30
    multiprocessors: int = 132
    clock_khz: int = 1_980_000
    l2_bytes: int = 1 << 16
    has_pools: bool = True


def api(values=0, *, unsafe=False, always=False):
    """Make a method a function of the runtime, which returns a status and ``values`` values.

    An ``unsafe`` function is forbidden while this or another thread captures, unless the thread's mode allows it. One
    that works ``always`` does so after an error that sticks to the device, and without a context.
    """

    def mark(method):
        name = method.__name__

        @functools.wraps(method)
        def call(self, *arguments):
            plan = self.recorder.called(self.part, name)
            self.recorder.log.append((name, *arguments))
            with self.lock:
                self.scheduler.clock_ms += _HOST_CALL_MS
                self.scheduler.keep_up()
                try:
                    if plan is not None:
                        if name == "cudaFreeAsync":  # whose error may be one of earlier work
                            method(self, *arguments)
                        raise Refusal(plan.status or _FAILURES.get(name, Status.cudaErrorUnknown))
                    if not always:
                        self.make_context()
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


#: The errors of functions that are made to fail, where the test names none.
_FAILURES = {
    "cudaMalloc": Status.cudaErrorMemoryAllocation,
    "cudaMallocFromPoolAsync": Status.cudaErrorMemoryAllocation,
    "cudaEventCreateWithFlags": Status.cudaErrorMemoryAllocation,
    "cudaStreamCreateWithFlags": Status.cudaErrorMemoryAllocation,
    "cudaGetDeviceCount": Status.cudaErrorNoDevice,
}


class Machine(Part):
    """The state that the functions of the runtime act on."""

    def __init__(self, recorder, devices):
        super().__init__("runtime", real, recorder)
        self.lock = threading.RLock()
        self.devices = tuple(devices)
        self.memory = Memory([x.memory_bytes for x in devices])
        self.scheduler = Scheduler()
        self.last_error = Status.cudaSuccess
        self.sticky: dict[int, Any] = {}
        self.captures: list[Capture] = []
        self.thread = threading.local()
        #: Devices that have a primary context.
        self.contexts: set[int] = set()
        self.handles = itertools.count(0x51000000, 0x40)
        self.streams: dict[int, Stream] = {}
        self._foreign: dict[int, Stream] = {}
        self._defaults: dict[tuple[int, int, int], Stream] = {}
        self.events: dict[int, Event] = {}
        for device in range(len(devices)):
            self._default_stream(device, 1)

    # -- rules ------------------------------------------------------------------------------------

    @property
    def device(self):
        """The current device of this thread: that of its context, else the one that it set, else the first."""
        return self.context if self.context is not None else getattr(self.thread, "device", 0)

    @property
    def context(self):
        """The device of this thread's context, None where it has none."""
        return getattr(self.thread, "context", None)

    def make_context(self):
        """Give this thread the primary context of its device, as the runtime does where it needs one."""
        self.thread.context = self.device
        self.contexts.add(self.device)

    def check_sticky(self):
        """Refuse everything on a device whose memory was misused."""
        if self.device in self.sticky:
            raise Refusal(self.sticky[self.device])

    def check_unsafe(self, name):
        """Refuse what might synchronise while work is being captured."""
        mode = getattr(self.thread, "mode", GLOBAL)
        if mode == _RELAXED:
            return
        for capture in self.captures:
            own = capture.thread == threading.get_ident() and capture.mode != _RELAXED
            if own or (mode == GLOBAL and capture.mode == GLOBAL):
                capture.is_invalid = True
                self.recorder.faults.append(f"{name} during a capture that it invalidates")
                raise Refusal(Status.cudaErrorStreamCaptureUnsupported)

    def check_capture(self, stream):
        """Refuse work on an invalid capture, and work on the legacy default stream that would end one."""
        if stream.capture is not None and stream.capture.is_invalid:
            raise Refusal(Status.cudaErrorStreamCaptureInvalidated)
        if stream.is_legacy and (ended := self.ended_by(stream)):
            ended[0].is_invalid = True
            raise Refusal(Status.cudaErrorStreamCaptureImplicit)

    def ended_by(self, legacy):
        """Return the captures that work on the legacy default stream of a device would end."""
        device = legacy.device
        return [c for c in self.captures if any(x.blocking and x.device == device for x in c.tails)]

    def _default_stream(self, device, handle):
        """Return the legacy default stream (1), or that of this thread (2)."""
        key = (device, handle, threading.get_ident() if handle == 2 else 0)
        found = self._defaults.get(key)
        if found is None:
            found = self._defaults[key] = Stream(
                handle, device, blocking=handle == 2, is_legacy=handle == 1
            )
            self.scheduler.streams.append(found)
        return found

    def stream(self, handle, *, current=False):
        """Return a stream by its handle; if ``current``, it must be of the current device."""
        number = int(handle)
        if number in (0, 1, 2):
            return self._default_stream(self.device, number or 1)
        found = self.streams.get(number) or self._foreign.get(number)
        if found is None:
            self.recorder.faults.append(f"{number:#x} is no stream")
        if found is None or (current and found.device != self.device):
            raise Refusal(Status.cudaErrorInvalidResourceHandle)
        return found

    def event(self, handle):
        found = self.events.get(int(handle))
        if found is None:
            self.recorder.faults.append(f"{int(handle):#x} is no event")
            raise Refusal(Status.cudaErrorInvalidResourceHandle)
        return found

    def model(self, device):
        if not 0 <= device < len(self.devices):
            raise Refusal(Status.cudaErrorInvalidDevice)
        return self.devices[device]

    # -- work -------------------------------------------------------------------------------------

    def enqueue(self, stream, label, run, cost_ms=0.0, after=()):
        """Queue work; after a fault in it the device refuses everything, as a real one does."""
        self.check_capture(stream)
        device = stream.device

        def guarded():
            if device in self.sticky:
                return
            try:
                run()
            except Fault as fault:
                self.recorder.faults.append(f"{label}: {fault}")
                self.sticky[device] = Status.cudaErrorIllegalAddress

        return self.scheduler.enqueue(stream, label, guarded, cost_ms, after)

    def wait(self, targets):
        self.scheduler.drain(targets)
        finish = max((x.finish_ms for x in targets), default=0.0)
        self.scheduler.clock_ms = max(self.scheduler.clock_ms, finish)

    def drain(self):
        with self.lock:
            self.scheduler.drain()

    # -- other libraries' streams -----------------------------------------------------------------

    def stream_of(self, device, handle):
        """Return a stream by its handle; 1 is the legacy default stream of the device."""
        return self._default_stream(device, 1) if handle in (0, 1) else self.stream(handle)

    def give_handle(self, stream):
        """Give another library's stream a handle; it is not counted among those that are alive."""
        with self.lock:
            stream.handle = next(self.handles)
            self._foreign[stream.handle] = stream
            return stream.handle

    def join(self, before, after):
        """Make a stream wait for the queued work of another, as another library would with an event."""
        with self.lock:
            if before is not after:
                mark = self.enqueue(before, "record", nothing)
                self.enqueue(after, "wait", nothing, after=[mark])

    def wait_for(self, stream):
        """Wait for the work of a stream alone, as another library would."""
        with self.lock:
            if stream.tail is not None:
                self.wait([stream.tail])

    # -- capture, for tests -----------------------------------------------------------------------

    def begin_capture(self, stream, mode="Global"):
        """Capture the work of a stream from now on; ``mode`` is "Global", "ThreadLocal" or "Relaxed"."""
        with self.lock:
            found = self.stream(stream)
            assert not found.is_legacy, "the legacy default stream cannot be captured"
            number = int(getattr(real.cudaStreamCaptureMode, f"cudaStreamCaptureMode{mode}"))
            found.capture = Capture(found, number, threading.get_ident())
            self.captures.append(found.capture)

    def end_capture(self, stream):
        """Return what was captured; raises Refusal if a call has invalidated it, or a fork was not joined."""
        with self.lock:
            capture = self.stream(stream).capture
            self.captures.remove(capture)
            for x in capture.tails:
                x.capture = None
            if capture.is_invalid:
                raise Refusal(Status.cudaErrorStreamCaptureInvalidated)
            if not capture.is_joined():
                raise Refusal(Status.cudaErrorStreamCaptureUnjoined)
            return Graph(self, capture.ops, capture.origin)

    def live(self):
        return {
            "blocks": len(self.memory.live()),
            "bytes": sum(self.memory.used),
            "streams": len(self.streams),
            "events": len(self.events),
        }


class Graph:
    """Captured work, which may run any number of times."""

    def __init__(self, runtime, ops, origin):
        self._runtime = runtime
        self._ops = ops
        self._origin = origin

    @property
    def labels(self):
        return [op.label for op in self._ops if op.label not in ("wait", "record")]

    def replay(self, stream=None):
        """Queue the work on a stream, by default the captured one."""
        runtime = self._runtime
        with runtime.lock:
            found = self._origin if stream is None else runtime.stream(stream)
            runtime.scheduler.replay(self._ops, found)
