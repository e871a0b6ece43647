"""Sums of AMD's matrix cores against the published rules, one number at a time, in exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu.emulation.matrix_cores import MATRIX_CORES
from lowprec.emulation import mma
from lowprec.formats import BFLOAT16, FLOAT16, TF32
from support.narrow_twin import float32, floor_log2

FORMATS = {"float16": FLOAT16, "bfloat16": BFLOAT16, "tf32": TF32}
LEAST = Fraction(1, 2**126)


def flushed(x, core, least=LEAST):
    return Fraction(0) if core.flushes and abs(x) < least else x


def in_pairs(products, c, core):
    sums = [flushed(float32(p), core) for p in products]
    sums += [Fraction(0)] * (core.group - len(sums))
    while len(sums) > 1:
        sums = [flushed(float32(x + y), core) for x, y in zip(sums[::2], sums[1::2], strict=True)]
    return flushed(float32(c + sums[0]), core)


def rounded_down(terms, c, core):
    """`terms`: significands and exponents of the products."""
    largest = max(e for _, e in terms)
    step = Fraction(2) ** (largest - core.fraction_bits)
    total = sum(math.trunc(x / step) * step for x, _ in terms)
    whole = max(largest, exponent_of(c, -126))
    first, second = Fraction(2) ** (whole - 31), Fraction(2) ** (whole - 24)
    return float32(math.floor(total / first) * first + math.floor(c / second) * second)


def exponent_of(x, emin):
    return max(floor_log2(abs(x)), emin) if x else -126


def dot(a, b, c, core, emin):
    a, b = ([flushed(Fraction(float(x)), core, Fraction(2) ** emin) for x in y] for y in (a, b))
    total = flushed(Fraction(float(c)), core)
    for i in range(0, len(a), core.group):
        pairs = [*zip(a[i : i + core.group], b[i : i + core.group], strict=True)]
        if core.fraction_bits:
            terms = [(x * y, exponent_of(x, emin) + exponent_of(y, emin)) for x, y in pairs]
            total = rounded_down(terms, total, core)
        else:
            total = in_pairs([x * y for x, y in pairs], total, core)
    return float(total)


def wild(rng, shape, fmt, spread):
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, 4, shape)
    x[rng.random(shape) < 0.1] = 0
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, fmt.emin) - fmt.precision + 1)
    return (np.rint(x / step) * step).astype(np.float32)


@pytest.mark.parametrize("spread", [1, 8, 20, 60])
@pytest.mark.parametrize(("arch", "name"), MATRIX_CORES)
def test_sums_follow_the_published_rules(arch, name, spread, rng):
    fmt, core = FORMATS[name], MATRIX_CORES[arch, name]
    a, b = wild(rng, (4, 22), fmt, spread), wild(rng, (22, 5), fmt, spread)
    c = wild(rng, (4, 5), TF32, 2 * spread)
    found = mma(a, b, c, arch=arch, format=name)
    expected = [[dot(a[i], b[:, j], c[i, j], core, fmt.emin) for j in range(5)] for i in range(4)]
    np.testing.assert_array_equal(found.astype(float), expected)


def test_cdna3_rounds_a_small_accumulator_down():
    one = np.float32([[1.0]])
    found = [
        mma(one, one, np.float32([[c]]), arch="cdna3", format="fp16")
        for c in (2.0**-40, -(2.0**-40))
    ]
    assert found == [1.0, 1.0 - 2.0**-24]


def test_special_values_and_a_format_that_is_missing():
    one, inf = np.float32([[1.0]]), np.float32([[np.inf]])
    for arch in ("cdna1", "cdna2", "cdna3"):
        assert mma(inf, one, one, arch=arch, format="fp16") == np.inf
        assert np.isnan(mma(inf, one, -inf, arch=arch, format="fp16"))
    with pytest.raises(
        lowprec.SettingError,
        match="matrix cores of cdna1 have the formats float16, bfloat16, not tf32",
    ):
        mma(one, one, one, arch="cdna1", format="tf32")
