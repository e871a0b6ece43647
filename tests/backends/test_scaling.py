"""Mode ``fp16`` on the CPU: rows and columns scaled by powers of two, alike on every kernel path."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.modes import MathMode, row
from support import oracles
from support.machines import MACHINES, fixture

#: m, k, n by their kernel path: small, BLAS, a matrix and a vector on either side.
SHAPES = {"small": (9, 21, 17), "blas": (150, 260, 140), "A @ v": (190, 170, 1), "v @ A": (1, 180, 170)}


def special(rng, shape):
    x = rng.standard_normal(shape)
    x[..., 0, 0], x[..., -1, 0], x[..., 0, -1] = 1e-45, np.inf, np.nan
    return x


def zeros(rng, shape):
    x = rng.standard_normal(shape) * 1e25
    x[..., 0, :] = x[..., 0] = 0
    return x


KINDS = {
    "near": lambda rng, shape: rng.standard_normal(shape),
    "tall": lambda rng, shape: rng.standard_normal(shape) * 1e30,
    "small": lambda rng, shape: rng.standard_normal(shape) * 1e-30,
    "spread": lambda rng, shape: np.exp(10 * rng.standard_normal(shape)),
    "special": special,
    "zeros": zeros,
}
near, spread, small = (KINDS[kind] for kind in ("near", "spread", "small"))
PAIRS = [("near", x) for x in KINDS] + [(x, "near") for x in KINDS] + [("tall", "small"), ("spread", "spread")]


machine = fixture(*MACHINES)


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_any_size(kinds, shape, machine, rng):
    m, k, n = SHAPES[shape]
    a, b = (KINDS[x](rng, s).astype(np.float32) for x, s in zip(kinds, ((m, k), (k, n)), strict=True))
    for left, right in itertools.product((a, np.asfortranarray(a)), (b, b[::-1][::-1, ::-1][:, ::-1])):
        oracles.assert_within_bound(lowprec.matmul(left, right, math_mode="fp16"), a, b, "fp16")


@pytest.mark.parametrize("kinds", [("spread", "near"), ("near", "tall")], ids="-".join)
@pytest.mark.parametrize("dtype", ["complex64", "float16", "bfloat16"])
def test_other_operands_with_float32(kinds, dtype, machine, rng):
    """A float16 operand is what it is; a bfloat16 one is scaled, since float16 has not its range."""
    a, b = (KINDS[x](rng, s) for x, s in zip(kinds, ((19, 23), (23, 18)), strict=True))
    a, b = a.astype(np.float32), b.astype(np.float32)
    if dtype == "complex64":
        b = (b * (1 + 1e-9j)).astype(np.complex64)
        a = (a * (1j + 2.0**-40)).astype(np.complex64)
        oracles.assert_within_bound(lowprec.matmul(a, b, math_mode="fp16"), a, b, "fp16")
        return
    other = (KINDS["near"](rng, (18, 19)) * 2.0**-10).astype(getattr(ml_dtypes, dtype, dtype))
    found = lowprec.matmul(other, a, math_mode="fp16")
    exact = other.astype(np.float32)
    x = oracles.round_to(exact, "fp16", -1) if dtype == "bfloat16" else exact
    assert lowprec.plan(other, a, math_mode="fp16").scaled == (dtype == "bfloat16", True)
    y = oracles.round_both(a.T, a, "fp16")[1]
    how = oracles.arithmetic(a, a, "fp16")
    allowed = 1.01 * oracles.accumulation_bound(x, y, "fp16", how)
    want = oracles.product(x, y)
    oracles.assert_close(found, want, allowed + oracles.storage_bound(want, "float32"))


@pytest.mark.parametrize("shape", [(7, 9, 8), (60, 70, 50)], ids=str)
def test_batches_prepared_operands_and_epilogues(shape, machine, rng):
    m, k, n = shape
    a, b = near(rng, (5, m, k)).astype(np.float32), near(rng, (k, n)).astype(np.float32)
    a[1], a[3, 2:4] = spread(rng, (m, k)), small(rng, (2, k))
    b[:, 1::2] *= np.float32(1e15)
    c, bias = near(rng, (5, m, n)).astype(np.float32), near(rng, (n,)).astype(np.float32)
    then = oracles.Epilogue(alpha=0.5, beta=-2.0, c=c, bias=bias, activation="relu")
    words = {"alpha": 0.5, "beta": -2.0, "c": c, "bias": bias, "activation": "relu"}
    every = np.broadcast_to(b, (5, k, n))
    for right in (b, lowprec.prepare(b, math_mode="fp16"), every, every[:, ::-1].copy()[:, ::-1]):
        for _ in range(2):
            found = lowprec.matmul(a, right, math_mode="fp16", **words)
            oracles.assert_expression(found, a, every, "fp16", then)
    for i in range(5):
        oracles.assert_within_bound(lowprec.matmul(a[i], b, math_mode="fp16"), a[i], b, "fp16")


@pytest.mark.parametrize("sides", [*itertools.product((False, True), repeat=2)], ids=str)
def test_products_of_a_batch_are_scaled_one_by_one(sides, machine, rng):
    a, b = near(rng, (6, 60, 70)).astype(np.float32), near(rng, (6, 70, 50)).astype(np.float32)
    # Scaling by the first element makes the others subnormal in float16, and b leaves out the first.
    a[1] *= np.float32(2.0**-12)
    a[1, :, 0], b[1, 0] = 2.0**20, 0
    b[4] *= np.float32(2.0**-12)
    b[4, 0], a[4, :, 0] = 2.0**20, 0
    given = [x.mT.copy().mT if turned else x for x, turned in zip((a, b), sides, strict=True)]
    found = lowprec.matmul(*given, math_mode="fp16")
    for left, right, one in zip(a, b, found, strict=True):
        x, y = oracles.round_both(left, right, "fp16")
        allowed = 1.01 * oracles.accumulation_bound(x, y, "fp16", oracles.arithmetic(left, right, "fp16"))
        want = oracles.product(x, y)
        oracles.assert_close(one, want, allowed + oracles.storage_bound(want, "float32"))


def test_tensor_cores_are_given_scaled_numbers(rng):
    """Their arithmetic treats float16's subnormal numbers in its own way, so that factors matter."""
    from lowprec.emulation import mma

    a, b = near(rng, (6, 40)).astype(np.float32), near(rng, (40, 5)).astype(np.float32)
    a *= np.float32(2.0**-20)
    with lowprec.emulate("hopper"):
        found = lowprec.matmul(a, b, math_mode="fp16")
    exponents, parts = [], []
    for x, axis in ((a, -1), (b, -2)):
        e = 15 - np.frexp(np.abs(x).max(axis, keepdims=True))[1]
        exponents.append(e)
        parts.append(np.ldexp(x, e).astype(np.float16).astype(np.float32))
    zero = np.zeros((6, 5), np.float32)
    want = np.ldexp(mma(*parts, zero, arch="hopper", format="fp16"), -sum(exponents))
    np.testing.assert_array_equal(found, want)
    assert row(MathMode.FP16).parts == 1
