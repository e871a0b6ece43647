"""Whole products in every order that the streams leave open: who forgets to wait gets poison, or memory that went."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowprec
import software_cuda as software
from cuda_backend.cuda_reset import reset
from lowprec.arrays import libraries
from lowprec.arrays.dlpack import import_array
from lowprec.core import executors

ORDERS = ["lazy", "all", 0, 1, 2, 3]
A = np.random.default_rng(0).integers(-3, 4, (16, 24)).astype(np.float32)
B = np.random.default_rng(1).integers(-3, 4, (24, 32)).astype(np.float32)
MODES = ["fp32", "bf16", "fp16"]  # as they lie; packed; packed, and the product staged

Array = np.ndarray[Any, Any]


@pytest.fixture(params=ORDERS)
def cuda(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[software.Software]:
    if software.compiler() is None:
        pytest.skip("g++ is not installed")
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path))
    made = software.install(order=request.param)
    executors.clear_caches()
    yield made
    made.drain()
    executors.clear_caches()
    reset()
    gc.collect()
    made.drain()
    left = made.live()
    software.uninstall()
    assert made.faults == []
    # A stream of lowprec's own stays.
    assert not any(number for name, number in left.items() if name != "streams"), left


@pytest.fixture
def cupy(cuda: software.Software, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = software.Cupy(cuda.runtime)
    monkeypatch.setitem(sys.modules, "cupy", module)
    yield module
    libraries._INSTANCES.pop("cupy", None)
    libraries._BY_TYPE.pop(module.ndarray, None)


@pytest.mark.parametrize("mode", MODES)
def test_arrays_known_only_by_dlpack(cuda: software.Software, mode: str) -> None:
    for device in (0, 1, 0):
        x, y = cuda.array(A, device=device), cuda.array(B, device=device)
        found = lowprec.matmul(x, y, math_mode=mode)
        del x, y  # what is still read must be held
        gc.collect()
        np.testing.assert_array_equal(cuda.read(found), A @ B)


@pytest.mark.parametrize("mode", MODES)
def test_out_is_written_in_the_order_of_the_default_stream(cuda: software.Software, mode: str) -> None:
    out = cuda.array(np.ones((16, 32), np.float32))
    lowprec.matmul(cuda.array(A), cuda.array(B), out=out, c=out, beta=2.0, math_mode=mode)
    np.testing.assert_array_equal(out.to_numpy(), A @ B + 2)


@pytest.mark.parametrize("mode", MODES)
def test_products_of_products(cuda: software.Software, mode: str) -> None:
    square = A @ A.T % 5
    x = cuda.array(square)
    found = lowprec.matmul(lowprec.matmul(x, x, math_mode=mode), x, math_mode=mode)
    assert np.linalg.norm(cuda.read(found) - square @ square @ square) < 1e-2 * np.linalg.norm(square @ square @ square)


@pytest.mark.parametrize("mode", MODES)
def test_cupy_on_two_streams_and_an_array_of_another_library(cuda: software.Software, cupy: Any, mode: str) -> None:
    results = []
    streams = [cupy.cuda.Stream() for _ in range(3)]
    for turn, own in enumerate(streams):
        with own:
            x, bias = cupy.asarray(A + turn), cupy.asarray(np.ones(32, np.float32))
            found = lowprec.matmul(x, cuda.array(B), bias=bias, activation="relu", math_mode=mode)
            del x, bias
            results.append(found)
    gc.collect()
    for turn, (own, found) in enumerate(zip(streams, results, strict=True)):
        with own:
            np.testing.assert_array_equal(cupy.asnumpy(found), np.maximum((A + turn) @ B + 1, 0))


def test_an_operand_that_is_overwritten_by_its_library_afterwards(cuda: software.Software, cupy: Any) -> None:
    """The other library's later work on its current stream comes after the product."""
    y = cuda.array(B, stream=1)
    with cupy.cuda.Stream() as own:
        x = cupy.asarray(A)
        found = lowprec.matmul(x, y)
    later = np.zeros_like(B)
    cuda.runtime.cudaMemcpyAsync(y.address, later.ctypes.data, later.nbytes, 4, 1)
    cuda.runtime.cudaStreamSynchronize(1)
    own.synchronize()
    with own:
        np.testing.assert_array_equal(cupy.asnumpy(found), A @ B)


def test_memory_that_another_library_still_reads_is_not_reused(cuda: software.Software) -> None:
    """It has let go of the array on the host, while its stream has yet to read it."""
    reader = int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])
    x, y = cuda.array(A), cuda.array(B)
    found = lowprec.matmul(x, y)
    view = import_array(found, reader)
    nbytes = view.nbytes
    target = cuda.runtime.cudaMalloc(nbytes)[1]
    cuda.runtime.cudaMemcpyAsync(target, view.address, nbytes, 4, reader)
    del found, view
    gc.collect()
    for _ in range(3):
        again = lowprec.matmul(x, y, alpha=2.0)
        cuda.runtime.cudaStreamSynchronize(1)
        del again
    cuda.runtime.cudaStreamSynchronize(reader)
    read = cuda.runtime.memory.at(target, nbytes, 0, "").view(np.float32).reshape(16, 32)
    np.testing.assert_array_equal(read, A @ B)
    cuda.runtime.cudaFree(target)


@pytest.mark.parametrize("mode", MODES)
def test_a_warm_product_is_captured(cuda: software.Software, cupy: Any, mode: str) -> None:
    with cupy.cuda.Stream() as own:
        x, y, out = cupy.asarray(A), cupy.asarray(B), cupy.empty((16, 32), np.float32)
        lowprec.matmul(x, y, out=out, math_mode=mode)
        own.synchronize()
        cuda.runtime.begin_capture(own.ptr)
        lowprec.matmul(x, y, out=out, math_mode=mode)
        graph = cuda.runtime.end_capture(own.ptr)
        assert "matmul" in graph.labels
        for turn in range(3):
            changed = A + turn
            cuda.runtime.cudaMemcpyAsync(x.data.ptr, changed.ctypes.data, A.nbytes, 4, own.ptr)
            graph.replay()
            np.testing.assert_array_equal(cupy.asnumpy(out), changed @ B)
        # Memory that the graph uses was not given to anybody else.
        lowprec.matmul(cupy.asarray(A * 2), y, math_mode=mode)
        graph.replay()
        np.testing.assert_array_equal(cupy.asnumpy(out), (A + 2) @ B)
