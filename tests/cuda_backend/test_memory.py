"""The pool of device memory: what is reused when, what is held how long, and what a failure leaves behind.

The runtime is a stand-in that keeps account of memory, events and streams. It computes nothing: whether products come
out right over these streams is tested elsewhere.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from cuda_backend.cuda_reset import reset
from lowprec.arrays import Device, device_memory
from lowprec.backends.cuda import memory
from lowprec.backends.cuda.libraries import Libraries, use
from lowprec.errors import BackendError, DeviceMemoryError
from software_cuda.driver import DeviceDriver

GPU, OTHER_GPU = Device(2, 0), Device(2, 1)
LEGACY, FIRST, SECOND, CAPTURED = 1, 11, 12, 13
MIB = 1 << 20


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorNotReady = 600
    cudaErrorLaunchFailure = 719
    cudaErrorStreamCaptureImplicit = 906


class CaptureStatus(IntEnum):
    cudaStreamCaptureStatusNone = 0
    cudaStreamCaptureStatusActive = 1


class CaptureMode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeRelaxed = 2


class Event:
    def __init__(self, device: int) -> None:
        self.device = device
        self.stream: int | None = None
        self.done = True


class Runtime:
    """Two devices with 16 MiB of memory each, and streams that are at work until they are told to finish."""

    cudaError_t = Status
    cudaStreamCaptureStatus = CaptureStatus
    cudaStreamCaptureMode = CaptureMode
    cudaDeviceAttr = types.SimpleNamespace(cudaDevAttrClockRate=13, cudaDevAttrMemoryPoolsSupported=115)
    cudaMemAllocationType = types.SimpleNamespace(cudaMemAllocationTypePinned=1)
    cudaMemLocationType = types.SimpleNamespace(cudaMemLocationTypeDevice=1)
    cudaMemPoolAttr = types.SimpleNamespace(cudaMemPoolAttrReleaseThreshold=4)
    cudaMemAccessFlags = types.SimpleNamespace(cudaMemAccessFlagsProtReadWrite=3)
    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyDefault=4)
    cudaEventDefault = 0
    cudaEventDisableTiming = 2
    cudaStreamNonBlocking = 1
    memory_bytes = 16 * MIB

    def __init__(self) -> None:
        self.device = 0
        self.mode = CaptureMode.cudaStreamCaptureModeGlobal
        self.allocated: dict[int, tuple[int, int]] = {}
        self.next_address = 1 << 32
        self.events: list[Event] = []
        self.busy: set[int] = set()
        self.streams: list[tuple[int, int]] = []
        self.log: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()
        self.pools: list[int] = []
        self.keeps: dict[int, int] = {}
        self.has_pools = True
        self.peers: set[tuple[int, int]] = set()
        self.access: dict[int, list[int]] = {}
        self.lock = threading.RLock()

    def driver(self) -> DeviceDriver:
        return DeviceDriver(self)

    def finish(self, stream: int) -> None:
        self.busy.discard(stream)
        for event in self.events:
            event.done = event.done or event.stream == stream

    def count(self, name: str) -> int:
        return sum(entry[0] == name for entry in self.log)

    def _status(self, name: str, *arguments: Any) -> tuple[Status]:
        self.log.append((name, *arguments))
        return (Status.cudaErrorLaunchFailure if name in self.fails else Status.cudaSuccess,)

    def cudaGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return Status.cudaSuccess, b"in words"

    def cudaGetLastError(self) -> tuple[Status]:
        return (Status.cudaSuccess,)

    def cudaGetDeviceCount(self) -> tuple[Status, int]:
        return Status.cudaSuccess, 2

    def cudaGetDevice(self) -> tuple[Status, int]:
        return Status.cudaSuccess, self.device

    def cudaSetDevice(self, device: int) -> tuple[Status]:
        self.device = device
        return (Status.cudaSuccess,)

    def cudaGetDeviceProperties(self, device: int) -> tuple[Status, Any]:
        found = types.SimpleNamespace(
            name=b"GPU", major=9, minor=0, totalGlobalMem=self.memory_bytes, multiProcessorCount=1
        )
        return Status.cudaSuccess, found

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Status, int]:
        return Status.cudaSuccess, int(attribute != 115 or self.has_pools)

    def cudaThreadExchangeStreamCaptureMode(self, mode: CaptureMode) -> tuple[Status, CaptureMode]:
        before, self.mode = self.mode, mode
        return Status.cudaSuccess, before

    @staticmethod
    def cudaMemPoolProps() -> Any:
        return types.SimpleNamespace(location=types.SimpleNamespace())

    def cudaMemPoolCreate(self, wanted: Any) -> tuple[Status, int]:
        assert (wanted.allocType, wanted.location.type) == (1, 1)
        self.pools.append(wanted.location.id)
        return Status.cudaSuccess, len(self.pools)

    def cudaMemPoolSetAttribute(self, pool: int, attribute: int, value: int) -> tuple[Status]:
        assert attribute == 4
        self.keeps[self.pools[pool - 1]] = value
        return (Status.cudaSuccess,)

    def cudaDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[Status, int]:
        assert device != peer
        return Status.cudaSuccess, int((device, peer) in self.peers)

    @staticmethod
    def cudaMemAccessDesc() -> Any:
        return types.SimpleNamespace(location=types.SimpleNamespace())

    def cudaMemPoolSetAccess(self, pool: int, wanted: list[Any], count: int) -> tuple[Status]:
        assert {(x.location.type, x.flags) for x in wanted} == {(1, 3)}
        assert count == len(wanted)
        self.access[self.pools[pool - 1]] = [x.location.id for x in wanted]
        return (Status.cudaSuccess,)

    def cudaMemPoolTrimTo(self, pool: int, nbytes: int) -> tuple[Status]:
        return self._status("cudaMemPoolTrimTo", self.pools[pool - 1], nbytes)

    def cudaDeviceGraphMemTrim(self, device: int) -> tuple[Status]:
        return self._status("cudaDeviceGraphMemTrim", device)

    def cudaMallocFromPoolAsync(self, nbytes: int, pool: int, stream: int) -> tuple[Status, int]:
        assert self.pools[pool - 1] == self.device
        return self._allocate("cudaMallocFromPoolAsync", nbytes, stream)

    def cudaFreeAsync(self, address: int, stream: int) -> tuple[Status]:
        (status,) = self._status("cudaFreeAsync", address, stream)
        if status == Status.cudaSuccess:
            with self.lock:
                device, _ = self.allocated.pop(address)
            assert device == self.device
        return (status,)

    def cudaMalloc(self, nbytes: int) -> tuple[Status, int]:
        assert self.mode is CaptureMode.cudaStreamCaptureModeRelaxed
        return self._allocate("cudaMalloc", nbytes)

    def _allocate(self, name: str, nbytes: int, *stream: int) -> tuple[Status, int]:
        assert nbytes
        with self.lock:
            used = sum(n for device, n in self.allocated.values() if device == self.device)
            if used + nbytes > self.memory_bytes:
                return Status.cudaErrorMemoryAllocation, 0
            address, self.next_address = self.next_address, self.next_address + nbytes
            self.allocated[address] = (self.device, nbytes)
            self.log.append((name, nbytes, *stream))
        return Status.cudaSuccess, address

    def cudaFree(self, address: int) -> tuple[Status]:
        assert self.mode is CaptureMode.cudaStreamCaptureModeRelaxed
        device, _ = self.allocated.pop(address)
        assert device == self.device
        return self._status("cudaFree", address)

    def cudaDeviceSynchronize(self) -> tuple[Status]:
        assert self.mode is CaptureMode.cudaStreamCaptureModeRelaxed
        return self._status("cudaDeviceSynchronize")

    def cudaStreamIsCapturing(self, stream: int) -> tuple[Status, CaptureStatus]:
        return Status.cudaSuccess, CaptureStatus(stream == CAPTURED)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Status, int]:
        self.streams.append((self.device, flags))
        return Status.cudaSuccess, 100 + len(self.streams)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Status, Event]:
        assert flags == self.cudaEventDisableTiming
        event = Event(self.device)
        self.events.append(event)
        return Status.cudaSuccess, event

    def cudaEventRecord(self, event: Event, stream: int) -> tuple[Status]:
        assert event.device == self.device
        event.stream, event.done = stream, stream not in self.busy
        return self._status("cudaEventRecord", self.device, stream)

    def cudaStreamWaitEvent(self, stream: int, event: Event, flags: int) -> tuple[Status]:
        assert event.device == self.device
        return self._status("cudaStreamWaitEvent", self.device, stream, event.stream)

    def cudaEventQuery(self, event: Event) -> tuple[Status]:
        assert self.mode is CaptureMode.cudaStreamCaptureModeRelaxed
        return (Status.cudaSuccess if event.done else Status.cudaErrorNotReady,)

    def cudaEventSynchronize(self, event: Event) -> tuple[Status]:
        assert self.mode is CaptureMode.cudaStreamCaptureModeRelaxed
        event.done = True
        return self._status("cudaEventSynchronize", event.stream)

    def cudaEventDestroy(self, event: Event) -> tuple[Status]:
        self.events.remove(event)
        return (Status.cudaSuccess,)

    def cudaMemcpyAsync(self, target: int, source: int, n: int, kind: int, stream: int) -> Any:
        return self._status("cudaMemcpyAsync", target, source, n, stream)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    stand_in = Runtime()
    before = use(Libraries(None, None, stand_in, None, stand_in.driver()))
    yield stand_in
    use(before)


@pytest.fixture
def warm(runtime: Runtime) -> Runtime:
    """The pool is there, which cannot be made while capturing."""
    memory._pool(GPU.index)
    return runtime


def test_a_pool_is_not_made_while_capturing(runtime: Runtime) -> None:
    with pytest.raises(BackendError, match=r"memory pool, .* run it once before capturing"):
        memory.temporary(10, 0, CAPTURED)
    assert runtime.pools == []


# -- blocks ---------------------------------------------------------------------------------------


def test_the_module_is_the_provider(runtime: Runtime) -> None:
    provider = device_memory.provider(GPU)
    block = provider.allocate(100, GPU, FIRST)
    assert isinstance(block, memory.Block)
    assert block.address in runtime.allocated


def test_temporary_memory_goes_back_in_the_order_of_its_stream(runtime: Runtime) -> None:
    for n, stream in enumerate((LEGACY, FIRST, CAPTURED), 1):
        with memory.temporary(1000 * n, 0, stream) as address:
            assert address in runtime.allocated
        assert runtime.log == [("cudaMallocFromPoolAsync", 1000 * n, stream), ("cudaFreeAsync", address, stream)]
        runtime.log.clear()
    assert runtime.allocated == {}


def test_what_fails_between_does_not_hide_behind_what_is_given_back(runtime: Runtime) -> None:
    runtime.fails = {"cudaFreeAsync"}
    with pytest.raises(ValueError, match="first"), memory.temporary(10, 0, FIRST):
        raise ValueError("first")
    with pytest.raises(BackendError, match="cudaFreeAsync failed"), memory.temporary(10, 0, FIRST):
        pass
    # Neither is lost.
    assert len(runtime.allocated) == 2
    memory.release()
    assert runtime.allocated == {}


def test_devices_do_not_share_memory(runtime: Runtime) -> None:
    first, second = (memory.allocate(10, device, LEGACY) for device in (GPU, OTHER_GPU))
    assert [runtime.allocated[x.address][0] for x in (first, second)] == [0, 1]
    assert runtime.device == 0
    assert runtime.pools == [0, 1]


def test_no_bytes_have_an_address_too(runtime: Runtime) -> None:
    block = memory.allocate(0, GPU, FIRST)
    assert block.address in runtime.allocated


def test_the_memory_of_a_pool_is_bounded(runtime: Runtime) -> None:
    memory.allocate(10, GPU, FIRST)
    runtime.memory_bytes = 64 << 30
    memory.allocate(10, OTHER_GPU, FIRST)
    assert runtime.keeps == {0: 128 * MIB, 1: 4 << 30}


def test_a_pool_is_open_to_the_devices_that_reach_it(runtime: Runtime) -> None:
    runtime.peers = {(1, 0)}  # device 1 reaches memory on device 0, and not the reverse
    for device in (GPU, OTHER_GPU):
        memory.allocate(10, device, FIRST)
    assert runtime.access == {0: [1]}


def test_a_wait_that_fails_loses_no_bytes(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LIMIT_BYTES", 3 * MIB)
    for _ in range(4):
        memory.allocate(MIB, GPU, FIRST)
    runtime.fails = {"cudaFree"}
    with pytest.raises(BackendError, match="cudaFree failed"):
        memory.allocate(10, GPU, FIRST)
    runtime.fails = set()
    memory.allocate(10, GPU, FIRST)
    memory.allocate(10, GPU, FIRST)  # notes the one before: the limit is still exceeded
    assert len(runtime.allocated) < 4


def test_a_failed_capture_leaves_no_address_to_free(warm: Runtime) -> None:
    warm.fails = {"cudaFreeAsync"}
    with pytest.raises(BackendError, match="cudaFreeAsync failed"), memory.temporary(10, 0, CAPTURED) as address:
        pass
    memory.release()
    assert ("cudaFree", address) not in warm.log


def test_memory_is_found_by_giving_back_what_is_unused(runtime: Runtime) -> None:
    held = memory.allocate(6 * MIB, GPU, FIRST)
    for stream in (FIRST, SECOND):
        memory.allocate(5 * MIB, GPU, stream)
    with memory.temporary(9 * MIB, 0, FIRST) as address:
        assert runtime.allocated.keys() == {held.address, address}
    with pytest.raises(DeviceMemoryError, match=r"cuda:0 has no 12\.0 MiB of memory left"):
        memory.allocate(12 * MIB, GPU, FIRST)


def test_arrays_that_died_wait_for_the_whole_device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LIMIT_BYTES", 3 * MIB)
    addresses = {memory.allocate(MIB, GPU, FIRST).address for _ in range(4)}
    assert runtime.count("cudaMalloc") == 0
    assert runtime.allocated.keys() == addresses
    memory.allocate(10, GPU, SECOND)  # more than the limit: one wait for all four
    names = [entry[0] for entry in runtime.log]
    assert names[4:] == ["cudaMalloc", *["cudaFree"] * 5, "cudaMallocFromPoolAsync"]
    assert runtime.log[5][1] not in addresses  # memory of cudaMalloc, which the device finishes its work for
    assert not addresses & runtime.allocated.keys()


def test_the_device_is_waited_for_where_not_a_byte_is_left(runtime: Runtime) -> None:
    memory.allocate(16 * MIB, GPU, FIRST)
    memory.allocate(10, GPU, FIRST)
    assert runtime.count("cudaDeviceSynchronize") == 1
    assert len(runtime.allocated) == 1


def test_how_many_arrays_wait_is_bounded(runtime: Runtime) -> None:
    for _ in range(memory._MAX_DEAD + 3):
        memory.allocate(1, GPU, FIRST)
    assert runtime.count("cudaMalloc") == 1
    assert len(runtime.allocated) == 2


def test_arrays_that_died_are_given_back_when_memory_runs_out(runtime: Runtime) -> None:
    memory.allocate(10 * MIB, GPU, FIRST)
    block = memory.allocate(12 * MIB, GPU, SECOND)
    names = [entry[0] for entry in runtime.log]
    assert names == [
        "cudaMallocFromPoolAsync",
        "cudaMalloc",
        "cudaFree",
        "cudaFree",
        "cudaMemPoolTrimTo",
        "cudaDeviceGraphMemTrim",
        "cudaMallocFromPoolAsync",
    ]
    assert list(runtime.allocated) == [block.address]


def test_nothing_is_waited_for_while_capturing(warm: Runtime) -> None:
    """Waiting for the device would end the capture."""
    with pytest.raises(DeviceMemoryError, match=r"no 20\.0 MiB"):
        memory.temporary(20 * MIB, 0, CAPTURED)
    assert warm.log == []


def test_arrays_that_died_wait_while_capturing(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the device would end the capture here, too."""
    monkeypatch.setattr(memory, "_LIMIT_BYTES", MIB)
    blocks = [memory.allocate(MIB, GPU, FIRST) for _ in range(2)]
    blocks.clear()
    memory.allocate(10, GPU, CAPTURED)
    assert runtime.count("cudaFree") == 0
    memory.allocate(10, GPU, FIRST)
    assert runtime.count("cudaFree") == 1 + 3


def test_an_array_is_no_part_of_a_graph(warm: Runtime) -> None:
    block = memory.allocate(1000, GPU, CAPTURED)
    assert warm.log == [("cudaMalloc", 1000)]
    del block
    memory.release()
    assert warm.allocated == {}


def test_a_device_without_pools(runtime: Runtime) -> None:
    runtime.has_pools = False
    with memory.temporary(1000, 0, FIRST) as address:
        assert runtime.log == [("cudaMalloc", 1000)]
    assert address in runtime.allocated  # the stream may be at work on it
    with pytest.raises(BackendError, match="cudaDevAttrMemoryPoolsSupported is 0"):
        memory.temporary(1000, 0, CAPTURED)
    memory.release()
    assert runtime.allocated == {}


def test_release_gives_everything_back_but_living_blocks(runtime: Runtime) -> None:
    held = memory.allocate(1000, GPU, FIRST)
    for device in (GPU, OTHER_GPU):
        memory.allocate(1000, device, SECOND)
        memory.order(FIRST, SECOND, device)
    memory.release()
    assert list(runtime.allocated) == [held.address]
    reset()
    assert runtime.events == []
    for device in (0, 1):
        assert ("cudaMemPoolTrimTo", device, 0) in runtime.log
        assert ("cudaDeviceGraphMemTrim", device) in runtime.log


def test_blocks_of_another_runtime_stay_out(runtime: Runtime) -> None:
    block = memory.allocate(1000, GPU, FIRST)
    other = Runtime()
    before = use(Libraries(None, None, other, None, other.driver()))
    try:
        del block
        memory.allocate(1000, GPU, FIRST)
        memory.release()
    finally:
        use(before)
    assert len(runtime.allocated) == 1


def test_blocks_from_many_threads(runtime: Runtime) -> None:
    in_use: set[int] = set()
    lock = threading.Lock()

    def work(stream: int) -> None:
        for n in range(200):
            blocks = [memory.allocate(x, GPU, stream) for x in (n * 8, 64)]
            addresses = {x.address for x in blocks}
            with lock:
                assert len(addresses) == 2
                assert not in_use & addresses
                in_use.update(addresses)
            with lock:
                in_use.difference_update(addresses)
                del blocks

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, [FIRST] * 8))
    finally:
        sys.setswitchinterval(interval)
    memory.release()
    assert runtime.allocated == {}


def test_a_block_may_die_inside_the_pools_lock(runtime: Runtime) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self
            self.block = memory.allocate(1000, GPU, FIRST)

    pool = memory._pool(GPU.index)
    cycle = Cycle()
    address = cycle.block.address
    del cycle
    with pool.lock:
        gc.collect()
    memory.release()
    assert address not in runtime.allocated


# -- order ----------------------------------------------------------------------------------------


def test_one_stream_waits_for_another(runtime: Runtime) -> None:
    memory.order(LEGACY, FIRST, OTHER_GPU)
    assert runtime.log == [("cudaEventRecord", 1, LEGACY), ("cudaStreamWaitEvent", 1, FIRST, LEGACY)]
    memory.order(FIRST, FIRST, GPU)
    assert len(runtime.log) == 2
    assert runtime.device == 0


def test_events_are_used_again(runtime: Runtime) -> None:
    for _ in range(10):
        memory.order(FIRST, SECOND, GPU)
        memory.order(SECOND, FIRST, GPU)
    assert len(runtime.events) == 1


@pytest.mark.parametrize("function", ["cudaEventRecord", "cudaStreamWaitEvent"])
def test_a_join_that_fails_is_reported_and_loses_no_event(runtime: Runtime, function: str) -> None:
    runtime.fails = {function}
    with pytest.raises(BackendError, match=f"{function} failed with cudaErrorLaunchFailure"):
        memory.order(FIRST, SECOND, GPU)
    runtime.fails = set()
    memory.order(FIRST, SECOND, GPU)
    assert len(runtime.events) == 1


def test_a_device_has_one_stream_of_lowprecs(runtime: Runtime) -> None:
    streams = [memory.own_stream(device) for device in (GPU, OTHER_GPU, GPU, OTHER_GPU)]
    assert streams[:2] == streams[2:]
    assert runtime.streams == [(0, runtime.cudaStreamNonBlocking), (1, runtime.cudaStreamNonBlocking)]


def test_a_copy_of_nothing_is_none(runtime: Runtime) -> None:
    memory.copy(1, 2, 0, GPU, FIRST)
    memory.copy(1, 2, 30, GPU, FIRST)
    assert runtime.log == [("cudaMemcpyAsync", 2, 1, 30, FIRST)]


# -- what is held ---------------------------------------------------------------------------------


class Owner:
    """Stands for a capsule."""


def owners_and_count() -> tuple[list[Owner], Any]:
    owners = [Owner(), Owner()]
    alive = weakref.WeakSet(owners)
    return owners, lambda: len(alive)


def test_owners_are_held_until_their_work_is_done(runtime: Runtime) -> None:
    runtime.busy = {FIRST}
    owners, alive = owners_and_count()
    memory.keep(owners, FIRST, GPU)
    del owners
    memory.release_finished()
    assert alive() == 2
    runtime.finish(FIRST)
    assert alive() == 2  # nothing has looked yet
    memory.release_finished()
    assert alive() == 0
    assert len(runtime.events) == 1


def test_a_slow_stream_does_not_hold_up_another(runtime: Runtime) -> None:
    runtime.busy = {FIRST}
    slow, slow_alive = owners_and_count()
    fast, fast_alive = owners_and_count()
    memory.keep(slow, FIRST, GPU)
    memory.keep(fast, SECOND, GPU)
    del slow, fast
    assert (slow_alive(), fast_alive()) == (2, 0)


def test_how_much_is_held_is_bounded(runtime: Runtime) -> None:
    runtime.busy = {FIRST}
    counts = []
    for _ in range(70):
        owners, alive = owners_and_count()
        memory.keep(owners, FIRST, GPU)
        counts.append(alive)
        del owners
    assert sum(count() for count in counts) == 2 * memory._MAX_KEPT
    assert [count() for count in counts[:6]] == [0] * 6
    assert runtime.count("cudaEventSynchronize") == 6


def test_operands_of_a_graph_are_held(runtime: Runtime) -> None:
    owners, alive = owners_and_count()
    memory.keep(owners, CAPTURED, GPU)
    del owners
    memory.release()
    assert alive() == 2
    assert runtime.events == []


def test_owners_are_held_where_nothing_can_report_the_end(runtime: Runtime) -> None:
    runtime.fails = {"cudaEventRecord"}
    owners, alive = owners_and_count()
    with pytest.raises(BackendError, match="cudaEventRecord failed"):
        memory.keep(owners, FIRST, GPU)
    del owners
    memory.release_finished()
    assert alive() == 2


def test_letting_go_may_come_back_to_the_pool(runtime: Runtime) -> None:
    class Nested:
        def __del__(self) -> None:
            free.append(not lock._is_owned())

    free: list[bool] = []
    lock = memory._pool(GPU.index).lock
    runtime.busy = {FIRST}
    memory.keep([Nested()], FIRST, GPU)
    runtime.finish(FIRST)
    memory.release_finished()
    assert free == [True]


def test_release_waits_for_work(runtime: Runtime) -> None:
    runtime.busy = {FIRST}
    owners, alive = owners_and_count()
    memory.keep(owners, FIRST, GPU)
    del owners
    memory.release()
    assert alive() == 0
    assert runtime.count("cudaEventSynchronize") == 1


def test_the_end_of_the_process_is_quiet() -> None:
    """In its own process: blocks and owners that are alive at the end, some of them in cycles."""
    code = f"""
import runpy, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from lowprec.arrays import Device
from lowprec.backends.cuda import memory
from lowprec.backends.cuda.libraries import Libraries, use
runtime = runpy.run_path({__file__!r})["Runtime"]()
use(Libraries(None, None, runtime, None, runtime.driver()))
class Owner:
    def __del__(self): print("finalizing:", sys.is_finalizing(), flush=True)
class Cycle: pass
cycle = Cycle(); cycle.itself = cycle; cycle.block = memory.allocate(10, Device(2, 0), 11)
sys.kept = memory.allocate(10, Device(2, 0), 11)
runtime.busy = {{11}}
memory.keep([Owner()], 11, Device(2, 0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finalizing: False\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    """In its own process: another thread lets go of operands, with the pool's lock, while the process is forked."""
    code = f"""
import os, sys, threading
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import software_cuda
from lowprec.arrays import Device
from lowprec.backends.cuda import memory
software_cuda.install()
device = Device(2, 0)
memory.keep([object()], 1, device)
(pool,) = memory._pools.values()
taken, leave = threading.Event(), threading.Event()
def hold():
    with pool.lock:
        taken.set()
        leave.wait()
thread = threading.Thread(target=hold)
thread.start()
taken.wait()
child = os.fork()
if not child:
    memory.keep([object()], 1, device)
    os._exit(0)
_, status = os.waitpid(child, 0)
leave.set()
thread.join()
print(os.waitstatus_to_exitcode(status))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
