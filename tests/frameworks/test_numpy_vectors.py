"""Products of a matrix and a vector under ``intercept``, which rounds the matrix in the pass that reads it."""

import sys

import numpy as np
import pytest

import lowprec.numpy as ln
from lowprec.backends.cpu import library
from lowprec.core import blas

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or library.library() is None,
    reason="interception needs Linux and the compiled kernels",
)

MODES = ("fp32", "tf32", "bf16", "fp16")


def rounded(x, bits, ties_away):
    """Round to a significand of `bits` bits by integers; a carry into the exponent is right."""
    wide = x.astype(np.float64).view(np.int64)
    dropped = 53 - bits
    half = (1 << (dropped - 1)) - 1 + (ties_away or wide >> dropped & 1)
    return ((wide + half) >> dropped << dropped).view(np.float64).astype(np.float32)


def numbers(rng, count, dtype):
    """Draw numbers of many exponents, each second one a tie of bfloat16 or TF32 or next to one."""
    x = rng.standard_normal(count) * 2.0 ** rng.integers(-60, 60, count)
    significand, exponent = np.frexp(x)
    bits = rng.choice([8, 11], count)
    ties = np.ldexp(np.floor(np.ldexp(significand, bits)) + 0.5, exponent - bits)
    near = ties * (1 + rng.integers(-1, 2, count) * np.finfo(dtype).eps)
    return np.where(np.arange(count) % 2, near, x).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("mode", "bits", "ties_away"), [("bf16", 8, False), ("tf32", 11, True)])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_numbers_are_rounded_once(rng, mode, bits, ties_away, dtype, layout):
    a = numbers(rng, 37 * 61, dtype).reshape(37, 61)
    a = a if layout == "rows" else np.asfortranarray(a)
    for column in range(61):
        one = np.zeros(61, dtype)
        one[column] = 1
        with ln.intercept(mode, cast=True) as seen:
            found = a @ one
        assert [p.mode for p in seen.report().taken] == [mode]
        assert np.array_equal(found, rounded(a[:, column], bits, ties_away))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("m", "k"), [(3, 5), (8, 8), (17, 33), (70, 300), (513, 129)])
def test_every_layout_is_within_the_bound(rng, mode, dtype, m, k):
    a = rng.standard_normal((m, k)).astype(dtype)
    x = rng.standard_normal(3 * k).astype(dtype)
    unit = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}[mode]
    padded = np.zeros((m, k + 7), dtype)
    padded[:, :k] = a
    layouts = {
        "rows": (a, x[:k]),
        "columns": (np.asfortranarray(a), x[:k]),
        "part of rows": (padded[:, :k], x[:k]),
        "strides of the vector": (a, x[::3]),
    }
    for name, (matrix, vector) in layouts.items():
        true = matrix.astype(np.float64) @ vector.astype(np.float64)
        size = np.abs(matrix).astype(np.float64) @ np.abs(vector).astype(np.float64)
        with ln.intercept(mode, cast=True) as seen:
            found = [matrix @ vector, vector @ matrix.T]
        assert not seen.report().passed
        # Two roundings, and k sums and two more roundings in float32.
        bound = (2 * unit + unit**2 + (k + 2) * 2.0**-24) * size
        for each in found:
            assert (each.dtype, each.shape) == (dtype, (m,))
            assert (np.abs(each - true) <= bound).all(), name


@pytest.mark.parametrize("mode", MODES)
def test_inf_and_nan_reach_their_sums_alone(mode):
    for dtype in (np.float32, np.float64):
        for order in "CF":
            a = np.ones((40, 50), dtype, order=order)
            a[3, 7] = np.inf
            a[5, 49] = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]
            with ln.intercept(mode, cast=True):
                found = a @ np.ones(50, dtype)
            assert np.flatnonzero(np.isinf(found)).tolist() == [3]
            assert np.flatnonzero(np.isnan(found)).tolist() == [5]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_alpha_and_beta_and_increments(rng, dtype):
    blas = pytest.importorskip("scipy.linalg.blas", reason="scipy is not installed")
    gemv = blas.sgemv if dtype == np.float32 else blas.dgemv
    a = rng.standard_normal((30, 20)).astype(dtype)
    x = rng.standard_normal(60).astype(dtype)
    y = rng.standard_normal(60).astype(dtype)
    for trans, rows, size in ((0, 30, 20), (1, 20, 30)):
        given = {"x": x, "y": y, "incx": 2, "incy": -2, "beta": -0.5, "trans": trans}
        with ln.intercept("bf16", cast=True):
            found = gemv(1.5, np.asfortranarray(a), **given)
        true = gemv(1.5, a, **given)
        bound = 1.5 * 2.0**-7 * (np.abs(a.T if trans else a) @ np.abs(x[: 2 * size : 2])) + 1e-5
        at = slice(0, 2 * rows, 2)
        assert (np.abs(found - true)[at] <= bound[::-1] * 1.01).all()
        assert np.array_equal(found[1 : 2 * rows : 2], y[1 : 2 * rows : 2])


@pytest.mark.parametrize("order", "CF")
def test_threads_give_the_same_bits(rng, order, monkeypatch):
    """512 x 700 numbers are shared among threads; 64 sums a thread or more."""
    a = np.asarray(rng.standard_normal((512, 700)), np.float32, order=order)
    x = rng.standard_normal(700).astype(np.float32)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(blas.threads, "num_threads", lambda count=threads: count)
        with ln.intercept("tf32"):
            found.append(a @ x)
    assert np.array_equal(*found)
