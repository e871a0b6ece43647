"""Products of the modes that quantise: equal to products of the rounded numbers, for every layout and epilogue."""

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import recipes
from lowprec.backends.cpu import library, quantizing
from lowprec.recipes import Recipe
from support import cpu_units, machines, quantized_cases
from support.programs import in_threads
from support.quantized_cases import close

MODES = recipes.MODES
_ELEMENTS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn"}
#: Whose scale depends on all of the tensor.
OF_TENSOR = ("fp8", "nvfp4")


def to_elements(x, elements):
    """Round float32 numbers to nearest, clipped to the largest element."""
    if elements == "int8":
        return np.rint(np.clip(x, -127, 127))
    dtype = np.dtype(getattr(ml_dtypes, _ELEMENTS[elements]))
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype).astype(np.float64)


def up_to_a_power(scale, rule):
    """Round float32 scales up to powers of two if the rule has these."""
    if not rule.power_scales:
        return scale
    mantissa, exponent = np.frexp(scale)
    return np.ldexp(np.float32(1), exponent - (mantissa == 0.5))


def rounded(x, rule):
    """Return the numbers of an operand of finite numbers, k last, that a rule rounds, in float64."""
    x = x.astype(np.float32)
    largest = rule.number_format.largest if rule.number_format else 127.0
    k, ones = x.shape[-1], np.float32(1)
    if rule.scaling != "block":
        axis = None if rule.scaling == "tensor" else -1
        peak = np.abs(x).max(axis, keepdims=True, initial=0)
        scale = np.where(
            peak > 0, np.maximum(peak / np.float32(largest), np.finfo(np.float32).tiny), ones
        )
        scale = up_to_a_power(scale, rule)
        return to_elements(x / scale, rule.elements) * scale.astype(np.float64)
    rows, length = rule.block
    flat = np.atleast_2d(x)
    pads = [(0, 0)] * (flat.ndim - 2) + [(0, -flat.shape[-2] % rows), (0, -k % length)]
    padded = np.pad(flat, pads)
    blocks = padded.reshape(
        (*padded.shape[:-2], padded.shape[-2] // rows, rows, padded.shape[-1] // length, length)
    )
    peak = np.abs(blocks).max((-3, -1), keepdims=True, initial=0)
    whole = ones
    if rule.block_scale == "float32":
        scale = np.where(
            peak > 0, np.maximum(peak / np.float32(largest), np.finfo(np.float32).tiny), ones
        )
        scale = up_to_a_power(scale, rule)
    elif rule.block_scale == "e4m3":
        peak_of_all = np.abs(x).max(initial=0)
        whole = (
            np.maximum(peak_of_all / np.float32(largest * 448), np.finfo(np.float32).tiny)
            if peak_of_all
            else ones
        )
        scale = (
            (peak / np.float32(largest) / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        )
    else:
        mantissa, exponent = np.frexp(peak)
        exponent = exponent - 1 - rule.number_format.emax
        if rule.block_scale == "rceil":  # the smallest power of two from which no number is clipped
            exponent = exponent + (mantissa * 2 > largest / 2.0**rule.number_format.emax)
        # of the peak as it is rounded to the bits of an element, ties up
        if rule.block_scale == "even":
            exponent = exponent + (mantissa * 2 >= 2 - 2.0**-rule.number_format.precision)
        scale = np.ldexp(ones, np.clip(np.where(peak > 0, exponent, 0), -127, 127))
    safe = np.where(scale > 0, scale, 1)
    values = (
        np.where(scale > 0, to_elements(blocks / (safe * whole), rule.elements), 0)
        * safe
        * np.float64(whole)
    )
    return values.reshape(padded.shape)[..., : flat.shape[-2], :k].reshape(x.shape)


def operands(a, b, mode):
    """Return the numbers that a mode multiplies, in float64."""
    rules = recipes.FORMATS[mode] if isinstance(mode, str) else mode.rules
    inner = -2 if b.ndim > 1 else -1
    return rounded(a, rules[0]), np.moveaxis(
        rounded(np.moveaxis(b, inner, -1), rules[1]), -1, inner
    )


#: With the scales of other rules.
SCALED = [
    *(Recipe(name, scale_rule="rceil") for name in ("fp8", "fp8_rows", "fp8_blocks")),
    *(Recipe(name, scale_rule="even") for name in ("mxfp8", "mxfp4")),
    Recipe("fp8_blocks", product="grad_weight"),
]


@pytest.mark.parametrize("mode", [*MODES, *SCALED], ids=str)
def test_products_are_those_of_the_rounded_numbers(mode):
    for a, b, given, exact, x, y in quantized_cases.products(
        lambda a, b: operands(a, b, mode), 150
    ):
        found = lowprec.matmul(a, b, math_mode=mode, **given)
        assert (found.dtype, found.shape) == (np.float32, exact.shape)
        assert close(found, exact, 2 * x, y), (
            mode,
            a.shape,
            b.shape,
            a.strides,
            b.strides,
            given.keys(),
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_result_has_the_operands_type_and_may_be_written_to_out(mode, dtype):
    rng = np.random.default_rng(1)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b = (rng.standard_normal(s).astype(kind) for s in ((9, 70), (70, 5)))
    found = lowprec.matmul(a, b, math_mode=mode)
    assert found.dtype == kind
    wide = lowprec.matmul(a, b, math_mode=mode, out_dtype="float32")
    assert np.array_equal(found, wide.astype(kind)), "rounded once"
    out = np.empty((5, 9), kind).T
    assert lowprec.matmul(a, b, math_mode=mode, out=out) is out
    assert np.array_equal(out, found)
    square = rng.standard_normal((16, 16)).astype(kind)
    expected = lowprec.matmul(square, square, math_mode=mode)
    lowprec.matmul(square, square, math_mode=mode, out=square)
    assert np.array_equal(square, expected)


@pytest.mark.parametrize("mode", [*MODES, *SCALED], ids=str)
def test_errors_are_within_the_bounds_of_the_plan(mode):
    rng = np.random.default_rng(2)
    for k in (1, 16, 500, 2048):
        for scale in (0, 4):  # factors over many binades, too
            a, b = (
                (rng.standard_normal(s) * np.exp(scale * rng.standard_normal(s))).astype(np.float32)
                for s in ((30, k), (k, 20))
            )
            plan = lowprec.plan(a, b, math_mode=mode)
            error = np.linalg.norm(
                lowprec.matmul(a, b, math_mode=mode) - a.astype(float) @ b.astype(float)
            )
            size = float(np.linalg.norm(a.astype(float)) * np.linalg.norm(b.astype(float)))
            assert error <= plan.bound.probable * size * (1 + 1e-6) + 1e-30
            assert 0 < plan.bound.probable <= plan.bound.relative
            assert plan.bound.relative <= 2, "of use"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("x", "y"), [(2.0**-140, 2.0**60), (2.0**-75, 2.0**-75)], ids=["operand", "result"]
)
def test_the_bound_holds_where_numbers_underflow(mode, x, y):
    a, b = np.full((2, 4), x, np.float32), np.full((4, 3), y, np.float32)
    bound = lowprec.plan(a, b, math_mode=mode).bound
    error = np.linalg.norm(lowprec.matmul(a, b, math_mode=mode) - a.astype(float) @ b.astype(float))
    assert error <= bound.frobenius(np.sqrt(8) * x, np.sqrt(12) * y, 2, 3)


def test_a_number_that_the_floor_rule_clips_reaches_its_bound():
    a, b = np.full((1, 32), np.float32(511.99), np.float32), np.ones((32, 1), np.float32)
    modes = {rule: Recipe("mxfp8", scale_rule=rule) for rule in ("floor", "rceil")}
    found = {rule: lowprec.matmul(a, b, math_mode=mode)[0, 0] for rule, mode in modes.items()}
    assert found == {"floor": 448 * 32, "rceil": 512 * 32}
    floor, rceil = (lowprec.plan(a, b, math_mode=mode).bound.relative for mode in modes.values())
    assert rceil < 0.13
    assert 0.25 < floor < 0.27, "both operands may be clipped by 1/8"


@pytest.mark.parametrize("mode", MODES)
def test_a_row_depends_on_itself_and_b_alone(mode):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((40, 300), (300, 50)))
    whole, rows = lowprec.matmul(a, b, math_mode=mode), lowprec.matmul(a[3:7], b, math_mode=mode)
    if lowprec.plan(a, b, math_mode=mode).kernel != "numpy":
        assert np.array_equal(whole[3:7], rows) is (mode not in OF_TENSOR)
    assert np.allclose(whole[3:7], rows, atol=1e-4) is (mode not in OF_TENSOR)


def test_long_sums_of_integers_do_not_overflow():
    k = 3 * 2**17
    a, b = np.ones((1, k), np.float32), np.ones((k, 2), np.float32)
    assert np.allclose(lowprec.matmul(a, b, math_mode="int8"), k, rtol=1e-6)
    assert lowprec.plan(a, b, math_mode="int8").quantized.k_piece == 2**16


@pytest.mark.parametrize("mode", [*MODES, Recipe("mxfp8", scale_rule="rceil")])
@pytest.mark.parametrize("hidden", [(), cpu_units.UNITS], ids=["kernels", "numpy"])
def test_a_prepared_operand_is_rounded_once(mode, hidden):
    with machines.without(hidden):
        check_a_prepared_operand(mode)


def check_a_prepared_operand(mode):
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((20, 200), (200, 30)))
    prepared = lowprec.prepare(b, math_mode=mode)
    expected = lowprec.matmul(a, b, math_mode=mode)
    assert np.array_equal(lowprec.matmul(a, prepared, math_mode=mode), expected)
    assert prepared.packed_bytes > 0
    assert prepared.math_mode == mode
    prepared._view.ndarray().setflags(write=True)
    prepared._view.ndarray()[...] = np.nan
    assert np.array_equal(lowprec.matmul(a, prepared, math_mode=mode), expected)
    prepared._view.ndarray()[...] = b
    assert np.array_equal(
        lowprec.matmul(b.T, prepared.T.T, math_mode="bf16"),
        lowprec.matmul(b.T, b, math_mode="bf16"),
    )
    assert "keeps its packed b" in str(lowprec.plan(a, prepared, math_mode=mode).prepared)


def test_a_stored_operand_is_not_rounded_again():
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((20, 200), (200, 30)))
    for name in ("mxfp8", "mxfp4", "nvfp4", "fp8"):
        stored = lowprec.quantize(b, name, axis=0)
        x, y = operands(a, b, name)
        found = lowprec.matmul(a, stored, math_mode=name)
        assert close(found, x @ y, x, y)
        assert found.dtype == np.float32
        plan = lowprec.plan(a, stored, math_mode="mxfp8")
        assert (plan.rounded, plan.mode_has_effect) == ((True, False), True)
        both = lowprec.plan(lowprec.quantize(a, name), stored, math_mode=name)
        assert not both.mode_has_effect
    stored = lowprec.quantize(b, "mxfp8", axis=0)
    for mode in ("fp8_blocks", "int8"):
        mixed = lowprec.matmul(a, stored, math_mode=mode)
        assert close(mixed, operands(a, b, mode)[0] @ stored.dequantize(), a, b)


@pytest.mark.parametrize("mode", MODES)
def test_types_on_which_a_mode_does_not_act(mode):
    for dtype in ("complex64", "float64"):
        a = np.eye(3, dtype=dtype) / 3
        plan = lowprec.plan(a, a, math_mode=mode)
        assert not plan.mode_has_effect
        assert "acts on float32, float16 and bfloat16 only" in plan.note
        with lowprec.math_mode(mode):
            assert np.array_equal(lowprec.matmul(a, a), lowprec.matmul(a, a, math_mode="fp32"))


@pytest.mark.parametrize("mode", MODES)
def test_no_finite_number_becomes_infinite(mode):
    a = np.array([[3e38, 1e-30], [-3e38, 0.0]], np.float32)
    found = lowprec.matmul(a, np.eye(2, dtype=np.float32) * np.float32(0.5), math_mode=mode)
    assert np.isfinite(found).all()
    assert np.allclose(found[:, 0], [1.5e38, -1.5e38], rtol=0.3)


def test_k_chunk_is_refused_where_k_is_summed_in_pieces():
    a = np.ones((2, 300), np.float32)
    with pytest.raises(
        lowprec.UnsupportedError, match="fp8_blocks sums k in pieces of 128; omit k_chunk="
    ):
        lowprec.matmul(a, a.T, math_mode="fp8_blocks", k_chunk=64)
    assert np.allclose(lowprec.matmul(a, a.T, math_mode="mxfp8", k_chunk=64), 300)


def test_rtol_may_choose_integers_by_the_probable_bound():
    a = np.random.default_rng(8).standard_normal((256, 1024), dtype=np.float32)
    able = lowprec.plan(a, a.T, rtol=0.05, bound="probable")
    costs = {x.mode: x.cost for x in able.candidates}
    assert able.mode == min(
        (x.mode for x in able.candidates if x.bound <= 0.05), key=costs.__getitem__
    )
    assert {x.mode.value for x in able.candidates}.issuperset(MODES)
    bound = lowprec.plan(a, a.T, math_mode="int8").bound
    assert 0.25 <= bound.relative < 0.27
    assert bound.probable < 0.05


@pytest.mark.parametrize("mode", MODES)
def test_the_rounding_of_a_layout_is_described_once(mode, monkeypatch):
    rng = np.random.default_rng(18)
    a, b = rng.standard_normal((2, 40, 64), np.float32), rng.standard_normal((64, 50), np.float32)
    want = lowprec.matmul(a, b, math_mode=mode)
    monkeypatch.setattr(quantizing, "add_rule", None)
    np.testing.assert_array_equal(lowprec.matmul(a.copy(), b.copy(), math_mode=mode), want)


@pytest.mark.skipif(not library.units(), reason="lowprec has no kernels")
def test_memory_of_rounded_operands_is_kept_and_released():
    a = np.random.default_rng(9).standard_normal((400, 400), dtype=np.float32)
    expected = lowprec.matmul(a, a, math_mode="mxfp8")
    assert library.functions().kept_bytes() >= 2 * 2 * a.size
    results = in_threads(4, lambda _: [lowprec.matmul(a, a, math_mode="mxfp8") for _ in range(10)])
    assert all(np.array_equal(x, expected) for each in results for x in each)
    lowprec.release_memory()
    assert library.functions().kept_bytes() == 0


@pytest.mark.parametrize(
    "mode", ["fp8", "fp8_rows", "fp8_blocks", "nvfp4", "int8", lowprec.Recipe(("fp8", "fp8_rows"))]
)
def test_a_sum_of_zero_with_large_scales_is_zero(mode):
    for large in (3e19, 1e30, 3e38):
        a, b = np.array([[3e38, 0]], np.float32), np.array([[0], [large]], np.float32)
        assert lowprec.matmul(a, b, math_mode=mode) == 0
        assert lowprec.matmul(a[0], b[:, 0], math_mode=mode) == 0
        assert lowprec.matmul(a, b, math_mode=mode, alpha=-1e3) == 0
        a = np.array([[large, large], [0, 2.0**-60]], np.float32)
        b = np.array([[large], [-large]], np.float32)
        assert (lowprec.matmul(a, b, math_mode=mode)[0] == 0).all()
        assert np.isposinf(lowprec.matmul(a, abs(b), math_mode=mode)[0]).all()
        a, b = np.array([[3e38, 0], [np.nan, 0]], np.float32), np.array([[0], [large]], np.float32)
        if mode not in OF_TENSOR:
            assert lowprec.matmul(a, b, math_mode=mode)[0] == 0


def test_small_results_with_large_scales():
    """The product of the scales is 2^132, beyond float32's range, and results are not."""
    a = np.array([[2.0**100, 0], [0, 2.0**86]], np.float32)
    b = np.array([[0, 2.0**50], [2.0**36, 2.0**36]], np.float32)
    want = np.array([[0, np.inf], [2.0**122, 2.0**122]], np.float32)
    np.testing.assert_allclose(lowprec.matmul(a, b, math_mode="fp8"), want, rtol=1e-6)


@pytest.mark.parametrize("shape", [(5, 300), (3, 5, 300)])
def test_int8_has_the_same_bits_by_numpy(shape):
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal(shape, np.float32), rng.standard_normal((300, 40), np.float32)
    expected = lowprec.matmul(a, b, math_mode="int8")
    with machines.without(cpu_units.UNITS):
        assert lowprec.plan(a, b, math_mode="int8").kernel == "numpy"
        np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode="int8"), expected)


@pytest.mark.parametrize("mode", ["mxfp8", "nvfp4", "int8", "fp8_blocks"])
def test_alpha_zero_reads_no_operand(mode, rng):
    a = rng.standard_normal((16, 17)).astype(np.float32)
    a[3, 4] = np.nan
    b = rng.standard_normal((17, 3)).astype(np.float32)
    product = lowprec.matmul(a, b, math_mode=mode, alpha=0.0)
    assert np.array_equal(product.view(np.int32), np.zeros((16, 3), np.int32))
