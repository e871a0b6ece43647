"""Formats as values: their text, their numbers against exact fractions and ml_dtypes, and their products."""

import itertools
import pickle
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.arrays import block_codes
from lowprec.arrays.narrow_numbers import nearest_codes, numbers_of
from lowprec.backends.cpu import library
from lowprec.core.rules import parse_rules
from lowprec.formats import number_format
from lowprec.modes import parse_mode, rules_of
from lowprec.recipes import Recipe
from lowprec.rounding_rules import NAMED, Format
from support.format_twin import float_scale, magnitudes, rounded_exactly
from support.narrow_twin import nearest
from support.random_formats import blocks, random_format


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


@pytest.mark.parametrize("formats", [10, pytest.param(250, marks=pytest.mark.sweep)])
def test_numbers_are_those_of_gfloat(formats, rng):
    """A million in the long run, of random formats, from below the smallest number to beyond the largest one."""
    gfloat = pytest.importorskip("gfloat")
    for _ in range(formats):
        fmt = random_format(rng)
        to = number_format(fmt.elements)
        info = gfloat.FormatInfo(
            fmt.elements, fmt.exponent + fmt.mantissa + 1, to.precision, bias=1 - to.emin, is_signed=True,
            domain=gfloat.Domain.Extended if to.has_infinity else gfloat.Domain.Finite,
            has_nz=fmt.specials not in ("fnuz", "p3109"),
            num_high_nans={"nan": 1, "ieee": 2**fmt.mantissa - 1}.get(fmt.specials, 0),
            has_subnormals=True, is_twos_complement=False,
        )  # fmt: skip
        low = np.log2(to.smallest_subnormal) - 2
        x = 2.0 ** rng.uniform(low, np.log2(to.largest) + 1, 4000)
        x = np.float32(x * (1 + rng.integers(0, 2, x.shape) * 2.0**-12))
        found = numbers_of(nearest_codes(x, to, np), to, 31, np)
        want = gfloat.round_ndarray(info, x.astype(np.float64), sat=True)
        np.testing.assert_array_equal(found, want, str(fmt))


@pytest.mark.sweep
def test_numbers_in_range_are_those_of_pychop(rng):
    """Its formats are those of IEEE 754 with any bits; numbers beyond the largest one, it does not saturate."""
    pychop = pytest.importorskip("pychop")
    for exponent, mantissa in itertools.product(range(2, 7), range(1, 6)):
        if exponent + mantissa > 7:
            continue
        to = number_format(Format(exponent, mantissa, "ieee").elements)
        low = np.log2(to.smallest_subnormal) - 2
        x = np.float32(2.0 ** rng.uniform(low, np.log2(to.largest), 4000))
        want = pychop.Chop(exponent, mantissa)(x.astype(np.float64))
        found = numbers_of(nearest_codes(x, to, np), to, 31, np)
        np.testing.assert_array_equal(found, want, f"e{exponent}m{mantissa}")


def test_formats_of_p3109_are_those_of_gfloat():
    """All signed ones of 3 to 8 bits, with infinities and without."""
    gfloat = pytest.importorskip("gfloat")
    p3109 = pytest.importorskip("gfloat.formats").format_info_p3109
    for bits, precision in itertools.combinations(range(8, 0, -1), 2):
        for domain, specials in (("Extended", "p3109"), ("Finite", "fnuz")):
            if bits < 3:
                continue
            info = p3109(bits, precision, domain=getattr(gfloat.Domain, domain))
            values = [gfloat.decode_float(info, code).fval for code in range(2 ** (bits - 1))]
            to = number_format(f"e{bits - precision}m{precision - 1}{specials}")
            finite = [v for v in values if np.isfinite(v)]
            codes = np.arange(len(finite), dtype=np.int32)
            assert (numbers_of(codes, to, 31, np) == finite).all()
            assert to.largest == finite[-1]


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


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.sweep)])
def test_blocks_are_exact_for_random_formats(count, rng):
    """100,000 blocks in the long run: their numbers, and the float32 scales of tensors and rows."""
    for _ in range(200 if count > 12 else 60):
        fmt = random_format(rng)
        x = blocks(rng, fmt, count)
        values, scales, whole = block_codes.rounded(x, -1, fmt.rules[0], np)
        want, of_vectors = rounded_exactly(x, fmt)
        np.testing.assert_array_equal(values.astype(float), want, str(fmt))
        if fmt.outer == "rows" or fmt.block == "rows":
            np.testing.assert_array_equal(scales, of_vectors, str(fmt))
        else:
            assert (of_vectors == float(whole)).all(), fmt


@pytest.mark.parametrize(
    "fmt",
    [*NAMED.values(), Format(4, 3, "ieee", block="rows"), Format(2, 0, block=32, scale="e8m0"), Format(3, 2, bias=1),
     Format(2, 5, block=16, scale="e4m3"), Format(1, 2, block=64)],
    ids=str,
)  # fmt: skip
def test_products_are_those_of_the_rounded_numbers(fmt, rng):
    a, b = rng.standard_normal((5, 64), np.float32), rng.standard_normal((7, 64), np.float32)
    (x, of_x), (y, of_y) = (rounded_exactly(v, fmt) for v in (a, b))
    if fmt.scale == "float32" and isinstance(fmt.block, int):
        of_x, of_y = (
            np.float32(
                [float_scale(float(np.abs(row).max()), float(magnitudes(fmt)[-1])) for row in v]
            )
            for v in (a, b)
        )
    exact = (x * of_x[:, None]) @ (y * of_y[:, None]).T
    found = lowprec.matmul(a, b.T, math_mode=fmt)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2.0**-16 * 64)
    error = np.linalg.norm(found - a.astype(float) @ b.T.astype(float))
    plan = lowprec.plan(a, b.T, math_mode=str(fmt))
    assert error <= plan.bound.probable * np.linalg.norm(a) * np.linalg.norm(b)
    assert plan.kernel == "numpy"
    assert np.array_equal(
        found, lowprec.matmul(a, lowprec.prepare(np.ascontiguousarray(b.T)), math_mode=fmt)
    )


def test_the_better_peak_has_the_smaller_error(rng):
    x = rng.standard_normal((200, 16), np.float32)

    def squares(fmt):
        values, _, whole = block_codes.rounded(x, -1, fmt.rules[0], np)
        return ((values.astype(float) * whole - x) ** 2).sum(-1)

    each = [squares(Format(2, 1, block=16, scale="e4m3", peaks=(6, p))) for p in (6, 4)]
    assert each[1].sum() < 0.9 * each[0].sum()
    assert (each[1] < each[0]).mean() > 0.2


def test_rows_of_nvfp4_are_independent_of_their_batch(rng):
    """The first row alone has the bits that it has next to a row of 2^20 times its numbers; not so with one scale."""
    a, b = rng.standard_normal((3, 64), np.float32), rng.standard_normal((64, 7), np.float32)
    a[1] *= 2.0**20
    for mode, is_same in (("nvfp4_rows", True), ("nvfp4", False)):
        alone, together = (lowprec.matmul(x, b, math_mode=mode)[0] for x in (a[:1], a))
        assert np.array_equal(alone, together) == is_same


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
        (lambda: Format("3", 2), "exponent of a format is an integer, got '3'"),
        (lambda: Format(-1, 2), "exponent of a format is an integer, got -1"),
        (lambda: Format(3, 2.5), "mantissa of a format is an integer, got 2.5"),
        (lambda: Format(3, 2, bias="x"), "bias of a format is an integer, got 'x'"),
        (lambda: Format(3, 2, block=32.0), "block of a format must be one of .*, got 32.0"),
        (lambda: Format(3, 2, block=32, scale=["e8m0"]), "scale of a format must be one of"),
        (lambda: Format(2, 1, block=16, scale="e4m3", peaks=6), "peaks of a format are numbers .*; got 6"),
        (lambda: Format(2, 1, block=16, scale="e4m3", peaks=("a",)), "peaks of a format are numbers"),
        (lambda: Format.parse(5), "5 is not a format"),
        (lambda: Format(3, 2, "inf"), "is not a format of elements"),
        (lambda: Format(3, 2, bias=200), "exponents from -100 to 100"),
        (lambda: Format(3, 2, block=24), "block of a format must be one of 'tensor', 'rows', 16, 32, 64, 128, got 24"),
        (lambda: Format(3, 2, block=32, scale="e5m2"), "scale of a format must be one of e8m0, e4m3, e5m3, float32"),
        (lambda: Format(3, 2, scale="e8m0"), "scales of a tensor or of rows are float32, got e8m0; pass block=32"),
        (lambda: parse_mode("e3m2:size=32"), "'e3m2:size=32' is not a format"),
        (lambda: Format(2, 1, block=16, outer="rows"), "outer of a format must be 'tensor', or 'rows'"),
        (lambda: Format(2, 1, block=16, scale="e4m3", peaks=(4, 6)), "peaks of a format are numbers of its elements"),
        (lambda: Format(2, 1, block=16, scale="e8m0", peaks=(6, 4)), "peaks of a format are numbers of its elements"),
        (lambda: parse_mode("e2m1:block=16:scale=e4m3:peaks=6-4"), "are not numbers, such as 6x4"),
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
