"""Temporary memory and contexts of whole products: whose they are, what a graph keeps, what is given back and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import lowprec
import oracles
import software_cuda
from device_fixture import SoftwareGpu
from lowprec import executors
from software_cuda.cupy import Cupy


def draw(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


N = 96
A, B = draw(0, N, N), draw(1, N, N)
TRUE = oracles.product(A, B)

#: Of the modes: operands as they lie, rewritten, rewritten with exponents.
MODES = ["fp32", "bf16", "fp16"]


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Return what a new thread finds."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


# -- streams of threads ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_each_thread_has_a_default_stream_of_its_own(
    software: SoftwareGpu, cupy: Cupy, mode: str
) -> None:
    """Stream 2 is another in each thread: what one thread's work has used, the other's may not have yet."""
    software.software.runtime.scheduler.use("all")
    lowprec.matmul(cupy.asarray(A), cupy.asarray(B), math_mode=mode)  # compiles
    software.software.drain()

    def work(number: int) -> Any:
        with cupy.cuda.Stream(ptds=True):
            return lowprec.matmul(cupy.asarray(A + number), cupy.asarray(B), math_mode=mode)

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        # Both are queued, one after the other, and neither has run.
        found = [pool.submit(work, n).result() for n, pool in enumerate((first, second))]
    for number, result in enumerate(found):
        true = oracles.product(A + number, B)
        np.testing.assert_array_equal(software.get(result), true)


def test_a_handle_that_is_taken_over_brings_no_workspace(software: SoftwareGpu, cupy: Cupy) -> None:
    """Work of a thread that has ended may still wait on its stream."""
    software.software.runtime.scheduler.use("all")
    x = cupy.asarray(A)
    lowprec.matmul(x, x, math_mode="bf16")
    software.software.drain()

    def work() -> tuple[Any, Any]:
        with cupy.cuda.Stream(ptds=True) as stream:
            a = cupy.asarray(A)
            return lowprec.matmul(a, a), stream

    done = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: done.append(work()))
        thread.start()
        thread.join()
    software.software.drain()
    for found, _ in done:
        np.testing.assert_array_equal(software.get(found), oracles.product(A, A))


# -- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_captured_products_keep_no_memory(software: SoftwareGpu, cupy: Cupy, mode: str) -> None:
    runtime = software.software.runtime
    with cupy.cuda.Stream() as stream:
        a, b, out = (cupy.asarray(x) for x in (A, B, np.zeros_like(A)))
        lowprec.matmul(a, b, out=out, math_mode=mode)
        stream.synchronize()
        before = software.live()
        graphs = []
        for _ in range(10):
            runtime.begin_capture(stream.ptr)
            lowprec.matmul(a, b, out=out, math_mode=mode)
            graphs.append(runtime.end_capture(stream.ptr))
        assert software.live() == before
        for graph in (*graphs, graphs[0]):
            graph.replay()
            np.testing.assert_array_equal(cupy.asnumpy(out), TRUE)
        assert software.live() == before


def test_a_graph_allocates_and_frees_in_its_own_work(software: SoftwareGpu, cupy: Cupy) -> None:
    runtime = software.software.runtime
    with cupy.cuda.Stream() as stream:
        a, b, out = (cupy.asarray(x) for x in (A, B, np.zeros_like(A)))
        lowprec.matmul(a, b, out=out, math_mode="bf16")
        runtime.begin_capture(stream.ptr)
        lowprec.matmul(a, b, out=out, math_mode="bf16")
        labels = runtime.end_capture(stream.ptr).labels
    assert labels.count("cudaMallocAsync") == labels.count("cudaFreeAsync") > 0
    assert labels[0] == "cudaMallocAsync"
    assert labels[-1] == "cudaFreeAsync"


# -- contexts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", [0, 1])
def test_a_thread_without_a_context(software: SoftwareGpu, device: int, mode: str) -> None:
    """Its first product makes the context of that device, and of no other, and leaves the thread as it was."""
    runtime = software.software.runtime

    def work() -> tuple[Any, int | None]:
        return lowprec.matmul(a, b, math_mode=mode), runtime.context

    a, b = software.put(A, device), software.put(B, device)
    others, runtime.contexts = runtime.contexts, set()
    found, context = in_a_thread(work)
    assert runtime.contexts == {device}
    assert context is None
    runtime.contexts |= others
    np.testing.assert_array_equal(software.get(found), TRUE)


def test_the_context_of_another_device_comes_back(software: SoftwareGpu) -> None:
    runtime = software.software.runtime
    runtime.cudaSetDevice(0)
    a = software.put(A, 1)
    np.testing.assert_array_equal(software.get(lowprec.matmul(a, a)), oracles.product(A, A))
    assert runtime.context == 0


# -- too little memory ----------------------------------------------------------------------------

MIB = 1 << 20


@pytest.fixture
def small() -> Iterator[SoftwareGpu]:
    """A device with 16 MiB, of which lowprec has used 6 and keeps them."""
    found = software_cuda.install(1, memory_bytes=16 * MIB)
    executors.forget()
    gpu = SoftwareGpu(found)
    found.runtime.cudaSetDevice(0)
    x = gpu.put(np.ones((1024, 1024), np.float32))
    found.drain()
    gpu.get(lowprec.matmul(x, x[:, :8] if False else x, math_mode="bf16"))
    yield gpu
    software_cuda.uninstall()
