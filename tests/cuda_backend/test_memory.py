"""The pool of device memory: when memory is reused, how long objects are held, and the state after a failure."""

import contextlib
import weakref
from pathlib import Path

import pytest

from cuda_backend.cuda_reset import reset
from lowprec.arrays import Device
from lowprec.backends.cuda import memory
from lowprec.errors import BackendError, DeviceMemoryError
from software_cuda import DeviceModel, Software
from software_cuda.streams import nothing
from support.programs import run_python

GPU, OTHER_GPU = Device(2, 0), Device(2, 1)
LEGACY = 1
MIB = 1 << 20
#: The functions that allocate, free, or wait.
OF_MEMORY = (
    "cudaMalloc", "cudaFree", "cudaMallocFromPoolAsync", "cudaFreeAsync", "cudaMemPoolTrimTo",
    "cudaDeviceGraphMemTrim", "cudaDeviceSynchronize", "cudaEventSynchronize",
)  # fmt: skip


class Small(Software):
    """Two devices with 16 MiB each, and two streams of device 0."""

    first: int
    second: int

    def logged(self, *functions):
        """Return the calls of some functions with their arguments, by default those for memory."""
        return [x for x in self.recorder.log if x[0] in (functions or OF_MEMORY)]

    def names(self):
        return [name for name, *_ in self.logged()]

    def addresses(self):
        """Return the addresses of the allocated memory, after all work."""
        self.drain()
        return [x.address for x in self.runtime.memory.live()]

    def keep_busy(self, stream):
        """Queue work that polling an event does not finish."""
        for _ in range(500):
            self.runtime.enqueue(self.runtime.stream(stream), "work", nothing)

    @contextlib.contextmanager
    def captured(self):
        """A stream that is being captured, in the strictest mode."""
        stream = int(self.runtime.cudaStreamCreateWithFlags(1)[1])
        self.runtime.begin_capture(stream)
        yield stream
        self.runtime.end_capture(stream)


@pytest.fixture
def fresh(software):
    cuda = software.software
    cuda.__class__ = Small
    cuda.runtime.memory.limits[:] = [16 * MIB] * 2
    cuda.first, cuda.second = (int(cuda.runtime.cudaStreamCreateWithFlags(1)[1]) for _ in range(2))
    return cuda


@pytest.fixture
def cuda(fresh):
    """The pool exists, which cannot be made while capturing."""
    memory._pool(GPU.index)
    fresh.recorder.log.clear()
    return fresh


def test_a_pool_is_not_made_while_capturing(fresh):
    with (
        fresh.captured() as stream,
        pytest.raises(BackendError, match=r"memory pool, .* run it once before capturing"),
    ):
        memory.temporary(10, 0, stream)
    assert fresh.runtime.pools == {}


# -- blocks ---------------------------------------------------------------------------------------


def test_temporary_memory_is_freed_in_the_order_of_its_stream(cuda):
    with cuda.captured() as captured:
        for n, stream in enumerate((LEGACY, cuda.first, captured), 1):
            with memory.temporary(1000 * n, 0, stream) as address:
                pass
            allocated, freed = cuda.logged()
            assert (allocated[0], allocated[1], allocated[3]) == (
                "cudaMallocFromPoolAsync",
                1000 * n,
                stream,
            )
            assert freed == ("cudaFreeAsync", address, stream)
            cuda.recorder.log.clear()
    assert cuda.addresses() == []


def test_errors_of_the_work_and_of_freeing(cuda):
    """A failure to free does not replace the error of the work, and its memory is not freed twice."""
    with (
        cuda.fail("cudaFreeAsync"),
        pytest.raises(ValueError, match="first"),
        memory.temporary(10, 0, cuda.first),
    ):
        raise ValueError("first")
    with (
        cuda.fail("cudaFreeAsync"),
        pytest.raises(BackendError, match="cudaFreeAsync failed"),
        memory.temporary(10, 0, cuda.first),
    ):
        pass
    with memory.temporary(10, 0, cuda.first) as address:
        memory.release()
        assert cuda.addresses() == [address]
    assert ("cudaFree", address) not in cuda.logged()


def test_a_pool_is_bounded(fresh, monkeypatch):
    memory.allocate(10, GPU, LEGACY)
    monkeypatch.setattr(memory, "_LIMIT_SHARE", 2)
    memory.allocate(10, OTHER_GPU, LEGACY)
    assert [(x.device, x.threshold) for x in fresh.runtime.pools.values()] == [
        (0, 128 * MIB),
        (1, 512 * MIB),
    ]


@pytest.mark.parametrize("setting", ["0", "1"])
def test_results_are_open_to_other_devices_on_request(cuda, monkeypatch, setting):
    """The software has no cudaMemPoolSetAccess: it is slow (openxla/xla 19431) and unreliable (CUDA.jl 3112)."""
    monkeypatch.setenv("LOWPREC_PEER_ACCESS", setting)
    memory.allocate(10, GPU, cuda.first)
    with memory.temporary(10, 0, cuda.first):
        pass
    allocated = [name for name in cuda.names() if "Malloc" in name]
    assert allocated == [
        ["cudaMallocFromPoolAsync", "cudaMalloc"][int(setting)],
        "cudaMallocFromPoolAsync",
    ]
    memory.release()
    assert cuda.addresses() == []


def test_a_wait_that_fails_loses_no_bytes(cuda, monkeypatch):
    monkeypatch.setattr(memory._pool(0), "_limit", 3 * MIB)
    for _ in range(4):
        memory.allocate(MIB, GPU, cuda.first)
    with (
        cuda.fail("cudaEventSynchronize"),
        pytest.raises(BackendError, match="cudaEventSynchronize failed"),
    ):
        memory.allocate(10, GPU, cuda.first)
    memory.allocate(10, GPU, cuda.first)
    memory.allocate(10, GPU, cuda.first)  # counts the one before: the limit is still exceeded
    assert len(cuda.addresses()) < 4


def test_after_a_failed_capture_its_memory_is_not_freed(cuda):
    with cuda.captured() as stream:
        temporary = memory.temporary(10, 0, stream)
        address = temporary.address
        with (
            cuda.fail("cudaFreeAsync"),
            pytest.raises(BackendError, match="cudaFreeAsync failed"),
            temporary,
        ):
            pass
    memory.release()
    assert ("cudaFree", address) not in cuda.logged()


@pytest.fixture
def three_mib(cuda, monkeypatch):
    """At most 3 MiB may be dead on device 0."""
    monkeypatch.setattr(memory._pool(0), "_limit", 3 * MIB)
    return cuda


def test_dead_arrays_are_freed_after_one_wait_for_their_streams(three_mib):
    cuda = three_mib
    block = memory.allocate(MIB, GPU, cuda.first)
    block.used_on(cuda.second)
    addresses = {block.address, *(memory.allocate(MIB, GPU, cuda.first).address for _ in range(3))}
    del block
    assert cuda.names() == ["cudaMallocFromPoolAsync"] * 4
    cuda.recorder.log.clear()
    third = int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])
    memory.allocate(10, GPU, third)  # more than the limit is dead
    assert cuda.names() == [
        *["cudaEventSynchronize"] * 2,
        *["cudaFree"] * 4,
        "cudaMallocFromPoolAsync",
    ]
    assert {x[2] for x in cuda.logged("cudaEventRecord")} == {cuda.first, cuda.second}
    assert not addresses & set(cuda.addresses())


@pytest.mark.parametrize(
    "stream", [0, 2, -1], ids=["unknown", "another one in each thread", "none"]
)
def test_the_device_is_synchronised_for_streams_that_are_not_known(three_mib, stream):
    cuda, address = three_mib, 0
    for _ in range(4):
        block = memory.allocate(MIB, GPU, cuda.first)
        block.used_on(stream)
        address = block.address
        del block
    memory.allocate(10, GPU, cuda.first)
    assert cuda.names().count("cudaDeviceSynchronize") == 1
    assert address not in cuda.addresses()


def test_the_device_is_synchronised_for_a_stream_that_was_destroyed(three_mib):
    cuda = three_mib
    for _ in range(4):
        memory.allocate(MIB, GPU, cuda.first).used_on(cuda.second)
    found = cuda.runtime.streams.pop(cuda.second)
    memory.allocate(10, GPU, cuda.first)
    assert cuda.names().count("cudaDeviceSynchronize") == 1
    assert cuda.faults.pop() == f"{cuda.second:#x} is no stream"
    cuda.runtime.streams[cuda.second] = found


def test_memory_of_a_captured_stream_is_freed_later(three_mib):
    """An event on it would be part of the graph, and a synchronisation of the device would end the capture."""
    cuda = three_mib
    with cuda.captured() as stream:
        blocks = [memory.allocate(2 * MIB, GPU, x) for x in (cuda.first, cuda.second, cuda.second)]
        blocks[1].used_on(stream)
        blocks[2].used_on(0)
        first, *others = [x.address for x in blocks]
        del blocks
        memory.allocate(10, GPU, cuda.first)
        assert first not in cuda.addresses()
        assert set(others) <= set(cuda.addresses())
    memory.allocate(10, GPU, cuda.first)
    assert not set(others) & set(cuda.addresses())


def test_the_number_of_dead_arrays_is_bounded(cuda, monkeypatch):
    monkeypatch.setattr(memory, "_MAX_DEAD", 10)
    for _ in range(13):
        memory.allocate(1, GPU, cuda.first)
    assert cuda.names().count("cudaEventSynchronize") == 1
    assert len(cuda.addresses()) == 2


def test_the_device_is_not_waited_for_while_capturing(cuda, monkeypatch):
    """It would end the capture."""
    monkeypatch.setattr(memory._pool(0), "_limit", MIB)
    for _ in range(2):
        memory.allocate(MIB, GPU, cuda.first)
    with cuda.captured() as stream:
        with (
            cuda.fail("cudaMallocFromPoolAsync"),
            pytest.raises(DeviceMemoryError, match=r"less than 20\.0 MiB"),
        ):
            memory.temporary(20 * MIB, 0, stream)
        memory.allocate(10, GPU, stream)
    assert "cudaFree" not in cuda.names()
    memory.allocate(10, GPU, cuda.first)
    assert cuda.names().count("cudaFree") == 3
    assert "cudaDeviceSynchronize" not in cuda.names()


def test_an_array_is_no_part_of_a_graph(cuda):
    with cuda.captured() as stream:
        block = memory.allocate(1000, GPU, stream)
    assert cuda.logged() == [("cudaMalloc", 1000)]
    del block
    memory.release()
    assert cuda.addresses() == []


def test_a_device_without_pools(fresh):
    fresh.runtime.devices = (DeviceModel(has_pools=False),) * 2
    with memory.temporary(1000, 0, fresh.first) as address:
        assert fresh.logged() == [("cudaMalloc", 1000)]
    assert address in fresh.addresses()  # the stream may be using it
    with (
        fresh.captured() as stream,
        pytest.raises(BackendError, match="cudaDevAttrMemoryPoolsSupported is 0"),
    ):
        memory.temporary(1000, 0, stream)
    memory.release()
    assert fresh.addresses() == []


def test_release_frees_all_but_living_blocks(cuda):
    held = memory.allocate(1000, GPU, cuda.first)
    for device in (GPU, OTHER_GPU):
        memory.allocate(1000, device, LEGACY)
        memory.order(LEGACY, memory.own_stream(device), device)
    memory.release()
    assert cuda.addresses() == [held.address]
    reset()
    assert cuda.live()["events"] == 0
    pools = list(cuda.runtime.pools)
    assert {(int(x[1]), x[2]) for x in cuda.logged("cudaMemPoolTrimTo")} == {(x, 0) for x in pools}
    assert {x[1] for x in cuda.logged("cudaDeviceGraphMemTrim")} == {0, 1}


# -- order ----------------------------------------------------------------------------------------


def test_one_stream_waits_for_another(cuda):
    own = memory.own_stream(OTHER_GPU)
    memory.order(LEGACY, own, OTHER_GPU)
    recorded, waited = cuda.logged("cudaEventRecord", "cudaStreamWaitEvent")
    assert recorded[2] == LEGACY
    assert (waited[1], waited[2]) == (own, recorded[1])
    assert cuda.runtime.event(recorded[1]).device == 1
    memory.order(own, own, GPU)
    for _ in range(10):
        memory.order(own, LEGACY, OTHER_GPU)
    assert cuda.live()["events"] == 1  # used again
    assert len(cuda.logged("cudaEventRecord")) == 11
    assert cuda.runtime.device == 0


@pytest.mark.parametrize("function", ["cudaEventRecord", "cudaStreamWaitEvent"])
def test_a_join_that_fails_is_reported_and_loses_no_event(cuda, function):
    status = cuda.runtime.cudaError_t.cudaErrorLaunchFailure
    with (
        cuda.fail(function, status=status),
        pytest.raises(BackendError, match=f"{function} failed with cudaErrorLaunchFailure"),
    ):
        memory.order(cuda.first, cuda.second, GPU)
    memory.order(cuda.first, cuda.second, GPU)
    assert cuda.live()["events"] == 1


# -- held objects ---------------------------------------------------------------------------------


class Owner:
    """Replaces a capsule."""


def owners_and_count():
    owners = [Owner(), Owner()]
    alive = weakref.WeakSet(owners)
    return owners, lambda: len(alive)


def test_owners_are_held_until_their_work_is_done(cuda):
    cuda.keep_busy(cuda.first)
    slow, slow_alive = owners_and_count()
    fast, fast_alive = owners_and_count()
    memory.keep(slow, cuda.first, GPU)
    memory.keep(fast, cuda.second, GPU)
    del slow, fast
    assert memory.release_finished()  # a slow stream does not delay another
    assert cuda.runtime.cudaGetLastError() == (0,), (
        "another library would find that an event is not ready"
    )
    assert (slow_alive(), fast_alive()) == (2, 0)
    cuda.drain()
    assert slow_alive() == 2
    assert not memory.release_finished()
    assert slow_alive() == 0


def test_the_number_of_held_objects_is_bounded(cuda):
    cuda.keep_busy(cuda.first)
    counts = []
    for _ in range(memory._MAX_KEPT + 6):
        owners, alive = owners_and_count()
        cuda.keep_busy(cuda.first)
        memory.keep(owners, cuda.first, GPU)
        counts.append(alive)
        del owners
    assert [count() for count in counts] == [0] * 6 + [2] * memory._MAX_KEPT
    assert cuda.count("cudaEventSynchronize") == 6


def test_operands_of_a_graph_are_held(cuda):
    owners, alive = owners_and_count()
    with cuda.captured() as stream:
        memory.keep(owners, stream, GPU)
    del owners
    memory.release()
    assert alive() == 2
    assert cuda.live()["events"] == 0


def test_owners_are_held_where_no_event_can_be_recorded(cuda):
    owners, alive = owners_and_count()
    with cuda.fail("cudaEventRecord"), pytest.raises(BackendError, match="cudaEventRecord failed"):
        memory.keep(owners, cuda.first, GPU)
    del owners
    memory.release_finished()
    assert alive() == 2


def test_operands_released_by_another_thread_meanwhile(cuda, monkeypatch):
    events = memory._pool(GPU.index).events
    cuda.keep_busy(cuda.first)
    memory.keep([object()], cuda.first, GPU)
    cuda.drain()

    def release_first(event):
        monkeypatch.undo()
        return not memory.release_finished()

    monkeypatch.setattr(memory.runtime, "event_is_done", release_first)
    memory.release_finished()
    assert len(events) == 1


# -- processes ------------------------------------------------------------------------------------


def test_the_end_of_the_process_is_quiet():
    """Blocks and owners are alive at the end, some of them in cycles."""
    code = """
        import sys
        import software_cuda
        from lowprec.arrays import Device
        from lowprec.backends.cuda import memory

        class Owner:
            def __del__(self): print("finalizing:", sys.is_finalizing(), flush=True)
        class Cycle: pass

        software_cuda.install()
        device = Device(2, 0)
        memory._waiter.stop()
        cycle = Cycle(); cycle.itself = cycle; cycle.block = memory.allocate(10, device, 1)
        sys.kept = memory.allocate(10, device, 1)
        memory.keep([Owner()], 1, device)
    """
    assert (
        run_python(code, warn="ignore", PYTHONPATH=str(Path(__file__).parents[1]))
        == "finalizing: False"
    )
