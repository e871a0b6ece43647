"""Modes that recover FP32 on the CPU: exact splits, errors within the plan's bound, NaN and Inf as in FP32."""

import contextlib

import numpy as np
import pytest

import lowprec
from lowprec.architectures import Architecture
from lowprec.backends.cpu import numpy_products
from lowprec.modes import TABLE, MathMode, row
from lowprec.planning import selection
from support import machines, oracles

SCHEMES = [r.mode for r in TABLE if r.parts > 1]
SCALED = [m for m in SCHEMES if "fp16" in m]
ALL = [*SCHEMES, MathMode.FP64, MathMode.FP32_EMULATED]

ARCHITECTURES = [str(architecture) for architecture in Architecture]

TOP, LEAST = np.float32(3.4028235e38), np.float32(2.0**-149)


def split(mode, x, scaled_over=None):
    """Return the parts of an array, and the exponents of its rows."""
    found = row(mode)
    matrix = np.atleast_2d(x)
    with np.errstate(over="ignore"):
        parts, exponents = numpy_products.split(matrix, x.dtype, found, found.operand_format, found.parts, scaled_over)
    return [part.reshape(x.shape).astype(np.float64) for part in parts], exponents


@pytest.mark.parametrize("mode", ["bf16x6", "bf16x9"])
def test_three_bfloat16_parts_are_the_number_bit_for_bit(mode, rng):
    x = oracles.every_exponent(rng)
    # What rounds to an infinity in bfloat16 has no parts; below 2^-110 digits are finer than bfloat16's finest, 2^-133.
    x = x[(np.abs(x) < 2.0**128 - 2.0**119) & ((np.abs(x) >= 2.0**-110) | (x == 0))]
    total = sum(split(MathMode(mode), x)[0])
    np.testing.assert_array_equal(total, x)


def test_the_error_of_bfloat16_parts_of_tiny_numbers(rng):
    x = oracles.every_exponent(rng)
    x = x[np.abs(x) < 2.0**-110]
    total = sum(split(MathMode.BF16X9, x)[0])
    assert np.max(np.abs(total - x)) == 2.0**-134


@pytest.mark.parametrize("mode", ["bf16x3", "tf32x3"])
def test_two_parts_keep_twice_the_bits_and_one(mode, rng):
    x = oracles.every_exponent(rng)
    x = x[(np.abs(x) < 2.0**127) & (np.abs(x) >= 2.0**-100)]
    p = row(MathMode(mode)).operand_format.precision
    total = sum(split(MathMode(mode), x)[0])
    lost = np.abs(total - x) / np.abs(x).astype(np.float64)
    assert 0.4 < lost.max() * 2.0 ** (2 * p + 1) <= 1
    # Numbers of so many bits are split exactly.
    short = (x.view(np.uint32) & np.uint32(2**32 - (1 << (24 - 2 * p)))).view(np.float32)
    total = sum(split(MathMode(mode), short)[0])
    np.testing.assert_array_equal(total, short)


@pytest.mark.parametrize("mode", ["fp16x3", "fp16x4"])
def test_two_float16_parts_of_scaled_rows(mode, rng):
    """One row for each number: each is scaled to the same binade, from where 22 bits are never lost."""
    x = oracles.every_exponent(rng).reshape(-1, 1)
    (high, low), exponents = split(MathMode(mode), x, scaled_over=-1)
    assert np.abs(high).max() <= 2.0**15
    assert np.abs(low).max() <= 2.0**15
    total = np.ldexp(high + low * 2.0**-11, -exponents)
    assert np.max(np.abs(total - x) / np.maximum(np.abs(x), LEAST)) <= 2.0**-23
    short = (x.view(np.uint32) & np.uint32(0xFFFFFFFC)).view(np.float32)
    (high, low), exponents = split(MathMode(mode), short, scaled_over=-1)
    np.testing.assert_array_equal(np.ldexp(high + low * 2.0**-11, -exponents), short)


def operands(rng, dtype, *shapes):
    return [oracles.random_matrix(rng, shape, dtype) for shape in shapes]


def check(a, b, mode, **kwargs):
    """Multiply, and assert the plan's bound against float64."""
    found = lowprec.matmul(a, b, math_mode=mode, **kwargs)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    bound = lowprec.plan(a, b, math_mode=mode, **kwargs).bound
    exact = a.astype(wide) @ b.astype(wide)
    norms = np.linalg.norm(a.astype(wide)), np.linalg.norm(b.astype(wide))
    assert np.linalg.norm(found - exact) <= bound.frobenius(*norms, *exact.shape[-2:])
    return found


@pytest.mark.parametrize("machine", machines.MACHINES)
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_errors_are_within_the_bound(machine, mode, dtype, rng):
    a, b = operands(rng, dtype, (30, 200), (200, 20))
    with machines.on(machine):
        found = check(a, b, mode)
        assert found.dtype == dtype
        # The same numbers in other layouts.
        for x, y in ((np.asfortranarray(a), b), (a[::-1][::-1], np.asfortranarray(b))):
            check(x, y, mode)
        check(a[::-1, ::-2], b[::-2], mode)
        chunked = check(a, b, mode, k_chunk=64)
    assert not np.array_equal(chunked, found) or mode in ("fp64", "bf16x3")


def specials(rng, dtype):
    """Operands with everything that is no ordinary number, far apart from one another."""
    a, b = operands(rng, dtype, (12, 9), (9, 11))
    for i, x in enumerate((np.nan, np.inf, -np.inf, TOP, -TOP, 65536.0, 1e-45)):
        a[i, i] = x
    a[8, 2], a[8, 3] = np.inf, -np.inf
    b[1, 4], b[2, 5], b[5, 6] = np.inf, np.nan, 0
    b[1, 3] = 0
    return a, b


@pytest.mark.parametrize("machine", machines.MACHINES)
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_nan_and_inf_are_those_of_fp32(machine, mode, dtype, rng):
    a, b = specials(rng, dtype)
    with machines.on(machine):
        want = lowprec.matmul(a, b, math_mode="fp32")
        found = lowprec.matmul(a, b, math_mode=mode)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(want))
    # What (Inf + 0i) (1 + 1i) is, a BLAS answers in its own way for each type.
    if mode is not MathMode.FP64 or dtype is np.float32:
        for x, y in ((found.real, want.real), (found.imag, want.imag)):
            for kind in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(kind(x), kind(y))
    finite = np.isfinite(want)
    assert 20 < finite.sum() < want.size
    # Rows of huge numbers apart: the same numbers within the error of the least exact scheme.
    ordinary = finite & (np.abs(want) < 1e4)
    np.testing.assert_allclose(found[ordinary], want[ordinary], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("mode", SCHEMES)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_nan_spoils_its_row_or_column_only(mode, name, rng):
    a, b = operands(rng, np.float32, (7, 33), (33, 5))
    clean = lowprec.matmul(a, b, math_mode=mode)
    if name == "a":
        a[3, 7] = np.nan
        clean[3] = np.nan
    else:
        b[7, 3] = np.nan
        clean[:, 3] = np.nan
    # The rest is not FP32's: it is the scheme's, bit for bit.
    np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode=mode), clean)


@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_powers_of_two_on_rows_and_columns_change_nothing(mode, dtype, rng):
    a, b = operands(rng, dtype, (20, 60), (60, 15))
    rows = np.ldexp(np.float32(1), rng.integers(-60, 60, (20, 1))).astype(np.float32)
    cols = np.ldexp(np.float32(1), rng.integers(-60, 60, (1, 15))).astype(np.float32)
    found = lowprec.matmul(a * rows, b * cols, math_mode=mode)
    np.testing.assert_array_equal(found, lowprec.matmul(a, b, math_mode=mode) * rows * cols)


def test_fp64_is_the_exact_product_rounded_once(rng):
    """Integers below 2^24 in each operand, sums below 2^53: exact in FP64, far from it in FP32."""
    a, b = (rng.integers(-(2**23), 2**23, s).astype(np.float32) for s in ((20, 50), (50, 30)))
    exact = a.astype(np.int64) @ b.astype(np.int64)
    np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode="fp64"), exact.astype(np.float32))
    assert not np.array_equal(lowprec.matmul(a, b, math_mode="fp32"), exact.astype(np.float32))
    z = a + 1j * a[::-1]
    exact = (z.astype(np.complex128) @ b.astype(np.float64)).astype(np.complex64)
    np.testing.assert_array_equal(
        lowprec.matmul(z.astype(np.complex64), b.astype(np.complex64), math_mode="fp64"), exact
    )


def test_fp64_rounds_after_the_epilogue(rng):
    """The sum with c is taken before anything is rounded: 2^24 + 1 is no float32, and 1 is."""
    a = np.array([[2.0**24, 1]], np.float32)
    b = np.ones((2, 1), np.float32)
    c = np.array([[-(2.0**24)]], np.float32)
    assert lowprec.matmul(a, b, c=c, beta=1.0, math_mode="fp64").item() == 1
    assert lowprec.matmul(a, b, c=c, beta=1.0, math_mode="fp32").item() == 0


@pytest.mark.parametrize(("name", "digits"), [("float16", 11), ("bfloat16", 8)])
def test_fp64_rounds_to_a_narrow_result_once(name, digits):
    """1 + 2^-11 + 2^-30: to float32 it is 1 + 2^-11, a tie of float16's, and would go to even."""
    x, y = np.array([[1 + 2.0**-digits, 2.0**-30]], np.float32), np.ones((2, 1), np.float32)
    for sign in (1, -1):
        found = lowprec.matmul(sign * x, y, out_dtype=name, math_mode="fp64")
        assert float(found.item()) == sign * (1 + 2.0 ** (1 - digits))
    for extreme in (np.inf, -np.inf, np.nan, 3e38, 1e-45, 0.0):
        found = lowprec.matmul(np.float32([[extreme]]), y[:1], out_dtype=name, math_mode="fp64")
        with np.errstate(over="ignore"):
            want = np.float32([[extreme]]).astype(found.dtype)
        np.testing.assert_array_equal(found.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("machine", machines.MACHINES)
def test_k_chunk_is_applied_and_shown(machine, rng):
    a, b = (rng.integers(-3, 4, s).astype(np.float32) for s in ((8, 50), (50, 6)))
    with machines.on(machine):
        made = lowprec.plan(a, b, k_chunk=16)
        found = lowprec.matmul(a, b, k_chunk=16)
    assert [(p.k_start, p.k_stop) for p in made.schedule] == [(0, 16), (16, 32), (32, 48), (48, 50)]
    assert "k chunk       16: " in str(made)
    assert made.to_dict()["k_chunk"] == 16
    assert made.bound.relative < lowprec.plan(a, b).bound.relative
    np.testing.assert_array_equal(found, oracles.product(a, b))


def test_k_chunk_holds_in_every_storage_that_is_summed_in_floating_point(rng):
    for dtype in (np.float64, np.float16, np.complex128):
        a = rng.integers(-3, 4, (6, 20)).astype(dtype)
        np.testing.assert_array_equal(lowprec.matmul(a, a.T, k_chunk=7), a @ a.T)


@pytest.mark.parametrize("k_chunk", [0, -1, 1.5, True, "8"])
def test_k_chunk_must_be_a_length(k_chunk):
    a = np.ones((4, 4), np.float32)
    with pytest.raises(lowprec.ShapeError, match="k_chunk must be an integer of at least 1, got"):
        lowprec.matmul(a, a, k_chunk=k_chunk)


def test_integers_have_no_chunks():
    a = np.ones((4, 4), np.int8)
    with pytest.raises(lowprec.UnsupportedError, match="k_chunk is 2, but int8 products are not summed in chunks"):
        lowprec.matmul(a, a, k_chunk=2)


@pytest.mark.parametrize("mode", ["fp16x3", "bf16x6", "tf32x3"])
def test_the_chunk_keeps_data_of_one_sign_near_fp32(mode, rng):
    """What Hopper's tensor cores cut adds up there; next to an FP32 sum of one product after the other."""
    k = 8192
    a, b = (rng.random(s, dtype=np.float32) for s in ((16, k), (k, 16)))
    exact, single = a.astype(np.float64) @ b.astype(np.float64), np.zeros((16, 16), np.float32)
    for i in range(k):
        single += a[:, i, None] * b[i]
    with lowprec.emulate("hopper"):
        found = lowprec.matmul(a, b, math_mode=mode)
    assert np.linalg.norm(found - exact) < 1.5 * np.linalg.norm(single - exact)


# -- accuracy on demand ---------------------------------------------------------------------------


#: Each takes a generator and a shape (count, ...), and returns that many matrices. Those of constants round all alike:
#: their errors come closest to the guaranteed bound, and are not what the probable one assumes.
RANDOM_MATRICES = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "positive": lambda rng, shape: rng.random(shape),
    "wide": lambda rng, shape: rng.standard_normal(shape) * 2.0 ** rng.uniform(-30, 30, shape),
    "log-uniform": lambda rng, shape: 2.0 ** rng.uniform(-8, 8, shape),
    "cancelling": lambda rng, shape: rng.choice([-1, 1], shape) * (1 + 2.0**-12 * rng.random(shape)),
    "constants": lambda rng, shape: np.broadcast_to(
        1 + 2.0 ** rng.choice([-8, -11, -17], (shape[0], 1, 1)) * (1 - 0.1 * rng.random((shape[0], 1, 1))), shape
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bound", ["guaranteed", "probable"])
@pytest.mark.parametrize(
    "machine",
    [
        "this machine",
        "hopper",
        pytest.param("NumPy alone", marks=pytest.mark.sweep),
        pytest.param("volta", marks=pytest.mark.sweep),
    ],
)
def test_ten_thousand_random_problems_are_within_rtol(machine, bound, rng, monkeypatch):
    """100 problems each of 100 shapes, by the loosest mode that promises enough: the cheap ones of every device.

    The guaranteed bound always holds. The probable one may fail for one result in a thousand, and a result is 100
    problems.
    """
    monkeypatch.setattr(selection, "expected_cost", lambda plan: -plan.bound.relative)
    names = list(RANDOM_MATRICES)[: -1 if bound == "probable" else None]
    failures, taken = 0, set()
    emulated = contextlib.nullcontext() if machine not in ARCHITECTURES else lowprec.emulate(machine)
    selection.select_mode.cache_clear()
    try:
        with machines.on(machine), emulated:
            for number in range(100):
                m, n, k = (int(2 ** rng.uniform(0, top)) for top in (4, 4, 11))
                draw = RANDOM_MATRICES[names[number % len(names)]]
                a, b = (draw(rng, (100, *s)).astype(np.float32) for s in ((m, k), (k, n)))
                rtol = 10.0 ** rng.uniform(-7, -2)
                taken.add(lowprec.plan(a, b, rtol=rtol, bound=bound).mode)
                error = lowprec.matmul(a, b, rtol=rtol, bound=bound) - a.astype(np.float64) @ b
                size = np.linalg.norm(a, axis=(1, 2)) * np.linalg.norm(b, axis=(1, 2))
                failures += np.any(np.linalg.norm(error, axis=(1, 2)) > rtol * size)
    finally:
        selection.select_mode.cache_clear()
    assert failures == 0
    assert len(taken) >= 5


def test_the_guard_accepts_fp64_and_no_mode_that_recovers_fp32():
    """A bound as good as fp32's is a promise about the error; the guard promises the arithmetic."""
    with lowprec.fp32_guard():
        for mode in (*SCHEMES, MathMode.FP32_EMULATED):
            assert lowprec.policy.resolve(mode).mode is MathMode.FP32
        assert lowprec.policy.resolve("F64_F64_F64").mode is MathMode.FP64


# -- parts of exact numbers --------------------------------------------------------------------------


def test_exact_numbers_of_a_format_have_one_part():
    """bfloat16 with float32: two products are left of three, one where both are bfloat16."""
    import ml_dtypes

    mode = lowprec.modes.MathMode.BF16X3
    wide, narrow = np.ones((4, 4), np.float32), np.ones((4, 4), ml_dtypes.bfloat16)
    schedule = lowprec.plan(wide, narrow, math_mode=mode).schedule
    assert [(p.a_part, p.b_part, p.accumulates) for p in schedule] == [(1, 0, False), (0, 0, True)]
