"""Each term of a guaranteed error, by hand from the derivations in ``planning.bounds`` and ``planning.split_bounds``.

Experiments show that a bound holds; most terms are too small next to others for an experiment to miss them.
"""

from math import prod, sqrt

import numpy as np
import pytest

import lowprec
from lowprec.formats import FLOAT32, DType
from lowprec.modes import MathMode
from lowprec.planning import ErrorBound, split_bounds
from lowprec.planning.bounds import MAX_K_INT8, error_bound
from support.machines import ROWS

F32, C64, F16 = DType.FLOAT32, DType.COMPLEX64, DType.FLOAT16
HOPPER = (9, 0)

#: Half the spacing of float32 near zero, and its smallest normal number.
HALF_STEP, NORMAL = 2.0**-150, 2.0**-126


def gamma(count):
    return count * 2.0**-24 / (1 - count * 2.0**-24)


def joint(*errors):
    return prod(1 + x for x in errors) - 1


def in_two_parts(roundings, high=1 + 2.0**-8, low=2.0**-8, rest=2.0**-17):
    """Return the relative error of the products of two parts of each operand, in the order of their summation.

    ``high`` and ``low`` bound the parts and ``rest`` what they leave, which is not multiplied, as low times low.
    """
    first, second, last = map(gamma, roundings)
    return 2 * rest + rest**2 + low * low + high * low * (first + second) + high**2 * last


def check(bound, relative, operand_loss, result_loss, components=1):
    """Compare with losses that are carried through the roundings that follow, and count in each component."""
    carried = (1 + relative) * components
    expected = (relative, carried * operand_loss, carried * result_loss)
    found = (bound.relative, bound.operand_absolute, bound.result_absolute)
    assert found == pytest.approx(expected, rel=1e-9, abs=0)


def test_complex_numbers():
    # 2 k products in each component; sqrt(2) on their gamma, and 2 on what underflows.
    bound = error_bound(MathMode.BF16, C64, C64, 3, ROWS["numpy"])
    check(bound, joint(sqrt(2) * gamma(6), 2.0**-8, 2.0**-8), 2.0**-134, 6 * HALF_STEP, 2)


def test_narrow_results():
    bound = error_bound(MathMode.FP32, F32, F16, 8, ROWS["numpy"])
    check(bound, joint(gamma(8), 2.0**-11), 0, 8 * HALF_STEP + 2.0**-25)


def test_pairs_of_parts_on_tile_units():
    # 17 roundings and one for each 32 of k; 3 additions of 4 sums. 4 k products may be flushed, and each operand.
    bound = error_bound(MathMode.TF32, F32, F32, 64, ROWS["bf16_amx_pair"])
    relative = joint(gamma(17 + 2 + 3), 2.0**-11, 2.0**-11)
    check(bound, relative, NORMAL, 4 * 64 * NORMAL)


def test_scaled_rows():
    # Below the normal range 2^-39 of a row's largest number is lost, sqrt(k) times; scaling back may meet a subnormal.
    k = 2**20
    lost = 2.0**-11 + 2.0**-39 * 2**10
    bound = error_bound(MathMode.FP16, F32, F32, k, ROWS["numpy"])
    check(bound, joint(gamma(k), lost, lost), 0, 2 * HALF_STEP)


# -- tensor cores ---------------------------------------------------------------------------------
# On Hopper a group of 16 products (8 of TF32) costs (16 + 1) / 2 + 2 units (9 / 2 + 2).


def test_scaled_rows_on_tensor_cores():
    # What is aligned early: 2^-27 sqrt(k) of the norms.
    k = 1024
    lost, cut = 2.0**-11 + 2.0**-39 * 32, gamma(64 * 10.5)
    bound = error_bound(MathMode.FP16, F32, F32, k, ROWS["cublaslt"], capability=HOPPER)
    check(bound, joint(cut, lost, lost, cut * 2.0**-27 * 32), 0, 2 * HALF_STEP)


def test_bfloat16_on_tensor_cores():
    # Half a bfloat16 step near zero, and nu of each operand; of each product the spacing of a cut result.
    cut = gamma(11)
    bound = error_bound(MathMode.BF16, F32, F32, 16, ROWS["cublaslt"], capability=HOPPER)
    check(bound, joint(cut, 2.0**-8, 2.0**-8), 2.0**-134 + cut * NORMAL, 16 * 2.0**-148)


def test_float16_data_on_tensor_cores():
    # nu is 2^-14, and products never underflow: all that is lost is aligned early.
    cut = gamma(21)
    bound = error_bound(MathMode.FP32, F16, F32, 32, ROWS["cublaslt"], capability=HOPPER)
    check(bound, cut, cut * 2.0**-14, cut * 32 * 2.0**-28)


def test_tf32_data_is_cut_where_it_is_not_split():
    # Truncation, the worst case, loses 2^-10, and near zero twice as much as rounding.
    cut = gamma(7)
    bound = error_bound(MathMode.TF32, F32, F32, 8, ROWS["cublaslt"], capability=HOPPER)
    check(bound, joint(cut, 2.0**-10, 2.0**-10), 2.0**-136 + cut * NORMAL, 8 * 2.0**-148)
    # Parts are rounded before: 2 operands' losses of 2^-137; 1 + 2 parts that are aligned early.
    split = error_bound(MathMode.TF32X3, F32, F32, 8, ROWS["cublaslt"], capability=HOPPER)
    relative = in_two_parts((7 + 2, 7 + 2, 7 + 1), 1 + 2.0**-11, 2.0**-11, 2.0**-23)
    early = 3 * gamma(8) * NORMAL
    check(split, relative, 2 * 2.0**-137 + early, (3 * 8 + 2) * 2.0**-148)


# -- products of parts ----------------------------------------------------------------------------


def test_two_parts():
    # The sums of the small products are added twice, that of the large one once.
    relative = in_two_parts((5 + 2, 5 + 2, 5 + 1))
    bound = error_bound(MathMode.BF16X3, F32, F32, 5, ROWS["numpy"])
    # Underflow: twice what one part loses; 3 k products and two sums that are added.
    check(bound, relative, 2 * 2.0**-134, (3 * 5 + 2) * HALF_STEP)


def test_three_parts():
    # They hold a float32, and nothing is left.
    w = (1 + 2.0**-8, 2.0**-8, 2.0**-17)
    dropped = 2 * w[1] * w[2] + w[2] ** 2
    # (0, 2) and (1, 1) are added 5 times, each later one once less.
    relative = dropped + sum(
        w[i] * w[j] * gamma(9 + added)
        for i, j, added in ((0, 2, 5), (1, 1, 5), (2, 0, 4), (0, 1, 3), (1, 0, 2), (0, 0, 1))
    )
    bound = error_bound(MathMode.BF16X6, F32, F32, 9, ROWS["numpy"])
    check(bound, relative, 2 * 2.0**-134, (6 * 9 + 5) * HALF_STEP)


def test_scaled_parts():
    k = 64
    lost = 2.0**-39 * 8  # and of the rest 2^-11 of it
    parts = 1 + 2.0**-11 + lost, 2.0**-11 + lost, 2.0**-23 + lost * 2.0**-11
    relative = in_two_parts((k + 2, k + 2, k + 1), *parts)
    bound = error_bound(MathMode.FP16X3, F32, F32, k, ROWS["numpy"])
    check(bound, relative, 0, 2 * HALF_STEP)


def test_the_sum_of_the_parts():
    # Karatsuba: 2^-11 (h + l) (h + l) with the sums rounded; two of the factors are no powers of two.
    k, u = 64, 2.0**-11
    lost = 2.0**-39 * 8
    high, low, rest = 1 + u + lost, 1 + lost / u, 2.0**-23 + lost * u
    both = (1 + u) * (high + low)
    fixed = 2 * rest + rest**2 + u * (both**2 - (high + low) ** 2)
    relative = (
        fixed
        + u * (1 - u) * low**2 * gamma(k + 2 + 1)
        + u * both**2 * gamma(k + 2)
        + (1 - u) * high**2 * gamma(k + 1 + 1)
    )
    bound = error_bound(MathMode.FP16_KARATSUBA, F32, F32, k, ROWS["numpy"])
    check(bound, relative, 0, 2 * HALF_STEP)


@pytest.mark.parametrize(("k", "length", "chunks"), [(384, 384, 1), (385, 256, 2), (2000, 384, 6)])
def test_chunks_on_fp32_units(k, length, chunks):
    # Of each chunk the sum is added, after the first.
    bound = error_bound(MathMode.FP32, F32, F32, k, ROWS["fp32_avx512"])
    check(bound, gamma(length + chunks - 1), 0, (k + chunks - 1) * HALF_STEP)


def test_complex_numbers_on_fp32_units():
    # Two sums of each chunk are added: of products of real parts, and of imaginary ones.
    bound = error_bound(MathMode.FP32, C64, C64, 2000, ROWS["fp32_avx2"])
    check(bound, sqrt(2) * gamma(384 + 2 * 6 - 1), 0, 2 * (2000 + 5) * HALF_STEP, 2)


@pytest.mark.parametrize(("k", "length", "chunks"), [(101, 102, 1), (768, 768, 1), (6000, 768, 8)])
def test_parts_on_vector_units(k, length, chunks):
    # An odd length takes an even number of roundings. Each chunk of a product is added, the smallest first.
    relative = in_two_parts(length + 3 * chunks - after for after in (1, 1, 2))
    bound = error_bound(MathMode.BF16X3, F32, F32, k, ROWS["bf16_avx512"])
    check(bound, relative, 2 * NORMAL, (3 * (k + chunks - 1) + 2) * NORMAL)


def test_pairs_that_are_rounded_to_odd():
    # Twice the error of each of 2 roundings, whose variance is that of 4 times as many.
    bound = error_bound(MathMode.FP32, DType.BFLOAT16, F32, 100, ROWS["bf16_neon"])
    check(bound, gamma(8 * 50), NORMAL, 100 * NORMAL)


def test_parts_on_tile_units():
    # 17 roundings and one for each 32 of a chunk of 768, of which there are 8.
    relative = in_two_parts(17 + 24 + 3 * 8 - after for after in (1, 1, 2))
    bound = error_bound(MathMode.BF16X3, F32, F32, 6000, ROWS["bf16_amx"])
    check(bound, relative, 2 * NORMAL, (3 * (6000 + 7) + 2) * NORMAL)


def test_underflow_of_both_operands_is_in_the_bound_of_the_norms():
    # Of operands that are lost altogether, k products of two losses in each of m n elements.
    bound = ErrorBound(0.5, 2.0**-10, 2.0**-30, 4, "", "", "", unconditional=True)
    assert bound.frobenius(0, 0, 9, 16) == 12 * (4 * 2.0**-20 + 2.0**-30)
    assert bound.frobenius(8, 0, 9, 16) == 12 * (4 * 2.0**-20 + 2.0**-30) + 2 * 4 * 8 * 2.0**-10
    assert bound.frobenius(8, 4, 0, 0) == 16


MODES = (MathMode.FP32, MathMode.TF32, MathMode.BF16, MathMode.FP16)


def test_operands_that_are_exact_are_not_rounded():
    one = error_bound(MathMode.BF16, DType.FLOAT32, DType.FLOAT32, 1, ROWS["numpy"], a_exact=True)
    both = error_bound(
        MathMode.BF16, DType.FLOAT32, DType.FLOAT32, 1, ROWS["numpy"], a_exact=True, b_exact=True
    )
    # k = 1 leaves one rounding of the product: gamma_1 is a hair above u.
    assert one.relative == pytest.approx(2.0**-8, rel=1e-3)
    assert both.relative == pytest.approx(2.0**-24, rel=1e-3)


@pytest.mark.parametrize(
    ("compute", "out", "kernel", "formula"),
    [
        (DType.FLOAT64, DType.FLOAT64, ROWS["numpy"],
         "(1 + gamma_100) - 1; gamma_d = d u / (1 - d u) bounds d roundings, u = 2^-53"),
        (DType.FLOAT16, DType.FLOAT16, ROWS["numpy"],
         "(1 + gamma_100) (1 + 2^-11) - 1; gamma_d = d u / (1 - d u) bounds d roundings, u = 2^-24"),
        (DType.BFLOAT16, DType.FLOAT32, ROWS["bf16_amx"],
         "(1 + gamma_21) - 1; gamma_d = d u / (1 - d u) bounds d roundings, u = 2^-24"),
        (DType.COMPLEX128, DType.COMPLEX128, ROWS["numpy"],
         "(1 + sqrt(2) gamma_200) - 1; gamma_d = d u / (1 - d u) bounds d roundings, u = 2^-53"),
        (DType.BFLOAT16, DType.FLOAT32, ROWS["bf16_avx512"],
         "(1 + gamma_100) - 1; gamma_d = d u / (1 - d u) bounds d roundings, u = 2^-24"),
        (DType.INT8, DType.INT32, ROWS["int8_amx"], "exact"),
    ],
)  # fmt: skip
def test_formulas_of_storage_that_modes_leave_alone(compute, out, kernel, formula):
    bounds = {error_bound(mode, compute, out, 100, kernel) for mode in MODES}
    assert {b.formula for b in bounds} == {formula}
    assert len(bounds) == 1


def test_int8_sums_fit_int32_up_to_the_stated_length():
    assert MAX_K_INT8 * 128 * 128 < 2**31 <= (MAX_K_INT8 + 1) * 128 * 128
    assert (
        error_bound(MathMode.FP32, DType.INT8, DType.INT32, 5, ROWS["numpy"]).frobenius(1, 1, 2, 2)
        == 0
    )


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
    assert split_bounds.gamma(2**24 - 1, FLOAT32) == 2**24 - 1


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
