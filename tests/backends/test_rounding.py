"""Rounding to the formats of the modes, bit by bit: scalar oracle, fast twin and ml_dtypes against each other."""

import numpy as np
import pytest

import lowprec
from lowprec import formats
from support import oracles
from support.machines import MACHINES, fixture
from support.rounding_oracle import round_scalar, round_to_format

FORMATS = {"tf32": formats.TF32, "bf16": formats.BFLOAT16, "fp16": formats.FLOAT16}
EXACT_TYPES = {"bf16": oracles.bfloat16, "fp16": np.float16}

modes = pytest.mark.parametrize("mode", FORMATS)
machine = fixture(*MACHINES)


def rounded(x, mode):
    return round_to_format(x, FORMATS[mode])


def rounded_one_by_one(x, mode):
    to, away = FORMATS[mode], mode == "tf32"
    found = [round_scalar(float(v), to, ties_away=away) for v in x]
    # Past the largest number of the format but representable in float64: the oracle made it an infinity already.
    return np.array(found, np.float64).astype(np.float32)


def bits(x):
    return np.ascontiguousarray(x).view(np.uint32)


def assert_same_bits(got, want, source):
    """Compare bits, signs of zeros included; a NaN must be a NaN, whatever its payload."""
    differ = (bits(got) != bits(want)) & ~(np.isnan(got) & np.isnan(want))
    if differ.any():
        i = int(np.flatnonzero(differ)[0])
        raise AssertionError(
            f"{differ.sum()} of {differ.size} differ, first {i}: {float(source[i]).hex()} became "
            f"{float(got[i]).hex()}, expected {float(want[i]).hex()}"
        )


def sample(rng, per_exponent):
    """Return every exponent, both signs, ties, the edges of each format, infinities, NaNs of many payloads, zeros."""
    edges = [2.0**-149, 2.0**-137, 2.0**-136, 2.0**-134, 2.0**-133, 2.0**-126]
    for to in FORMATS.values():
        half_ulp_beyond = to.largest * (1 + 2.0 ** -(to.precision + 1))
        edges += [to.smallest_subnormal / 2, to.smallest_subnormal, to.smallest_normal, to.largest]
        edges += [half_ulp_beyond] if half_ulp_beyond < formats.FLOAT32.largest else []
    edges += [65519.0, 65520.0, 65536.0, formats.FLOAT32.largest]
    payloads = rng.integers(1, 1 << 23, 500, dtype=np.uint32) | np.uint32(0x7F800000)
    few = np.array([1, 0x7FFFFF, 0x400000, 0x3FFFFF, 0x1000, 0x8000, 0x1FFF], np.uint32)
    nans = np.concatenate([payloads, few | np.uint32(0x7F800000)])
    special = np.array([0.0, -0.0, np.inf, -np.inf], np.float32)
    return np.concatenate(
        [
            oracles.every_exponent(rng, per_exponent),
            oracles.around(edges),
            nans.view(np.float32),
            (nans | np.uint32(1 << 31)).view(np.float32),
            special,
        ]
    )


@modes
def test_twin_agrees_with_the_oracle(mode, rng):
    x = sample(rng, 40)
    assert_same_bits(rounded(x, mode), rounded_one_by_one(x, mode), x)


@modes
def test_twin_agrees_with_an_independent_rounding(mode, rng):
    x = sample(rng, 4000)
    assert x.size > 1_000_000
    assert_same_bits(rounded(x, mode), oracles.round_to(x, mode), x)


@pytest.mark.parametrize("mode", EXACT_TYPES)
def test_every_16_bit_pattern_is_kept(mode):
    with np.errstate(invalid="ignore"):  # as AArch64 says of a signalling NaN
        x = np.arange(1 << 16, dtype=np.uint16).view(EXACT_TYPES[mode]).astype(np.float32)
    assert_same_bits(rounded(x, mode), x, x)
    assert_same_bits(rounded_one_by_one(x, mode), x, x)


@pytest.mark.parametrize("mode", EXACT_TYPES)
def test_every_midpoint_of_16_bit_neighbours_goes_to_even(mode):
    positive = np.arange((1 << 15) - 1, dtype=np.uint16)
    low = oracles.widen(positive.view(EXACT_TYPES[mode]))
    high = oracles.widen((positive + np.uint16(1)).view(EXACT_TYPES[mode]))
    finite = np.isfinite(low) & np.isfinite(high)
    # Exact in float32: a midpoint needs one bit more than its neighbours.
    middle = ((low[finite] + high[finite]) / 2).astype(np.float32)
    even = np.where(positive[finite] % 2 == 0, low[finite], high[finite]).astype(np.float32)
    for sign in (np.float32(1), np.float32(-1)):
        assert_same_bits(rounded(sign * middle, mode), sign * even, middle)
        below, above = np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)
        assert_same_bits(rounded(sign * below, mode), sign * low[finite].astype(np.float32), below)
        assert_same_bits(rounded(sign * above, mode), sign * high[finite].astype(np.float32), above)


@modes
@pytest.mark.parametrize("size", [0, 1, 3, 65_535, 65_536, 65_537, 524_288, 600_001])
def test_every_size_of_block_is_whole(mode, size, rng):
    x = rng.standard_normal(size, dtype=np.float32)
    x[size // 2 : size // 2 + 1] = np.nan
    assert_same_bits(rounded(x, mode), oracles.round_to(x, mode), x)


@modes
@pytest.mark.parametrize("dtype", [np.float16, oracles.bfloat16], ids=["float16", "bfloat16"])
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
