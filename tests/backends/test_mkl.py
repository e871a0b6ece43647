"""MKL behind the pool: every layout, every cut into panels, and beside another library's OpenMP."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import numpy as np
import pytest

from lowprec.backends.cpu import gemm, mkl, threads
from lowprec.formats import dtype_from_name
from lowprec.planning import MatrixStack

needs_mkl = pytest.mark.skipif(mkl.mkl() is None, reason="MKL is not installed")

DTYPES = ("float32", "float64", "complex64", "complex128")
#: Large enough to be cut into panels; no extent is a multiple of the grain.
M, N, K = 331, 275, 180


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = rng.standard_normal((2, *shape))
    return (values[0] + 1j * values[1] if dtype.startswith("c") else values[0]).astype(dtype)


def assert_product(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """|C - AB| <= sqrt(2) gamma_2k |A||B| element by element.

    Sums of k products, of 2k in each component of a complex number (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1); the factor sqrt(2) turns bounds of components into one of moduli.
    """
    u = np.finfo(out.dtype).eps / 2
    k = a.shape[-1]
    gamma = 2 * k * u / (1 - 2 * k * u)
    wide = np.clongdouble if out.dtype.kind == "c" else np.longdouble
    error = np.abs(out - a.astype(wide) @ b.astype(wide))
    assert np.all(error <= np.sqrt(2) * gamma * (np.abs(a) @ np.abs(b)))


@needs_mkl
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column_major", range(8), ids=lambda i: f"{i:03b}")
def test_layouts(
    dtype: str, column_major: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "num_threads", lambda: 3)
    shapes = ((M, K), (K, N), (M, N))
    a, b, out = (
        np.asarray(random(rng, shape, dtype), order="F" if column_major >> i & 1 else "C")
        for i, shape in enumerate(shapes)
    )
    gemm.multiply_mkl(a, b, out)
    assert_product(out, a, b)


@needs_mkl
@pytest.mark.parametrize("workers", [1, 2, 5, 6, 16])
def test_panels_cover_the_result_once(
    workers: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "num_threads", lambda: workers)
    # Views of larger arrays: leading dimensions beyond the extents, and a frame that must stay.
    a, b = random(rng, (M, K + 7), "float32")[:, :K], random(rng, (K, N + 3), "float32")[:, :N]
    frame = np.full((M + 2, N + 2), 7.0, np.float32)
    gemm.multiply_mkl(a, b, frame[1:-1, 1:-1])
    assert_product(frame[1:-1, 1:-1], a, b)
    frame[1:-1, 1:-1] = 7.0
    assert np.all(frame == 7.0)


@pytest.mark.parametrize(("m", "n"), [(331, 275), (40, 4000), (4000, 40), (1, 1), (48, 96)])
@pytest.mark.parametrize("workers", [1, 2, 3, 8, 64])
def test_cuts(m: int, n: int, workers: int) -> None:
    covered = np.zeros((m, n), int)
    panels = list(mkl._panels(m, n, workers))
    for i, rows, j, columns in panels:
        covered[i : i + rows, j : j + columns] += 1
    assert np.all(covered == 1)
    assert 1 <= len(panels) <= workers


@needs_mkl
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_outlive_the_library_that_they_were_asked_of(
    dtype: str, rng: np.random.Generator
) -> None:
    """Threads that open MKL at the same moment get an object each, and one of them stays."""
    opened = mkl.loaded_mkl()
    a, b = random(rng, (20, 30), dtype), random(rng, (30, 10), dtype)
    out = np.zeros((20, 10), dtype)
    stacks = [MatrixStack.of(dtype_from_name(dtype), *x.shape, x.shape[1], 1) for x in (a, b, out)]
    another = mkl.Mkl(ctypes.CDLL(opened.path), opened.path, opened.is_sequential)
    product = another.product(*stacks)
    del another
    gc.collect()
    # Where its memory was, if it is free, other numbers are now.
    others = [np.array([3, 5], dtype) for _ in range(1000)]
    product(a.ctypes.data, b.ctypes.data, out.ctypes.data)
    assert len(others) == 1000
    assert_product(out, a, b)


@needs_mkl
def test_beside_the_openmp_of_torch() -> None:
    """torch first: with an OpenMP layer of its own MKL then computes wrong products, silently."""
    pytest.importorskip("torch", reason="torch is not installed")
    program = (
        "import torch, numpy as np, lowprec\n"
        "torch.ones(600, 600) @ torch.ones(600, 600)\n"
        "a = np.arange(600 * 600, dtype=np.float64).reshape(600, 600) % 7\n"
        "assert lowprec.plan(a, a).kernel == 'mkl'\n"
        "assert np.array_equal(lowprec.matmul(a, a), a.astype(int) @ a.astype(int))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
