"""FP8 operands on the CPU: every kernel, code, result type and scale, against float64 under the plan's bound."""

import ml_dtypes
import numpy as np
import pytest

import lowprec

E4M3, E5M2, BF16 = (
    np.dtype(getattr(ml_dtypes, x)) for x in ("float8_e4m3fn", "float8_e5m2", "bfloat16")
)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
FLOAT8 = (E4M3, E5M2)

#: m, n, k: tiny products, BLAS, few vectors either way, packed kernels, edges of strips and steps.
SHAPES = [(3, 5, 7), (33, 20, 70), (1, 300, 400), (400, 3, 300), (8, 520, 515), (257, 129, 300)]


def check(a, b, c=None, **options):
    """Compare a product with float64 under its bound, plus one rounding in float32 for a factor."""
    c = lowprec.matmul(a, b, **options) if c is None else c
    made = lowprec.plan(a, b, **options)
    x, y = (np.asarray(z, np.float64) for z in (a, b))
    factor = options.get("scale_a", 1.0) * options.get("scale_b", 1.0) * options.get("alpha", 1.0)
    m, n = c.shape[-2:]
    norms = np.linalg.norm(x) * abs(factor), np.linalg.norm(y)
    error = np.linalg.norm(np.asarray(c, np.float64) - factor * (x @ y))
    assert error <= made.bound.frobenius(*norms, m, n) + 2.0**-24 * norms[0] * norms[1]
    assert str(c.dtype) == made.out_dtype.label
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2), (E4M3, BF16), (F16, E5M2), (F32, E4M3)],
                         ids=lambda pair: f"{pair[0]}-{pair[1]}")  # fmt: skip
@pytest.mark.parametrize("column_major", [False, True])
def test_products_are_within_the_bound(shape, pair, column_major):
    m, n, k = shape
    rng = np.random.default_rng(sum(shape))
    a, b = rng.standard_normal((m, k)).astype(pair[0]), rng.standard_normal((k, n)).astype(pair[1])
    if column_major:
        a, b = (np.ascontiguousarray(x.T).T for x in (a, b))
    check(a, b)
    for out in (F32, BF16, F16, E4M3, E5M2):
        check(a, b, out_dtype=out)
    check(a, b, alpha=0.5, bias=np.zeros(n, np.float32), out_dtype=F32)
    if all(x in FLOAT8 for x in pair):
        check(a, b, scale_a=0.75, scale_b=3.0)


@pytest.mark.parametrize("mode", ["tf32", "bf16", "fp16", "bf16x3", "tf32x3", "fp64"])
@pytest.mark.parametrize("shape", [(6, 9, 11), (2, 300, 400), (70, 140, 96)], ids=str)
def test_modes_act_on_the_float32_operand_alone(mode, shape):
    m, n, k = shape
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(E4M3)
    made = check(a, b, math_mode=mode)
    assert made.rounded == (mode != "fp64", False)
    again = lowprec.matmul(a, b, math_mode=mode)
    assert np.array_equal(
        again, lowprec.matmul(a, lowprec.prepare(b, math_mode=mode), math_mode=mode)
    )


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("other", [None, BF16, F32], ids=str)
@pytest.mark.parametrize("extent", [8, 300])
def test_every_code(dtype, other, extent):
    """A product with one column of codes and the identity gives each number, and NaN and Inf where they are."""
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    a = np.zeros((256, extent), dtype)
    a[:, 3] = codes
    identity = np.eye(extent, dtype=np.float32).astype(dtype if other is None else other)
    want = codes.astype(np.float32)
    finite = np.isfinite(want)
    for x in (a, np.asfortranarray(a)):
        for b in (identity, lowprec.prepare(identity)):
            c = lowprec.matmul(x, b, out_dtype="float32")
            np.testing.assert_array_equal(c[finite, 3], want[finite])
            assert not np.isfinite(c[~finite, 3]).any()
    c = lowprec.matmul(identity.T, lowprec.prepare(np.ascontiguousarray(a.T)), out_dtype="float32")
    np.testing.assert_array_equal(c[3, finite], want[finite])
    np.testing.assert_array_equal(np.isnan(c[3, np.isnan(want)]), True)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_results_in_float8_are_rounded_once_as_by_astype(mode):
    """To nearest, ties to even; beyond the range NaN (E4M3) or Inf (E5M2), not saturated."""
    values = np.array(
        [[0.0, 1.0625, 1.1875, 448.0, 464.0, 465.0, -1e9, 2.0**-10, 61440.0, 2.0**-17]], np.float32
    )
    one = np.ones((1, 1), E4M3)
    for dtype in FLOAT8:
        c = lowprec.matmul(one, values, out_dtype=dtype, math_mode=mode)
        held = values if mode == "fp32" else values.astype(BF16)
        np.testing.assert_array_equal(
            c.view(np.uint8) & 0x7F, held.astype(dtype).view(np.uint8) & 0x7F
        )


def test_batches_and_strides():
    rng = np.random.default_rng(2)
    a = rng.standard_normal((3, 2, 20, 80)).astype(E4M3)[:, ::-1, ::2, ::-2]
    b = rng.standard_normal((2, 40, 30)).astype(E5M2)
    want = a.astype(np.float64) @ b.astype(np.float64)
    # Sums of 40 exact products in float32.
    bound = 40 * 2.0**-24 * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    for right in (b, lowprec.prepare(b)):
        assert (
            np.abs(lowprec.matmul(a, right, out_dtype=np.float32) - want) <= bound + 2.0**-126
        ).all()


def test_other_libraries(torch):
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((12, 12)).astype(np.float32) for _ in range(2))
    for dtype in FLOAT8:
        x, y = (torch.from_numpy(z).to(getattr(torch, dtype.name)) for z in (a, b))
        want = lowprec.matmul(a.astype(dtype), b.astype(dtype), scale_a=2.0)
        found = lowprec.matmul(x, y, scale_a=torch.tensor(2.0))
        assert found.dtype == torch.bfloat16
        np.testing.assert_array_equal(found.float().numpy(), want.astype(np.float32))
        found = lowprec.matmul(x, y, out_dtype=torch.float8_e5m2)
        assert found.dtype == torch.float8_e5m2
        found = lowprec.matmul(
            jnp.asarray(a).astype(dtype), jnp.asarray(b).astype(dtype), scale_a=jnp.float32(2.0)
        )
        np.testing.assert_array_equal(np.asarray(found), want)


def test_scales_are_checked():
    x, y = np.ones((4, 4), E4M3), np.ones((4, 4), np.float32)
    with pytest.raises(
        lowprec.UnsupportedError, match="scale_b is for an FP8 operand, but the operand is float32"
    ):
        lowprec.matmul(x, y, scale_b=2.0)
    with pytest.raises(lowprec.DTypeError, match="scale_a must be a number or one float32"):
        lowprec.matmul(x, y, scale_a=np.ones(2, np.float32))
    with pytest.raises(lowprec.SettingError, match=r"alpha is .* float32 cannot represent"):
        lowprec.matmul(x, x, scale_a=1e30, scale_b=1e30)
    c = np.full((4, 4), 2.0, np.float32)
    found = lowprec.matmul(
        x, x, scale_a=0.5, scale_b=np.float32(3), alpha=2.0, beta=1.0, c=c, out_dtype=np.float32
    )
    np.testing.assert_array_equal(found, np.full((4, 4), 14.0))


def test_block_scaled_tensor_cores_are_those_of_blackwell():
    """Ampere has none, so FP8 operands are widened there, as on such a GPU."""
    x, q = np.ones((16, 32), E4M3), lowprec.quantize(np.ones((16, 32), np.float32), "nvfp4")
    with lowprec.emulate("ampere"):
        assert lowprec.plan(x, x.T).kernel == "ampere_bfloat16"
        assert lowprec.matmul(q, q.T, out_dtype="float32")[0, 0] == 32
    with lowprec.emulate("blackwell"):
        assert lowprec.plan(x, x.T).kernel == "blackwell_float8_e4m3fn"
        assert lowprec.matmul(q, q.T, out_dtype="float32")[0, 0] == 32
        other = lowprec.quantize(np.ones((16, 32), np.float32), "mxfp4")
        with pytest.raises(
            lowprec.UnsupportedError, match="products of nvfp4 and mxfp4 on the tensor cores of B"
        ):
            lowprec.matmul(q, other.T)
        assert lowprec.matmul(x.astype(BF16), q.T)[0, 0] == 32


def test_contractions():
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-3, 4, (6, 6)).astype(E4M3) for _ in range(2))
    x, y = a.astype(np.float64), b.astype(np.float64)
    for subscripts, operands, want in (
        ("ij,jk->ik", (a, b), x @ y),
        ("ij,jk,kl->il", (a, b, a), x @ y @ x),
        ("ij,jk->k", (a, b.astype(E5M2)), (x @ y).sum(0)),
        ("ij,jk->ik", (a, b.astype(np.float32)), x @ y),
    ):
        found = lowprec.einsum(subscripts, *operands, out_dtype="float32")
        np.testing.assert_array_equal(found, want.astype(np.float32))
    assert lowprec.einsum("ij,jk->ik", a, b, out_dtype=E4M3).dtype == E4M3
    assert lowprec.einsum("ij,jk,kl->il", a, b, a).dtype == BF16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stack", [(), (2,)], ids=str)
def test_prepared_operands_have_the_same_bits(shape, stack):
    """E4M3 numbers along k are kept in the order of FP32 units; NaN is found by column."""
    m, n, k = shape
    rng = np.random.default_rng(sum(shape))
    a, b = (
        rng.standard_normal((*stack, m, k)).astype(F32),
        rng.standard_normal((*stack, n, k)).astype(E4M3),
    )
    b[..., 0, k - 1] = b[..., n - 1, 0] = np.nan
    for weight in (b.swapaxes(-1, -2), b.swapaxes(-1, -2).copy()):
        prepared = lowprec.prepare(weight)
        for x, mode in ((a, "fp32"), (a, "bf16"), (a, "tf32x3"), (a.astype(BF16), None)):
            want, found = (
                lowprec.matmul(x, y, math_mode=mode).astype(F32) for y in (weight, prepared)
            )
            assert np.isnan(want).any(axis=tuple(range(want.ndim - 1))).sum() == 2
            np.testing.assert_array_equal(found, want)
        if lowprec.plan(a, weight).kernel_row.decodes_b:
            assert (prepared.packed_bytes > 0) == (weight.strides[-2] == 1)
