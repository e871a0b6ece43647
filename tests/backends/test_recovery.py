"""Modes that recover FP32 on the CPU: errors within the plan's bound, chunks of k, and accuracy on demand."""

import contextlib

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import recipes
from lowprec.architectures import Architecture
from lowprec.modes import TABLE, MathMode
from lowprec.planning import selection
from support import machines, oracles

SCHEMES = [r.mode for r in TABLE if r.parts > 1]
SCALED = [m for m in SCHEMES if "fp16" in m]
ALL = [*SCHEMES, MathMode.FP64, MathMode.FP32_EMULATED]

ARCHITECTURES = [str(architecture) for architecture in Architecture]


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


@pytest.mark.parametrize(
    ("name", "digits"), [("float16", 11), ("bfloat16", 8), ("float8_e4m3fn", 4)]
)
def test_fp64_rounds_to_a_narrow_result_once(name, digits):
    """1 + 2^-11 + 2^-30: to float32 it is 1 + 2^-11, a tie of float16's, and would go to even."""
    # An operand of FP8 allows results of FP8.
    x, y = (
        np.array([[1 + 2.0**-digits, 2.0**-30]], np.float32),
        np.ones((2, 1), ml_dtypes.float8_e4m3fn),
    )
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
    with pytest.raises(lowprec.SettingError, match="k_chunk must be an integer of at least 1, got"):
        lowprec.matmul(a, a, k_chunk=k_chunk)


def test_integers_have_no_chunks():
    a = np.ones((4, 4), np.int8)
    with pytest.raises(
        lowprec.UnsupportedError, match="k_chunk is 2, but int8 products are not summed in chunks"
    ):
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
    emulated = (
        contextlib.nullcontext() if machine not in ARCHITECTURES else lowprec.emulate(machine)
    )
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
        for mode in (*SCHEMES, MathMode.FP32_EMULATED, *recipes.MODES):
            assert lowprec.policy.resolve(mode).mode is MathMode.FP32
        assert lowprec.policy.resolve("F64_F64_F64").mode is MathMode.FP64


def test_exact_numbers_of_a_format_have_one_part():
    """bfloat16 with float32: two products are left of three, one where both are bfloat16."""
    mode = lowprec.modes.MathMode.BF16X3
    wide, narrow = np.ones((4, 4), np.float32), np.ones((4, 4), ml_dtypes.bfloat16)
    schedule = lowprec.plan(wide, narrow, math_mode=mode).schedule
    assert [(p.a_part, p.b_part, p.accumulates) for p in schedule] == [(1, 0, False), (0, 0, True)]
