"""Temporary memory and contexts of whole products: streams, graphs, and too little memory."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import lowprec
from cuda_backend.cuda_reset import reset
from cuda_backend.device_fixture import draw
from lowprec.backends.cuda import handles
from support import oracles
from support.programs import run_python

N = 96
A, B = draw(0, N, N), draw(1, N, N)
TRUE = oracles.product(A, B)

#: Operands as they are, rewritten, rewritten with exponents.
MODES = ["fp32", "bf16", "fp16"]


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("mode", MODES)
def test_each_thread_has_a_default_stream_of_its_own(software, cupy, mode):
    """Stream 2 is another in each thread: what one thread's work has used, the other's may not have yet."""
    software.software.runtime.scheduler.use("all")
    lowprec.matmul(cupy.asarray(A), cupy.asarray(B), math_mode=mode)  # compiles
    software.software.drain()

    def work(number):
        with cupy.cuda.Stream(ptds=True):
            return lowprec.matmul(cupy.asarray(A + number), cupy.asarray(B), math_mode=mode)

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        # Both are queued, one after the other, and neither has run.
        found = [pool.submit(work, n).result() for n, pool in enumerate((first, second))]
    for number, result in enumerate(found):
        true = oracles.product(A + number, B)
        np.testing.assert_array_equal(software.get(result), true)


def test_a_handle_of_an_ended_thread_has_no_workspace(software, cupy):
    """Work of the thread may still be queued on its stream."""
    software.software.runtime.scheduler.use("all")
    x = cupy.asarray(A)
    lowprec.matmul(x, x, math_mode="bf16")
    software.software.drain()

    def work():
        with cupy.cuda.Stream(ptds=True) as stream:
            a = cupy.asarray(A)
            return lowprec.matmul(a, a), stream

    done = [in_a_thread(work) for _ in range(3)]
    software.software.drain()
    for found, _ in done:
        np.testing.assert_array_equal(software.get(found), oracles.product(A, A))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", [0, 1])
def test_a_thread_without_a_context(software, device, mode):
    """Its first product makes the context of that device, and of no other, and leaves the thread as it was."""
    runtime = software.software.runtime

    def work():
        return lowprec.matmul(a, b, math_mode=mode), runtime.context

    a, b = software.put(A, device), software.put(B, device)
    others, runtime.contexts = runtime.contexts, set()
    found, context = in_a_thread(work)
    assert runtime.contexts == {device}
    assert context is None
    runtime.contexts |= others
    np.testing.assert_array_equal(software.get(found), TRUE)


MIB = 1 << 20


@pytest.fixture
def small(monkeypatch, software):
    """A device of 16 MiB; an operand takes 4, a result that died 4, and of temporary memory 4 are kept."""
    cuda = software.software
    cuda.runtime.cudaSetDevice(0)
    cuda.runtime.memory.limits[0] = 16 * MIB
    x = software.put(np.ones((1024, 1024), np.float32))
    software.get(lowprec.matmul(x, x, math_mode="bf16"))
    assert cuda.live()["bytes"] > 8 * MIB
    assert free_mib(software) < 5
    return software


def free_mib(gpu):
    return gpu.free_bytes() / MIB


def tall_and_wide(rows):
    """Operands of few bytes whose product has many."""
    return [draw(0, rows, 4), draw(1, 4, rows)]


def test_cached_memory_is_used_for_results(small):
    a, b = tall_and_wide(1536)
    found = lowprec.matmul(small.put(a), small.put(b))
    np.testing.assert_array_equal(small.get(found), a @ b)
    with pytest.raises(
        lowprec.DeviceMemoryError, match=r"cuda:0 has less than 64\.0 MiB of free memory"
    ):
        lowprec.matmul(*(small.put(x) for x in tall_and_wide(4096)))


def test_cached_memory_is_freed_for_the_library_of_a(small, cupy):
    a, b = tall_and_wide(1536)
    x, y = cupy.asarray(a), cupy.asarray(b)
    with pytest.raises(MemoryError, match="Out of memory"):
        cupy.empty((1536, 1536), np.float32)
    np.testing.assert_array_equal(cupy.asnumpy(lowprec.matmul(x, y)), a @ b)
    with pytest.raises(MemoryError, match="Out of memory"):
        lowprec.matmul(*(cupy.asarray(x) for x in tall_and_wide(4096)))


def test_cached_memory_is_freed_for_handles(small, cupy):
    reset()
    before = small.software.live()["handles"]
    with small.failing_call("cublas_lt.create", status=3):
        assert handles.handle(0)
    assert small.software.live()["handles"] == before + 1
    small.forgive()


def test_release_memory_frees_all_of_it(small, cupy):
    before = free_mib(small)
    lowprec.release_memory()
    assert free_mib(small) > before + 7.9
    np.testing.assert_array_equal(
        cupy.asnumpy(lowprec.matmul(cupy.asarray(A), cupy.asarray(B), math_mode="bf16")), TRUE
    )


def test_release_memory_loads_nothing():
    code = "import sys, lowprec; lowprec.release_memory(); print('lowprec.backends.cuda.backend' in sys.modules)"
    assert run_python(code) == "False"
