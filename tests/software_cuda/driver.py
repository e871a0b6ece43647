"""The functions of ``cuda.bindings.driver`` that lowprec calls: each thread's current context, and launches.

Source: the CUDA Driver API reference, *Context Management*, *Primary Context Management* and *Execution Control*.
"""

import functools

from cuda.bindings import driver as real

from software_cuda.core import Kernel
from software_cuda.recorder import Part, Refusal

Result = real.CUresult

#: Handle of the primary context of device 0.
_CONTEXTS = 0x7C000000
_MAX_GRID, _MAX_BLOCK = (2**31 - 1, 65535, 65535), (1024, 1024, 64)
_MAX_THREADS = 1024


def function(values):
    """Make a method a function of the driver, which returns a result and ``values`` values."""

    def mark(method):
        @functools.wraps(method)
        def call(self, *arguments):
            plan = self.recorder.called(self.part, method.__name__)
            try:
                if plan is not None:
                    raise Refusal(plan.status or Result.CUDA_ERROR_UNKNOWN)
                found = method(self, *arguments)
            except Refusal as refusal:  # the driver's errors have the runtime's numbers
                return (Result(int(refusal.status)), *[None] * values)
            return (Result.CUDA_SUCCESS, *([found] if values else []))

        return call

    return mark


class Driver(Part):
    def __init__(self, recorder, runtime):
        super().__init__("driver", real, recorder)
        self._runtime = runtime

    @function(1)
    def cuGetErrorString(self, result):
        return f"{result.name} in words".encode()

    @function(1)
    def cuCtxGetDevice(self):
        found = self._runtime.context
        if found is None:
            raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
        return real.CUdevice(found)

    @function(1)
    def cuCtxGetCurrent(self):
        found = self._runtime.context
        return real.CUcontext(0 if found is None else _CONTEXTS + found)

    @function(0)
    def cuCtxSetCurrent(self, context):
        number = int(context)
        self._runtime.thread.context = number - _CONTEXTS if number else None

    @function(1)
    def cuDeviceGet(self, ordinal):
        self._runtime.model(ordinal)
        return real.CUdevice(ordinal)

    @function(1)
    def cuDevicePrimaryCtxRetain(self, device):
        self._runtime.contexts.add(int(device))
        return real.CUcontext(_CONTEXTS + int(device))

    @function(0)
    def cuLaunchKernel(self, kernel, *rest):
        *extents, shared, stream, parameters, extra = rest
        assert isinstance(kernel, real.CUfunction)
        assert (len(extents), shared, extra) == (6, 0, 0), "shared memory is not modelled"
        threads = extents[3] * extents[4] * extents[5]
        limits = zip(extents, _MAX_GRID + _MAX_BLOCK, strict=True)
        if threads > _MAX_THREADS or not all(0 < x <= most for x, most in limits):
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        found, runtime = Kernel.by_handle[int(kernel)], self._runtime
        values = found.read(parameters)
        with runtime.lock:
            if runtime.context is None:  # unlike the runtime, the driver makes none
                raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
            runtime.check_sticky()
            on = runtime.stream(stream, current=True)

            def run():
                found.run(extents, values, runtime, on.device)

            cost_ms = 0.005
            if found.name == "spin":
                cost_ms = values[0].value / runtime.devices[on.device].clock_khz
            runtime.enqueue(on, f"kernel {found.name}", run, cost_ms)
