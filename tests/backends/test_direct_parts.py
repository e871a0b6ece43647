"""Small products of parts in one call: what NumPy computes without numba, in any layout, with any epilogue."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import lowprec
import machines
from lowprec import executors, formats
from lowprec.backends.cpu import casting, direct, direct_parts, threads
from lowprec.backends.cpu.direct_job import AT_BLOCK, job_of
from lowprec.modes import TABLE, MathMode, row
from rounding_oracle import round_scalar
from small_products import BF16, assert_same, both, matmul, numbers, views

pytestmark = pytest.mark.skipif(
    not casting.has_kernels(), reason="numba is not installed, or switched off"
)

MODES = [str(r.mode) for r in TABLE if r.parts > 1]


@pytest.fixture(autouse=True)
def _fresh():
    executors.forget()
    yield
    executors.forget()


@pytest.mark.parametrize("mode", ["bf16x3", "bf16x6", "bf16x9", "tf32x3"])
def test_sums_of_products_of_parts(mode: str, rng: np.random.Generator) -> None:
    """The readable oracle: every operation of float32, one sum for each product of parts, the smallest first."""
    how = row(MathMode(mode))
    fmt, away = how.operand_format, how.operand_format is formats.TF32
    a, b = numbers(rng, 9, 7), numbers(rng, 7, 18)

    def parts(x: Any) -> list[Any]:
        found = []
        for _ in range(how.parts):
            rounded = [round_scalar(float(v), fmt, ties_away=away) for v in x.flat]
            found.append(np.array(rounded, np.float32).reshape(x.shape))
            x = x - found[-1]
        return found

    x, y = parts(a), parts(b)
    want = np.zeros((9, 18), np.float32)
    for i, j in itertools.product(range(9), range(18)):
        total = np.float32(0)
        for left, right in how.pairs:
            term = np.float32(0)
            for p in range(7):
                term = np.float32(term + np.float32(x[left][i, p] * y[right][p, j]))
            total = np.float32(total + term)
        want[i, j] = total
    assert_same(both(a, b, math_mode=mode), want)


SHAPES = [(1, 1, 1), (8, 8, 8), (9, 17, 3), (1, 40, 33), (40, 1, 16), (7, 33, 65), (24, 32, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_shapes_and_epilogues(
    mode: str, shape: tuple[int, int, int], rng: np.random.Generator
) -> None:
    m, n, k = shape
    a, b, c, bias = (numbers(rng, *s) for s in ((m, k), (k, n), (m, n), (n,)))
    found = both(a, b, math_mode=mode)
    error = np.abs(found - a.astype(np.float64) @ b)
    bound = lowprec.plan(a, b, math_mode=mode).bound
    assert np.linalg.norm(error) <= bound.frobenius(*map(np.linalg.norm, (a, b)), m, n)
    for activation in ("relu", "gelu", None):
        both(a, b, math_mode=mode, alpha=1.7, c=c, beta=-0.3, bias=bias, activation=activation)
        both(a, b, math_mode=mode, bias=bias, activation=activation, out_dtype="bfloat16")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k_chunk", [1, 4, 100])
def test_pieces_of_k(mode: str, k_chunk: int, rng: np.random.Generator) -> None:
    a, b = numbers(rng, 3, 9, 11), numbers(rng, 11, 20)
    found = both(a, b, math_mode=mode, k_chunk=k_chunk)
    assert np.array_equal(found, both(a, b, math_mode=mode)) == (k_chunk == 100)


@pytest.mark.parametrize("mode", ["tf32", "bf16", "fp16"])
def test_pieces_of_k_of_whole_operands(mode: str, rng: np.random.Generator) -> None:
    """They are one part, and what overflows in the format stays what it is."""
    a, b = numbers(rng, 9, 11), numbers(rng, 11, 20)
    for dtype in (BF16, np.float16):
        both(a.astype(dtype), b.astype(dtype), math_mode=mode, k_chunk=4)
    a[2, 3] = 3.4e38
    both(a, b, math_mode=mode, k_chunk=4)
    assert_same(both(a, b, math_mode=mode, k_chunk=11), matmul(a, b, math_mode=mode))


@pytest.mark.parametrize("mode", MODES)
def test_special_values(mode: str, rng: np.random.Generator) -> None:
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-45, 3.4e38, -3.4e38, 65520.0, 6e-8]
    payload = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    pool = np.concatenate([np.array(special, np.float32), payload, numbers(rng, 40)])
    for _ in range(20):
        a, b, c = (rng.choice(pool, s) for s in ((11, 3), (3, 18), (11, 18)))
        both(a, b, c=c, beta=2.0, bias=b[1], alpha=0.5, activation="relu", math_mode=mode)
        both(a, b, alpha=-1.0, math_mode=mode, out_dtype="bfloat16")


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_is_computed_again_alone(mode: str, rng: np.random.Generator) -> None:
    """In either road, beside elements that keep their bits; of a batch in each of its products."""
    a, b = numbers(rng, 3, 20, 6), numbers(rng, 6, 35)
    clean = both(a, b, math_mode=mode)
    a[1, 9, 2], a[1, 19, 3], a[2, 0, 0] = np.nan, np.inf, np.float32(3.4e38)
    found = both(a, b, math_mode=mode)
    touched = np.zeros(found.shape, bool)
    touched[1, 9], touched[1, 19], touched[2, 0] = True, True, True
    np.testing.assert_array_equal(found[~touched], clean[~touched])
    assert np.isnan(found[1, 9]).all()
    np.testing.assert_array_equal(found[1, 19], np.inf * b[3])
    with np.errstate(over="ignore"):
        want = a[2, 0].astype(np.float64) @ b
        np.testing.assert_array_equal(np.isinf(found[2, 0]), np.isinf(want.astype(np.float32)))
    finite = np.isfinite(found[2, 0])
    np.testing.assert_allclose(found[2, 0][finite], want[finite], rtol=1e-3)


@pytest.mark.parametrize("mode", ["bf16x6", "fp16x3", "fp16_karatsuba"])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_strides(dtype: Any, mode: str, rng: np.random.Generator) -> None:
    lefts, rights = views(rng, 11, 6, np.float32), views(rng, 6, 19, dtype)
    addends = views(rng, 11, 19, dtype)
    bias = numbers(rng, 38, dtype=dtype)[::-2]
    for (_, a), (_, b) in itertools.product(lefts.items(), rights.items()):
        both(a, b, math_mode=mode)
        both(b.T, a.T, math_mode=mode)
    for c in addends.values():
        both(lefts["rows"], rights["rows"], c=c, beta=2.0, bias=bias, math_mode=mode)
    for name, out in views(rng, 11, 19, np.float32).items():
        if not name.startswith("one"):
            both(lefts["rows"], rights["columns"], out=out, math_mode=mode)


@pytest.mark.parametrize("mode", ["bf16x9", "tf32x3", "fp16x4"])
def test_batches(mode: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, bias = numbers(rng, 4, 3, 10, 6), numbers(rng, 3, 6, 9), numbers(rng, 9)
    b[1, 2, 3] = np.inf
    for c in (numbers(rng, 4, 1, 10, 9), numbers(rng, 3, 1, 9), numbers(rng, 1)):
        both(a, b, c=c, beta=0.5, bias=bias, math_mode=mode)
        both(a, b[1], c=c, beta=0.5, bias=bias, math_mode=mode)
        both(a[:, :1], b, c=c, beta=0.5, math_mode=mode)
    both(a, b, c=numbers(rng, 4, 3, 10, 9), beta=0.5, bias=bias, math_mode=mode)
    both(a, b[0, :, 0], math_mode=mode, alpha=2.0)
    both(a[0, 0, 0], b, math_mode=mode, c=numbers(rng, 9), beta=1.0)
    both(a[0, 0, 0], b[0, :, 0], math_mode=mode)


@pytest.mark.parametrize("mode", ["bf16x6", "fp16x3"])
def test_the_result_does_not_depend_on_the_number_of_threads(
    mode: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = (numbers(rng, 300, 20, 20) for _ in range(3))
    want = matmul(a, b, c=c, beta=0.5, bias=c[0, 0], math_mode=mode, native=False)
    for count in (1, 2, 5):
        monkeypatch.setattr(threads, "num_threads", lambda count=count: count)
        found = matmul(a, b, c=c, beta=0.5, bias=c[0, 0], math_mode=mode)
        assert_same(found, want)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_prepared_operands(
    mode: str, native: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alike with and without, alone and in batches; also where elements are computed again."""
    monkeypatch.setattr(direct, "_has_kernels", lambda: native)
    a, b = numbers(rng, 3, 6, 21), numbers(rng, 19, 21).T
    b[3, 4] = np.inf
    for dtype in (np.float32, BF16, np.float16):
        y = b.astype(dtype)
        prepared = lowprec.prepare(y, math_mode=mode)
        for x in (a, a[0], a[0, 0], a[:, ::2]):
            for given in ({}, {"alpha": 2.0, "bias": numbers(rng, 19)}):
                want = lowprec.matmul(x, y, math_mode=mode, **given)
                assert_same(lowprec.matmul(x, prepared, math_mode=mode, **given), want)
        assert prepared.packed_bytes > 0


@pytest.mark.parametrize("mode", ["bf16x9", "fp16_karatsuba"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 24_575), (24_575, 1, 1), (1, 24_575, 1), (1, 49_152, 0), (128, 128, 128)]
)
def test_the_scratch_memory_suffices(
    shape: tuple[int, int, int], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest products; a block, and the sum of one product, are the last in it."""
    m, n, k = shape
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    seen = []

    def spy(*arguments: Any) -> Any:
        seen.append(job_of(*arguments))
        return seen[-1]

    monkeypatch.setattr(direct_parts, "job_of", spy)
    with machines.without({"avx512_bf16"}):
        found = both(a, b, math_mode=mode, c=np.ones((m, n), np.float32), beta=1.0, bias=b.sum(0))
    np.testing.assert_array_equal(found, np.full((m, n), 2 * k + 1))
    if k:
        assert seen[-1][AT_BLOCK] + 2048 <= direct._SCRATCH_BYTES
