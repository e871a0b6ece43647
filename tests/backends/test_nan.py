"""A NaN in an operand reaches every element of the result that it touches, whatever its bits and position.

Integer arithmetic on the bits of a NaN carries its payload into the exponent or the sign: 0x7fffffff becomes a zero,
0x7f800001 an infinity. So every class of payload goes through every kind of stride.
"""

import ml_dtypes
import numpy as np
import pytest

import lowprec
from support import oracles
from support.machines import MACHINES, fixture

bfloat16 = np.dtype(ml_dtypes.bfloat16)

modes = pytest.mark.parametrize("mode", oracles.ALL_MODES)


def put(view, index, nan):
    """Write the bits of a NaN: an assignment of floats may quieten it."""
    bits = np.dtype(f"u{nan.itemsize}")
    real = view.real if view.dtype.kind == "c" else view
    real.view(bits)[index] = nan.view(bits)


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


def test_a_signalling_nan_is_widened_in_silence(machine):
    """Warnings are errors here."""
    a = np.full((2, 2), 0x7F800001, np.uint32).view(np.float32)
    assert np.isnan(lowprec.matmul(a, np.ones((2, 2), np.complex64), math_mode="fp64")).all()
    assert np.isnan(lowprec.matmul(a, np.eye(2, dtype=np.float32), math_mode="fp64")).all()
