"""``quantize`` against a scalar twin of the specifications and against ml_dtypes, and its arguments."""

import copy
import itertools
import pickle
import typing
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.arrays import block_layout
from lowprec.arrays.quantized import QuantizedArray
from lowprec.backends.cpu import library
from lowprec.core.quantize import quantize
from lowprec.formats import BLOCK_FORMATS, FLOAT8_E5M2, FLOAT8_E8M0FNU, BlockFormat, FormatName
from support import narrow_twin

FORMATS = tuple(name for name, row in BLOCK_FORMATS.items() if not row.has_float_scales)
BLOCKED = ("mxfp8", "mxfp4", "nvfp4")
FOUR_BITS = ("mxfp4", "nvfp4")
rules = pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((name, "floor") for name in FORMATS),
        *itertools.product(("mxfp8", "mxfp4"), ("rceil", "even")),
    ],
)


def codes_of(x):
    """One code in each byte."""
    if x.format not in FOUR_BITS:
        return x.codes
    return np.stack((x.codes & 15, x.codes >> 4), axis=-1).reshape(
        *x.codes.shape[:-1], 2 * x.codes.shape[-1]
    )


def packed(codes, name):
    """The inverse of :func:`codes_of`."""
    codes = np.asarray(codes, np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4 if name in FOUR_BITS else codes


def agree(x, name, rule="floor"):
    """Assert that a vector's codes, scales and numbers are the twin's, bit for bit, and return it."""
    found = quantize(x, name, scale_rule=rule)
    codes, scales, scale = narrow_twin.quantized(x.tolist(), name, rule)
    np.testing.assert_array_equal(codes_of(found), codes)
    assert (None if found.scales is None else found.scales.tolist()) == scales
    assert Fraction(found.scale) == scale
    block = BLOCK_FORMATS[name].block
    want = [
        narrow_twin.dequantized(code, None if scales is None else scales[i // block], name, scale)
        for i, code in enumerate(codes[: len(x)])
    ]
    same_bits(found.dequantize(), np.array(want, np.float32))
    return found


def same_bits(found, want):
    """Assert equal numbers with their signs; NaN has no sign."""
    np.testing.assert_array_equal(found, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(want)[numbers])


def test_the_names_of_formats():
    assert typing.get_args(FormatName) == tuple(BLOCK_FORMATS)
    for name, row in BLOCK_FORMATS.items():
        assert quantize(np.ones(1), name.upper()).format == row.name == name


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_every_code_with_every_power_of_two(name):
    bits = BLOCK_FORMATS[name].bits
    codes = np.resize(np.arange(1 << bits), (256, 256))  # each row has all codes, and one scale
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    x = QuantizedArray(packed(codes, name), scales, name, (256, 256), 1)
    found = x.dequantize()
    elements = codes.astype(np.uint8).view(
        ml_dtypes.float8_e4m3fn if bits == 8 else ml_dtypes.float4_e2m1fn
    )
    with np.errstate(over="ignore"):
        powers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        same_bits(found, elements.astype(np.float32) * powers[:, None])


@pytest.mark.parametrize(
    "scale", [1.0, float(np.float32(1 / 3)), 2.0**-126, float(np.float32(1e-37)), 2.0**126]
)
def test_every_code_with_every_scale_of_nvfp4(scale):
    codes = np.resize(np.arange(16), (256, 16))
    x = QuantizedArray(
        packed(codes, "nvfp4"),
        np.arange(256, dtype=np.uint8)[:, None],
        "nvfp4",
        (256, 16),
        1,
        scale,
    )
    twin = [
        [narrow_twin.dequantized(c, s, "nvfp4", Fraction(scale)) for c in range(16)]
        for s in range(256)
    ]
    same_bits(x.dequantize(), np.array(twin, np.float32))


@rules
def test_random_blocks_of_every_exponent(name, rule, rng):
    """Blocks with numbers of similar size, of which there are 2^-149 to 2^127, and some that are zero."""
    for exponent in range(-150, 126, 3 if name in BLOCKED else 12):
        x = np.ldexp(rng.standard_normal(70), exponent + rng.integers(-8, 3, 70)).astype(np.float32)
        x[rng.integers(0, 70, 5)] = 0
        agree(x, name, rule)


@rules
def test_random_bits(name, rule, rng):
    """Numbers of all sizes in one block, NaN and infinities."""
    x = rng.integers(0, 1 << 32, 32 * 40, dtype=np.uint32).view(np.float32)
    finite = np.where(np.isfinite(x), x, np.float32(0))
    for numbers in (x, finite, np.float32(2.0**-100) * np.clip(finite, -1e3, 1e3)):
        agree(numbers, name, rule)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exponent", [-140, -127, -120, -3, 0, 5, 100])
def test_halfway_cases_and_their_neighbours(name, exponent):
    """Midpoints of neighbouring numbers and the float32 numbers next to them, with a number that sets the scale."""
    numbers = [
        float(v) for v in (narrow_twin.E4M3 if BLOCK_FORMATS[name].bits == 8 else narrow_twin.E2M1)
    ]
    middle = np.array(
        [(a + b) / 2 for a, b in itertools.pairwise(numbers)] + [numbers[-1] * 1.03125]
    )
    middle = np.ldexp(middle, exponent).astype(np.float32)
    if exponent > -120:  # scaled exactly
        assert len(set(middle)) == len(numbers)
    around = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    largest = np.float32(np.ldexp(numbers[-1], exponent))
    block = BLOCK_FORMATS[name].block or 32
    x = np.resize(np.concatenate(around), (4 * len(numbers) // (block - 1) + 1, block - 1))
    whole = np.concatenate((np.full((len(x), 1), largest), x), axis=1).ravel()
    agree(whole, name)
    agree(-whole, name)


def test_the_scale_of_a_block_is_rounded_after_each_division(rng):
    """Blocks whose scale is another E4M3 number if they are divided once, by the product of both divisors."""
    middle = np.array(
        [float(a + b) / 2 for a, b in itertools.pairwise(narrow_twin.E4M3)], np.float32
    )
    six, different = np.float32(6), 0
    for first in rng.uniform(1, 2, 5).astype(np.float32):
        scale = first / np.float32(6 * 448)
        peaks = np.minimum(middle * six * scale, first)
        peaks = np.concatenate((peaks, np.nextafter(peaks, np.float32(0))))
        once, twice = (
            x.astype(ml_dtypes.float8_e4m3fn) for x in (peaks / (six * scale), peaks / six / scale)
        )
        for i in np.flatnonzero(once != twice):
            different += 1
            found = agree(np.concatenate((np.full(16, first), np.full(16, peaks[i]))), "nvfp4")
            assert found.scales[1] == twice[i].view(np.uint8)
    assert different >= 20


@pytest.mark.parametrize("name", FORMATS)
def test_special_blocks(name):
    tiny, huge = np.float32(2.0**-149), np.finfo(np.float32).max
    block = BLOCK_FORMATS[name].block or 32
    for value in (
        0.0,
        -0.0,
        tiny,
        3 * tiny,
        np.float32(2.0**-126),
        np.float32(2.0**-127),
        huge,
        np.nan,
        np.inf,
    ):
        x = np.full(2 * block, value, np.float32)
        agree(x, name)
        x[block:] = 1
        agree(x, name)
        agree(-x, name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "shape", [(0,), (1,), (33,), (0, 5), (5, 17), (2, 3, 40), (2, 1, 3, 33), (64, 64)]
)
def test_every_axis(name, shape, rng):
    row = BLOCK_FORMATS[name]
    x = rng.standard_normal(shape).astype(np.float32)
    for axis in range(-len(shape), len(shape)):
        found = quantize(x, name, axis)
        lines = np.moveaxis(x, axis, -1)
        others, n = lines.shape[:-1], lines.shape[-1]
        blocks = -(-n // row.block) if row.block else 0
        assert (found.shape, found.axis, found.ndim) == (shape, axis % len(shape), len(shape))
        assert codes_of(found).shape == (*others, blocks * row.block or n)
        assert (
            (found.scales is None) if name == "fp8" else (found.scales.shape == (*others, blocks))
        )
        assert found.codes.dtype == np.uint8
        assert found.nbytes == found.codes.size + (0 if found.scales is None else found.scales.size)
        assert not codes_of(found)[..., n:].any()
        whole = quantize(np.ascontiguousarray(lines), name)
        np.testing.assert_array_equal(found.codes, whole.codes)
        np.testing.assert_array_equal(found.dequantize(), np.moveaxis(whole.dequantize(), -1, axis))
        if len(shape) == 1:
            agree(x, name)
            with pytest.raises(lowprec.ShapeError, match="has no transpose"):
                _ = found.T
        else:
            np.testing.assert_array_equal(found.T.dequantize(), found.dequantize().swapaxes(-1, -2))
            assert found.T.shape == found.dequantize().swapaxes(-1, -2).shape
            same_bits(found.T.T.dequantize(), found.dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_strides(name, rng):
    base = rng.standard_normal((12, 80)).astype(np.float32)
    swapped = base.astype(">f4")
    odd = np.frombuffer(b"\0" + base.tobytes(), np.uint8)[1:].view(np.float32).reshape(base.shape)
    views = [
        base[::-1, ::-1],
        base.T,
        base[::3, 5::2],
        np.broadcast_to(base[0], (4, 80)),
        swapped,
        odd,
    ]
    views += [np.broadcast_to(base[:, :1], (12, 40)), base[:, None, 1:]]
    for view in views:
        for axis in (0, -1):
            found, want = (
                quantize(view, name, axis),
                quantize(np.array(view, np.float32, order="C"), name, axis),
            )
            np.testing.assert_array_equal(found.codes, want.codes)
            np.testing.assert_array_equal(found.dequantize(), want.dequantize())


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_scales_that_are_rounded_up(name):
    """Nothing is clipped, and the next smaller power of two would clip."""
    largest = BLOCK_FORMATS[name].elements.largest
    # the largest number, and the float32 numbers next to it
    for exponent in (-140, -130, -127, -126, -3, 0, 100):
        peak = np.float32(np.ldexp(largest, exponent))
        for x in (peak, np.nextafter(peak, np.float32(0)), np.nextafter(peak, np.float32(np.inf))):
            agree(np.full(32, x, np.float32), name, "rceil")
    x = np.float32([957.0, *[1.0] * 31])
    assert quantize(x, name, scale_rule="rceil").scales[0] == quantize(x, name).scales[0] + 1
    with pytest.raises(
        lowprec.SettingError, match="scale_rule is 'floor', 'rceil' or 'even', got 'up'"
    ):
        quantize(x, name, scale_rule="up")
    with pytest.raises(
        lowprec.SettingError, match="scale_rule='rceil' has no effect on int8, whose scales are not"
    ):
        quantize(x, "int8", scale_rule="rceil")


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_scales_of_the_rounded_peak(name):
    """A peak from halfway between the largest number of a binade and the next binade on has the scale of that one."""
    limit = {"mxfp8": 496.0, "mxfp4": 7.0}[name]
    for exponent in (-140, -130, -127, -126, -3, 0, 100):
        peak = np.float32(np.ldexp(limit, exponent))
        for x in (peak, np.nextafter(peak, np.float32(0)), np.nextafter(peak, np.float32(np.inf))):
            agree(np.full(32, x, np.float32), name, "even")
    low, high = (
        np.full(32, np.nextafter(np.float32(limit), np.float32(0))),
        np.full(32, np.float32(limit)),
    )
    of_low, of_high = (quantize(x, name, scale_rule="even").scales[0] for x in (low, high))
    assert of_high == of_low + 1


@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_float64_is_rounded_once(name, rule, rng):
    """Numbers next to midpoints in float64, where rounding to float32 first gives the midpoint."""
    numbers = [float(v) for v in (narrow_twin.E4M3 if name == "mxfp8" else narrow_twin.E2M1)]
    middle = np.array([(a + b) / 2 for a, b in itertools.pairwise(numbers)])
    around = np.concatenate([np.nextafter(middle, side) for side in (-np.inf, np.inf)])
    x = np.concatenate(
        (
            np.resize(around, (len(around) // 31 + 1, 31)),
            np.full((len(around) // 31 + 1, 1), 448.0),
        ),
        1,
    )
    for scale in (1.0, 2.0**-120, 2.0**100):
        agree(x.ravel() * scale, name, rule)
        agree(-x.ravel() * scale, name, rule)
    agree(np.ldexp(rng.standard_normal(640), rng.integers(-30, 30, 640)), name, rule)
    agree(np.array([np.nextafter(448.0, 449), np.nextafter(512.0, 0), *[0.0] * 30]), name, rule)
    if name == "mxfp8":
        assert quantize(np.array([-431.99999999999994, 448]), name).dequantize()[0] == -416


def test_float64_with_a_scale_of_the_array(rng):
    """The quotient is rounded in float64, and then once to the format."""
    for scale in (1.0, 0.75, 2.0**-20):
        x = np.array([-431.99999999999994, 432.0000000000001, 448, 17, 1e-30]) * scale
        found = quantize(x, "fp8")
        assert found.scale == scale
        np.testing.assert_array_equal(
            found.dequantize(), np.float32([-416, 448, 448, 17 - 1, 0]) * np.float32(scale)
        )
    x = np.array([2688.0, *[0.0] * 15, np.nextafter(2.5, 0), np.nextafter(2.5, 3), 6, *[0.0] * 13])
    np.testing.assert_array_equal(quantize(x, "nvfp4").dequantize()[16:19], [2, 3, 6])


@pytest.mark.parametrize("name", FORMATS)
def test_other_element_types(name, rng):
    x = rng.standard_normal((6, 50)) * 2.0 ** rng.integers(-12, 12, (6, 50))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        typed = x.astype(dtype)
        found, want = quantize(typed, name), quantize(typed.astype(np.float32), name)
        np.testing.assert_array_equal(found.codes, want.codes)
        assert found.dequantize().dtype == np.float32
    wide = quantize(np.array([1e300, 1.0, 3.4028235e38]), name)  # infinite in float32
    assert np.isnan(wide.dequantize()[0])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_kernels_and_numpy_give_the_same_codes(name, axis, rng, monkeypatch):
    x = rng.integers(0, 1 << 32, (3, 70, 130), dtype=np.uint32).view(np.float32)
    arrays = [x, x.T, x[:, ::-1, ::2], rng.standard_normal((40, 33, 9)).astype(np.float16)]
    subnormal = np.ldexp(rng.random((1, 70, 130)), -130)
    arrays += [y.astype(np.float32) for y in (rng.standard_normal((2, 131, 90)), subnormal)]
    found = [quantize(y, name, axis) for y in arrays]
    monkeypatch.setattr(library, "library", lambda: None)
    for y, one in zip(arrays, found, strict=True):
        want = quantize(y, name, axis)
        np.testing.assert_array_equal(one.codes, want.codes)
        assert one.scale == want.scale
        np.testing.assert_array_equal(one.scales, want.scales)


def test_a_format_is_one_row(rng, monkeypatch):
    row = BlockFormat(
        "mxfp8_e5m2", FLOAT8_E5M2, 8, 32, FLOAT8_E8M0FNU, has_scale=False, is_mode=False
    )
    monkeypatch.setitem(BLOCK_FORMATS, row.name, row)
    x = rng.standard_normal((40, 64)).astype(np.float32)
    found = quantize(x, row.name)
    numbers = found.codes.view(ml_dtypes.float8_e5m2).astype(np.float64).reshape(40, 2, 32)
    values = np.ldexp(numbers, found.scales.astype(int)[..., None] - 127).reshape(x.shape)
    np.testing.assert_array_equal(found.dequantize(), values)
    # The largest number is 1.75 times 2^15, and peaks are below 2^16: 1/8 is lost at most, as by rounding to 3 bits.
    # Below 2^-14 the numbers are multiples of 2^-16, and the scales are below 2^-12.
    assert (np.abs(values - x) <= np.abs(x) / 8 + 2.0**-29).all()


@pytest.mark.parametrize("name", FORMATS)
def test_arrays_that_are_converted_in_several_parts(name, rng):
    rows = block_layout._AT_ONCE // 48 + 10
    x = rng.standard_normal((rows, 50)).astype(np.float32)
    x[-1, -1] = 100  # sets the scale of the array
    found = quantize(x, name)
    alone = quantize(x[-20:], name)
    np.testing.assert_array_equal(found.codes[-20:], alone.codes)
    np.testing.assert_array_equal(found.dequantize()[-20:], alone.dequantize())
    assert found.scale == alone.scale


@pytest.mark.parametrize("name", FORMATS)
def test_copies_are_equal_and_read_only(name, rng):
    x = quantize(rng.standard_normal((4, 40)).astype(np.float32), name)
    copies = [
        pickle.loads(pickle.dumps(x, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ]
    for other in (x, copy.copy(x), copy.deepcopy(x), *copies):
        np.testing.assert_array_equal(other.codes, x.codes)
        np.testing.assert_array_equal(other.dequantize(), x.dequantize())
        assert repr(other) == repr(x)
        for part in (other.codes, other.scales):
            if part is not None:
                with pytest.raises(ValueError, match="read-only"):
                    part[0] = 0
    with pytest.raises(AttributeError, match="cannot assign"):
        x.scale = 2.0
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = np.ones((4, 4), np.float32) @ x
    with pytest.raises(
        lowprec.ArrayError, match=r"a quantised array, which .* pass its dequantize\(\)$"
    ):
        np.asarray(x)
    with pytest.raises(lowprec.ArrayError, match="expected an array, got a quantised array, which"):
        quantize(x, "fp8")


X = np.ones((4, 32), np.float32)
OTHER = (np.int8, np.int32, bool, np.uint8, np.complex64, ml_dtypes.float8_e4m3fn, np.longdouble)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            (X, "mxfp5"),
            lowprec.DTypeError,
            r"format 'mxfp5' is not a narrow format; .*mxfp8.*did you mean 'mx",
        ),
        ((X, 4), lowprec.DTypeError, "format 4 is not a narrow format"),
        (
            (X[0, 0, ...], "fp8"),
            lowprec.ShapeError,
            "axis -1 is out of bounds for array of dimension 0",
        ),
        ((X, "fp8", 2), lowprec.ShapeError, "axis 2 is out of bounds for array of dimension 2"),
        ((X, "fp8", -3), lowprec.ShapeError, "axis -3 is out of bounds for array of dimension 2"),
        ((X, "fp8", 1.5), lowprec.ShapeError, "integer"),
        (([1.0], "fp8"), lowprec.ArrayError, "expected an array"),
        ((None, "fp8"), lowprec.ArrayError, "expected an array"),
        *(
            (
                (X.astype(dtype), "fp8"),
                lowprec.DTypeError,
                "quantize takes arrays of .*, bfloat16, not",
            )
            for dtype in OTHER
        ),
    ],
)
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        quantize(*arguments)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize(
    "wrong", [None, np.uint8(1), np.zeros((), np.uint8), [1], 3, "x", np.zeros(0, np.uint8)]
)
def test_parts_of_another_type_or_shape_are_refused(name, part, wrong):
    x = lowprec.quantize(np.ones((64, 64), np.float32), name)
    parts = {"codes": x.codes, "scales": x.scales, part: wrong}
    if getattr(x, part) is None and wrong is None:
        return
    with pytest.raises((lowprec.ArrayError, lowprec.DTypeError, lowprec.ShapeError), match=r"\w"):
        QuantizedArray(**parts, format=name, shape=(64, 64), axis=1, scale=1.0)
