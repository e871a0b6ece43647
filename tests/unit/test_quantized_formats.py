"""``quantize`` to formats as values against the exact twin and ml_dtypes, and arrays with several float32 scales."""

import pickle

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import Format, QuantizedArray
from lowprec.formats import numbers_of_codes
from lowprec.rounding_rules import NAMED
from support.format_twin import float_scale, magnitudes, rounded_exactly
from support.random_formats import blocks, random_format


def stored_exactly(x, fmt):
    """The numbers of the codes by the twin, with all scales."""
    values, scales = rounded_exactly(x, fmt)
    if fmt.scale == "float32" and isinstance(fmt.block, int):
        largest = float(magnitudes(fmt)[-1])
        scales = np.ones(x.shape)
        for start in range(0, x.shape[1], fmt.block):
            for row, of_row in zip(np.abs(x[:, start : start + fmt.block]), scales, strict=True):
                of_row[start : start + fmt.block] = float_scale(float(row.max()), largest)
        return (values * scales).astype(np.float32)
    return (values * scales[:, None]).astype(np.float32)


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.sweep)])
def test_a_round_trip_is_exact_for_random_formats(count, rng):
    formats = [random_format(rng) for _ in range(count * 3)]
    for fmt in [*NAMED.values(), *formats]:
        x = blocks(rng, fmt, count)
        found = lowprec.quantize(x, fmt)
        want = stored_exactly(x, fmt)
        np.testing.assert_array_equal(found.dequantize(), want, str(fmt))
        again = lowprec.quantize(x.T, str(fmt), axis=0)
        np.testing.assert_array_equal(again.dequantize().T, want, str(fmt))
        assert lowprec.quantize(x, found.format).format == found.format


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("e3m2", "float6_e3m2fn"), ("e2m3", "float6_e2m3fn"), ("e2m1", "float4_e2m1fn"), ("e4m3", "float8_e4m3fn"),
        ("e4m3fnuz", "float8_e4m3fnuz"), ("e5m2fnuz", "float8_e5m2fnuz"), ("e4m3fnuzb11", "float8_e4m3b11fnuz"),
        ("e4m3ieee", "float8_e4m3"), ("e3m4ieee", "float8_e3m4"), ("e5m2", "float8_e5m2"),
    ],
)  # fmt: skip
def test_numbers_of_all_codes_are_those_of_ml_dtypes(text, name):
    found = np.array(numbers_of_codes(text), np.float32)
    want = np.arange(len(found), dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float32)
    np.testing.assert_array_equal(found, want)
    is_number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(found)[is_number], np.signbit(want)[is_number])


def test_a_format_of_kernels_is_stored_as_theirs(rng):
    x = rng.standard_normal((3, 64), np.float32)
    for fmt, name in [
        (Format(4, 3, block=32, scale="e8m0"), "mxfp8"), (Format(2, 1, block=16, scale="e4m3"), "nvfp4"),
        ("e4m3:block=tensor", "fp8"), ("e3m2:block=32:scale=e8m0", "mxfp6"),
    ]:  # fmt: skip
        found, want = lowprec.quantize(x, fmt), lowprec.quantize(x, name)
        assert found.format == name
        np.testing.assert_array_equal(found.codes, want.codes)
    rule = lowprec.quantize(x, "mxfp6", scale_rule="rceil")
    assert (
        np.abs(rule.dequantize()).max() >= np.abs(lowprec.quantize(x, "mxfp6").dequantize()).max()
    )


@pytest.mark.parametrize(
    "fmt", ["mxfp6", "nvfp4_rows", "e3m2:block=tensor", "fp8_fnuz", "e2m3:block=64"]
)
def test_products_read_the_numbers(fmt, rng):
    """Each sum has 70 terms, and its float32 numbers one scale more than the widened ones."""
    a, b = rng.standard_normal((5, 70), np.float32), rng.standard_normal((70, 9), np.float32)
    q = lowprec.quantize(b, fmt, axis=0)
    want = a.astype(float) @ q.dequantize()
    bound = 75 * 2.0**-24 * (np.abs(a) @ np.abs(q.dequantize()))
    for operand in (q, lowprec.prepare(q), pickle.loads(pickle.dumps(q))):
        assert (np.abs(lowprec.matmul(a, operand) - want) <= bound).all()
    assert (np.abs(lowprec.matmul(q.T, a.T).T - want) <= bound).all()
    assert f"its {q.format}" in str(lowprec.plan(a, q))
    assert lowprec.matmul(a, q, math_mode=fmt).shape == (5, 9)


def test_not_a_number(rng):
    x = np.array([[1.0, np.nan, -0.0, np.inf], [2.0, 1.0, -1.0, -0.0]], np.float32)
    for fmt in ("mxfp6", "nvfp4_rows"):
        found = lowprec.quantize(x, fmt).dequantize()
        assert np.isnan(found[0]).all()
        assert np.isfinite(found[1]).all()
    for fmt in ("fp8_fnuz", "e4m3p3109:block=rows", "e3m4ieee:block=64"):
        found = lowprec.quantize(x, fmt).dequantize()
        assert np.isnan(found).tolist() == [[False, True, False, True], [False] * 4]
    for fmt in ("e3m2:block=tensor", "fp6_rows", "e3m2:block=64"):
        with pytest.raises(lowprec.ArrayError, match="but e3m2 has no NaN"):
            lowprec.quantize(x, fmt)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3), (0,)])
def test_arrays_without_elements(shape):
    for fmt in ("nvfp4_rows", "e3m2:block=tensor", "mxfp6", "e3m2:block=64"):
        assert lowprec.quantize(np.zeros(shape, np.float32), fmt).dequantize().shape == shape


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "e3m2:block=tensor"])
def test_a_stack_with_a_scale_for_each_matrix(name, axis, rng):
    """The leading axes of the others than the axis of the blocks have scales."""
    x = rng.standard_normal((3, 20, 32), np.float32)
    q = lowprec.quantize(x, name, axis)
    others = [n for i, n in enumerate(x.shape) if i != axis]
    scale = rng.uniform(0.5, 2, others[0]).astype(np.float32)
    stack = QuantizedArray(q.codes, q.scales, q.format, q.shape, axis, scale)
    of_one = QuantizedArray(q.codes, q.scales, q.format, q.shape, axis, 1.0).dequantize()
    first = next(i for i in range(3) if i != axis)
    want = of_one * np.expand_dims(scale, tuple(i for i in range(3) if i != first))
    np.testing.assert_array_equal(stack.dequantize(), want)
    np.testing.assert_array_equal(stack.T.dequantize(), want.swapaxes(1, 2))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(stack)).dequantize(), want)
    a = rng.standard_normal((3, 4, 20), np.float32)
    exact = a.astype(float) @ want
    for b in (stack, lowprec.prepare(stack)):
        error = np.abs(lowprec.matmul(a, b) - exact)
        assert (error <= 24 * 2.0**-24 * (np.abs(a) @ np.abs(want))).all()


def test_bad_formats_and_scales(rng):
    x = rng.standard_normal((3, 64), np.float32)
    q = lowprec.quantize(x, "nvfp4")
    for scale, error, words in [
        (np.ones(4, np.float32), lowprec.ShapeError, r"scale of shape \(4,\) has not the leading axes of \(3,\)"),
        (np.zeros(3, np.float32), lowprec.SettingError, "scales of nvfp4 are positive numbers"),
        (np.ones(3, np.int32), lowprec.DTypeError, "scale are float32"),
        (-1.0, lowprec.SettingError, "scale of nvfp4 is a positive number"),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            QuantizedArray(q.codes, q.scales, "nvfp4", (3, 64), 1, scale)
    for fmt, error, words in [
        ("mxfp7", lowprec.DTypeError, "not a narrow format.*or pass a lowprec.Format; did you mean"),
        ("e3m2:block=33", lowprec.ModeError, "block of a format must be one of"),
        ("e9m9:block=32", lowprec.ModeError, "is not a format of 2 to 8 bits"),
        (7, lowprec.DTypeError, "format 7 is not a narrow format"),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            lowprec.quantize(x, fmt)
    for arguments in ({"group": 32}, {"symmetric": False}, {"scale_rule": "rceil"}):
        with pytest.raises(lowprec.SettingError, match="omit"):
            lowprec.quantize(x, "fp8_fnuz", **arguments)
