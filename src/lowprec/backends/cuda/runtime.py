"""CUDA's runtime with its status codes turned into exceptions: devices, memory, streams, events.

The only file that calls ``cuda.bindings.runtime``, and what the driver has for contexts. Streams are integers, as
everywhere in lowprec: 1 is the legacy default stream. Source: the CUDA Runtime API and Driver API references.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lowprec.backends.cuda.libraries import libraries
from lowprec.errors import BackendError, DeviceError, DeviceMemoryError

_MIB = 1 << 20


def _call(function: str, *arguments: Any) -> Any:
    """Call a function of the runtime and return its value (None if it has none); raise if it reports an error."""
    runtime = libraries().runtime
    status, *values = getattr(runtime, function)(*arguments)
    if status != runtime.cudaError_t.cudaSuccess:
        raise _error(runtime, function, status)
    return values[0] if values else None


def _driver(function: str, *arguments: Any) -> Any:
    """Call a function of the driver, likewise."""
    driver = libraries().driver
    status, *values = getattr(driver, function)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        words = text.decode() if isinstance(text, bytes) else str(text)
        raise BackendError(f"{function} failed with {status.name}: {words}")
    return values[0] if values else None


def _put_back(call: Callable[..., Any], function: str, before: Any) -> None:
    """Put a setting of the thread back, if need be at the second try: work of others would run under it."""
    try:
        call(function, before)
    except BackendError:
        call(function, before)


def _error(runtime: Any, function: str, status: Any) -> BackendError:
    name = getattr(status, "name", str(status))
    _, text = runtime.cudaGetErrorString(status)
    words = text.decode() if isinstance(text, bytes) else str(text)
    # An error that does not stick to the context is kept as the last one, and would be blamed on someone else's call.
    runtime.cudaGetLastError()
    return BackendError(f"{function} failed with {name}: {words}")


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


@functools.lru_cache(maxsize=64)
def _properties(runtime: Any, index: int) -> DeviceProperties:
    """Look up a device; the runtime is a part of the key, so that tests may exchange it."""
    count = _call("cudaGetDeviceCount")
    if not 0 <= index < count:
        raise DeviceError(f"there is no device cuda:{index}; this process sees {count}")
    found = _call("cudaGetDeviceProperties", index)
    name = found.name.decode() if isinstance(found.name, bytes) else str(found.name)
    clock = _call("cudaDeviceGetAttribute", runtime.cudaDeviceAttr.cudaDevAttrClockRate, index)
    return DeviceProperties(
        index,
        name.rstrip("\0"),
        (int(found.major), int(found.minor)),
        int(found.totalGlobalMem),
        int(found.multiProcessorCount),
        int(clock),
    )


def properties(index: int) -> DeviceProperties:
    """Return what a device is, looked up once; a DeviceError if there is no such device."""
    return _properties(libraries().runtime, index)


def device_count() -> int:
    """Return how many devices this process sees."""
    return int(_call("cudaGetDeviceCount"))


def l2_bytes(index: int) -> int:
    """Return the size of a device's L2 cache."""
    wanted = libraries().runtime.cudaDeviceAttr.cudaDevAttrL2CacheSize
    return int(_call("cudaDeviceGetAttribute", wanted, index))


def driver_version() -> tuple[int, int]:
    """Return the newest version of CUDA that the driver serves, (major, minor)."""
    version = int(_call("cudaDriverGetVersion"))
    return version // 1000, version % 1000 // 10


def current_device() -> int:
    """Return the device of this thread's context, -1 where the thread has none yet."""
    # Every product asks, so it is asked without a detour. What else may be wrong, the next call tells.
    status, device = libraries().driver.cuCtxGetDevice()
    return int(device) if status == 0 else -1


@functools.lru_cache(maxsize=64)
def _primary_context(driver: Any, index: int) -> Any:
    """Look up a device's primary context, and make it if need be; the driver is a part of the key, for tests."""
    return _driver("cuDevicePrimaryCtxRetain", _driver("cuDeviceGet", index))


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make the primary context of a device the current one of this thread for the length of a block.

    All copies of CUDA's runtime in a process go by the driver's current context. A device is not put back by
    ``cudaSetDevice``: that would make a context on it where the thread had none.
    """
    if current_device() == index:
        yield
        return
    before = _driver("cuCtxGetCurrent")
    try:
        _driver("cuCtxSetCurrent", _primary_context(libraries().driver, index))
        yield
    finally:
        _put_back(_driver, "cuCtxSetCurrent", before)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow calls that have nothing to do with the work which this or another thread is capturing into a graph."""
    relaxed = libraries().runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    mode = _call("cudaThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        _put_back(_call, "cudaThreadExchangeStreamCaptureMode", mode)


def synchronize_device() -> None:
    """Wait on the host for all work of the current device, on all streams."""
    with relaxed_capture():
        _call("cudaDeviceSynchronize")


# -- memory ---------------------------------------------------------------------------------------


def create_pool(device: int, keeps_bytes: int) -> Any:
    """Return a new pool of a device's memory, which keeps so much that is unused; None where there are no pools."""
    runtime = libraries().runtime
    supported = runtime.cudaDeviceAttr.cudaDevAttrMemoryPoolsSupported
    if not _call("cudaDeviceGetAttribute", supported, device):
        return None
    wanted = runtime.cudaMemPoolProps()
    wanted.allocType = runtime.cudaMemAllocationType.cudaMemAllocationTypePinned
    wanted.location.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    wanted.location.id = device
    pool = _call("cudaMemPoolCreate", wanted)
    threshold = runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
    _call("cudaMemPoolSetAttribute", pool, threshold, libraries().driver.cuuint64_t(keeps_bytes))
    return pool


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
    if status != runtime.cudaError_t.cudaSuccess:
        raise _error(runtime, "cudaMalloc", status)
    return int(address)


def free_async(address: int, stream: int) -> None:
    """Give memory of a pool back in the order of a stream, or of the graph that it is captured into."""
    _call("cudaFreeAsync", address, stream)


def trim(pool: Any, device: int) -> None:
    """Give the system what a pool, and all graphs of a device, have unused."""
    with relaxed_capture():
        if pool is not None:
            _call("cudaMemPoolTrimTo", pool, 0)
        _call("cudaDeviceGraphMemTrim", device)


def free(address: int) -> None:
    """Give memory back that no work uses any more; if it is of no pool, the device finishes all its work first."""
    with relaxed_capture():
        _call("cudaFree", address)


def copy_async(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy bytes, wherever they lie, in the order of a stream."""
    kind = libraries().runtime.cudaMemcpyKind.cudaMemcpyDefault
    _call("cudaMemcpyAsync", target, source, nbytes, kind, stream)


def set_zero_async(address: int, nbytes: int, stream: int) -> None:
    """Fill memory of the device with zero bytes, in the order of a stream."""
    _call("cudaMemsetAsync", address, 0, nbytes, stream)


# -- streams and events ---------------------------------------------------------------------------


def create_stream() -> int:
    """Return a new stream of the current device that does not wait for the default stream."""
    runtime = libraries().runtime
    return int(_call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking))


def synchronize_stream(stream: int) -> None:
    """Wait on the host for the work of a stream."""
    _call("cudaStreamSynchronize", stream)


def is_capturing(stream: int) -> bool:
    """Whether the work of a stream is being captured into a graph."""
    runtime = libraries().runtime
    idle = runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone
    return bool(_call("cudaStreamIsCapturing", stream) != idle)


def create_event(*, timing: bool = False) -> Any:
    """Return a new event of the current device."""
    runtime = libraries().runtime
    flags = runtime.cudaEventDefault if timing else runtime.cudaEventDisableTiming
    return _call("cudaEventCreateWithFlags", flags)


def destroy_event(event: Any) -> None:
    """Destroy an event; what waits for it goes on to do so."""
    _call("cudaEventDestroy", event)


def record_event(event: Any, stream: int) -> None:
    """Have an event stand for the work that a stream holds now."""
    _call("cudaEventRecord", event, stream)


def wait_event(stream: int, event: Any) -> None:
    """Have later work of a stream wait for an event."""
    _call("cudaStreamWaitEvent", stream, event, 0)


def event_is_done(event: Any) -> bool:
    """Whether the work before an event is done."""
    runtime = libraries().runtime
    (status,) = runtime.cudaEventQuery(event)
    if status == runtime.cudaError_t.cudaErrorNotReady:
        runtime.cudaGetLastError()
        return False
    if status != runtime.cudaError_t.cudaSuccess:
        raise _error(runtime, "cudaEventQuery", status)
    return True


def synchronize_event(event: Any) -> None:
    """Wait on the host for an event."""
    _call("cudaEventSynchronize", event)


def elapsed_ms(start: Any, end: Any) -> float:
    """Return the milliseconds between two events that are done and were created with ``timing``."""
    return float(_call("cudaEventElapsedTime", start, end))
