"""Schemes that recover FP32 on a GPU: parts side by side, pieces of k, errors within the bound, NaN and Inf."""

import numpy as np
import pytest

import lowprec
from lowprec.modes import TABLE, MathMode
from support import oracles

SCHEMES = [r.mode for r in TABLE if r.parts > 1]
ALL = [*SCHEMES, MathMode.FP64, MathMode.FP32_EMULATED]


def operands(rng, dtype, *shapes):
    made = []
    for shape in shapes:
        x = rng.standard_normal(shape)
        made.append(
            (x + 1j * rng.standard_normal(shape)).astype(dtype)
            if dtype == np.complex64
            else x.astype(dtype)
        )
    return made


def laid(x, order):
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) if order == "t" else x


@pytest.mark.feature("schemes that recover FP32")
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
@pytest.mark.sampled(3)
def test_errors_are_within_the_bound(gpu, mode, dtype, order):
    """An odd k, so that parts are padded; k long enough for several pieces."""
    rng = np.random.default_rng(0)
    a, b = operands(rng, dtype, (9, 601), (601, 7))
    a, b = laid(a, order[0]), laid(b, order[1])
    x, y = gpu.put(a), gpu.put(b)
    wide = np.complex128 if dtype == np.complex64 else np.float64
    exact = a.astype(wide) @ b.astype(wide)
    norms = np.linalg.norm(a.astype(wide)), np.linalg.norm(b.astype(wide))
    for k_chunk in (None, 250):
        plan = lowprec.plan(x, y, math_mode=mode, k_chunk=k_chunk)
        found = gpu.get(lowprec.matmul(x, y, math_mode=mode, k_chunk=k_chunk))
        error = np.linalg.norm(found - exact)
        assert error <= plan.bound.frobenius(*norms, *exact.shape)
        # As good as FP32: what would be lost with a part is thousands of times as much.
        assert error <= 2e-5 * np.linalg.norm(exact)
        if k_chunk and plan.mode_has_effect:
            assert plan.k_chunk == 250


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.sampled(2)
def test_batches_and_epilogues(gpu, mode, dtype):
    """Batched, broadcast (an operand is packed once), strided; bias, c, alpha and a strided result."""
    rng = np.random.default_rng(0)
    a, shared, each, c, bias = operands(rng, dtype, (3, 9, 20), (20, 6), (3, 20, 6), (9, 6), (6,))
    for b in (shared, each, each[:1]):
        exact = a.astype(np.complex128) @ b.astype(np.complex128)
        want = 2 * exact - 1.5 * c + bias
        x, y, z, v = (gpu.put(array) for array in (a, b, c, bias))
        found = gpu.get(lowprec.matmul(x, y, c=z, bias=v, alpha=2.0, beta=-1.5, math_mode=mode))
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-3)
    flipped = a[::-1, ::2, ::-1]
    found = gpu.get(lowprec.matmul(gpu.put(flipped), gpu.put(each), math_mode=mode))
    np.testing.assert_allclose(found, flipped.astype(np.complex128) @ each, rtol=0, atol=1e-3)


@pytest.mark.parametrize("mode", SCHEMES)
def test_small_products_run_as_one_and_the_leading_one_in_pieces(gpu, mode):
    a = gpu.put(np.ones((64, 2048), np.float32))
    b = gpu.put(np.ones((2048, 64), np.float32))
    # split by lowprec on every GPU
    schedule = lowprec.plan(a, b, math_mode=mode, k_chunk=512).schedule
    pieces = [(p.k_start, p.k_stop) for p in schedule if p.pairs == ((0, 0),)]
    assert pieces == [(0, 512), (512, 1024), (1024, 1536), (1536, 2048)]
    before = [p.pairs for p in schedule if p.pairs != ((0, 0),)]
    if mode is not MathMode.FP16_KARATSUBA:
        assert before[-1] == ((1, 0), (0, 1))
        # The smallest first: each order of the parts is one product.
        orders = [{i + j for i, j in pairs} for pairs in before]
        assert all(len(order) == 1 for order in orders)
        assert [order.pop() for order in orders] == list(range(len(before), 0, -1))
    plan = lowprec.plan(a, b, math_mode=mode)
    by_cublas = plan.kernel_row.cublas_emulation is not None
    assert plan.k_chunk in ((2048,) if by_cublas else (256, 512))
    assert (f"k chunk       {plan.k_chunk}: " in str(plan)) is not by_cublas


TOP = np.float32(3.4028235e38)


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("order", ["nn", "tt"])
@pytest.mark.sampled(2)
def test_nan_and_inf_are_those_of_fp32(gpu, mode, dtype, order):
    rng = np.random.default_rng(0)
    a, b = operands(rng, dtype, (2, 12, 9), (9, 11))
    for i, x in enumerate((np.nan, np.inf, -np.inf, TOP, -TOP, 65536.0, 1e-45)):
        a[0, i, i] = x
    a[1, 8, 2], a[1, 8, 3] = np.inf, -np.inf
    b[1, 4], b[2, 5], b[5, 6], b[1, 3] = np.inf, np.nan, 0, 0
    x, y = gpu.put(laid(a, order[0])), gpu.put(laid(b, order[1]))
    with np.errstate(all="ignore"):
        want = gpu.get(lowprec.matmul(x, y, math_mode="fp32"))
        found = gpu.get(lowprec.matmul(x, y, math_mode=mode))
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(want))
    if dtype is np.float32:  # what (Inf + 0i) (1 + 1i) is, each library answers in its own way
        for kind in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(kind(found), kind(want))
    ordinary = np.isfinite(want) & (np.abs(want) < 1e4)
    assert ordinary.sum() > 100
    np.testing.assert_allclose(found[ordinary], want[ordinary], rtol=1e-4, atol=2e-3)


def test_fp64_rounds_once(gpu):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-(2**23), 2**23, s).astype(np.float32) for s in ((20, 50), (50, 30)))
    exact = a.astype(np.int64) @ b.astype(np.int64)
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode="fp64"))
    np.testing.assert_array_equal(found, exact.astype(np.float32))
    for name, digits in (("float16", 11), ("bfloat16", 8)):
        # 1 + 2^-11 + 2^-30: to float32 it is 1 + 2^-11, a tie of float16's, and would go to even.
        x = gpu.put(np.array([[1 + 2.0**-digits, 2.0**-30]], np.float32))
        y = gpu.put(np.ones((2, 1), np.float32))
        found = gpu.get(lowprec.matmul(x, y, out_dtype=name, math_mode="fp64"))
        assert float(found.item()) == 1 + 2.0 ** (1 - digits)
        found = gpu.get(lowprec.matmul(x, y, out_dtype=name, alpha=-1.0, math_mode="fp64"))
        assert float(found.item()) == -1 - 2.0 ** (1 - digits)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", SCHEMES)
@pytest.mark.sampled(2)
def test_exact_numbers_of_a_format_have_one_part(gpu, mode, name):
    import ml_dtypes

    rng = np.random.default_rng(0)
    narrow = rng.standard_normal((8, 33)).astype(getattr(ml_dtypes, name, name))
    wide = rng.standard_normal((33, 5)).astype(np.float32)
    exact = narrow.astype(np.float64) @ wide
    x, y = gpu.put(narrow), gpu.put(wide)
    plan = lowprec.plan(x, y, math_mode=mode)
    np.testing.assert_allclose(gpu.get(lowprec.matmul(x, y, math_mode=mode)), exact, atol=2e-4)
    holds = (
        (name == "bfloat16") == ("bf16" in mode)
        or "tf32" in mode
        or plan.kernel_row.cublas_emulation is not None
    )
    assert (plan.split[0] == 1) is holds
    both = lowprec.matmul(gpu.put(wide.T.copy()), gpu.put(narrow.T.copy()), math_mode=mode)
    np.testing.assert_allclose(gpu.get(both), exact.T, atol=2e-4)


@pytest.mark.parametrize("mode", ["bf16x3", "bf16x9", "fp16x3", "fp16x3_unscaled"])
def test_a_sum_of_no_products_is_zero(gpu, mode):
    a, b = np.ones((4, 0), np.float32), np.ones((0, 3), np.float32)
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode=mode))
    np.testing.assert_array_equal(found, np.zeros((4, 3), np.float32))


@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
@pytest.mark.sampled(2)
def test_chunks_of_the_inner_dimension_are_summed(gpu, mode, dtype, order):
    rng = np.random.default_rng(0)
    a, b, c = (
        rng.integers(-3, 4, shape).astype(dtype) for shape in ((3, 20, 50), (3, 50, 30), (30,))
    )
    a, b = laid(a, order[0]), laid(b, order[1])
    found = gpu.get(
        lowprec.matmul(gpu.put(a), gpu.put(b), c=gpu.put(c), beta=2.0, math_mode=mode, k_chunk=16)
    )
    np.testing.assert_array_equal(found, oracles.product(a, b) + 2 * c)
