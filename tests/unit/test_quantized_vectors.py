"""``quantize`` with float32 scales of vectors and groups: bit by bit the definitions in NumPy."""

import pickle

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.arrays.quantized import QuantizedArray
from lowprec.core.quantize import quantize

#: Formats with their arguments, and the length of a group along the axis, 0 for all of it.
CASES = [
    ("fp8_rows", {}, 0),
    ("int8", {}, 0),
    ("int4", {}, 64),
    ("int4", {"group": 32}, 32),
    ("int4", {"group": 128}, 128),
    ("int4", {"symmetric": False}, 64),
    ("int4", {"group": 32, "symmetric": False}, 32),
]
cases = pytest.mark.parametrize(("name", "options", "group"), CASES)
F32 = np.float32


def reference(x, name, *, symmetric=True):
    """Return codes, scales, zeros and numbers of finite groups, shape (..., groups, elements)."""
    if symmetric:
        largest = {"fp8_rows": 448, "int8": 127, "int4": 7.5}[name]
        peak, zeros = abs(x).max(-1), None
        scales = np.where(
            peak > 0, np.maximum((peak / F32(largest)).astype(F32), F32(2.0**-126)), F32(1)
        )
        q = x / scales[..., None]
        if name == "fp8_rows":
            codes = np.clip(q, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            return codes.view(np.uint8), scales, None, codes.astype(F32) * scales[..., None]
        codes = np.clip(np.rint(q), -8, 7) if name == "int4" else np.clip(np.rint(q), -127, 127)
        numbers = codes.astype(F32) * scales[..., None]
        return (
            codes.astype(np.int8).view(np.uint8) & (255 if name == "int8" else 15),
            scales,
            None,
            numbers,
        )
    low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    size = (high / F32(15) - low / F32(15)).astype(F32)
    scales = np.where(high > low, np.maximum(size, F32(2.0**-126)), F32(1))
    zeros = np.clip(np.rint(-low / scales), 0, 15)
    codes = np.clip(np.rint(x / scales[..., None]) + zeros[..., None], 0, 15)
    numbers = (codes - zeros[..., None]).astype(F32) * scales[..., None]
    return codes.astype(np.uint8), scales, zeros.astype(np.uint8), numbers


def grouped(x, group):
    group = group or x.shape[-1]
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % group)])
    return padded.reshape(*x.shape[:-1], -1, group)


def agree(x, name, options, group):
    found = quantize(x, name, **options)
    codes, scales, zeros, numbers = reference(
        grouped(x, group), name, symmetric=options.get("symmetric", True)
    )
    codes = codes.reshape(*x.shape[:-1], -1)
    if name == "int4":
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_array_equal(found.scales, scales)
    assert (found.zeros is None) == (zeros is None)
    if zeros is not None:
        np.testing.assert_array_equal(found.zeros, zeros)
    np.testing.assert_array_equal(
        found.dequantize(), numbers.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    )
    assert found.scale == 1
    return found


@cases
def test_numbers_of_all_exponents(name, options, group, rng):
    for exponent in range(-150, 126, 6):
        x = np.ldexp(
            rng.standard_normal((40, 200)), exponent + rng.integers(-8, 2, (40, 200))
        ).astype(F32)
        x[3], x[5:7] = 0, abs(x[5:7])
        x[7:9] = -abs(x[7:9])
        agree(x, name, options, group)


@cases
def test_other_types_and_halfway_cases(name, options, group, rng):
    x = np.concatenate((rng.integers(-254, 255, (20, 127)) / 2, np.full((20, 1), 127.0)), 1).astype(
        F32
    )
    agree(x, name, options, group)
    agree(np.full((2, 64), F32(3e38)) * F32([[1], [-1]]), name, options, group)
    agree(x.astype(np.float64) * (1 + 2.0**-40), name, options, group)
    half = rng.standard_normal((5, 70)).astype(np.float16)
    for typed in (half, half.astype(F32).astype(ml_dtypes.bfloat16)):
        found, want = (
            quantize(typed, name, **options),
            agree(typed.astype(F32), name, options, group),
        )
        np.testing.assert_array_equal(found.codes, want.codes)


@cases
def test_non_finite_numbers(name, options, group):
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((3, 256), F32)
        x[1, 3] = bad
        lost = np.isnan(quantize(x, name, **options).dequantize())
        assert not lost[[0, 2]].any()
        assert lost[1].sum() == (1 if name == "fp8_rows" else group or 256)
    assert np.isnan(quantize(np.array([1e300, 1.0]), name, **options).dequantize()[0])


@cases
def test_axes_transposes_copies_and_empty_arrays(name, options, group, rng):
    x = rng.standard_normal((2, 5, 70)).astype(F32)
    for axis in range(3):
        found = quantize(x, name, axis, **options)
        numbers = quantize(np.moveaxis(x, axis, -1), name, **options).dequantize()
        np.testing.assert_array_equal(found.dequantize(), np.moveaxis(numbers, -1, axis))
        for other in (found.T, pickle.loads(pickle.dumps(found)).T):
            np.testing.assert_array_equal(other.dequantize(), found.dequantize().swapaxes(-1, -2))
            assert (other.shape, repr(other)) == ((2, 70, 5), repr(found.T))
        for part in (found.codes, found.scales, found.zeros):
            if part is not None:
                np.testing.assert_array_equal(np.from_dlpack(part), part)
                with pytest.raises(ValueError, match="read-only"):
                    part[0] = 0
        blocks = -(-x.shape[axis] // group) if group else 1
        rest = x.size // x.shape[axis]
        codes = rest * blocks * group // 2 if group else x.size
        assert found.nbytes == codes + rest * blocks * (4 + ("symmetric" in options))
        blocks_of = pickle.loads(pickle.dumps(found._view.blocks)).row
        assert blocks_of.stored_bytes(found.shape, axis) == found.nbytes
    for shape in ((0,), (0, 5), (5, 0)):
        assert quantize(np.zeros(shape, F32), name, **options).dequantize().shape == shape


@pytest.mark.filterwarnings("ignore:b is quantised along axis")
@cases
def test_products(name, options, group, rng):
    """Products are those of the numbers in float32, in the current mode, along any axis."""
    a, b = (rng.standard_normal(s).astype(F32) for s in ((4, 150), (150, 30)))
    along_k = quantize(b, name, 0, **options), quantize(b.T.copy(), name, **options).T
    numbers = along_k[0].dequantize()
    for rows in (1, 3, 4):  # decoded in registers, and by columns
        for stored in (*along_k, *map(lowprec.prepare, along_k)):
            np.testing.assert_array_equal(
                lowprec.matmul(a[:rows], stored), lowprec.matmul(a[:rows], numbers)
            )
    for stored in (*along_k, quantize(b, name, **options)):
        for mode in ("fp32", "bf16", "int8"):
            want = lowprec.matmul(
                a, stored.dequantize(), math_mode=mode if mode != "int8" else "fp32"
            )
            found = lowprec.matmul(a, stored, math_mode=mode)
            np.testing.assert_allclose(found, want, rtol=0.03, atol=1e-4 if mode != "int8" else 0.7)
        plan = lowprec.plan(a, stored)
        assert plan.b_becomes == f"{name} values as float32"
        widens = f"its {name} numbers are widened to float32 in each product" in " ".join(
            str(plan).split()
        )
        assert widens == (stored.axis == 1 or not plan.kernel_row.decodes_b)
        np.testing.assert_array_equal(
            lowprec.matmul(a, stored), lowprec.matmul(a, lowprec.prepare(stored))
        )
        typed = lowprec.matmul(a.astype(ml_dtypes.bfloat16), stored, out_dtype="bfloat16")
        assert typed.dtype == ml_dtypes.bfloat16
    left = quantize(a, name, **options)
    np.testing.assert_array_equal(lowprec.matmul(left, b), lowprec.matmul(left.dequantize(), b))


@pytest.mark.parametrize("module", ["torch", "jax.numpy"])
def test_zeros_are_arrays_of_the_library(module, rng):
    xp = pytest.importorskip(module, reason=f"{module} is not installed")
    x = rng.standard_normal((3, 70)).astype(F32)
    found, want = (quantize(y, "int4", symmetric=False) for y in (xp.asarray(x), x))
    assert type(found.zeros) is type(xp.asarray(x))
    np.testing.assert_array_equal(np.asarray(found.zeros), want.zeros)
    np.testing.assert_array_equal(np.asarray(found.dequantize()), want.dequantize())


def test_wrong_arguments():
    x = np.ones((4, 64), F32)
    for group in (0, 16, 256, "64"):
        with pytest.raises(lowprec.SettingError, match="group of int4 is 32, 64 or 128, got"):
            quantize(x, "int4", group=group)
    for options in ({"group": 64}, {"symmetric": False}):
        with pytest.raises(
            lowprec.SettingError, match="group and symmetric are arguments of the format int4"
        ):
            quantize(x, "int8", **options)
    q = quantize(x, "int4", symmetric=False)
    with pytest.raises(
        lowprec.DTypeError, match="scales are float32, float16 or bfloat16, not uint8"
    ):
        QuantizedArray(q.codes, q.zeros, "int4", q.shape, 1)
    with pytest.raises(
        lowprec.ShapeError,
        match=r"zeros of int4 for shape \(4, 64\) have shape \(4, 1\), not \(1, 1\)",
    ):
        QuantizedArray(q.codes, q.scales, "int4", q.shape, 1, 1.0, q.zeros[:1])
    with pytest.raises(lowprec.ShapeError, match="zeros of int8 for shape"):
        QuantizedArray(x.astype(np.int8), q.scales, "int8", q.shape, 1, 1.0, q.zeros)
