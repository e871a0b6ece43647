"""Guaranteed errors: their formulas, and the conditions under which they hold."""

from __future__ import annotations

import numpy as np
import pytest

import lowprec
from lowprec.formats import BFLOAT16, FLOAT16, FLOAT32, TF32, DType
from lowprec.modes import MathMode
from lowprec.planning.bounds import MAX_K_INT8, error_bound, holds
from lowprec.planning.split_bounds import gamma
from support.machines import ROWS

MODES = (MathMode.FP32, MathMode.TF32, MathMode.BF16, MathMode.FP16)


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
    bounds = {error_bound(mode, compute, out, 100, kernel) for mode in MODES}
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
    for mode in MODES:
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
