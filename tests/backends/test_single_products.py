"""Small products by BLAS, with native kernels and step by step in NumPy: the same bits in any layout and epilogue."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import casting, numba_import, single_products, threads
from lowprec.core import executors
from support import interrupts
from support.programs import run_python

pytestmark = pytest.mark.skipif(not casting.has_kernels(), reason="numba is not installed, or switched off")

BF16 = np.dtype(ml_dtypes.bfloat16)


def matmul(a: Any, b: Any, *, native: bool = True, **keywords: Any) -> Any:
    """Multiply by BLAS, rounded and written by native kernels or by NumPy; fail where the plan has another kernel."""
    assert lowprec.plan(a, b, **keywords).kernel_row.blas
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not native:
            monkeypatch.setattr(single_products, "prepare", lambda *_: None)
            monkeypatch.setattr(casting, "is_ready", lambda: False)
        executors.clear_caches()
        return lowprec.matmul(a, b, **keywords)


def assert_same(found: Any, want: Any) -> None:
    """NaN equals NaN; the signs of zeros count."""
    assert found.dtype == want.dtype
    if found.dtype == BF16:  # NumPy does not know its NaN
        found, want = found.astype(np.float32), want.astype(np.float32)
    np.testing.assert_array_equal(found, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(want)[numbers])


def both(a: Any, b: Any, **keywords: Any) -> Any:
    """Multiply with the kernels and without; the bits must be the same.

    A BLAS may compute the transpose of a result in columns with other sums, so both results have the same layout.
    """
    out = keywords.get("out")
    want = matmul(a, b, native=False, **keywords)
    if out is not None:
        want = want.copy()
        out[...] = 7
    found = matmul(a, b, **keywords)
    assert_same(found, want)
    return found


def numbers(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def views(rng: np.random.Generator, rows: int, cols: int, dtype: Any) -> dict[str, Any]:
    """Arrays of one shape in each memory layout."""
    return {
        "rows": numbers(rng, rows, cols, dtype=dtype),
        "columns": numbers(rng, cols, rows, dtype=dtype).T,
        "steps": numbers(rng, 2 * rows, 3 * cols, dtype=dtype)[::2, ::3],
        "backwards": numbers(rng, rows, cols, dtype=dtype)[::-1, ::-1],
        "columns with gaps": numbers(rng, cols, rows + 3, dtype=dtype).T[:rows],
        "one row": np.broadcast_to(numbers(rng, 1, cols, dtype=dtype), (rows, cols)),
        "one column": np.broadcast_to(numbers(rng, rows, 1, dtype=dtype), (rows, cols)),
    }


@pytest.fixture(autouse=True)
def _fresh():
    executors.clear_caches()
    yield
    executors.clear_caches()


@pytest.mark.parametrize("order", ["C", "F"])
def test_scaled_operands(order: Any, rng: np.random.Generator) -> None:
    """One of them, the other or both; the one that is shared by a batch, too."""
    near = numbers(rng, 5, 9, 21)
    far = np.exp(10 * numbers(rng, 5, 9, 21))
    far[1, 2], far[2, 3, 4], far[3, 1, 0], far[4] = 0, np.inf, np.nan, far[4] * np.float32(1e-30)
    far[0, :, 1:] *= np.float32(1e-44)
    c, bias = numbers(rng, 5, 9, 9), numbers(rng, 9)
    for a, b in itertools.product((near, far), repeat=2):
        b = np.asarray(b.swapaxes(-1, -2), order=order)
        for right in (b, b[4], b[0]):
            both(a, right, math_mode="fp16")
            both(a, right, math_mode="fp16", alpha=0.5, beta=2.0, c=c, bias=bias, activation="relu")
        for x, y in zip(a, b, strict=True):
            both(x, y, math_mode="fp16")


SHAPES = [(1, 1, 1), (8, 8, 8), (9, 17, 3), (1, 40, 33), (40, 1, 16), (7, 33, 65), (24, 32, 5)]


#: Larger ones in bf16 may go to vector units.
CASES = [(mode, s) for mode in ("fp32", "tf32", "fp16", "fp64") for s in SHAPES]
CASES += [("bf16", s) for s in SHAPES if sum(map(math.prod, itertools.combinations(s, 2))) < 9000]


@pytest.mark.parametrize(("mode", "shape"), CASES)
def test_shapes_and_epilogues(mode: str, shape: tuple[int, int, int], rng: np.random.Generator) -> None:
    m, n, k = shape
    a, b, c, bias = (numbers(rng, *s) for s in ((m, k), (k, n), (m, n), (n,)))
    some = {"alpha": 1.7, "c": c, "beta": -0.3, "bias": bias}
    for size in range(4):
        for names in itertools.combinations(("alpha", "c", "bias"), size):
            given = {x: some[x] for x in names} | ({"beta": -0.3} if "c" in names else {})
            for activation in (None, "relu", "gelu"):
                if mode == "fp32" and not given and not activation:
                    continue
                both(a, b, math_mode=mode, activation=activation, **given)


STORED = [np.dtype(np.float32), np.dtype(np.float16), BF16, np.dtype(np.float64)]


@pytest.mark.parametrize(("left", "right"), [*itertools.product(STORED, STORED)])
def test_stored_types(left: Any, right: Any, rng: np.random.Generator) -> None:
    a, b, c = (numbers(rng, 8, 8, dtype=d) for d in (left, right, left))
    for out_dtype in (None, "float32", "float16", "bfloat16"):
        if out_dtype and np.dtype(np.float64) in (left, right):
            continue
        if out_dtype and out_dtype not in ("float32",) and np.float32 not in (left, right):
            continue
        both(a, b, c=c, beta=0.5, bias=b[0], activation="relu", out_dtype=out_dtype)
        both(a, b, c=c, beta=0.5, activation="gelu", out_dtype=out_dtype)


@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16", "fp16", "fp64"])
def test_special_values(mode: str, rng: np.random.Generator) -> None:
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-45, 3e38, -3e38, 65520.0, 6e-8]
    payload = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    pool = np.concatenate([np.array(special, np.float32), payload, numbers(rng, 20)])
    for _ in range(20):
        a, b, c = (rng.choice(pool, s) for s in ((5, 6), (6, 18), (5, 18)))
        both(a, b, c=c, beta=2.0, bias=b[1], alpha=0.5, activation="relu", math_mode=mode)
        both(a, b, alpha=-1.0, math_mode=mode, out_dtype="bfloat16")


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float64])
def test_strides(dtype: Any, rng: np.random.Generator) -> None:
    lefts, rights = views(rng, 11, 6, dtype), views(rng, 6, 19, dtype)
    addends = views(rng, 11, 19, dtype)
    bias = numbers(rng, 38, dtype=dtype)[::-2]
    for (_, a), (_, b) in itertools.product(lefts.items(), rights.items()):
        both(a, b, alpha=0.5)
    for c in addends.values():
        both(lefts["rows"], rights["rows"], c=c, beta=2.0, bias=bias)
    for name, out in views(rng, 11, 19, dtype).items():
        if not name.startswith("one"):
            both(lefts["rows"], rights["columns"], alpha=0.5, out=out)
            addend = out.copy()
            want = matmul(lefts["rows"], rights["rows"], c=addend, beta=1.0)
            assert_same(matmul(lefts["rows"], rights["rows"], c=out, beta=1.0, out=out), want)


@pytest.mark.parametrize("order", ["rows", "columns", "backwards", "steps"])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_only_the_elements_of_the_result_are_written(order: str, dtype: Any, rng: np.random.Generator) -> None:
    a, b = numbers(rng, 6, 13, 9, dtype=dtype), numbers(rng, 6, 9, 21, dtype=dtype)
    memory = np.full((6, 60, 60), 7, dtype)
    inside = {
        "rows": np.s_[:, 3:16, 5:26],
        "columns": np.s_[:, 3:24, 5:18],
        "backwards": np.s_[::-1, 15:2:-1, 25:4:-1],
        "steps": np.s_[:, 1:27:2, 2:44:2],
    }[order]
    out = memory[inside].swapaxes(1, 2) if order == "columns" else memory[inside]
    for activation in ("relu", "gelu"):
        both(a, b, out=out, activation=activation)
    assert (out != 7).all()
    written = np.zeros(memory.shape, bool)
    written[inside] = True
    assert (memory[~written] == 7).all()


def test_batches(rng: np.random.Generator) -> None:
    """Broadcast matrices, addends that broadcast otherwise, batches of two, vectors."""
    a, b, bias = numbers(rng, 4, 3, 10, 6), numbers(rng, 3, 6, 9), numbers(rng, 9)
    for c in (numbers(rng, 4, 1, 10, 9), numbers(rng, 3, 1, 9), numbers(rng, 1), numbers(rng, 10, 1)):
        both(a, b, c=c, beta=0.5, bias=bias, math_mode="tf32")
        both(a, b[0], c=c, beta=0.5, bias=bias, math_mode="tf32")
        both(a[:, :1], b, c=c, beta=0.5, math_mode="fp16")
    both(a, b, c=numbers(rng, 4, 3, 10, 9), beta=0.5, bias=bias, math_mode="tf32")
    pair = numbers(rng, 2, 80, 80)  # larger, for OpenBLAS
    both(pair, pair[::-1], alpha=0.5, bias=pair[0, 0])
    both(a, b[0, :, 0], math_mode="tf32", alpha=2.0)
    both(a[0, 0, 0], b, math_mode="tf32", c=numbers(rng, 9), beta=1.0)
    both(a[0, 0, 0], b[0, :, 0], math_mode="tf32", c=numbers(rng, 1)[0:1].reshape(()), beta=1.0)


def test_the_result_does_not_depend_on_the_number_of_threads(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = (numbers(rng, 700, 20, 20) for _ in range(3))
    results = []
    for count in (1, 2, 5):
        monkeypatch.setattr(threads, "num_threads", lambda count=count: count)
        results.append(matmul(a, b, c=c, beta=0.5, bias=c[0, 0], math_mode="tf32"))
    want = matmul(a, b, c=c, beta=0.5, bias=c[0, 0], math_mode="tf32", native=False)
    for found in results:
        assert_same(found, want)


def test_a_handler_that_multiplies(rng: np.random.Generator) -> None:
    """A product in the middle of another, at any line, changes nothing in it."""
    a, b, c = (numbers(rng, 12, 12) for _ in range(3))
    want = matmul(a, b, c=c, beta=0.5, alpha=3.0, bias=c[0])
    other = matmul(b, a, c=c, beta=-2.0, alpha=0.25)

    def product() -> None:
        found.append(lowprec.matmul(a, b, c=c, beta=0.5, alpha=3.0, bias=c[0]))

    def handler() -> None:
        assert_same(lowprec.matmul(b, a, c=c, beta=-2.0, alpha=0.25), other)

    found: list[Any] = []
    at = 0
    while interrupts.strike(product, at, handler):
        at += 1
    assert at > 5
    for x in found:
        assert_same(x, want)


@pytest.mark.parametrize(
    ("mode", "dtype", "imports"),
    [("fp32", "float32", False), ("fp64", "float64", False), ("bf16", "float32", True),
     ("fp16x3", "float32", True), ("fp32", "float16", True)],
)  # fmt: skip
@pytest.mark.sampled(2)
def test_numba_is_imported_with_the_first_plan_that_uses_it(mode: str, dtype: str, imports: bool) -> None:
    program = f"""
import sys, numpy, lowprec
a = numpy.eye(8, dtype="{dtype}")
assert (lowprec.matmul(a, a, math_mode="{mode}") == a).all()
assert (lowprec.matmul(a[::2], a, math_mode="{mode}") == a[::2]).all()
print("numba" in sys.modules)
"""
    assert run_python(program) == str(imports)


def test_gelu_is_right_to_a_few_units(rng: np.random.Generator) -> None:
    """The argument of the exponential, at most 88, is off by 7 roundings, and its value by 2 units in the last place.

    So e^-2y is off by 88 * 7 + 4 times u at most, and the sum and the division add 2. What is given up where y is below
    -44 is at most 10.1 e^-88.
    """
    x = np.concatenate([np.linspace(-14, 14, 4000), rng.standard_normal(96) * 1e-3])
    x = x.astype(np.float32)[None]
    found = both(np.ones((1, 1), np.float32), x, activation="gelu")
    wide = x.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    want = wide / (1 + np.exp(-2 * inner))
    error = np.abs(found - want)
    assert (error <= 622 * 2.0**-24 * np.abs(want) + 10.1 * np.exp(-88)).all()
    assert (error <= 8 * 2.0**-24 * np.abs(want))[np.abs(x) < 0.5].all()
    special = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e30, 1e30]], np.float32)
    ones = np.ones((1, 1), np.float32)
    found = both(ones, special, activation="gelu")
    np.testing.assert_array_equal(found, np.array([[np.nan, np.inf, 0, 0, 0, 0, 0, 1e30]], np.float32))


@pytest.mark.parametrize("n", [1, 5, 8, 16, 17, 31, 33])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_without_gaps_end_where_the_result_does(
    n: int, dtype: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written beyond a row's end is in the next row, and is right in the end."""
    for m in (1, 3, 9):
        a, b = numbers(rng, 3, m, 7, dtype=dtype), numbers(rng, 3, 7, n, dtype=dtype)
        memory = np.full(3 * m * n + 64, 7, dtype)
        out = memory[32:-32].reshape(3, m, n)
        both(a, b, alpha=0.5, out=out)
        assert (memory[:32] == 7).all()
        assert (memory[-32:] == 7).all()
        out[...] = 7
        both(a[1], b[1], alpha=0.5, out=out[1])
        assert (out[::2] == 7).all()


def test_a_numba_that_fails_later(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has multiplied for a while goes on."""
    a = numbers(rng, 8, 8)
    want = matmul(a, a, alpha=0.5)
    try:
        monkeypatch.setattr(numba_import, "_failure", ["broken"])
        for _ in range(2):
            executors.clear_caches()
            assert_same(lowprec.matmul(a, a, alpha=0.5), want)
    finally:
        casting.has_kernels.cache_clear()


@pytest.mark.parametrize("mode", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize("stored", [np.float32, BF16])
def test_a_batch_of_one(mode: str, stored: Any, rng: np.random.Generator) -> None:
    """Either operand cast or in place, of another batch than the other."""
    a, b = numbers(rng, 1, 1, 9, 12), numbers(rng, 12, 7, dtype=stored)
    for x, y in ((a, b), (a, b[None]), (b.T[None], a.swapaxes(2, 3)), (a[:, :, ::2, 1::2], b[:6])):
        both(x, y, math_mode=mode, out_dtype="float32", alpha=0.5)
        if mode != "fp32" or stored is BF16:
            both(x, y, math_mode=mode)
