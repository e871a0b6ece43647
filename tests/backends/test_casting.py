"""Native casts against NumPy's conversions and the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import formats
from lowprec.backends.cpu import casting, threads
from lowprec.backends.cpu.rounding import round_float32
from lowprec.formats import NumberFormat
from support import oracles
from support.rounding_oracle import round_scalar

needs_numba = pytest.mark.skipif(not casting.has_kernels(), reason="numba is not installed, or switched off")

ROUNDED = (formats.TF32, formats.BFLOAT16, formats.FLOAT16)
WIDENED = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int8))


def every_number(rng: np.random.Generator) -> np.ndarray:
    """float32 with each sign and exponent, those of infinities and NaN too, and ties of every format."""
    return np.concatenate(
        [oracles.every_exponent(rng, 256), oracles.nans(np.float32), [0, -0.0, np.inf, -np.inf]], dtype=np.float32
    )


def assert_same(found: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(found, want)  # NaN equals NaN
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(want)[numbers])


def cast_by_kernel(source: np.ndarray, out: np.ndarray, to: NumberFormat | None) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(casting, "_PAYS_TO_CALL", 0)
        assert casting.can_compile() == casting.has_kernels()
        casting.cast([(source, out)], to)


@needs_numba
@pytest.mark.parametrize("to", ROUNDED, ids=lambda to: to.name)
def test_rounding_over_every_exponent(to: NumberFormat, rng: np.random.Generator) -> None:
    values = every_number(rng)
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
    with np.errstate(invalid="ignore"):  # as AArch64 says of a signalling NaN
        want = codes.astype(np.float32)
    assert_same(found, want)


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
    with np.errstate(invalid="ignore"):
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
    values = every_number(rng)
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


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_layouts_without_a_kernel_are_left_to_numpy(dtype: type, rng: np.random.Generator) -> None:
    source, out = rng.standard_normal((300, 300)).astype(np.float32), np.empty((300, 300), dtype)
    cast_by_kernel(source, out, None)
    np.testing.assert_array_equal(out, source)


def test_a_signalling_nan_is_widened_in_silence() -> None:
    """Warnings are errors here."""
    a = np.full((2, 2), 0x7F800001, np.uint32).view(np.float32)
    assert np.isnan(lowprec.matmul(a, np.ones((2, 2), np.complex64), math_mode="fp64")).all()
    assert np.isnan(lowprec.matmul(a, np.eye(2, dtype=np.float32), math_mode="fp64")).all()
