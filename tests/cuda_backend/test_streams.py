"""Whole products in the order of their arrays' libraries: nothing is read too early, nothing given back too soon.

The software CUDA runs work only when somebody waits for it, and the memory of an array that nobody holds is poisoned at
once: a join that is missing shows as a wrong number.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import SoftwareGpu
from cuda_backend.device_libraries import StreamedLibrary
from lowprec.core import executors
from lowprec.errors import BackendError
from software_cuda.arrays import DeviceArray, read
from software_cuda.cupy import Cupy
from support import oracles


def draw(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


A, B, C = draw(0, 24, 24), draw(1, 24, 24), draw(2, 24, 24)
TRUE = oracles.product(A, B)


# -- a library with current streams ---------------------------------------------------------------


def test_results_feed_the_next_product(cupy: Cupy) -> None:
    with cupy.cuda.Stream():
        x = cupy.asarray(A / 4)
        for _ in range(5):
            x = lowprec.matmul(x, cupy.asarray(np.eye(24, dtype=np.float32)), math_mode="bf16")
        np.testing.assert_array_equal(cupy.asnumpy(x), A / 4)


def test_out_and_addends_on_the_stream(cupy: Cupy) -> None:
    with cupy.cuda.Stream():
        a, b, c, out = (cupy.asarray(x) for x in (A, B, C, np.zeros_like(A)))
        assert lowprec.matmul(a, b, c=c, beta=2.0, out=out) is out
        np.testing.assert_array_equal(cupy.asnumpy(out), TRUE + 2 * C)


# -- arrays of two libraries ----------------------------------------------------------------------


def test_out_of_a_library_that_reports_no_stream(software: SoftwareGpu) -> None:
    runtime = software.software.runtime
    out = DeviceArray(runtime, np.zeros_like(A))
    assert lowprec.matmul(DeviceArray(runtime, A), DeviceArray(runtime, B), out=out) is out
    np.testing.assert_array_equal(out.to_numpy(), TRUE)


@pytest.mark.parametrize("mode", ["bf16", "fp16x3"])
def test_what_is_kept_of_a_prepared_operand_is_ready_for_every_stream(library: StreamedLibrary, mode: str) -> None:
    with library.stream():
        b = library.late(B)
        want = library.get(lowprec.matmul(library.late(A), b, math_mode=mode))
        prepared = lowprec.prepare(b, math_mode=mode)
        first = lowprec.matmul(library.late(A), prepared, math_mode=mode)  # packs it, and is not waited for
        with library.stream():
            second = library.get(lowprec.matmul(library.late(A), prepared, math_mode=mode))
        np.testing.assert_array_equal(second, want)
        np.testing.assert_array_equal(library.get(first), want)


# -- devices and threads --------------------------------------------------------------------------


def test_threads_share_a_bias_product(cupy: Cupy) -> None:
    """The pointer of a bias is part of a descriptor that all threads share."""

    def work(number: int) -> bool:
        with cupy.cuda.Stream():
            bias = np.full(24, number, np.float32)
            a, b, c = cupy.asarray(A), cupy.asarray(B), cupy.asarray(bias)
            found = [lowprec.matmul(a, b, bias=c) for _ in range(20)]
            return all(np.array_equal(cupy.asnumpy(x), TRUE + number) for x in found)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(12)))


def test_a_thread_that_ends_leaves_its_handle(software: SoftwareGpu, cupy: Cupy) -> None:
    def work() -> None:
        cupy.asnumpy(lowprec.matmul(cupy.asarray(A), cupy.asarray(B)))

    for _ in range(5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert software.live()["handles"] == 1


@pytest.mark.parametrize("epilogue", [False, True], ids=["plain", "epilogue"])
def test_a_warm_call_is_one_call_of_cublaslt(software: SoftwareGpu, cupy: Cupy, epilogue: bool) -> None:
    a, b, out, bias = (cupy.asarray(x) for x in (A, B, C, C[0]))
    keywords = {"bias": bias, "activation": "relu"} if epilogue else {}
    lowprec.matmul(a, b, out=out, **keywords)
    before = software.calls_made()
    lowprec.matmul(a, b, out=out, **keywords)
    made = software.software.calls[before:]
    # The algorithm has a workspace.
    device, memory = ["driver.cuCtxGetDevice"], ["runtime.cudaMallocFromPoolAsync"]
    assert made == [*device, *memory, "cublas_lt.matmul", "runtime.cudaFreeAsync"]
    # The pointer of a bias is part of the descriptor, and is set where it is another.
    if epilogue:
        other = cupy.asarray(B[0])
        before = software.calls_made()
        found = lowprec.matmul(a, b, out=out, bias=other, activation="relu")
        made = [x for x in software.software.calls[before:] if x.startswith("cublas_lt")]
        assert made == ["cublas_lt.matmul_desc_set_attribute", "cublas_lt.matmul"]
        np.testing.assert_array_equal(cupy.asnumpy(found), np.maximum(TRUE + B[0], 0))


# -- graphs ---------------------------------------------------------------------------------------


def test_graphs_do_not_share_a_workspace(software: SoftwareGpu, cupy: Cupy) -> None:
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
def test_a_first_product_is_not_captured(software: SoftwareGpu, cupy: Cupy, cold: str, mode: str) -> None:
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

        def product() -> Any:
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
def test_arrays_of_another_library_are_not_captured(
    software: SoftwareGpu, cupy: Cupy, captures: str, non_blocking: bool
) -> None:
    """Streams outside of a capture cannot be waited for; it is refused before that is tried."""
    runtime = software.software.runtime
    with cupy.cuda.Stream(non_blocking=non_blocking) as stream:
        arrays = [cupy.asarray(A), DeviceArray(runtime, B)]
        if captures == "second":
            arrays.reverse()
        true = oracles.product(*([A, B] if captures == "first" else [B, A]))
        lowprec.matmul(*arrays)
        runtime.begin_capture(stream.ptr)
        with pytest.raises(BackendError, match="end the capture of a CUDA graph"):
            lowprec.matmul(*arrays)
        labels = runtime.end_capture(stream.ptr).labels
        assert set(labels) <= {"give back"}  # CuPy's memory for the result
        found = lowprec.matmul(*arrays)
        get = cupy.asnumpy if captures == "first" else lambda x: read(runtime, x)
        np.testing.assert_array_equal(get(found), true)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_results_are_not_handed_to_a_capture(software: SoftwareGpu, cupy: Cupy, non_blocking: bool) -> None:
    """Nor multiplied again on the legacy default stream, where that would end the capture."""
    runtime = software.software.runtime
    result = lowprec.matmul(DeviceArray(runtime, A), DeviceArray(runtime, B))
    with cupy.cuda.Stream(non_blocking=non_blocking) as stream:
        runtime.begin_capture(stream.ptr)
        with pytest.raises(BackendError, match="end the capture of a CUDA graph"):
            result.__dlpack__(stream=stream.ptr)
        if not non_blocking:
            with pytest.raises(BackendError, match="end the capture of a CUDA graph"):
                lowprec.matmul(result, result)
        assert runtime.end_capture(stream.ptr).labels == []
    np.testing.assert_array_equal(read(runtime, result), TRUE)


# -- what is told ---------------------------------------------------------------------------------


def test_a_plan_shows_what_cublaslt_chose(cupy: Cupy) -> None:
    a, b = cupy.asarray(A), cupy.asarray(B)
    told = {mode: dict(lowprec.plan(a, b, math_mode=mode).algorithm) for mode in ("fp32", "tf32", "bf16")}
    assert told["fp32"]["units"].endswith("no tensor cores")
    assert told["tf32"]["units"] == "HMMA on tf32, summed in float32: tensor cores"
    assert told["bf16"]["units"] == "HMMA on bfloat16, summed in float32: tensor cores"
    shown = str(lowprec.plan(a, b, math_mode="tf32"))
    assert "cuda:0: Software H200" in shown
    assert "split-K" in shown


def test_a_plan_shows_what_an_odd_address_costs(cupy: Cupy) -> None:
    a, b, wide = cupy.asarray(A), cupy.asarray(B), cupy.asarray(np.arange(32, dtype=np.float32))
    for start, told in ((0, False), (1, True)):
        rows = dict(lowprec.plan(a, b, bias=wide[start : start + 24]).algorithm)
        assert ("fallback" in rows) is told
    assert "no multiple of 16 bytes" in rows["fallback"]


def test_info_shows_the_devices(software: SoftwareGpu) -> None:
    lowprec.matmul(software.put(A), software.put(B))
    found = lowprec.info()
    gpus = [x for x in found["devices"] if x["device"].startswith("cuda")]
    assert [x["device"] for x in gpus] == ["cuda:0", "cuda:1"]
    assert gpus[0]["compute_capability"] == "9.0"
    assert gpus[0]["peak_tflops"]["bfloat16"] > gpus[0]["peak_tflops"]["tf32"]
    assert found["gpu"]["used"] is True
    assert found["gpu"]["cublas"] == "13.1.0"


def test_the_override_of_nvidia_holds(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowprec.policy import environment

    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    environment.refresh()
    try:
        plan = lowprec.plan(cupy.asarray(A), cupy.asarray(B), math_mode="tf32")
        assert plan.compute_type == "COMPUTE_32F"
        assert dict(plan.algorithm)["units"].endswith("no tensor cores")
    finally:
        monkeypatch.undo()
        environment.refresh()
