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
from typing import Any

import pytest

from lowprec.arrays import Device, device_memory
from lowprec.backends.cuda import memory
from lowprec.backends.cuda.libraries import Libraries, use
from lowprec.errors import BackendError, DeviceMemoryError

GPU, OTHER_GPU = Device(2, 0), Device(2, 1)
LEGACY, FIRST, SECOND, CAPTURED = 1, 11, 12, 13
MIB = 1 << 20


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorNotReady = 600
    cudaErrorLaunchFailure = 719


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
    cudaDeviceAttr = types.SimpleNamespace(cudaDevAttrClockRate=13)
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
        return Status.cudaSuccess, 1

    def cudaThreadExchangeStreamCaptureMode(self, mode: CaptureMode) -> tuple[Status, CaptureMode]:
        before, self.mode = self.mode, mode
        return Status.cudaSuccess, before

    def cudaMalloc(self, nbytes: int) -> tuple[Status, int]:
        assert self.mode is CaptureMode.cudaStreamCaptureModeRelaxed
        used = sum(n for device, n in self.allocated.values() if device == self.device)
        if used + nbytes > self.memory_bytes:
            return Status.cudaErrorMemoryAllocation, 0
        address, self.next_address = self.next_address, self.next_address + nbytes
        self.allocated[address] = (self.device, nbytes)
        self.log.append(("cudaMalloc", nbytes))
        return Status.cudaSuccess, address

    def cudaFree(self, address: int) -> tuple[Status]:
        assert self.mode is CaptureMode.cudaStreamCaptureModeRelaxed
        device, _ = self.allocated.pop(address)
        assert device == self.device
        return self._status("cudaFree", address)

    def cudaDeviceSynchronize(self) -> tuple[Status]:
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
    before = use(Libraries(None, None, stand_in, None))
    yield stand_in
    use(before)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LIMIT_BYTES", 1 * MIB)


# -- blocks ---------------------------------------------------------------------------------------


def test_the_module_is_the_provider(runtime: Runtime) -> None:
    provider = device_memory.provider(GPU)
    block = provider.allocate(100, GPU, FIRST)
    assert isinstance(block, memory.Block)
    assert block.address in runtime.allocated


def test_a_block_is_reused_on_its_own_stream_only(runtime: Runtime) -> None:
    block = memory.allocate(1000, GPU, FIRST)
    address = block.address
    assert memory.allocate(1000, GPU, FIRST).address != address  # it is alive
    del block
    assert memory.allocate(1000, GPU, SECOND).address != address
    again = memory.allocate(1024, GPU, FIRST)
    assert again.address == address
    assert memory.allocate(1024, GPU, FIRST).address != address
    assert memory.allocate(1025, GPU, FIRST).address != address


def test_devices_do_not_share_memory(runtime: Runtime) -> None:
    first, second = (memory.allocate(10, device, LEGACY) for device in (GPU, OTHER_GPU))
    assert [runtime.allocated[x.address][0] for x in (first, second)] == [0, 1]
    address = first.address
    del first
    assert memory.allocate(10, OTHER_GPU, LEGACY).address != address
    assert runtime.device == 0


def test_no_bytes_have_an_address_too(runtime: Runtime) -> None:
    assert memory.allocate(0, GPU, FIRST).address in runtime.allocated


@pytest.mark.parametrize("nbytes", [0, 1, 511, 512, 513, 4097, 1_000_000, MIB, MIB + 1, 3 << 30])
def test_sizes_waste_little(nbytes: int) -> None:
    size = memory._rounded(nbytes)
    assert size % 512 == 0
    assert nbytes <= size <= max(nbytes + 512, nbytes * 9 / 8)


def test_few_sizes_serve_many(runtime: Runtime) -> None:
    assert len({memory._rounded(n) for n in range(MIB + 1, 2 * MIB, 997)}) == 8


@pytest.mark.usefixtures("small_limit")
def test_what_is_unused_is_bounded_and_the_oldest_goes_first(runtime: Runtime) -> None:
    blocks = [memory.allocate(n * 1024, GPU, FIRST) for n in (400, 500, 600)]
    addresses = [x.address for x in blocks]
    while blocks:
        del blocks[0]
    memory.allocate(10, GPU, FIRST)
    assert [x in runtime.allocated for x in addresses] == [False, False, True]


def test_memory_is_found_by_giving_back_what_is_unused(runtime: Runtime) -> None:
    held = memory.allocate(6 * MIB, GPU, FIRST)
    for stream in (FIRST, SECOND):
        memory.allocate(5 * MIB, GPU, stream)
    assert memory.allocate(9 * MIB, GPU, FIRST).address in runtime.allocated
    assert held.address in runtime.allocated
    with pytest.raises(DeviceMemoryError, match=r"cuda:0 has no 12\.0 MiB of memory left"):
        memory.allocate(12 * MIB, GPU, FIRST)


def test_shared_blocks_wait_for_the_whole_device(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_LIMIT_BYTES", 3 * MIB)
    seen = set()
    for _ in range(3):
        block = memory.allocate(MIB, GPU, FIRST)
        block.share()
        seen.add(block.address)
        del block
    assert len(seen) == 3
    assert runtime.count("cudaDeviceSynchronize") == 0
    fourth = memory.allocate(MIB, GPU, FIRST)
    assert fourth.address not in seen
    fourth.share()
    del fourth  # more than the limit: the next call waits, once, and all four are free
    assert memory.allocate(10, GPU, SECOND)
    assert runtime.count("cudaDeviceSynchronize") == 1
    assert memory.allocate(MIB, GPU, FIRST).address in seen


def test_shared_blocks_are_given_back_when_memory_runs_out(runtime: Runtime) -> None:
    block = memory.allocate(10 * MIB, GPU, FIRST)
    block.share()
    del block
    assert memory.allocate(12 * MIB, GPU, SECOND)
    names = [entry[0] for entry in runtime.log]
    assert names == ["cudaMalloc", "cudaDeviceSynchronize", "cudaFree", "cudaMalloc"]


def test_memory_of_a_graph_is_never_reused_nor_freed(runtime: Runtime) -> None:
    memory.allocate(1000, GPU, CAPTURED)
    (address,) = runtime.allocated
    assert memory.allocate(1000, GPU, CAPTURED).address != address
    assert memory.allocate(1000, GPU, FIRST).address != address
    memory.release()
    assert address in runtime.allocated
    assert len(runtime.allocated) == 2


def test_release_gives_everything_back_but_living_blocks(runtime: Runtime) -> None:
    held = memory.allocate(1000, GPU, FIRST)
    for device in (GPU, OTHER_GPU):
        memory.allocate(1000, device, SECOND)
        memory.order(FIRST, SECOND, device)
    shared = memory.allocate(1000, GPU, FIRST)
    shared.share()
    del shared
    memory.release()
    assert list(runtime.allocated) == [held.address]
    assert runtime.events == []
    address = held.address
    del held
    assert memory.allocate(1000, GPU, FIRST).address == address


def test_blocks_of_another_runtime_stay_out(runtime: Runtime) -> None:
    block = memory.allocate(1000, GPU, FIRST)
    before = use(Libraries(None, None, Runtime(), None))
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

    pool = memory._pool(GPU)
    cycle = Cycle()
    address = cycle.block.address
    del cycle
    with pool._lock:
        gc.collect()
    assert memory.allocate(1000, GPU, FIRST).address == address


# -- order ----------------------------------------------------------------------------------------


def test_one_stream_waits_for_another(runtime: Runtime) -> None:
    memory.order(LEGACY, FIRST, OTHER_GPU)
    assert runtime.log == [
        ("cudaEventRecord", 1, LEGACY),
        ("cudaStreamWaitEvent", 1, FIRST, LEGACY),
    ]
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
    assert runtime.streams == [
        (0, runtime.cudaStreamNonBlocking),
        (1, runtime.cudaStreamNonBlocking),
    ]


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


def test_what_a_graph_reads_is_held_for_good(runtime: Runtime) -> None:
    owners, alive = owners_and_count()
    memory.keep(owners, CAPTURED, GPU)
    del owners
    memory.release()
    assert alive() == 2
    assert runtime.events == []


def test_owners_are_held_where_nothing_can_tell_the_end(runtime: Runtime) -> None:
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
    lock = memory._pool(GPU)._lock
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
from lowprec.arrays import Device
from lowprec.backends.cuda import memory
from lowprec.backends.cuda.libraries import Libraries, use
runtime = runpy.run_path({__file__!r})["Runtime"]()
use(Libraries(None, None, runtime, None))
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
import os, runpy, threading
from lowprec.arrays import Device
from lowprec.backends.cuda import memory
from lowprec.backends.cuda.libraries import Libraries, use
use(Libraries(None, None, runpy.run_path({__file__!r})["Runtime"](), None))
pool = memory._pool(Device(2, 0))
taken, leave = threading.Event(), threading.Event()
def hold():
    with pool._lock:
        taken.set()
        leave.wait()
thread = threading.Thread(target=hold)
thread.start()
taken.wait()
child = os.fork()
if not child:
    memory.allocate(10, Device(2, 0), 11)
    os._exit(0)
_, status = os.waitpid(child, 0)
leave.set()
thread.join()
print(os.waitstatus_to_exitcode(status))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
