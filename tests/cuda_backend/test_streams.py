"""Whole products in the order of their arrays' libraries: nothing is read too early, nothing freed too soon.

The software CUDA runs work only when it is waited for, and poisons the memory of unreachable arrays at once: a missing
wait shows as a wrong number.
"""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import draw
from lowprec.arrays.dlpack import import_array
from lowprec.backends.cuda import memory
from lowprec.core import executors
from lowprec.errors import BackendError
from software_cuda.arrays import DeviceArray, read
from support import oracles

A, B = draw(0, 24, 24), draw(1, 24, 24)
TRUE = oracles.product(A, B)


# -- every order that the streams allow -----------------------------------------------------------

ORDERS = ["lazy", "all", 0, 1, 2]
MODES = ["fp32", "bf16", "fp16"]  # operands as they are; packed; packed, with the product staged
each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(params=ORDERS)
def ordered(software, request):
    """The software CUDA in use by lowprec, with one of the orders."""
    software.software.runtime.scheduler.use(request.param)
    return software.software


@each_mode
def test_arrays_known_only_by_dlpack(ordered, mode):
    for device in (0, 1, 0):
        x, y = ordered.array(A, device=device), ordered.array(B, device=device)
        found = lowprec.matmul(x, y, math_mode=mode)
        del x, y  # operands that are being read must be held
        gc.collect()
        np.testing.assert_array_equal(ordered.read(found), TRUE)


@each_mode
def test_out_of_a_library_that_reports_no_stream(ordered, mode):
    """It is written in the order of the default stream."""
    out = ordered.array(np.ones_like(A))
    assert (
        lowprec.matmul(ordered.array(A), ordered.array(B), out=out, c=out, beta=2.0, math_mode=mode)
        is out
    )
    np.testing.assert_array_equal(out.to_numpy(), TRUE + 2)


@each_mode
def test_streams_of_cupy_and_an_array_of_another_library(ordered, cupy, mode):
    results = []
    streams = [cupy.cuda.Stream() for _ in range(3)]
    for turn, own in enumerate(streams):
        with own:
            x, bias = cupy.asarray(A + turn), ordered.array(np.ones(24, np.float32))
            x = lowprec.matmul(x, cupy.asarray(np.eye(24, dtype=np.float32)), math_mode=mode)
            results.append(
                lowprec.matmul(x, ordered.array(B), bias=bias, activation="relu", math_mode=mode)
            )
            del x, bias
    gc.collect()
    for turn, (own, found) in enumerate(zip(streams, results, strict=True)):
        with own:
            np.testing.assert_array_equal(cupy.asnumpy(found), np.maximum((A + turn) @ B + 1, 0))


@pytest.fixture
def freed_at_once(software, monkeypatch):
    """The next allocation frees the memory of dead arrays, however little it is."""
    monkeypatch.setattr(memory, "_LIMIT_BYTES", 0)
    monkeypatch.setattr(memory, "_LIMIT_SHARE", 1 << 40)
    memory._pools.clear()


@pytest.mark.usefixtures("freed_at_once")
def test_memory_that_another_library_reads_is_not_reused(ordered, monkeypatch):
    """The library has released the array on the host, before its stream has read it."""
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    runtime = ordered.runtime
    reader = int(runtime.cudaStreamCreateWithFlags(1)[1])
    x, y = ordered.array(A), ordered.array(B)
    found = lowprec.matmul(x, y)
    view = import_array(found, reader)
    target = runtime.cudaMalloc(view.nbytes)[1]
    runtime.cudaMemcpyAsync(target, view.address, view.nbytes, 4, reader)
    del found, view
    gc.collect()
    for _ in range(3):
        lowprec.matmul(x, y, alpha=2.0)
        runtime.cudaStreamSynchronize(1)
    runtime.cudaStreamSynchronize(reader)
    read = runtime.memory.at(target, 4 * TRUE.size, 0, "").view(np.float32).reshape(TRUE.shape)
    np.testing.assert_array_equal(read, TRUE)
    assert ordered.count("cudaFree") > 0
    assert ordered.count("cudaDeviceSynchronize") == 0


@pytest.mark.usefixtures("freed_at_once")
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16x3"])
def test_a_prepared_operand_may_go_while_the_product_waits(ordered, cupy, mode):
    with cupy.cuda.Stream():
        prepared = lowprec.prepare(cupy.asarray(B), math_mode=mode)
        lowprec.matmul(cupy.asarray(A), prepared, math_mode=mode)
    with cupy.cuda.Stream():
        found = lowprec.matmul(cupy.asarray(A), prepared, math_mode=mode)
        del prepared
        gc.collect()
        lowprec.matmul(ordered.array(A), ordered.array(B))
        np.testing.assert_array_equal(cupy.asnumpy(found), TRUE)
    assert ordered.count("cudaFree") > 0
    assert ordered.count("cudaDeviceSynchronize") == 0


@each_mode
@pytest.mark.parametrize("ptds", [False, True])
def test_memory_of_a_graph_is_its_own(ordered, cupy, mode, ptds):
    """cuBLASLt, which may not accept a thread's default stream, works on another one that joins the capture."""
    runtime = ordered.runtime
    with cupy.cuda.Stream(ptds=ptds) as own:
        x, y, out = cupy.asarray(A), cupy.asarray(B), cupy.empty((24, 24), np.float32)
        lowprec.matmul(x, y, out=out, math_mode=mode)
        own.synchronize()
        runtime.begin_capture(own.ptr)
        lowprec.matmul(x, y, out=out, math_mode=mode)
        graph = runtime.end_capture(own.ptr)  # raises if a stream has not joined again
        for turn in range(3):
            changed = A + turn
            x[...] = cupy.asarray(changed)
            lowprec.matmul(cupy.asarray(A * 2), y, math_mode=mode)
            graph.replay(own.ptr)
            np.testing.assert_array_equal(cupy.asnumpy(out), changed @ B)


def test_a_product_on_another_device_of_cupy(software, cupy):
    with cupy.cuda.Device(1):
        x = cupy.asarray(A)
    assert lowprec.matmul(x, x).device.id == 1


def test_an_algorithm_that_cannot_be_described(ordered):
    x, y = ordered.array(A), ordered.array(B)
    lowprec.matmul(x, y)
    failing = ordered.fail("matmul_algo_cap_get_attribute")
    with (
        failing,
        lowprec.profile(),
        pytest.raises(BackendError, match="cannot describe the algorithm of"),
    ):
        lowprec.matmul(x, y)


def test_operands_of_a_product_that_fails_half_way_are_held(ordered):
    x, y = ordered.array(A), ordered.array(B)
    lowprec.matmul(x, y, math_mode="bf16")
    with ordered.fail("cublas_lt.matmul"), pytest.raises(BackendError, match="cannot run float32"):
        lowprec.matmul(x, y, math_mode="bf16")
    del x, y
    gc.collect()
    ordered.drain()
    assert ordered.faults == []  # the kernels that pack them have run


# -- prepared operands ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bf16", "fp16x3"])
def test_a_packed_operand_is_ready_for_every_stream(library, mode):
    with library.stream():
        b = library.late(B)
        want = library.get(lowprec.matmul(library.late(A), b, math_mode=mode))
        prepared = lowprec.prepare(b, math_mode=mode)
        # packs it, and is not waited for
        first = lowprec.matmul(library.late(A), prepared, math_mode=mode)
        with library.stream():
            second = library.get(lowprec.matmul(library.late(A), prepared, math_mode=mode))
        np.testing.assert_array_equal(second, want)
        np.testing.assert_array_equal(library.get(first), want)


# -- devices and threads --------------------------------------------------------------------------


def test_threads_share_a_bias_product(cupy):
    """The pointer of a bias is part of a descriptor that all threads share."""

    def work(number):
        with cupy.cuda.Stream():
            bias = np.full(24, number, np.float32)
            a, b, c = cupy.asarray(A), cupy.asarray(B), cupy.asarray(bias)
            found = [lowprec.matmul(a, b, bias=c) for _ in range(20)]
            return all(np.array_equal(cupy.asnumpy(x), TRUE + number) for x in found)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(12)))


# -- graphs ---------------------------------------------------------------------------------------


def test_graphs_do_not_share_a_workspace(software, cupy):
    """Two graphs that were captured on one stream may be replayed side by side."""
    runtime = software.software.runtime
    large = draw(3, 96, 96)
    graphs, results = [], []
    with cupy.cuda.Stream() as stream:
        x = cupy.asarray(large)
        for _ in range(2):
            out = cupy.asarray(np.zeros_like(large))
            lowprec.matmul(x, x, out=out, math_mode="bf16")
            stream.synchronize()
            runtime.begin_capture(stream.ptr)
            lowprec.matmul(x, x, out=out, math_mode="bf16")
            graphs.append(runtime.end_capture(stream.ptr))
            results.append(out)
    streams = [cupy.cuda.Stream(), cupy.cuda.Stream()]
    for graph, other in zip(graphs, streams, strict=True):
        graph.replay(other.ptr)
    software.software.drain()
    for out in results:
        np.testing.assert_array_equal(cupy.asnumpy(out), oracles.product(large, large))


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("cold", ["all", "executor", "alignment", "thread"])
def test_a_first_product_is_not_captured(software, cupy, cold, mode):
    """It is refused before anything is queued; the capture stays valid."""
    runtime = software.software.runtime
    with cupy.cuda.Stream() as stream, ThreadPoolExecutor(1) as other:
        a, b, wide = cupy.asarray(A), cupy.asarray(B), cupy.asarray(np.zeros((24, 32), "f4"))
        out, odd = wide[:, :24], wide[:, 1:25]
        if cold != "all":
            lowprec.matmul(a, b, out=out, math_mode=mode)
        if cold == "executor":
            executors.clear_caches()
        if cold == "alignment":
            out = odd

        def product():
            with stream:
                runtime.begin_capture(stream.ptr)
                try:
                    with pytest.raises(BackendError, match="run it once before capturing"):
                        lowprec.matmul(a, b, out=out, math_mode=mode)
                finally:
                    graph = runtime.end_capture(stream.ptr)
                lowprec.matmul(a, b, out=out, math_mode=mode)
                runtime.begin_capture(stream.ptr)
                lowprec.matmul(a, b, out=out, math_mode=mode)
                return graph, runtime.end_capture(stream.ptr)

        refused, graph = other.submit(product).result() if cold == "thread" else product()
        assert refused.labels == []
        graph.replay(stream.ptr)
        np.testing.assert_array_equal(cupy.asnumpy(out), TRUE)


@pytest.mark.parametrize("captures", ["first", "second"])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_arrays_of_another_library_are_not_captured(software, cupy, captures, non_blocking):
    """Streams outside of a capture cannot be waited for; it is refused before that is tried."""
    runtime = software.software.runtime
    with cupy.cuda.Stream(non_blocking=non_blocking) as stream:
        arrays = [cupy.asarray(A), DeviceArray(runtime, B)]
        if captures == "second":
            arrays.reverse()
        true = oracles.product(*([A, B] if captures == "first" else [B, A]))
        lowprec.matmul(*arrays)
        runtime.begin_capture(stream.ptr)
        with pytest.raises(BackendError, match="invalidate the capture of a CUDA graph"):
            lowprec.matmul(*arrays)
        labels = runtime.end_capture(stream.ptr).labels
        assert set(labels) <= {"give back"}  # CuPy's memory for the result
        found = lowprec.matmul(*arrays)
        get = cupy.asnumpy if captures == "first" else lambda x: read(runtime, x)
        np.testing.assert_array_equal(get(found), true)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_results_are_not_handed_to_a_capture(software, cupy, non_blocking):
    """Nor multiplied again on the legacy default stream, where that would end the capture."""
    runtime = software.software.runtime
    result = lowprec.matmul(DeviceArray(runtime, A), DeviceArray(runtime, B))
    with cupy.cuda.Stream(non_blocking=non_blocking) as stream:
        runtime.begin_capture(stream.ptr)
        with pytest.raises(BackendError, match="invalidate the capture of a CUDA graph"):
            result.__dlpack__(stream=stream.ptr)
        if not non_blocking:
            with pytest.raises(BackendError, match="invalidate the capture of a CUDA graph"):
                lowprec.matmul(result, result)
        assert runtime.end_capture(stream.ptr).labels == []
    np.testing.assert_array_equal(read(runtime, result), TRUE)


# -- plans and info -------------------------------------------------------------------------------


def test_a_plan_shows_the_fallback_for_an_odd_address(cupy):
    a, b, wide = cupy.asarray(A), cupy.asarray(B), cupy.asarray(np.arange(32, dtype=np.float32))
    for start, falls_back in ((0, False), (1, True)):
        rows = dict(lowprec.plan(a, b, bias=wide[start : start + 24]).algorithm)
        assert ("fallback" in rows) is falls_back
    assert "not a multiple of 16 bytes" in rows["fallback"]
