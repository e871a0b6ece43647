"""Guaranteed errors, against experiments: never exceeded, and nearly reached by data made for the purpose."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.formats import BFLOAT16, FLOAT16, FLOAT32, TF32, DType
from lowprec.modes import MathMode
from lowprec.planning.bounds import MAX_K_INT8, error_bound, holds
from lowprec.planning.split_bounds import gamma
from support.machines import ROWS
from support.oracles import round_to

ROUNDED_MODES = (MathMode.TF32, MathMode.BF16, MathMode.FP16)


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
