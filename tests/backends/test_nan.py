"""A NaN in an operand reaches every element of the result that it touches, whatever its bits and position.

Integer arithmetic on the bits of a NaN carries its payload into the exponent or the sign: 0x7fffffff becomes a zero,
0x7f800001 an infinity. So every class of payload goes through every kind of stride.
"""

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import formats
from support import oracles
from support.machines import MACHINES, fixture
from support.rounding_oracle import round_to_format

bfloat16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = {"tf32": formats.TF32, "bf16": formats.BFLOAT16, "fp16": formats.FLOAT16}

modes = pytest.mark.parametrize("mode", oracles.ALL_MODES)


def scattered(view):
    """Return an element at the beginning, one in the middle, and one at the end of a view."""
    return sorted({tuple(n // 2 for n in view.shape), (0,) * view.ndim, tuple(n - 1 for n in view.shape)})


def put(view, index, nan):
    """Write the bits of a NaN: an assignment of floats may quieten it."""
    bits = np.dtype(f"u{nan.itemsize}")
    real = view.real if view.dtype.kind == "c" else view
    real.view(bits)[index] = nan.view(bits)


# -- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("strides", oracles.STRIDES)
def test_rounding_keeps_every_nan(mode, strides, rng):
    for nan in oracles.nans(np.float32):
        writable, view = oracles.STRIDES[strides](oracles.random_matrix(rng, (6, 8), np.float32))
        for index in scattered(writable):
            put(writable, index, nan)
        before = view.copy()
        got = round_to_format(view, FORMATS[mode])
        want = oracles.round_to(view, mode)
        assert (np.isnan(got) == np.isnan(view)).all(), hex(int(nan.view(np.uint32)))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(view.view(np.uint32), before.view(np.uint32))


@pytest.mark.parametrize("mode", FORMATS)
def test_rounding_of_several_blocks(mode, rng):
    x = oracles.random_matrix(rng, (1 << 10, 1 << 9), np.float32)
    nans = oracles.nans(np.float32)
    x[5, : nans.size] = nans
    x[7::101, ::103] = np.inf
    want = oracles.round_to(x, mode)
    assert np.isnan(x).sum() == nans.size
    np.testing.assert_array_equal(round_to_format(x, FORMATS[mode]), want)


# -- products -------------------------------------------------------------------------------------


machine = fixture(*MACHINES)


#: m, n, k; the second is cut into tiles where there are any.
SIZES = {"small": (6, 5, 8), "tiles": (70, 66, 96)}


@modes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.sampled(6)
def test_every_nan_reaches_the_result(mode, size, dtype, machine, rng):
    m, n, k = SIZES[size]
    patterns = oracles.nans(np.float32)
    for name, strided in oracles.STRIDES.items():
        some = patterns if size == "small" else patterns[:: len(patterns) // 4]
        for nan in some:
            for side in ("a", "b"):
                shape = (m, k) if side == "a" else (k, n)
                writable, x = strided(oracles.random_matrix(rng, shape, dtype))
                put(writable, tuple(extent // 2 for extent in writable.shape), nan)
                other = oracles.random_matrix(rng, (k, n) if side == "a" else (m, k), dtype)
                other[other == 0] = 1
                a, b = (x, other) if side == "a" else (other, x)
                got = lowprec.matmul(a, b, math_mode=mode)
                lines = np.isnan(x).any(axis=1 if side == "a" else 0)
                touched = np.isnan(got) if side == "a" else np.isnan(got).T
                case = name, side, hex(int(nan.view(np.uint32)))
                assert lines.any(), case
                assert (touched == lines[:, None]).all(), case
                oracles.assert_within_bound(got, a, b, mode)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", ["float32", None])
def test_every_nan_of_16_bits_reaches_the_result(dtype, out_dtype, machine, rng):
    for strided in oracles.STRIDES.values():
        for nan in oracles.nans(dtype):
            writable, a = strided(oracles.random_matrix(rng, (6, 8), dtype))
            put(writable, tuple(extent // 2 for extent in writable.shape), nan)
            b = oracles.random_matrix(rng, (8, 5), dtype)
            got = lowprec.matmul(a, b, out_dtype=out_dtype)
            lines = np.isnan(oracles.widen(a)).any(axis=1)
            assert lines.any()
            assert (np.isnan(oracles.widen(got)) == lines[:, None]).all()
            oracles.assert_within_bound(got, a, b)


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_every_nan_of_an_addend_reaches_the_result(out_dtype, activation, machine, rng):
    a, b = (oracles.random_matrix(rng, (64, 64), np.float32) for _ in range(2))
    for nan in oracles.nans(np.float32):
        c, bias = np.zeros((64, 64), np.float32), np.zeros(64, np.float32)
        put(c, (3, 4), nan)
        put(bias, (7,), nan)
        got = lowprec.matmul(
            a, b, c=c, beta=1.0, bias=bias, activation=activation, out_dtype=out_dtype, math_mode="bf16"
        )  # fmt: skip
        want = np.zeros((64, 64), bool)
        want[3, 4] = want[:, 7] = True
        np.testing.assert_array_equal(np.isnan(got), want)


@pytest.mark.parametrize("size", [2, 70, 140])
@pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("f8"), np.dtype("f2"), bfloat16], ids=str)
def test_gelu_of_minus_infinity_is_zero_on_every_kernel(size, dtype, machine):
    a = np.eye(size, dtype=dtype)
    c = np.zeros((size, size), dtype)
    c[0, 0], c[1, 1], c[1, 0], c[0, 1] = -np.inf, np.inf, np.nan, -60000
    got = lowprec.matmul(a, a, c=c, beta=1.0, activation="gelu")
    np.testing.assert_array_equal(oracles.widen(got)[:2, :2], [[0, 0], [np.nan, np.inf]])


def test_a_signalling_nan_is_widened_in_silence(machine):
    """Warnings are errors here."""
    a = np.full((2, 2), 0x7F800001, np.uint32).view(np.float32)
    assert np.isnan(lowprec.matmul(a, np.ones((2, 2), np.complex64), math_mode="fp64")).all()
    assert np.isnan(lowprec.matmul(a, np.eye(2, dtype=np.float32), math_mode="fp64")).all()
