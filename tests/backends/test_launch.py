"""Small products and batches of them in one call: the same bits as one product at a time, in any layout."""

from __future__ import annotations

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.arrays import library_of
from lowprec.backends.cpu import stacks, threads
from lowprec.backends.cpu.packed import run
from lowprec.backends.cpu.packed.micro_kernels import MICRO_KERNELS, MicroKernel
from lowprec.backends.execution import Arguments
from lowprec.formats import DType, dtype_from_name
from lowprec.planning.layout import OperandSpec, gemm_layout
from support import cpu_units, interrupts
from support.programs import in_threads

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "int8": np.dtype(np.int8), "float32": np.dtype(np.float32)}

kernels = cpu_units.kernels(*MICRO_KERNELS)


def whole_numbers(rng: np.random.Generator, kernel: MicroKernel, *shape: int) -> np.ndarray:
    """Return numbers whose sums are exact in float32, so that every right result has the same bits."""
    limit = 128 if kernel.storage == "int8" else 16
    return rng.integers(-limit, limit, shape).astype(DTYPES[kernel.storage])


def want(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64)


def spec(x: np.ndarray) -> OperandSpec:
    return OperandSpec(dtype_from_name(x.dtype.name), x.shape, tuple(s // x.itemsize for s in x.strides))


def multiply(kernel: MicroKernel, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the product by one job; the test fails where there is none."""
    if out is None:
        dtype = np.int32 if kernel.storage == "int8" else np.float32
        out = np.full(np.matmul(a.astype(float), b.astype(float)).shape, 7, dtype)
    layout = gemm_layout(spec(a), spec(b), spec(out))
    found = run.prepare(kernel, layout, "exact")
    assert found is not None
    assert not found.args[0].checks_a, "without c, which may be the result, A is packed once"
    assert found(Arguments(*(library_of(x).view(x) for x in (a, b, out))))
    return out


@kernels
@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 8, 8), (33, 5, 70), (5, 65, 1), (64, 64, 64)])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 5)])
def test_products(kernel: MicroKernel, rng: np.random.Generator, shape: tuple[int, int, int], batch: Any) -> None:
    m, n, k = shape
    a, b = whole_numbers(rng, kernel, *batch, m, k), whole_numbers(rng, kernel, *batch, k, n)
    np.testing.assert_array_equal(multiply(kernel, a, b), want(a, b))


@kernels
@pytest.mark.parametrize("order", ["rows", "columns", "backwards", "steps"])
def test_only_the_elements_of_the_result_are_written(kernel: MicroKernel, rng: np.random.Generator, order: str) -> None:
    """Guards surround every matrix of a batch, in layouts of rows, of columns and of neither."""
    a, b = whole_numbers(rng, kernel, 6, 35, 40), whole_numbers(rng, kernel, 6, 40, 37)
    dtype = np.int32 if kernel.storage == "int8" else np.float32
    memory = np.full((6, 80, 80), 7, dtype)
    inside = {
        "rows": np.s_[:, 3:38, 5:42],
        "columns": np.s_[:, 3:40, 5:40],
        "backwards": np.s_[::-1, 37:2:-1, 41:4:-1],
        "steps": np.s_[:, 1:71:2, 2:76:2],
    }[order]
    out = memory[inside]
    if order == "columns":
        out = out.swapaxes(1, 2)
    np.testing.assert_array_equal(multiply(kernel, a, b, out), want(a, b))
    written = np.zeros(memory.shape, bool)
    written[inside] = True
    assert (memory[~written] == 7).all()


@kernels
def test_broadcast_batches(kernel: MicroKernel, rng: np.random.Generator) -> None:
    """A matrix of B that is repeated in a row is packed once; one that returns after another is packed again."""
    a, b = whole_numbers(rng, kernel, 4, 3, 20, 30), whole_numbers(rng, kernel, 3, 30, 25)
    np.testing.assert_array_equal(multiply(kernel, a, b), want(a, b))
    b = whole_numbers(rng, kernel, 4, 1, 30, 25)
    np.testing.assert_array_equal(multiply(kernel, a, b), want(a, b))
    a = whole_numbers(rng, kernel, 5, 1, 1, 20, 30)
    np.testing.assert_array_equal(multiply(kernel, a, b), want(a, b))
    columns = np.zeros((4, 3, 25, 20), np.int32 if kernel.storage == "int8" else np.float32)
    a = whole_numbers(rng, kernel, 4, 1, 20, 30)
    b = whole_numbers(rng, kernel, 4, 3, 30, 25)
    np.testing.assert_array_equal(multiply(kernel, a, b, columns.swapaxes(-1, -2)), want(a, b))


@kernels
def test_batches_beyond_the_cache(
    kernel: MicroKernel, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "KEPT", 2)
    a, b = whole_numbers(rng, kernel, 7, 9, 30), whole_numbers(rng, kernel, 7, 30, 9)
    np.testing.assert_array_equal(multiply(kernel, a, b), want(a, b))


@kernels
def test_concurrent_callers_of_one_job(kernel: MicroKernel, rng: np.random.Generator) -> None:
    shape = (40, 33, 33)
    pairs = [[whole_numbers(rng, kernel, *shape) for _ in range(2)] for _ in range(8)]
    outs = [np.zeros(shape, np.int32 if kernel.storage == "int8" else np.float32) for _ in pairs]
    found = run.prepare(kernel, gemm_layout(*map(spec, (*pairs[0], outs[0]))), "exact")
    assert found is not None

    def call(i: int) -> None:
        arguments = Arguments(*(library_of(x).view(x) for x in (*pairs[i], outs[i])))
        for _ in range(20):
            outs[i][...] = 0
            found(arguments)
            np.testing.assert_array_equal(outs[i], want(*pairs[i]))

    in_threads(len(pairs), call)


@kernels
def test_no_thread_writes_after_an_exception(
    kernel: MicroKernel, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "num_threads", lambda: 3)
    a, b = whole_numbers(rng, kernel, 900, 48, 48), whole_numbers(rng, kernel, 900, 48, 48)
    out = multiply(kernel, a, b)
    found = run.prepare(kernel, gemm_layout(*map(spec, (a, b, out))), "exact")
    assert found is not None
    assert found.args[1].is_shared
    arguments = Arguments(*(library_of(x).view(x) for x in (a, b, out)))
    for error in interrupts.interrupted(lambda: found(arguments)):
        assert type(error) is interrupts.Interrupt
        out[...] = 7
        time.sleep(0.0005)
        assert (out == 7).all()
    found(arguments)
    np.testing.assert_array_equal(out, want(a, b))


@kernels
def test_large_products_of_a_batch_are_shared_instead(kernel: MicroKernel) -> None:
    square = OperandSpec.contiguous(dtype_from_name(kernel.storage), (2, 1024, 1024))
    out = OperandSpec.contiguous(DType.INT32 if kernel.storage == "int8" else DType.FLOAT32, (2, 1024, 1024))
    assert run.prepare(kernel, gemm_layout(square, square, out), "exact") is None


@pytest.mark.parametrize("shape", [(5, 1, 50), (5, 40, 1), (5, 1, 1), (40, 50), (5, 40, 50)])
def test_an_addend_of_a_batch_that_becomes_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    """One matrix for all products: their rows are one matrix, unless the addend is none then."""
    a, b = rng.integers(-3, 4, (5, 40, 64)), rng.integers(-3, 4, (64, 50))
    a, b, c = (x.astype(np.float32) for x in (a, b, rng.integers(-9, 9, shape)))
    got = lowprec.matmul(a, b, c=c, beta=2.0, math_mode="bf16")
    np.testing.assert_array_equal(got, want(a, b) + 2 * c)
