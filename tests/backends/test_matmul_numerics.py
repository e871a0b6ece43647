"""Every mode against float64, on this machine's fastest units and on NumPy alone.

The sharpest tests multiply by a signed permutation: each element of the result is then one rounded
element of the operand, so that the rounding shows bit by bit through whichever kernel ran. The
others compare with float64 under the bounds that ``oracles`` derives.
"""

import ml_dtypes
import numpy as np
import pytest

import lowprec
from support import oracles
from support.machines import MACHINES, fixture

#: m, n, k. The large ones take the tile units where there are any; the odd ones leave every tile unfilled.
SIZES = {
    "small": (7, 5, 11),
    "row": (1, 300, 200),
    "tiles": (256, 256, 256),
    "ragged": (257, 263, 269),
}
every_mode = pytest.mark.parametrize("mode", oracles.ALL_MODES)
rounding_mode = pytest.mark.parametrize("mode", oracles.ROUNDING_MODES)
small_and_large = pytest.mark.parametrize("size", ["small", "ragged"])


def uniform(rng, size):
    """Return operands of one sign: errors that are a bias do not cancel."""
    m, n, k = SIZES[size]
    return rng.random((m, k), np.float32), rng.random((k, n), np.float32)


def signed_permutation(n, rng):
    """Return a matrix P with one +-1 per row and column, and what ``x @ P`` does to the columns of x."""
    order, sign = rng.permutation(n), rng.choice([-1, 1], n)
    matrix = np.zeros((n, n), np.float32)
    matrix[order, np.arange(n)] = sign
    return matrix, lambda x: x[:, order] * sign.astype(x.dtype)


machine = fixture(*MACHINES)


# -- bounds ---------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("size", ["row", "tiles", "ragged"])
def test_the_plan_keeps_its_promise(mode, size, machine, rng):
    a, b = uniform(rng, size)
    bound = lowprec.plan(a, b, math_mode=mode).bound
    error = np.abs(oracles.widen(lowprec.matmul(a, b, math_mode=mode)) - oracles.product(a, b))
    relative = bound.relative * (np.abs(a.astype(float)) @ np.abs(b.astype(float)))
    # Uniform numbers are in float16's range, but some fall below its normal one: k times its absolute error.
    absolute = 2 * a.shape[1] * bound.operand_absolute * 1.01 + bound.result_absolute
    assert (error <= relative + absolute).all()
    # A promise of anything keeps itself: at most what is derived here, with room for another order of summing.
    assert bound.relative <= 2 * oracles.MODES[mode][0] * 1.01 + 1.05 * 4 * a.shape[1] * 2.0**-24
    if mode in oracles.ROUNDING_MODES:
        assert bound.relative >= oracles.MODES[mode][0]


# -- exact results --------------------------------------------------------------------------------


def in_range(x):
    """Keep numbers that stay finite and above what tile units take for zero, their second part included."""
    return np.where((np.abs(x) <= 3.3e38) & (np.abs(x) >= 2.0**-100), x, np.float32(1.5))


@every_mode
@small_and_large
def test_every_exponent_is_rounded_bit_by_bit(mode, size, machine, rng):
    m, n, _ = SIZES[size]
    x = in_range(rng.permutation(oracles.every_exponent(rng, 300)))[: m * n].reshape(m, n)
    p, permute = signed_permutation(n, rng)
    oracles.assert_equal(
        lowprec.matmul(x, p, math_mode=mode), permute(oracles.round_to(x, mode, -1))
    )
    q, permute = signed_permutation(m, rng)
    want = permute(oracles.round_to(x, mode, -2).T).T
    oracles.assert_equal(lowprec.matmul(q.T, x, math_mode=mode), want)


@every_mode
@small_and_large
def test_ties_and_the_edges_of_the_range(mode, size, machine, rng):
    m, n, _ = SIZES[size]
    # The largest TF32 number: its nearest bfloat16 is infinite, which a split in two parts must not fall for.
    largest = {"bf16": (2 - 2.0**-7) * 2.0**127}.get(mode, (2 - 2.0**-10) * 2.0**127)
    below_overflow = np.nextafter(np.float32(largest * (1 + 2.0**-12)), np.float32(0))
    edges = [
        1 + 2.0**-11,
        1 + 3 * 2.0**-11,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        2.0**-14,
        2.0**-24,
        2.0**-25,
    ]
    pool = np.array([*edges, largest, -largest, below_overflow], np.float32)
    pool = pool[np.isfinite(oracles.round_to(pool, mode))]
    x = rng.choice(pool, (m, n))
    p, permute = signed_permutation(n, rng)
    oracles.assert_equal(
        lowprec.matmul(x, p, math_mode=mode), permute(oracles.round_to(x, mode, -1))
    )


@every_mode
@small_and_large
def test_complex_parts_are_rounded_bit_by_bit(mode, size, machine, rng):
    m, n, _ = SIZES[size]
    x = (rng.standard_normal((m, n)) + 1j * rng.standard_normal((m, n))).astype(np.complex64)
    p, permute = signed_permutation(n, rng)
    for factor in np.complex64([1, 1j]):
        found = lowprec.matmul(x, factor * p, math_mode=mode)
        oracles.assert_equal(found, factor * permute(oracles.round_to(x, mode, -1)))


@rounding_mode
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_stored_numbers_that_a_format_does_not_hold_are_rounded(mode, dtype, machine):
    """In a product with float32; bfloat16 reaches beyond float16, which is the finer one."""
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)[:, None]
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float32)
    keeps = mode == "fp16" and dtype == np.float16
    want = wide if keeps else oracles.round_to(wide, mode, -1)
    normal = ~((wide != 0) & (np.abs(wide) < 2.0**-126))  # units may take others for zero
    found = lowprec.matmul(x, np.ones((1, 1), np.float32), math_mode=mode)
    np.testing.assert_array_equal(found[normal], want[normal])


# -- Inf, NaN, zeros, subnormals ------------------------------------------------------------------


@every_mode
@small_and_large
def test_inf_times_zero_is_nan(mode, size, machine, rng):
    a, b = uniform(rng, size)
    a[3, 2], b[2, 1] = np.inf, 0.0
    b[2, 0] = np.float32(1e-30)  # zero in float16, next to the numbers of its column
    a[0, 0], b[0, 3] = -0.0, np.inf
    c = lowprec.matmul(a, b, math_mode=mode)
    assert np.isnan(c[3, 1])
    assert np.isnan(c[0, 3])
    assert np.isnan(c[3, 0]) == (mode == "fp16")
    oracles.assert_within_bound(c, a, b, mode)


@every_mode
@small_and_large
def test_subnormal_float32_numbers(mode, size, machine, rng):
    """Kept where the units keep them; tile units take them for zero, which the bound says."""
    m, n, _ = SIZES[size]
    x = np.ldexp(rng.standard_normal((m, n)), rng.integers(-149, -120, (m, n))).astype(np.float32)
    p, permute = signed_permutation(n, rng)
    scale = np.float32(2.0**40)
    scaled = p * scale
    c = lowprec.matmul(x, scaled, math_mode=mode)
    if machine == "NumPy alone" or mode.startswith("fp32"):
        want = permute(oracles.round_to(x, mode, -1)) * scale
        oracles.assert_equal(c, want)
    oracles.assert_within_bound(c, x, scaled, mode)
