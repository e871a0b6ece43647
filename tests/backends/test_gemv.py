"""A matrix that meets a few vectors: rounded as it is read, or of int8, where every result is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lowprec
from backends.layouts import LAYOUTS
from lowprec.backends.cpu import casting, threads
from lowprec.backends.cpu.kernel_rows import GEMV, GEMV_INT8
from lowprec.planning import KernelRow
from support import oracles

pytestmark = pytest.mark.skipif(not casting.has_kernels(), reason="numba is not installed, or switched off")

#: No multiples of the elements of a step; long rows, long columns, and some that are divided among threads.
SHAPES = [(260, 300), (1100, 1037), (3, 70_000), (70_003, 9), (1, 60_001), (60_000, 1), (16_390, 33)]
#: Of int8 a step has 32 numbers of a row, 16 of a column, or 8 columns.
INT8_SHAPES = [(1100, 1037), (317, 319), (3, 70_003), (70_005, 9), (1, 110_001), (110_000, 1), (16_390, 33)]
COUNTS = (1, 2, 3, 4, 8)


def assert_runs(a: np.ndarray, b: np.ndarray, mode: str | None, row: KernelRow = GEMV) -> None:
    assert lowprec.plan(a, b, math_mode=mode).kernel == row.name


@pytest.mark.parametrize("mode", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(3)
def test_a_matrix_and_a_few_vectors(
    shape: tuple[int, int], layout: str, mode: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, k = shape
    a = LAYOUTS[layout](rng.standard_normal(shape, dtype=np.float32))
    columns = rng.standard_normal((COUNTS[-1], 2 * k), dtype=np.float32)[:, ::-2].T
    for count in COUNTS:
        b = columns[:, :count]
        if min(m, count) in GEMV.vectors:
            assert_runs(a, b, mode)
        results = []
        for workers in (1, 2, 5):
            monkeypatch.setattr(threads, "num_threads", lambda workers=workers: workers)
            frame = np.full((m, 2 * count + 2), 7, np.float32)
            lowprec.matmul(a, b, out=frame[:, 1:-1:2], math_mode=mode)
            results.append(frame[:, 1:-1:2].tobytes())
            frame[:, 1:-1:2] = 7
            assert np.all(frame == 7)
        assert results[0] == results[1] == results[2]
        found = np.frombuffer(results[0], np.float32).reshape(m, count)
        oracles.assert_within_bound(found, a, b, mode)
        oracles.assert_within_bound(lowprec.matmul(b.T, a.T, math_mode=mode).T, a, b, mode)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_numbers_far_apart_are_scaled(order: Any, count: int) -> None:
    """Of a number 2^30 times as small as the largest of its row or column 8 bits are left; nothing is summed here."""
    m, k, tiny = 250, 260, np.float32(2.0**-30 * (1 + 2.0**-9 + 2.0**-10))
    left = np.float32(2.0**-30 * (1 + 2.0**-8))
    for i in (0, 17, 249):
        a, b = np.ones((m, k), np.float32, order=order), np.zeros((k, count), np.float32)
        a[i, 5], b[5] = tiny, 1
        want = np.ones((m, count), np.float32)
        want[i] = left
        assert_runs(a, b, "fp16")
        np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode="fp16"), want)
    for j in range(count):
        a, b = np.zeros((m, k), np.float32, order=order), np.ones((k, count), np.float32)
        b[5, j], a[:, 5] = tiny, 1
        want = np.ones((m, count), np.float32)
        want[:, j] = left
        np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode="fp16"), want)
    a, b = np.ones((3, m, k), np.float32), np.zeros((3, k, count), np.float32)
    a[1, 7, 5], b[:, 5] = tiny, 1
    want = np.ones((3, m, count), np.float32)
    want[1, 7] = left
    np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode="fp16"), want)


@pytest.mark.parametrize("order", ["C", "F"])
def test_earlier_contents_of_memory_are_ignored(order: Any) -> None:
    m, k, count = 230, 257, 3
    nan = np.full((m, 272), np.nan, np.float32, order=order)
    a, b = np.ones((m, k), np.float32, order=order), np.ones((k, count), np.float32)
    for mode in ("tf32", "fp16"):
        lowprec.matmul(nan, np.full((272, 4), np.nan, np.float32), math_mode=mode)
        assert_runs(a, b, mode)
        assert (lowprec.matmul(a, b, math_mode=mode) == k).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", INT8_SHAPES, ids=str)
def test_a_matrix_of_int8_and_a_few_vectors(
    shape: tuple[int, int], layout: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, k = shape
    a = LAYOUTS[layout](rng.integers(-128, 128, shape, dtype=np.int8))
    columns = rng.integers(-128, 128, (4, 2 * k), dtype=np.int8)[:, ::-2].T
    for count in (1, 2, 3, 4):
        b = columns[:, :count]
        want = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)  # sums below 2^53 are exact
        if m * k >= GEMV_INT8.minimum_elements:
            assert_runs(a, b, None, GEMV_INT8)
        for workers in (1, 2, 5):
            monkeypatch.setattr(threads, "num_threads", lambda workers=workers: workers)
            frame = np.full((m, 2 * count + 2), 7, np.int32)
            lowprec.matmul(a, b, out=frame[:, 1:-1:2])
            np.testing.assert_array_equal(frame[:, 1:-1:2], want)
            frame[:, 1:-1:2] = 7
            assert np.all(frame == 7)
        np.testing.assert_array_equal(lowprec.matmul(b.T, a.T).T, want)
        np.testing.assert_array_equal(lowprec.matmul(a, np.ascontiguousarray(b)), want)


@pytest.mark.parametrize("order", ["C", "F"])
def test_earlier_contents_of_memory_are_ignored_with_int8(order: Any) -> None:
    ones = np.ones((330, 352), np.int8, order=order)
    lowprec.matmul(np.full_like(ones, 77), np.full((352, 4), 99, np.int8))
    a, b = ones[:, :321], np.ones((321, 3), np.int8)
    assert_runs(a, b, None, GEMV_INT8)
    assert (lowprec.matmul(a, b) == 321).all()
