"""The functions of ``cuda.bindings.driver`` that lowprec calls: each thread's current context.

Source: the CUDA Driver API reference, *Context Management* and *Primary Context Management*.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cuda.bindings import driver as real

from software_cuda.machine import Machine
from software_cuda.recorder import Part, Recorder

Result = real.CUresult

#: Handle of the primary context of device 0.
_CONTEXTS = 0x7C000000


def function(values: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method a function of the driver: it returns a result and ``values`` values."""

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Contexts, *arguments: Any) -> tuple[Any, ...]:
            plan = self.recorder.called(self.part, method.__name__)
            if plan is not None:
                return (plan.status or Result.CUDA_ERROR_UNKNOWN, *[None] * values)
            found = method(self, *arguments)
            if isinstance(found, Result):
                return (found, *[None] * values)
            return (Result.CUDA_SUCCESS, *([found] if values else []))

        return call

    return mark


class Contexts(Part):
    """What ``cuda.bindings.driver`` has for contexts.

    Parameters
    ----------
    recorder : Recorder
    machine : Machine
    """

    def __init__(self, recorder: Recorder, machine: Machine) -> None:
        super().__init__("driver", real, recorder)
        self.machine = machine

    @function(1)
    def cuGetErrorString(self, result: Any) -> bytes:
        return f"{result.name} in words".encode()

    @function(1)
    def cuCtxGetDevice(self) -> Any:
        found = self.machine.context
        return Result.CUDA_ERROR_INVALID_CONTEXT if found is None else real.CUdevice(found)

    @function(1)
    def cuCtxGetCurrent(self) -> Any:
        found = self.machine.context
        return real.CUcontext(0 if found is None else _CONTEXTS + found)

    @function(0)
    def cuCtxSetCurrent(self, context: Any) -> Any:
        number = int(context)
        device = number - _CONTEXTS if number else None
        if device is not None and device not in self.machine.contexts:
            self.recorder.faults.append(f"{number:#x} is no context")
            return Result.CUDA_ERROR_INVALID_CONTEXT
        self.machine.thread.context = device
        return None

    @function(1)
    def cuDeviceGet(self, ordinal: int) -> Any:
        if not 0 <= ordinal < len(self.machine.devices):
            return Result.CUDA_ERROR_INVALID_DEVICE
        return real.CUdevice(ordinal)

    @function(1)
    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        self.machine.contexts.add(int(device))
        return real.CUcontext(_CONTEXTS + int(device))


class DeviceDriver:
    """A driver beside a stand-in for the runtime that has a ``device``: there is one thread, and it has a context."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    cuuint64_t = int

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime

    def cuCtxGetDevice(self) -> tuple[int, int]:
        return 0, self.runtime.device

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self.runtime.device + 1

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        self.runtime.device = context - 1
        return (0,)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, device + 1
