"""The CUDA runtime and the driver's contexts, with status codes raised as exceptions.

Functions are called by name: ``call("cudaEventRecord", event, stream)``. Streams are integers; 1 is the legacy default
stream. Source: the CUDA Runtime API and Driver API references.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowprec.arrays.device_memory import LEGACY_STREAM
from lowprec.backends.cuda.libraries import cached, libraries, version_text
from lowprec.errors import BackendError, DeviceError, DeviceMemoryError
from lowprec.planning.tensor_cores import Capability

_MIB = 1 << 20


#: What :func:`call` returns instead of raising an expected error.
_FAILED = object()


def call(function: str, *arguments: Any, expected: str = "") -> Any:
    """Call a function of the runtime or the driver, and return its value or None; _FAILED for the expected error."""
    module = libraries().driver
    is_runtime = function.startswith("cuda")
    if is_runtime:
        module = libraries().runtime
    status, *values = getattr(module, function)(*arguments)
    if status:
        if is_runtime:
            module.cudaGetLastError()  # clear it, so that other libraries do not report it
        if status.name == expected:
            return _FAILED
        explain = "cudaGetErrorString" if is_runtime else "cuGetErrorString"
        _, text = getattr(module, explain)(status)
        raise BackendError(f"{function} failed with {status.name}: {text.decode()}")
    return values[0] if values else None


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a GPU; ``clock_khz`` is the peak clock of a multiprocessor, 0 if it is not reported."""

    index: int
    name: str
    capability: Capability
    memory_bytes: int
    multiprocessors: int
    clock_khz: int


@cached
def properties(index: int) -> DeviceProperties:
    """Return the properties of a device; raise DeviceError if there is no such device."""
    count = call("cudaGetDeviceCount")
    if not 0 <= index < count:
        raise DeviceError(f"there is no device cuda:{index}; this process has {count}")
    device = call("cudaGetDeviceProperties", index)
    return DeviceProperties(
        index,
        device.name.decode().rstrip("\0"),
        (device.major, device.minor),
        device.totalGlobalMem,
        device.multiProcessorCount,
        attribute("cudaDevAttrClockRate", index),
    )


def attribute(name: str, index: int) -> int:
    wanted = getattr(libraries().runtime.cudaDeviceAttr, name)
    return int(call("cudaDeviceGetAttribute", wanted, index))


def driver_version() -> str:
    return version_text(call("cudaDriverGetVersion"))


def current_device() -> int:
    """Return the device of this thread's context, -1 if it has none yet."""
    # Called for every product, so without the overhead of `call`; the next call raises other errors.
    status, device = libraries().driver.cuCtxGetDevice()
    return int(device) if status == 0 else -1


@cached
def _primary_context(index: int) -> Any:
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make the primary context of a device current in this thread; ``cudaSetDevice`` creates more."""
    if current_device() == index:
        yield
        return
    before = call("cuCtxGetCurrent")
    try:
        call("cuCtxSetCurrent", _primary_context(index))
        yield
    finally:
        libraries().driver.cuCtxSetCurrent(before)  # an error is one of earlier work


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow calls that are not part of a graph while this or another thread is capturing one."""
    relaxed = libraries().runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    mode = call("cudaThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        # an error is one of earlier work
        libraries().runtime.cudaThreadExchangeStreamCaptureMode(mode)


def create_pool(device: int, keeps_bytes: int) -> Any:
    """Return a new pool that keeps up to this much unused memory; None if the device does not support pools."""
    runtime = libraries().runtime
    if not attribute("cudaDevAttrMemoryPoolsSupported", device):
        return None

    wanted = runtime.cudaMemPoolProps()
    wanted.allocType = runtime.cudaMemAllocationType.cudaMemAllocationTypePinned
    wanted.location.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    wanted.location.id = device
    pool = call("cudaMemPoolCreate", wanted)
    threshold = runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
    call("cudaMemPoolSetAttribute", pool, threshold, libraries().driver.cuuint64_t(keeps_bytes))
    return pool


def allocate(nbytes: int, pool: Any = None, stream: int = 0) -> int:
    """Return the address of new memory on the current device, aligned to 256 bytes or more.

    Memory of a pool is for work on a stream, and belongs to the graph if that is captured; other memory never does.
    """
    lacks = "cudaErrorMemoryAllocation"
    if pool is not None:
        address = call("cudaMallocFromPoolAsync", nbytes or 1, pool, stream, expected=lacks)
    else:
        with relaxed_capture():
            address = call("cudaMalloc", nbytes or 1, expected=lacks)
    if address is _FAILED:
        raise DeviceMemoryError(
            f"cuda:{current_device()} has less than {nbytes / _MIB:.1f} MiB of free memory; free some, for example "
            "caches of frameworks with torch.cuda.empty_cache() or cupy.get_default_memory_pool().free_all_blocks()"
        )
    return int(address)


def free(address: int) -> None:
    with relaxed_capture():
        call("cudaFree", address)


def wait_for_device() -> None:
    """Wait for all work on all streams of the current device, which invalidates every capture there."""
    with relaxed_capture():
        call("cudaDeviceSynchronize")


def copy_async(target: int, source: int, nbytes: int, stream: int) -> None:
    """Queue a copy on a stream, also between host and device."""
    kind = libraries().runtime.cudaMemcpyKind.cudaMemcpyDefault
    call("cudaMemcpyAsync", target, source, nbytes, kind, stream)


def is_capturing(stream: int) -> bool:
    """Whether a stream is being captured; for the legacy default stream, whether work would invalidate a capture."""
    capture = call("cudaStreamIsCapturing", stream, expected="cudaErrorStreamCaptureImplicit")
    none = libraries().runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone
    return bool(capture != none)


def refuse_capture(stream: int, lacking: str) -> None:
    """Raise BackendError if a stream is being captured, during which ``lacking`` cannot be created."""
    if stream != LEGACY_STREAM and is_capturing(stream):
        raise BackendError(
            f"the product cannot be captured into a CUDA graph yet: it needs {lacking}, which cannot be created during "
            "a capture; run it once before capturing, in the same thread, with the same arguments and similar arrays"
        )


def create_event(*, timing: bool = False) -> Any:
    runtime = libraries().runtime
    flags = runtime.cudaEventDefault if timing else runtime.cudaEventDisableTiming
    return call("cudaEventCreateWithFlags", flags)


def create_stream() -> int:
    """Return a new stream of the current device, which does not wait for the default stream."""
    return int(call("cudaStreamCreateWithFlags", libraries().runtime.cudaStreamNonBlocking))


def wait_for_event(event: Any) -> None:
    """Wait for the work before an event, even while another thread is capturing."""
    with relaxed_capture():
        call("cudaEventSynchronize", event)


def event_is_done(event: Any) -> bool:
    return call("cudaEventQuery", event, expected="cudaErrorNotReady") is not _FAILED
