"""Guaranteed errors, against experiments: never exceeded, and nearly reached by data made for the purpose."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, TF32, DType
from lowprec.modes import MathMode
from lowprec.planning.bounds import MAX_K_INT8, error_bound, holds
from lowprec.planning.split_bounds import gamma
from support.machines import ROWS
from support.oracles import round_to

ROUNDED_MODES = (MathMode.TF32, MathMode.BF16, MathMode.FP16)
FLUSH = np.float32(2.0**-126)


def to_float16(x: np.ndarray, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Round to float16 after scaling to [2^14, 2^15); the scaled numbers, and the exponents."""
    largest = np.abs(x).max(axis, keepdims=True)
    exponent = np.where(largest > 0, 15 - np.frexp(largest)[1], 0)
    return np.ldexp(x, exponent).astype(np.float16).astype(np.float32), exponent


ROUND = {
    MathMode.FP32: lambda x: x,
    MathMode.TF32: lambda x: round_to(x, "tf32"),
    MathMode.BF16: lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
    MathMode.FP16: lambda x: to_float16(x)[0],
}


def sum_in_order(terms: np.ndarray) -> np.ndarray:
    """Sum float32 terms over the last axis one after another."""
    return np.cumsum(terms, axis=-1, dtype=np.float32)[..., -1]


def product(mode: MathMode, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A product with rounded operands and the worst order of summation that a BLAS might use."""
    if mode is MathMode.FP16:
        (x, e), (y, f) = to_float16(a), to_float16(b, -2)
        return np.ldexp(sum_in_order(x[:, None, :] * y.T[None, :, :]), -e - f)
    x, y = ROUND[mode](a), ROUND[mode](b)
    return sum_in_order(x[:, None, :] * y.T[None, :, :])


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < FLUSH, np.float32(0), x).astype(np.float32)


def tile_product(parts_a: list[np.ndarray], parts_b: list[np.ndarray]) -> np.ndarray:
    """The sum of the products of all parts, the smallest first, each summed as by :func:`tile_sum`."""
    pairs = [(x, y) for x in reversed(parts_a) for y in reversed(parts_b)]
    return functools.reduce(lambda total, pair: flush(total + tile_sum(*pair)), pairs[1:], tile_sum(*pairs[0]))


def tile_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """TDPBF16PS by the manual: per 32 products two sums of 16, both together, then to the accumulator."""
    k = a.shape[1]
    total = np.zeros((len(a), b.shape[1]), np.float32)
    x, y = flush(a), flush(b)
    for start in range(0, k, 32):
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for step in range(start, min(start + 32, k)):
            terms = flush(x[:, step, None] * y[None, step])
            sums[step % 2] = flush(sums[step % 2] + terms)
        total = flush(total + flush(sums[0] + sums[1]))
    return total


def vector_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """VDPBF16PS by the manual: of each pair the second product goes first, both by fused multiply-add."""
    total = np.zeros((len(a), b.shape[1]), np.float32)
    x, y = flush(a).astype(np.float64), flush(b).astype(np.float64)
    for pair in range(0, a.shape[1], 2):
        for step in range(min(pair + 2, a.shape[1]) - 1, pair - 1, -1):
            total = flush((total + x[:, step, None] * y[None, step]).astype(np.float32))
    return total


def check(bound, computed, a, b, slack=1.0):
    """Assert both forms of the bound against the exact product (float64 sums of float32 data: error 1e-13)."""
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    error = np.abs(computed - a @ b)
    rows, cols = np.abs(a).sum(1)[:, None], np.abs(b).sum(0)[None, :]
    lost = bound.operand_absolute * (rows + cols + bound.k * bound.operand_absolute)
    limit = bound.relative * (np.abs(a) @ np.abs(b)) + lost + bound.result_absolute
    assert np.all(error <= limit * (1 + 1e-9))
    norms = np.linalg.norm(a), np.linalg.norm(b)
    assert np.linalg.norm(error) <= bound.frobenius(*norms, *computed.shape) * (1 + 1e-9)


@pytest.mark.parametrize("k", [1, 2, 31, 300])
@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("scale", [1.0, 2.0**-20])
def test_errors_stay_within_the_bound(mode, k, scale, rng):
    bound = error_bound(mode, DType.FLOAT32, DType.FLOAT32, k, ROWS["numpy"])
    for draw in (rng.standard_normal, rng.random):
        a, b = ((draw(s) * scale).astype(np.float32) for s in ((6, k), (k, 5)))
        check(bound, product(mode, a, b), a, b)


@pytest.mark.parametrize("mode", ROUNDED_MODES)
def test_the_bound_is_nearly_reached(mode):
    """Every element just below half a step above 1: all lose nearly u, in the same direction."""
    u = {MathMode.TF32: TF32, MathMode.BF16: BFLOAT16, MathMode.FP16: FLOAT16}[mode].unit_roundoff
    a = np.full((1, 4), 1 + u * (1 - 2.0**-6), np.float32)
    bound = error_bound(mode, DType.FLOAT32, DType.FLOAT32, 4, ROWS["numpy"])
    exact = (a.astype(np.float64) @ a.T.astype(np.float64)).item()
    error = abs(product(mode, a, a.T).item() - exact) / exact
    assert 0.95 * bound.relative < error <= bound.relative


def test_the_bound_distinguishes_the_modes():
    """An FP32 result would miss half of what rounding bfloat16 operands must cost; the bounds are far apart."""
    relative = {mode: error_bound(mode, DType.FLOAT32, DType.FLOAT32, 256, ROWS["numpy"]).relative for mode in ROUND}
    assert relative[MathMode.FP32] < relative[MathMode.TF32] / 50
    assert relative[MathMode.TF32] == pytest.approx(relative[MathMode.FP16], rel=1e-5)
    assert relative[MathMode.TF32] < relative[MathMode.BF16] / 7


@pytest.mark.parametrize("kernel", ["bf16_amx", "bf16_avx512"])
@pytest.mark.parametrize("k", [1, 2, 33, 200])
@pytest.mark.parametrize("scale", [1.0, 2.0**-63, 2.0**-64])
def test_units_for_bfloat16_stay_within_their_bound(kernel, k, scale, rng):
    bound = error_bound(MathMode.BF16, DType.FLOAT32, DType.FLOAT32, k, ROWS[kernel])
    for draw in (rng.standard_normal, rng.random):
        a, b = ((draw(s) * scale).astype(np.float32) for s in ((5, k), (k, 4)))
        x, y = ROUND[MathMode.BF16](a), ROUND[MathMode.BF16](b)
        check(bound, tile_product([x], [y]) if kernel == "bf16_amx" else vector_product(x, y), a, b)


def test_each_product_of_a_pair_may_be_rounded_into_the_sum():
    """One rounding for a pair would not be enough: each of k - 2 small products is lost next to the first pair."""
    k = 64
    a, b = np.full((1, k), 2.0**-24, np.float32), np.ones((k, 1), np.float32)
    a[0, :2] = 1, 0
    bound = error_bound(MathMode.FP32, DType.BFLOAT16, DType.FLOAT32, k, ROWS["bf16_avx512"])
    error = (a.astype(float) @ b.astype(float)).item() - vector_product(a, b).item()
    assert error == (k - 2) * 2.0**-24
    assert 0.9 * error <= bound.relative * np.abs(a).sum()
    assert error > gamma(k // 2, FLOAT32) * np.abs(a).sum()


def pair(x: np.ndarray) -> list[np.ndarray]:
    """Two bfloat16 parts: x truncated, and the rest."""
    high = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return [high, x - high]


@pytest.mark.parametrize("mode", [MathMode.TF32, MathMode.FP16])
@pytest.mark.parametrize(("k", "scale"), [(1, 1.0), (100, 1.0), (100, 2.0**-10), (40, 2.0**-62)])
def test_pairs_on_tile_units_stay_within_their_bound(mode, k, scale, rng):
    bound = error_bound(mode, DType.FLOAT32, DType.FLOAT32, k, ROWS["bf16_amx_pair"])
    for draw in (rng.standard_normal, rng.random):
        a, b = ((draw(s) * scale).astype(np.float32) for s in ((5, k), (k, 4)))
        x, y, exponent = ROUND[mode](a), ROUND[mode](b), np.int32(0)
        if mode is MathMode.FP16:
            (x, e), (y, f) = to_float16(a), to_float16(b, -2)
            exponent = e + f
        assert all(np.array_equal(ROUND[MathMode.BF16](p), p) for p in (*pair(x), *pair(y)))
        check(bound, np.ldexp(tile_product(pair(x), pair(y)), -exponent), a, b)


@pytest.mark.parametrize("mode", ROUND)
def test_complex_errors_stay_within_the_bound(mode, rng):
    k = 60
    bound = error_bound(mode, DType.COMPLEX64, DType.COMPLEX64, k, ROWS["numpy"])
    ar, ai = (rng.standard_normal((5, k)).astype(np.float32) for _ in range(2))
    br, bi = (rng.standard_normal((k, 4)).astype(np.float32) for _ in range(2))
    real = product(mode, np.hstack([ar, -ai]), np.vstack([br, bi]))
    imag = product(mode, np.hstack([ar, ai]), np.vstack([bi, br]))
    check(bound, real + 1j * imag, ar + 1j * ai, br + 1j * bi)


def test_complex_sums_cost_the_square_root_of_two():
    bound = error_bound(MathMode.FP32, DType.COMPLEX128, DType.COMPLEX128, 10, ROWS["numpy"])
    assert bound.relative == pytest.approx(2**0.5 * gamma(20, FLOAT64), rel=1e-12, abs=0)


def test_tile_units_may_lose_subnormal_operands(rng):
    """A subnormal of a counts as zero, and a large b shows that far above the loss in the products."""
    a, b = rng.random((5, 40)) * 2.0**-127, rng.random((40, 4)) * 2.0**100
    a, b = a.astype(np.float32), b.astype(np.float32)
    bound = error_bound(MathMode.BF16, DType.FLOAT32, DType.FLOAT32, 40, ROWS["bf16_amx"])
    computed = tile_product([ROUND[MathMode.BF16](a)], [ROUND[MathMode.BF16](b)])
    assert np.all(computed == 0)
    check(bound, computed, a, b)


def test_the_complex_bound_is_nearly_reached():
    """Rounding the components costs a complex number no more than u: no factor sqrt(2) on the rounding."""
    part = 1 + BFLOAT16.unit_roundoff * (1 - 2.0**-8)
    rounded = ROUND[MathMode.BF16](np.float32([part])).item()
    bound = error_bound(MathMode.BF16, DType.COMPLEX64, DType.COMPLEX64, 1, ROWS["numpy"])
    error = abs((rounded + 1j * rounded) ** 2 - (part + 1j * part) ** 2)
    assert 0.95 * bound.relative < error / abs(part + 1j * part) ** 2 <= bound.relative


@pytest.mark.parametrize(("out", "numpy_dtype"), [(DType.FLOAT16, np.float16), (DType.BFLOAT16, ml_dtypes.bfloat16)])
def test_a_narrow_result_is_rounded_again(out, numpy_dtype, rng):
    k = 40
    for scale in (1.0, 2.0**-12):
        bound = error_bound(MathMode.FP32, DType.FLOAT32, out, k, ROWS["numpy"])
        a, b = ((rng.standard_normal(s) * scale).astype(np.float32) for s in ((6, k), (k, 5)))
        check(bound, product(MathMode.FP32, a, b).astype(numpy_dtype).astype(np.float64), a, b)


def test_underflow_after_scaling_is_in_the_bound_of_the_norms(rng):
    """Small numbers are lost next to a large one of their row: elements may exceed the bound, norms may not."""
    a, b = ((rng.standard_normal(s)).astype(np.float32) for s in ((6, 30), (30, 5)))
    a[:, 0], b[0] = 2.0**40, 0
    bound = error_bound(MathMode.FP16, DType.FLOAT32, DType.FLOAT32, 30, ROWS["numpy"])
    computed = product(MathMode.FP16, a, b)
    error = np.abs(computed - a.astype(np.float64) @ b)
    assert bound.by_norms
    assert (error > bound.relative * (np.abs(a[:, 1:]) @ np.abs(b[1:]))).any()
    assert np.linalg.norm(error) <= bound.frobenius(*map(np.linalg.norm, (a, b)), 6, 5)


def test_operands_that_are_exact_are_not_rounded():
    one = error_bound(MathMode.BF16, DType.FLOAT32, DType.FLOAT32, 1, ROWS["numpy"], a_exact=True)
    both = error_bound(MathMode.BF16, DType.FLOAT32, DType.FLOAT32, 1, ROWS["numpy"], a_exact=True, b_exact=True)
    # k = 1 leaves one rounding of the product: gamma_1 is a hair above u.
    assert one.relative == pytest.approx(2.0**-8, rel=1e-3)
    assert both.relative == pytest.approx(2.0**-24, rel=1e-3)


@pytest.mark.parametrize(
    ("compute", "out", "kernel", "formula"),
    [
        (DType.FLOAT64, DType.FLOAT64, ROWS["numpy"], "(1 + gamma_100) - 1; gamma_d = d u / (1 - d u), u = 2^-53"),
        (DType.FLOAT16, DType.FLOAT32, ROWS["numpy"], "(1 + gamma_100) - 1; gamma_d = d u / (1 - d u), u = 2^-24"),
        (DType.FLOAT16, DType.FLOAT16, ROWS["numpy"],
         "(1 + gamma_100) (1 + 2^-11) - 1; gamma_d = d u / (1 - d u), u = 2^-24"),
        (DType.BFLOAT16, DType.FLOAT32, ROWS["bf16_amx"], "(1 + gamma_21) - 1; gamma_d = d u / (1 - d u), u = 2^-24"),
        (DType.COMPLEX128, DType.COMPLEX128, ROWS["numpy"],
         "(1 + sqrt(2) gamma_200) - 1; gamma_d = d u / (1 - d u), u = 2^-53"),
        (DType.BFLOAT16, DType.FLOAT32, ROWS["bf16_avx512"],
         "(1 + gamma_100) - 1; gamma_d = d u / (1 - d u), u = 2^-24"),
        (DType.INT8, DType.INT32, ROWS["int8_amx"], "exact"),
        (DType.INT8, DType.INT32, ROWS["int8_avx512"], "exact"),
    ],
)  # fmt: skip
def test_formulas_of_storage_that_modes_leave_alone(compute, out, kernel, formula):
    bounds = {error_bound(mode, compute, out, 100, kernel) for mode in ROUND}
    assert {b.formula for b in bounds} == {formula}
    assert len(bounds) == 1


def test_int8_sums_fit_int32_up_to_the_stated_length():
    assert MAX_K_INT8 * 128 * 128 < 2**31 <= (MAX_K_INT8 + 1) * 128 * 128
    assert error_bound(MathMode.FP32, DType.INT8, DType.INT32, 5, ROWS["numpy"]).frobenius(1, 1, 2, 2) == 0


def test_sums_of_no_or_one_product():
    """(1 + x) - 1 in float64 would give 0 or 2.2e-16."""
    bound = error_bound(MathMode.FP32, DType.FLOAT64, DType.FLOAT64, 1, ROWS["numpy"])
    assert 2.0**-53 <= bound.relative < 2.0**-53 * 1.000001
    for kernel in (ROWS["numpy"], ROWS["bf16_amx"], ROWS["bf16_avx512"]):
        bound = error_bound(MathMode.FP32, DType.BFLOAT16, DType.FLOAT32, 0, kernel)
        assert (bound.relative, bound.formula) == (0.0, "exact")


def test_sums_too_long_for_the_accumulator_have_no_bound():
    bound = error_bound(MathMode.FP32, DType.FLOAT32, DType.FLOAT32, 2**24, ROWS["numpy"])
    assert bound.relative == np.inf
    assert gamma(2**24 - 1, FLOAT32) == 2**24 - 1


def test_no_mode_depends_on_the_range_of_the_data():
    for mode in ROUND:
        bound = error_bound(mode, DType.FLOAT32, DType.FLOAT32, 8, ROWS["numpy"])
        assert bound.unconditional
        assert "65504" not in bound.condition
    narrow = error_bound(MathMode.FP16, DType.FLOAT32, DType.FLOAT16, 8, ROWS["numpy"])
    assert "|result| <= 65504" in narrow.condition


@pytest.mark.parametrize(
    ("mode", "out", "numbers"),
    [
        (MathMode.FP32, DType.FLOAT32, "partial sum"),
        (MathMode.FP32, DType.BFLOAT16, "partial sum or rounded result"),
        (MathMode.BF16, DType.FLOAT32, "rounded operand or partial sum"),
        (MathMode.TF32, DType.BFLOAT16, "rounded operand or partial sum or rounded result"),
        (MathMode.BF16X3, DType.FLOAT32, "partial sum"),  # computed again where a part is infinite
        (MathMode.FP16, DType.FLOAT32, "partial sum"),
    ],
)
def test_a_number_that_rounding_takes_out_of_range_is_named(mode, out, numbers):
    """The largest bfloat16 and the largest TF32 number are below the largest float32."""
    bound = error_bound(mode, DType.FLOAT32, out, 8, ROWS["numpy"])
    assert bound.condition == f"no {numbers} beyond float32's range"
    largest = np.full((1, 1), np.finfo(np.float32).max)
    with np.errstate(over="ignore"):
        found = lowprec.matmul(largest, np.float32([[0.5]]), math_mode=mode)
    assert np.isinf(found).all() == ("rounded operand" in numbers)


def test_formats_hold_one_another_as_their_tables_say():
    assert holds(FLOAT32, TF32)
    assert not holds(TF32, FLOAT32)
    assert not holds(BFLOAT16, FLOAT16)
