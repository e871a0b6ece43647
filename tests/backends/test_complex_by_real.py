"""Complex products of which one operand is real have the numbers of a zero imaginary part."""

import ml_dtypes
import numpy as np
import pytest

import lowprec
from support import oracles
from support.machines import MACHINES, fixture

REAL = ["float32", "bfloat16", "float16"]
MODES = ["tf32", "bf16", "fp16", "bf16x3", "bf16x6", "bf16x9"]
SIDES = pytest.mark.parametrize("side", ["a", "b"], ids="real {}".format)

M, K, N = 150, 220, 100


machine = fixture(*MACHINES)


def operands(rng, side, dtype):
    """``a`` and ``b``, of which one is real and of a type of its own."""
    a, b = (oracles.random_matrix(rng, shape, "complex64") for shape in ((M, K), (K, N)))
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return (a.real.astype(narrow), b) if side == "a" else (a, b.real.astype(narrow))


def widened(x):
    return x if x.dtype.kind == "c" else x.astype(np.float32).astype(np.complex64)


@SIDES
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", REAL)
def test_the_numbers_are_those_of_a_zero_imaginary_part(rng, side, mode, dtype, machine):
    a, b = operands(rng, side, dtype)
    c = oracles.random_matrix(rng, (M, N), "complex64")
    want = lowprec.matmul(*map(widened, (a, b)), math_mode=mode, c=c, beta=2j)
    np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode=mode, c=c, beta=2j), want)
    if side == "b":
        prepared = lowprec.prepare(b, math_mode=mode)
        np.testing.assert_array_equal(
            lowprec.matmul(a, prepared, math_mode=mode, c=c, beta=2j), want
        )


@SIDES
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, complex(0, np.inf), 3e38 + 3e38j])
def test_non_finite_elements_are_as_with_a_zero_imaginary_part(rng, side, mode, value, machine):
    a, b = operands(rng, side, "float32")
    spoilt = [b[3, 5:7]] if side == "a" else [a[5:7, 3]]
    if not isinstance(value, complex):
        spoilt.append(a[1:2, 2] if side == "a" else b[2, 1:2])
    for place in spoilt:
        place[...] = value
    want = lowprec.matmul(*map(widened, (a, b)), math_mode=mode)
    found = lowprec.matmul(a, b, math_mode=mode)
    assert not np.isfinite(found).all()
    np.testing.assert_array_equal(found, want)
