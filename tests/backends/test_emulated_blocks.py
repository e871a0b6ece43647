"""Products with scales of blocks on emulated tensor cores, against exact fractions; the model is a published one."""

import ml_dtypes
import numpy as np
import pytest

import lowprec
from backends.tensor_core_oracle import scaled_dot
from lowprec import QuantizedArray, Recipe, UnsupportedError, emulate
from lowprec.backends.cpu import library

K = 100  # no multiple of a group
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: Of elements and scales: type of the codes, least exponent.
ELEMENTS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, -6), "e5m2": (ml_dtypes.float8_e5m2, -14),
    "e3m2": (ml_dtypes.float6_e3m2fn, -2), "e2m3": (ml_dtypes.float6_e2m3fn, 0),
}  # fmt: skip
FORMATS = {
    "mxfp8": ("e4m3", 32), "e5m2:block=32:scale=e8m0": ("e5m2", 32), "mxfp6": ("e3m2", 32), "mxfp6_e2m3": ("e2m3", 32),
    "mxfp4": ("e2m1", 32), "nvfp4": ("e2m1", 16),
}  # fmt: skip
PAIRS = [
    *((fmt, fmt) for fmt in FORMATS),
    ("mxfp8", "e5m2:block=32:scale=e8m0"), ("mxfp6", "mxfp8"), ("mxfp8", "mxfp4"),
]  # fmt: skip


@pytest.fixture(params=["compiled", "NumPy"])
def kernels(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(library, "library", lambda: None)


def in_numbers(x):
    """Return the numbers of codes, and the scale of each, without the scale of the array."""
    elements, block = FORMATS[x.format]
    codes, scales = np.asarray(x.codes), np.asarray(x.scales)
    if elements == "e2m1":
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
        numbers = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
    else:
        numbers = codes.view(ELEMENTS[elements][0]).astype(float)
    of_scales = ml_dtypes.float8_e4m3fn if block == 16 else ml_dtypes.float8_e8m0fnu
    scales = np.repeat(scales.view(of_scales).astype(float), block, -1)
    return numbers[:, :K].tolist(), scales[:, :K].tolist()


def exact(x, y):
    """Return the product of quantised matrices whose blocks are along the last axis of both."""
    kind, emins = "mxf8f6f4", [ELEMENTS.get(FORMATS[v.format][0], (None, 0))[1] for v in (x, y)]
    if emins == [0, 0] and FORMATS[x.format][0] == FORMATS[y.format][0] == "e2m1":
        kind, emins = "mxf4nvf4", [-6 if FORMATS[v.format][1] == 16 else -127 for v in (x, y)]
    rows, columns = in_numbers(x), in_numbers(y)
    return np.float32(
        [
            [scaled_dot(a, b, s, t, kind, emins) for b, t in zip(*columns, strict=True)]
            for a, s in zip(*rows, strict=True)
        ]
    )


def wild(rng, rows):
    x = rng.standard_normal((rows, K)) * 2.0 ** rng.integers(-9, 10, (rows, K))
    x *= 2.0 ** rng.integers(-8, 9, (rows, 1))
    x[:, rng.integers(0, K, 20)] = 0
    return x.astype(np.float32)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("of_a", "of_b"), PAIRS, ids=str)
def test_modes_and_stored_arrays(of_a, of_b, rng):
    a, b = wild(rng, 7), wild(rng, 18)
    x, y = lowprec.quantize(a, of_a), lowprec.quantize(b, of_b)
    scale = np.float32(x.scale * y.scale)
    with emulate("blackwell"):
        stored = lowprec.matmul(x, y.T, out_dtype="float32")
        by_mode = lowprec.matmul(a, b.T, math_mode=Recipe((of_a, of_b)))
        mixed = lowprec.matmul(a, y.T, math_mode=Recipe((of_a, of_b)))
        plan = lowprec.plan(a, b.T, math_mode=Recipe((of_a, of_b)))
    expected = exact(x, y) * scale
    np.testing.assert_array_equal(stored, expected)
    np.testing.assert_array_equal(by_mode, expected)
    np.testing.assert_array_equal(mixed, expected)
    is_fp4 = {of_a, of_b} <= {"mxfp4", "nvfp4"}
    assert plan.kernel == ("blackwell_mxf4nvf4" if is_fp4 else "blackwell_mxf8f6f4")
    error = np.linalg.norm(by_mode - a.astype(float) @ b.T)
    assert error <= plan.bound.relative * np.linalg.norm(a) * np.linalg.norm(b)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fmt", ["mxfp8", "e5m2:block=32:scale=e8m0", "mxfp4", "nvfp4"])
def test_all_scales(fmt, rng):
    """Sums that are subnormal, or beyond float32, and scales far below those of other blocks."""
    made = []
    for rows in (9, 20):
        x = lowprec.quantize(rng.standard_normal((rows, K)).astype(np.float32), fmt)
        codes = np.asarray(x.codes).copy()
        codes[rng.random(codes.shape) < 0.3] = 0
        scales = rng.integers(0, 127 if fmt == "nvfp4" else 255, x.scales.shape).astype(np.uint8)
        made.append(QuantizedArray(codes, scales, x.format, x.shape, x.axis, 1.0))
    x, y = made
    with emulate("blackwell"):
        found = lowprec.matmul(x, y.T, out_dtype="float32")
    np.testing.assert_array_equal(found, exact(x, y))
    scales = np.asarray(x.scales).copy()
    scales[3, 1] = 255 if fmt != "nvfp4" else 127
    x = QuantizedArray(x.codes, scales, x.format, x.shape, x.axis, 1.0)
    with emulate("blackwell"):
        assert np.isnan(lowprec.matmul(x, y.T, out_dtype="float32")[3]).all()


@pytest.mark.parametrize("mode", ["mxfp8", "mxfp4"])
def test_batches_chunks_and_vectors(mode, rng):
    a = rng.standard_normal((2, 1, 5, 128), np.float32)
    b = rng.standard_normal((3, 128, 6), np.float32)
    with emulate("blackwell"):
        found = lowprec.matmul(a, b, math_mode=mode, k_chunk=64)
        low, high = (
            lowprec.matmul(a[..., k], b[:, k], math_mode=mode) for k in (slice(64), slice(64, 128))
        )
        vector = lowprec.matmul(a[0, 0, 0], b[1], math_mode=mode)
        matrix = lowprec.matmul(a[0, 0], b[1], math_mode=mode)
        with pytest.raises(UnsupportedError, match=r"adds groups of (32|64) products; pass a mult"):
            lowprec.matmul(a, b, math_mode=mode, k_chunk=16)
    np.testing.assert_array_equal(found, low + high)
    np.testing.assert_array_equal(vector, matrix[0])
    assert found.shape == (2, 3, 5, 6)


@pytest.mark.parametrize("arch", ["ada", "hopper"])
def test_others_multiply_bfloat16_numbers(arch, rng):
    a, b = rng.standard_normal((5, 64), np.float32), rng.standard_normal((64, 6), np.float32)
    with emulate(arch):
        assert lowprec.plan(a, b, math_mode="nvfp4").kernel == f"{arch}_bfloat16"
    with (
        emulate("blackwell"),
        pytest.raises(UnsupportedError, match="no tensor cores have the format"),
    ):
        lowprec.matmul(a, b, math_mode="nvfp4_e5m3")


def test_weights_in_square_blocks_and_gradients(rng):
    recipe = Recipe.nvfp4_training(seed=1)
    a, b = rng.standard_normal((20, 64), np.float32), rng.standard_normal((64, 24), np.float32)
    with emulate("blackwell"):
        for product in ("forward", "grad_input", "grad_weight"):
            mode = recipe.of(product)
            plan = lowprec.plan(a, b, math_mode=mode)
            assert plan.kernel == "blackwell_mxf4nvf4"
            error = np.linalg.norm(lowprec.matmul(a, b, math_mode=mode) - a.astype(float) @ b)
            assert error <= plan.bound.relative * np.linalg.norm(a) * np.linalg.norm(b)
