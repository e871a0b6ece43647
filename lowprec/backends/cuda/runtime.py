"""CUDA's runtime, and what the driver has for contexts, with status codes turned into exceptions.

Functions that need no more than that are called by their own names, ``call("cudaEventRecord", event, stream)``; here
stands what is asked of several of them. Streams are integers, as everywhere in lowprec: 1 is the legacy default stream.
Source: the CUDA Runtime API and Driver API references.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from lowprec.arrays.device_memory import LEGACY_STREAM
from lowprec.backends.cuda.libraries import cached, libraries
from lowprec.errors import BackendError, DeviceError, DeviceMemoryError

_MIB = 1 << 20


def call(function: str, *arguments: Any) -> Any:
    """Call a function of the runtime or the driver and return its value, None if it has none."""
    found = libraries()
    module = found.runtime if function.startswith("cuda") else found.driver
    status, *values = getattr(module, function)(*arguments)
    if status != 0:
        _fail(function, status)
    return values[0] if values else None


def _fail(function: str, status: Any) -> NoReturn:
    """Raise what a function returned instead of success."""
    runtime, driver = libraries().runtime, libraries().driver
    if function.startswith("cuda"):
        _, text = runtime.cudaGetErrorString(status)
        # An error that does not stick to the context is kept as the last one, and would be blamed on someone else.
        runtime.cudaGetLastError()
    else:
        _, text = driver.cuGetErrorString(status)
    words = text.decode() if isinstance(text, bytes) else str(text)
    raise BackendError(f"{function} failed with {status.name}: {words}")


def _put_back(function: str, before: Any) -> None:
    """Put a setting of the thread back, if need be at the second try: work of others would run under it."""
    try:
        call(function, before)
    except BackendError:
        call(function, before)


# -- devices --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What a GPU is; ``clock_khz`` is the highest rate of a multiprocessor, 0 where the driver does not tell."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    clock_khz: int


@cached
def properties(index: int) -> DeviceProperties:
    """Return what a device is, looked up once; a DeviceError if there is no such device."""
    count = call("cudaGetDeviceCount")
    if not 0 <= index < count:
        raise DeviceError(f"there is no device cuda:{index}; this process sees {count}")
    found = call("cudaGetDeviceProperties", index)
    name = found.name.decode() if isinstance(found.name, bytes) else str(found.name)
    return DeviceProperties(
        index,
        name.rstrip("\0"),
        (int(found.major), int(found.minor)),
        int(found.totalGlobalMem),
        int(found.multiProcessorCount),
        attribute("cudaDevAttrClockRate", index),
    )


def attribute(name: str, index: int) -> int:
    """Return a ``cudaDeviceAttr`` of a device, by its name."""
    wanted = getattr(libraries().runtime.cudaDeviceAttr, name)
    return int(call("cudaDeviceGetAttribute", wanted, index))


def driver_version() -> str:
    """Return the newest version of CUDA that the driver serves."""
    version = int(call("cudaDriverGetVersion"))
    return f"{version // 1000}.{version % 1000 // 10}"


def current_device() -> int:
    """Return the device of this thread's context, -1 where the thread has none yet."""
    # Every product asks, so it is asked without a detour. What else may be wrong, the next call tells.
    status, device = libraries().driver.cuCtxGetDevice()
    return int(device) if status == 0 else -1


@cached
def _primary_context(index: int) -> Any:
    """Look up a device's primary context, and make it if need be."""
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make the primary context of a device the current one of this thread for the length of a block.

    All copies of CUDA's runtime in a process go by the driver's current context. A device is not put back by
    ``cudaSetDevice``: that would make a context on it where the thread had none.
    """
    if current_device() == index:
        yield
        return
    before = call("cuCtxGetCurrent")
    try:
        call("cuCtxSetCurrent", _primary_context(index))
        yield
    finally:
        _put_back("cuCtxSetCurrent", before)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow calls that have nothing to do with the work which this or another thread is capturing into a graph."""
    relaxed = libraries().runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    mode = call("cudaThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        _put_back("cudaThreadExchangeStreamCaptureMode", mode)


# -- memory ---------------------------------------------------------------------------------------


def create_pool(device: int, keeps_bytes: int) -> Any:
    """Return a new pool of a device's memory, which keeps so much that is unused; None where there are no pools."""
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
    peers = [i for i in range(call("cudaGetDeviceCount")) if i != device]
    allowed = [_access(i) for i in peers if call("cudaDeviceCanAccessPeer", i, device)]
    if allowed:  # memory of a pool is its own device's alone by default, unlike that of cudaMalloc
        call("cudaMemPoolSetAccess", pool, allowed, len(allowed))
    return pool


def _access(device: int) -> Any:
    """Return the permission of a device to read and write a pool."""
    runtime = libraries().runtime
    wanted = runtime.cudaMemAccessDesc()
    wanted.location.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    wanted.location.id = device
    wanted.flags = runtime.cudaMemAccessFlags.cudaMemAccessFlagsProtReadWrite
    return wanted


def allocate(nbytes: int, pool: Any = None, stream: int = 0) -> int:
    """Return the address of new memory on the current device, aligned to 256 bytes or more.

    That of a pool is for work on a stream; while the stream is being captured, it is the graph's. Without a pool the
    memory is no part of what is being captured.
    """
    runtime = libraries().runtime
    if pool is not None:
        status, address = runtime.cudaMallocFromPoolAsync(nbytes or 1, pool, stream)
    else:
        with relaxed_capture():
            status, address = runtime.cudaMalloc(nbytes or 1)
    if status == runtime.cudaError_t.cudaErrorMemoryAllocation:
        runtime.cudaGetLastError()
        raise DeviceMemoryError(
            f"cuda:{current_device()} has no {nbytes / _MIB:.1f} MiB of memory left for lowprec; free some (frameworks "
            "give back what they cache with torch.cuda.empty_cache() or "
            "cupy.get_default_memory_pool().free_all_blocks())"
        )
    if status != 0:
        _fail("cudaMalloc", status)
    return int(address)


def free(address: int) -> None:
    """Give memory back that no work uses any more; if it is of no pool, the device finishes all its work first."""
    with relaxed_capture():
        call("cudaFree", address)


def wait_for_device() -> None:
    """Wait for all work of the current device, of whatever stream, without ending any capture.

    ``cudaDeviceSynchronize`` ends every capture on the device, in any mode. ``cudaFree`` of memory of ``cudaMalloc``
    synchronises all streams as well, and is allowed. Source: the CUDA C++ Programming Guide, *Stream Ordered Memory
    Allocator*, and ``cudaThreadExchangeStreamCaptureMode`` in the CUDA Runtime API reference.
    """
    try:
        address = allocate(1)
    except DeviceMemoryError:
        with relaxed_capture():
            call("cudaDeviceSynchronize")
    else:
        free(address)


def copy_async(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy bytes, wherever they lie, in the order of a stream."""
    kind = libraries().runtime.cudaMemcpyKind.cudaMemcpyDefault
    call("cudaMemcpyAsync", target, source, nbytes, kind, stream)


# -- streams and events ---------------------------------------------------------------------------


def is_capturing(stream: int) -> bool:
    """Whether the work of a stream is being captured; for the legacy default stream, whether its work would end one."""
    runtime = libraries().runtime
    status, found = runtime.cudaStreamIsCapturing(stream)
    if status == runtime.cudaError_t.cudaErrorStreamCaptureImplicit:
        runtime.cudaGetLastError()
        return True
    if status != 0:
        _fail("cudaStreamIsCapturing", status)
    return bool(found != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone)


def refuse_capture(stream: int, lacking: str) -> None:
    """Raise a BackendError if a stream is being captured, where something must be made that a capture forbids."""
    if stream != LEGACY_STREAM and is_capturing(stream):
        raise BackendError(
            f"the product cannot be captured into a CUDA graph yet: it needs {lacking}, which cannot be made during a "
            "capture; run it once before capturing, in the same thread, with the same arguments and arrays like these"
        )


def create_event(*, timing: bool = False) -> Any:
    """Return a new event of the current device."""
    runtime = libraries().runtime
    flags = runtime.cudaEventDefault if timing else runtime.cudaEventDisableTiming
    return call("cudaEventCreateWithFlags", flags)


def wait_for_event(event: Any) -> None:
    """Wait for the work before an event, which no other thread's capture forbids."""
    with relaxed_capture():
        call("cudaEventSynchronize", event)


def event_is_done(event: Any) -> bool:
    """Whether the work before an event is done."""
    runtime = libraries().runtime
    (status,) = runtime.cudaEventQuery(event)
    if status == runtime.cudaError_t.cudaErrorNotReady:
        runtime.cudaGetLastError()
        return False
    if status != 0:
        _fail("cudaEventQuery", status)
    return True
