"""Native casts against NumPy's conversions and the oracle, and products that round a matrix as they read it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
import oracles
from lowprec import formats
from lowprec.backends.cpu import casting, gemm, threads
from lowprec.backends.cpu.kernel_rows import GEMV
from lowprec.backends.cpu.rounding import round_float32
from lowprec.formats import NumberFormat
from machines import OPENBLAS
from rounding_oracle import round_scalar

needs_numba = pytest.mark.skipif(
    not casting.has_kernels(), reason="numba is not installed, or switched off"
)

ROUNDED = (formats.TF32, formats.BFLOAT16, formats.FLOAT16)
WIDENED = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int8))


def of_every_exponent(rng: np.random.Generator, count: int = 200) -> np.ndarray:
    """float32 with each sign and exponent: random significands, ties of every format, and their neighbours."""
    ties = [1 << bit for bit in (11, 12, 13, 14, 15, 16)] + [0x7FFFFF, 0x7FF000, 0x7F8000, 0]
    near = {(x + d) & 0x7FFFFF for x in ties for d in (-1, 0, 1)}
    odd = {(x | 1 << bit) for x in near for bit in (13, 16)}
    significands = np.array(sorted(near | odd), np.uint32)
    exponents = np.arange(512, dtype=np.uint32)[:, None] << 23
    random = rng.integers(0, 1 << 23, (512, count), dtype=np.uint32)
    bits = np.concatenate([exponents | significands, exponents | random], axis=1)
    return bits.ravel().view(np.float32)


def assert_same(found: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(found, want)  # NaN equals NaN
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(want)[numbers])


def cast_by_kernel(source: np.ndarray, out: np.ndarray, to: NumberFormat | None) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(casting, "_PAYS_TO_CALL", 0)
        monkeypatch.setattr(casting, "_PAYS_TO_IMPORT", 0)
        casting.cast([(source, out)], to)


@needs_numba
@pytest.mark.parametrize("to", ROUNDED, ids=lambda to: to.name)
def test_rounding_over_every_exponent(to: NumberFormat, rng: np.random.Generator) -> None:
    values = of_every_exponent(rng)
    found, want = np.empty_like(values), np.empty_like(values)
    cast_by_kernel(values, found, to)
    round_float32(values, to, want)
    assert_same(found, want)
    for i in rng.integers(0, values.size, 500):
        exact = round_scalar(float(values[i]), to, ties_away=to is formats.TF32)
        assert found[i] == exact or (math.isnan(found[i]) and math.isnan(exact))


@needs_numba
@pytest.mark.parametrize("dtype", WIDENED, ids=str)
def test_widening_of_every_number(dtype: np.dtype[Any]) -> None:
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    found = np.empty(codes.shape, np.float32)
    cast_by_kernel(codes, found, None)
    assert_same(found, codes.astype(np.float32))


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "NumPy"])
@pytest.mark.parametrize("to", ROUNDED, ids=lambda to: to.name)
@pytest.mark.parametrize("dtype", WIDENED[:2], ids=str)
def test_stored_numbers_that_a_format_does_not_hold_are_rounded(
    dtype: np.dtype[Any], to: NumberFormat, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a product with float32 the mode rounds these, too: bfloat16 reaches beyond float16, which is the finer one."""
    if kernels and not casting.has_kernels():
        pytest.skip("numba is not installed, or switched off")
    codes = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    want = codes.astype(np.float32)
    round_float32(want, to, want)
    if not kernels:
        monkeypatch.setattr(casting, "has_kernels", lambda: False)
    found = np.empty_like(want)
    cast_by_kernel(codes, found, to)
    assert_same(found, want)


@needs_numba
@pytest.mark.parametrize("dtype", WIDENED[:2], ids=str)
def test_narrowing_over_every_exponent(dtype: np.dtype[Any], rng: np.random.Generator) -> None:
    values = of_every_exponent(rng)
    found = np.empty(values.shape, dtype)
    casting.narrow(values, found)
    with np.errstate(all="ignore"):
        want = values.astype(dtype)
    assert_same(found.astype(np.float32), want.astype(np.float32))


VIEWS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.swapaxes(-1, -2),
    "backwards": lambda x: x[..., ::-1, ::-1],
    "in steps": lambda x: x[..., ::3, 1::2],
    "a frame": lambda x: x[..., 1:-2, 2:-1],
    "repeated rows": lambda x: np.broadcast_to(x[..., :1, :], x.shape),
    "repeated columns": lambda x: np.broadcast_to(x[..., :1], x.shape),
    "one column": lambda x: x[..., 3:4],
    "nothing": lambda x: x[..., :0],
    "a batch that is no matrix": lambda x: np.stack([x, x, x])[::2, 1:],
    "a batch in another order": lambda x: np.stack([x, x, x], axis=-1).swapaxes(0, 2),
}


@needs_numba
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(21, 37), (3, 16), (40, 64), (5, 4)], ids=str)
def test_strides_and_edges(
    view: str, shape: tuple[int, int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of a few numbers, by three threads, into memory with a margin that must stay."""
    monkeypatch.setattr(casting, "_PIECE", 40)
    monkeypatch.setattr(casting, "_PAYS_TO_SHARE", 0)
    monkeypatch.setattr(threads, "num_threads", lambda: 3)
    values = rng.standard_normal(shape, dtype=np.float32)
    for dtype, to in [(np.dtype(np.float32), formats.TF32), *((d, None) for d in WIDENED)]:
        source = VIEWS[view]((values * 50).astype(dtype))
        memory = np.full(source.size + 32, 7, np.float32)
        out = memory[16:-16].reshape(source.shape)
        turned = memory[16:-16].reshape(source.swapaxes(-1, -2).shape).swapaxes(-1, -2)
        want = source.astype(np.float32, order="C")
        if to is not None:
            round_float32(want, to, want)
        for target in (out, turned):
            memory[...] = 7
            cast_by_kernel(source, target, to)
            assert_same(target, want)
            assert np.all(memory[:16] == 7)
            assert np.all(memory[-16:] == 7)
        if dtype.itemsize == 2:
            frame = np.full(2 * np.array(source.shape) + 2, 7).astype(dtype)
            inner = frame[(slice(1, -1, 2),) * source.ndim]
            monkeypatch.setattr(casting, "_PAYS_TO_CALL", 0)
            casting.narrow(np.ascontiguousarray(want), inner)
            assert_same(inner.astype(np.float32), want)
            inner[...] = 7
            assert np.all(frame == 7)


@needs_numba
@pytest.mark.parametrize("step", [1, 2])
def test_complex_numbers_are_rounded_by_component(step: int, rng: np.random.Generator) -> None:
    values = rng.standard_normal((2, 30, 40)).astype(np.float32)
    source = (values[0] + 1j * values[1])[:, ::step]
    out = np.empty(source.shape, np.complex64)
    cast_by_kernel(source, out, formats.BFLOAT16)
    for found, part in ((out.real, source.real), (out.imag, source.imag)):
        assert_same(found, part.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_what_no_kernel_reads_is_left_to_numpy(dtype: type, rng: np.random.Generator) -> None:
    source, out = rng.standard_normal((300, 300)).astype(np.float32), np.empty((300, 300), dtype)
    cast_by_kernel(source, out, None)
    np.testing.assert_array_equal(out, source)


@needs_numba
def test_without_numba_the_numbers_are_the_same(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = rng.standard_normal((300, 260), dtype=np.float32)
    for to in ROUNDED:
        outs = [np.empty_like(values) for _ in range(2)]
        casting.cast([(values, outs[0])], to)
        with monkeypatch.context() as alone:
            alone.setattr(casting, "has_kernels", lambda: False)
            alone.setattr(casting, "_cast_kernel", lambda *_: pytest.fail("it is not there"))
            casting.cast([(values, outs[1])], to)
        assert_same(outs[0], outs[1])


# -- a matrix and a vector ------------------------------------------------------------------------


def exact_operands(
    a: np.ndarray, b: np.ndarray, mode: str
) -> tuple[np.ndarray, np.ndarray]:  # rounded as the mode says, in float64
    if mode == "fp16":
        return oracles.round_both(a, b, mode)
    to = {"tf32": formats.TF32, "bf16": formats.BFLOAT16}[mode]
    rounded = []
    for x in (a, b):
        y = np.ascontiguousarray(x).astype(np.float32)
        if x.dtype == np.float32:
            round_float32(y, to, y)
        rounded.append(y.astype(np.float64))
    return rounded[0], rounded[1]


def assert_within_bound(found: np.ndarray, a: np.ndarray, b: np.ndarray, u: float = 0) -> None:
    """|found - a b| <= gamma_k |a||b|: products of rounded numbers are exact, k - 1 sums of them are rounded.

    Where the result is then rounded to u, by as much of it as well.
    """
    k = a.shape[-1]
    gamma = k * 2**-24 / (1 - k * 2**-24)
    size = np.abs(a) @ np.abs(b)
    assert np.all(np.abs(found.astype(np.float64) - a @ b) <= (gamma + u * (1 + gamma)) * size)


SHAPES = [(700, 800), (257, 1037), (3, 70_000), (70_003, 5), (1, 40_001), (33_000, 1)]


@needs_numba
@pytest.mark.parametrize("mode", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_matrix_and_a_vector(
    mode: str, shape: tuple[int, int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, k = shape
    wide = rng.standard_normal((m, k), dtype=np.float32)
    stepped = rng.standard_normal((m, 2 * k), dtype=np.float32)[:, ::2]
    x = rng.standard_normal(2 * k, dtype=np.float32)
    for a in (wide, np.asfortranarray(wide), wide[::-1], stepped):
        for v in (x[:k], x[::-2]):
            if 1 not in shape:
                assert str(lowprec.plan(a, v, math_mode=mode).kernel) == "gemv"
            results = []
            for workers in (1, 2, 5):
                monkeypatch.setattr(threads, "num_threads", lambda workers=workers: workers)
                frame = np.full(2 * m + 2, 7, np.float32)
                lowprec.matmul(a, v, out=frame[1:-1:2], math_mode=mode)
                results.append(frame[1:-1:2].copy())
                frame[1:-1:2] = 7
                assert np.all(frame == 7)
            assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
            exact = exact_operands(a, v, mode)
            assert_within_bound(results[0], *exact)
            left = lowprec.matmul(v, a.T, math_mode=mode)
            assert_within_bound(left, *exact)


@needs_numba
@pytest.mark.parametrize("dtype", WIDENED[:2], ids=str)
def test_a_stored_matrix_and_a_vector(dtype: np.dtype[Any], rng: np.random.Generator) -> None:
    a = rng.standard_normal((300, 260)).astype(dtype)
    v = rng.standard_normal(260).astype(dtype)
    assert str(lowprec.plan(a, v).kernel) == "gemv"
    wide = a.astype(np.float64), v.astype(np.float64)
    found = lowprec.matmul(a, v, out_dtype="float32")
    assert_within_bound(found, *wide)
    u = {2: 2.0**-11, 4: 2.0**-8}[2 if dtype == np.float16 else 4]
    for order in (a, np.asfortranarray(a)):
        assert_within_bound(lowprec.matmul(order, v), *wide, u=u)


@needs_numba
def test_vectors_with_batches_and_epilogues(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 200, 150), dtype=np.float32)
    b = rng.standard_normal((3, 150, 1), dtype=np.float32)
    assert str(lowprec.plan(a, b, math_mode="bf16").kernel) == "gemv"
    x, y = exact_operands(a, b, "bf16")
    assert_within_bound(lowprec.matmul(a, b, math_mode="bf16"), x, y)
    # One row, so that the bias is a vector of some length; whole numbers, so that all sums are exact.
    row, matrix = (rng.integers(-8, 9, s).astype(np.float32) for s in ((1, 150), (150, 200)))
    c, bias = (rng.integers(-8, 9, s).astype(np.float32) for s in ((1, 200), (200,)))
    found = lowprec.matmul(
        row, matrix, c=c, alpha=2.0, beta=-1.0, bias=bias, activation="relu", math_mode="tf32"
    )
    np.testing.assert_array_equal(found, np.maximum(2 * (row @ matrix) - c + bias, 0))


@needs_numba
@pytest.mark.parametrize("order", ["C", "F"])
def test_special_values_meet_only_their_row(order: str) -> None:
    """In every place: whole vectors, the rest of a row, the last rows."""
    m, k = 133, 167
    for i, j, value in itertools.product(
        (0, 64, 132), (0, 17, 166), (np.nan, np.inf, -np.inf, 7e4)
    ):
        a, v = np.ones((m, k), np.float32, order=order), np.ones(k, np.float32)
        a[i, j] = value
        assert str(lowprec.plan(a, v, math_mode="fp16").kernel) == "gemv"
        found = lowprec.matmul(a, v, math_mode="fp16")
        want = np.full(m, k, np.float32)
        # The numbers of float16's digits are 2^6 apart there.
        want[i] = k - 1 + 70016.0 if value == 7e4 else value
        np.testing.assert_array_equal(found, want)


def test_where_there_is_no_numba_nothing_runs_on_it() -> None:
    assert GEMV in OPENBLAS.kernels
    assert GEMV.requires not in OPENBLAS.features


# -- int8 by FP32 units ---------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 1000, 1025, 3000])
def test_int8_is_exact_at_its_extremes(k: int) -> None:
    """Sums of 1024 products of -128 and -128 are 2^24: the last that float32 counts."""
    a, b = np.full((9, k), -128, np.int8), np.full((k, 7), -128, np.int8)
    a[3], b[:, 2] = 127, np.arange(k) % 256 - 128
    out = np.empty((9, 7), np.int32)
    gemm.multiply_int8(gemm.multiply_numpy, a, b, out)
    np.testing.assert_array_equal(out, a.astype(np.int64) @ b.astype(np.int64))


def test_a_signalling_nan_is_widened_in_silence() -> None:
    """Warnings are errors here."""
    a = np.full((2, 2), 0x7F800001, np.uint32).view(np.float32)
    assert np.isnan(lowprec.matmul(a, np.ones((2, 2), np.complex64), math_mode="fp64")).all()
    assert np.isnan(lowprec.matmul(a, np.eye(2, dtype=np.float32), math_mode="fp64")).all()
