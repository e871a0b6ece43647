"""Formats as values: their text, their numbers against exact fractions and ml_dtypes, and their products."""

import itertools
import pickle
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.arrays.narrow_numbers import nearest_codes, numbers_of
from lowprec.backends.cpu import library
from lowprec.core.rules import parse_rules
from lowprec.formats import number_format
from lowprec.modes import parse_mode, rules_of
from lowprec.recipes import Recipe
from lowprec.rounding_rules import NAMED, Format
from support.narrow_twin import nearest

BLOCKS = [("tensor", "float32"), ("rows", "float32"), (32, "e8m0"), (16, "e4m3"), (64, "float32")]


def random_format(rng):
    """Return a format of at most 8 bits, of any special values, bias, block and scale."""
    while True:
        exponent, mantissa = int(rng.integers(1, 8)), int(rng.integers(0, 7))
        specials = [None, "none", "nan", "ieee", "fnuz"][rng.integers(5)]
        bias = None if rng.random() < 0.5 else int(rng.integers(-8, 20))
        block, scale = BLOCKS[rng.integers(len(BLOCKS))]
        try:
            return Format(exponent, mantissa, specials, bias, block, scale)
        except lowprec.ModeError:
            continue


def magnitudes(fmt):
    """The numbers of a format that are not negative, by its definition, as fractions."""
    bias = fmt.bias
    if bias is None:
        bias = 2 ** (fmt.exponent - 1) - (fmt.specials != "fnuz")
    found = []
    for code in range(2 ** (fmt.exponent + fmt.mantissa)):
        exponent, mantissa = divmod(code, 2**fmt.mantissa)
        is_top = exponent == 2**fmt.exponent - 1
        if is_top and (
            fmt.specials == "ieee" or (fmt.specials == "nan" and mantissa == 2**fmt.mantissa - 1)
        ):
            continue
        size = Fraction(mantissa, 2**fmt.mantissa) + (exponent > 0)
        found.append(size * Fraction(2) ** (max(exponent, 1) - bias))
    return found


def test_a_format_is_a_value_with_a_text(rng):
    for _ in range(500):
        fmt = random_format(rng)
        again = Format.parse(str(fmt))
        assert (
            again == fmt == pickle.loads(pickle.dumps(fmt)) == eval(repr(fmt), {"Format": Format})
        )
        assert hash(again) == hash(fmt)
        assert parse_mode(str(fmt)) == parse_mode(fmt) == Recipe(fmt) == Recipe(str(fmt))
        assert rules_of(parse_mode(fmt)) == fmt.rules


def test_rules_have_formats():
    text = "e3m2:block=32:scale=e8m0"
    assert parse_rules(text) == parse_rules(NAMED["mxfp6"]) == (("*", Recipe(text)),)
    assert parse_rules(f"head=e3m2:block=rows,*={text}") == (
        ("head", Recipe("e3m2:block=rows")),
        ("*", Recipe(text)),
    )


def test_rounding_is_exact_for_random_formats(rng):
    """Random bits, halves between neighbours, and numbers beyond the largest one, which saturate."""
    for _ in range(60):
        fmt = random_format(rng)
        numbers = magnitudes(fmt)
        to = number_format(fmt.elements)
        assert (to.largest, to.smallest_subnormal) == (
            numbers[-1],
            numbers[1] if len(numbers) > 1 else to.largest,
        )
        ends = [float((low + high) / 2) for low, high in itertools.pairwise(numbers)]
        x = np.concatenate([
            ends, np.nextafter(np.float32(ends), np.float32(0)), np.nextafter(np.float32(ends), np.float32(np.inf)),
            to.largest * 2.0 ** rng.uniform(-12, 1, 100), to.largest * rng.random(100),
        ]).astype(np.float32)  # fmt: skip
        codes = nearest_codes(x, to, np)
        want = [nearest(Fraction(float(v)), numbers) for v in x]
        assert codes.tolist() == want, fmt
        assert [Fraction(float(v)) for v in numbers_of(codes, to, 31, np)] == [
            numbers[i] for i in want
        ], fmt


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("e3m2", "float6_e3m2fn"), ("e2m3", "float6_e2m3fn"), ("e2m1", "float4_e2m1fn"), ("e4m3", "float8_e4m3fn"),
        ("e4m3fnuz", "float8_e4m3fnuz"), ("e5m2fnuz", "float8_e5m2fnuz"), ("e4m3fnuzb11", "float8_e4m3b11fnuz"),
        ("e4m3ieee", "float8_e4m3"), ("e3m4ieee", "float8_e3m4"), ("e5m2", "float8_e5m2"),
    ],
)  # fmt: skip
def test_numbers_are_those_of_ml_dtypes(text, name, rng):
    to, dtype = number_format(text), np.dtype(getattr(ml_dtypes, name))
    info = ml_dtypes.finfo(dtype)
    assert (to.largest, to.smallest_subnormal) == (float(info.max), float(info.smallest_subnormal))
    x = (to.largest * 2.0 ** rng.uniform(-14, 0, 5000)).astype(np.float32)
    np.testing.assert_array_equal(
        numbers_of(nearest_codes(x, to, np), to, 31, np), x.astype(dtype).astype(np.float32)
    )


def rounded(x, fmt):
    """Return the numbers of rows in float64; of blocks with powers of two, and of whole rows and tensors."""
    numbers = np.array([float(v) for v in magnitudes(fmt)])
    length = {"tensor": x.size, "rows": x.shape[-1]}.get(fmt.block, fmt.block)
    groups = x.reshape(-1, length)
    peak = np.abs(groups).max(-1, keepdims=True)
    if fmt.scale == "e8m0":
        scale = 2.0 ** (np.floor(np.log2(peak)) - np.floor(np.log2(numbers[-1])))
    else:
        scale = (peak / np.float32(numbers[-1])).astype(np.float32)
    q = np.minimum(np.abs(groups / scale.astype(np.float32)), np.float32(numbers[-1]))
    codes = [nearest(Fraction(float(v)), magnitudes(fmt)) for v in q.ravel()]
    return (numbers[codes].reshape(q.shape) * np.sign(groups) * scale).reshape(x.shape)


@pytest.mark.parametrize(
    "fmt",
    [*NAMED.values(), Format(4, 3, "ieee", block="rows"), Format(2, 0, block=32, scale="e8m0"), Format(3, 2, bias=1),
     Format(1, 2, block=64)],
    ids=str,
)  # fmt: skip
def test_products_are_those_of_the_rounded_numbers(fmt, rng):
    a, b = rng.standard_normal((5, 64), np.float32), rng.standard_normal((7, 64), np.float32)
    exact = rounded(a, fmt) @ rounded(b, fmt).T
    found = lowprec.matmul(a, b.T, math_mode=fmt)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2.0**-16 * 64)
    error = np.linalg.norm(found - a.astype(float) @ b.T.astype(float))
    plan = lowprec.plan(a, b.T, math_mode=str(fmt))
    assert error <= plan.bound.probable * np.linalg.norm(a) * np.linalg.norm(b)
    assert plan.kernel == "numpy"
    assert np.array_equal(
        found, lowprec.matmul(a, lowprec.prepare(np.ascontiguousarray(b.T)), math_mode=fmt)
    )


def test_formats_of_kernels_have_their_bits(rng):
    a, b = rng.standard_normal((5, 64), np.float32), rng.standard_normal((64, 7), np.float32)
    for fmt, mode in [
        (Format(4, 3, block=32, scale="e8m0"), "mxfp8"), (Format(2, 1, block=32, scale="e8m0"), "mxfp4"),
        (Format(2, 1, block=16, scale="e4m3"), "nvfp4"), (Format(4, 3), "fp8"),
        (Format(4, 3, block="rows"), "fp8_rows"), ("e5m2:block=tensor", Recipe("fp8_e5m2")),
    ]:  # fmt: skip
        assert np.array_equal(
            lowprec.matmul(a, b, math_mode=fmt), lowprec.matmul(a, b, math_mode=mode)
        )


def test_recipes_of_formats(rng):
    a, b = rng.standard_normal((5, 64), np.float32), rng.standard_normal((64, 7), np.float32)
    recipe = Recipe(
        (Format(3, 2, block=32, scale="e8m0"), "mxfp4"),
        rounding="stochastic",
        seed=1,
        grad_input="mxfp6",
    )
    assert parse_mode(str(recipe)) == recipe
    assert not np.array_equal(
        lowprec.matmul(a, b, math_mode=recipe), lowprec.matmul(a, b, math_mode=recipe.at(1))
    )
    for rule in ("rceil", "even"):
        assert rules_of(Recipe("mxfp6", scale_rule=rule))[0].block_scale == rule


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Format(5, 4), "e5m4 is not a format of 2 to 8 bits"),
        (lambda: Format(0, 3), "is not a format of 2 to 8 bits"),
        (lambda: Format(3, 2, "inf"), "is not a format of elements"),
        (lambda: Format(3, 2, bias=200), "exponents from -100 to 100"),
        (lambda: Format(3, 2, block=24), "block of a format must be one of 'tensor', 'rows', 16, 32, 64, 128, got 24"),
        (lambda: Format(3, 2, block=32, scale="e5m3"), "scale of a format must be one of e8m0, e4m3, float32"),
        (lambda: Format(3, 2, scale="e8m0"), "scales of a tensor or of rows are float32, got e8m0; pass block=32"),
        (lambda: parse_mode("e3m2:size=32"), "'e3m2:size=32' is not a format"),
        (lambda: Recipe((Format(3, 2, block=64), "mxfp8")), "cannot be multiplied"),
    ],
)  # fmt: skip
def test_bad_formats(make, words):
    with pytest.raises(lowprec.ModeError, match=words):
        make()


@pytest.mark.skipif(
    not library.units() or sys.platform != "linux",
    reason="BLAS calls are taken by kernels, on Linux",
)
def test_blas_calls_are_not_taken_in_a_format_without_kernels():
    with pytest.raises(
        lowprec.UnsupportedError, match="not taken in mxfp6, which has no compiled kernel"
    ):
        lowprec.numpy.intercept("mxfp6").__enter__()
