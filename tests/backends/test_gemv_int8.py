"""A matrix of int8 that meets a few vectors: integers, so every result is exact."""

from __future__ import annotations

import numpy as np
import pytest

import lowprec
from backends.layouts import LAYOUTS
from lowprec.backends.cpu import casting, threads
from lowprec.backends.cpu.kernel_rows import GEMV_INT8

pytestmark = pytest.mark.skipif(not casting.has_kernels(), reason="numba is not installed, or switched off")

#: No multiples of a step (32 numbers of a row, 16 of a column, 8 columns), and some that are divided among threads.
SHAPES = [(1100, 1037), (317, 319), (3, 70_003), (70_005, 9), (1, 110_001), (110_000, 1), (16_390, 33)]
COUNTS = (1, 2, 3, 4)


def _numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-128, 128, shape, dtype=np.int8)


def _exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)  # sums below 2^53 are exact


def _assert_runs(a: np.ndarray, b: np.ndarray) -> None:
    assert lowprec.plan(a, b).kernel == GEMV_INT8.name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_matrix_and_a_few_vectors(
    shape: tuple[int, int], layout: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, k = shape
    a = LAYOUTS[layout](_numbers(rng, m, k))
    columns = _numbers(rng, COUNTS[-1], 2 * k)[:, ::-2].T
    for count in COUNTS:
        b = columns[:, :count]
        want = _exact(a, b)
        if m * k >= GEMV_INT8.minimum_elements:
            _assert_runs(a, b)
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
def test_earlier_contents_of_memory_are_ignored(order: str) -> None:
    ones = np.ones((330, 352), np.int8, order=order)
    lowprec.matmul(np.full_like(ones, 77), np.full((352, 4), 99, np.int8))
    a, b = ones[:, :321], np.ones((321, 3), np.int8)
    _assert_runs(a, b)
    assert (lowprec.matmul(a, b) == 321).all()
