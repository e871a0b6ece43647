"""A software CUDA runtime: the functions of ``cuda.bindings.runtime`` that lowprec calls, on host memory.

Source: the CUDA Runtime API reference.
"""

import ctypes

import numpy as np
from cuda.bindings import runtime as real

from software_cuda.machine import GLOBAL, Refusal, Status, api
from software_cuda.pools import Pools
from software_cuda.streams import Event, Stream, nothing


class Runtime(Pools):
    # -- devices ----------------------------------------------------------------------------------

    @api(1, always=True)
    def cudaGetDeviceCount(self):
        return len(self.devices)

    @api(1, always=True)
    def cudaGetDevice(self):
        return self.device

    @api(always=True)
    def cudaSetDevice(self, device):
        self.model(device)
        self.thread.device = self.thread.context = device
        self.contexts.add(device)

    @api(1, always=True)
    def cudaGetDeviceProperties(self, device):
        model, found = self.model(device), real.cudaDeviceProp()
        found.name = model.name.encode().ljust(256, b"\0")
        found.major, found.minor = model.capability
        found.totalGlobalMem = model.memory_bytes
        found.multiProcessorCount = model.multiprocessors
        return found

    @api(1, always=True)
    def cudaDeviceGetAttribute(self, attribute, device):
        model, names = self.model(device), real.cudaDeviceAttr
        return {
            names.cudaDevAttrClockRate: model.clock_khz,
            names.cudaDevAttrL2CacheSize: model.l2_bytes,
            names.cudaDevAttrMemoryPoolsSupported: int(model.has_pools),
        }[attribute]

    @api(1, always=True)
    def cudaDriverGetVersion(self):
        return 13000

    @api()
    def cudaDeviceSynchronize(self):
        device = self.device
        for capture in self.captures:
            if any(x.device == device for x in capture.tails):
                capture.is_invalid = True
                raise Refusal(Status.cudaErrorStreamCaptureUnsupported)
        self.wait([op for x in self.scheduler.streams if x.device == device for op in x.queue])

    # -- memory -----------------------------------------------------------------------------------

    @api(1, unsafe=True)
    def cudaMalloc(self, nbytes):
        if not nbytes:
            return 0
        address = self.memory.allocate(self.device, int(nbytes))
        if not address:
            raise Refusal(Status.cudaErrorMemoryAllocation)
        return address

    @api(unsafe=True)
    def cudaFree(self, address):
        if not address or self.free_of_pool(int(address)):
            return
        if not self.recorder.switches.free_without_wait:
            self.wait([op for x in self.scheduler.streams for op in x.queue])
        if not self.memory.free(int(address)):
            self.recorder.faults.append(f"cudaFree of {int(address):#x}, which is not allocated")
            raise Refusal(Status.cudaErrorInvalidValue)

    @api()
    def cudaMemcpyAsync(self, target, source, nbytes, kind, stream):
        found = self.stream(stream)
        to_host = self.memory.find(int(target)) is None
        from_host = self.memory.find(int(source)) is None
        assert kind == real.cudaMemcpyKind.cudaMemcpyDefault, "others are not modelled"
        # Pageable memory of the host is read before the call returns, and is written by then.
        early = host_bytes(int(source), nbytes).copy() if from_host else None

        def copy():
            data = early
            if data is None:
                data = self.memory.at(int(source), nbytes, None, "copy from")
            if to_host:
                host_bytes(int(target), nbytes)[:] = data
            else:
                self.memory.at(int(target), nbytes, None, "copy to")[:] = data

        op = self.enqueue(found, "cudaMemcpyAsync", copy, 0.002 + nbytes / 2e9)
        if to_host and op.capture is None:
            self.wait([op])

    @api()
    def cudaMemsetAsync(self, address, value, nbytes, stream):
        found = self.stream(stream)

        def fill():
            self.memory.at(int(address), nbytes, found.device, "cudaMemsetAsync")[:] = value & 0xFF

        self.enqueue(found, "cudaMemsetAsync", fill, 0.002)

    # -- streams ----------------------------------------------------------------------------------

    @api(1)
    def cudaStreamCreateWithFlags(self, flags):
        handle = next(self.handles)
        found = Stream(handle, self.device, blocking=not flags)
        self.streams[handle] = found
        self.scheduler.streams.append(found)
        return real.cudaStream_t(handle)

    @api()
    def cudaStreamSynchronize(self, stream):
        found = self.stream(stream)
        if found.capture is not None:
            found.capture.is_invalid = True
            raise Refusal(Status.cudaErrorStreamCaptureUnsupported)
        self.check_unsafe("cudaStreamSynchronize")
        if found.is_legacy:
            self.check_capture(found)
            others = [x for x in self.scheduler.streams if x.device == found.device and x.blocking]
            self.wait([x.tail for x in (found, *others) if x.tail is not None])
        elif found.tail is not None:
            self.wait([found.tail])

    @api(1)
    def cudaStreamIsCapturing(self, stream):
        found, names = self.stream(stream), real.cudaStreamCaptureStatus
        if found.is_legacy and self.ended_by(found):
            raise Refusal(Status.cudaErrorStreamCaptureImplicit)  # the capture stays valid
        if found.capture is None:
            return names.cudaStreamCaptureStatusNone
        return names.cudaStreamCaptureStatusActive

    @api(1, always=True)
    def cudaThreadExchangeStreamCaptureMode(self, mode):
        before = getattr(self.thread, "mode", GLOBAL)
        self.thread.mode = int(mode)
        return real.cudaStreamCaptureMode(before)

    @api()
    def cudaStreamWaitEvent(self, stream, event, flags):
        found, mark = self.stream(stream), self.event(event).op
        self.check_capture(found)
        capture = found.capture
        if mark.capture is None:
            if capture is not None:
                capture.is_invalid = True
                raise Refusal(Status.cudaErrorStreamCaptureIsolation)
            self.enqueue(found, "wait", nothing, after=[mark])
            return
        if capture is None:
            found.capture = mark.capture
            mark.capture.tails[found] = None
        self.enqueue(found, "wait", nothing, after=[mark])

    # -- events -----------------------------------------------------------------------------------

    @api(1)
    def cudaEventCreateWithFlags(self, flags):
        handle = next(self.handles)
        timing = not flags & int(real.cudaEventDisableTiming)
        self.events[handle] = Event(self.device, timing=timing)
        return real.cudaEvent_t(handle)

    @api()
    def cudaEventDestroy(self, event):
        self.event(event)
        del self.events[int(event)]

    @api()
    def cudaEventRecord(self, event, stream):
        found, target = self.stream(stream), self.event(event)
        if target.device != found.device:
            raise Refusal(Status.cudaErrorInvalidResourceHandle)
        target.op = self.enqueue(found, "record", nothing, 0.0001)

    @api()
    def cudaEventQuery(self, event):
        mark = self._mark(event, "cudaEventQuery")
        if mark is None or mark.done:
            return
        # Time passes while the event is polled.
        self.scheduler.advance(mark)
        raise Refusal(Status.cudaErrorNotReady)

    @api()
    def cudaEventSynchronize(self, event):
        mark = self._mark(event, "cudaEventSynchronize")
        if mark is not None:
            self.wait([mark])

    def _mark(self, event, name):
        mark = self.event(event).op
        if mark is not None and mark.capture is not None:
            mark.capture.is_invalid = True
            raise Refusal(Status.cudaErrorCapturedEvent)
        self.check_unsafe(name)
        return mark

    @api(1)
    def cudaEventElapsedTime(self, start, end):
        first, last = self.event(start), self.event(end)
        marks = (first.op, last.op)
        if not (first.timing and last.timing) or any(x is None or x.capture for x in marks):
            raise Refusal(Status.cudaErrorInvalidResourceHandle)
        if not all(x is not None and x.done for x in marks):
            raise Refusal(Status.cudaErrorNotReady)
        return float(np.float32(last.op.finish_ms - first.op.finish_ms))

    # -- errors -----------------------------------------------------------------------------------

    @api(1, always=True)
    def cudaGetErrorString(self, status):
        return real.cudaGetErrorString(status)[1]

    def cudaGetLastError(self):
        self.recorder.called(self.part, "cudaGetLastError")
        error = self.sticky.get(self.device, self.last_error)
        self.last_error = Status.cudaSuccess
        return (error,)


def host_bytes(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
