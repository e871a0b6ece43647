"""Products of quantised arrays on the CPU, against float64 of their values under the plan's bound."""

import gc
import pickle
import weakref

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import recipes
from lowprec.backends.cpu import library as native
from lowprec.backends.cpu import products
from lowprec.formats import BLOCK_FORMATS, FLOAT8_E5M2, FLOAT8_E8M0FNU, BlockFormat
from lowprec.modes import available_modes
from support import cpu_units, machines
from support.programs import in_threads

#: Blocks along another axis are tested, too.
pytestmark = pytest.mark.filterwarnings("ignore:b is quantised along axis")

FORMATS = list(BLOCK_FORMATS)
BF16, E4M3, F16, F32 = (
    np.dtype(getattr(ml_dtypes, x, x)) for x in ("bfloat16", "float8_e4m3fn", "float16", "float32")
)

#: m, n, k: tiny products, one row, edges of strips and steps, few rows, blocks that are not whole, a narrow b.
SHAPES = [(3, 5, 7), (1, 300, 400), (8, 513, 515), (33, 200, 130), (257, 129, 300), (300, 8, 400)]


def check(a, b, found=None, **options):
    """Compare a product with float64 of the operands' values: the bound, and three roundings for the factors."""
    c = lowprec.matmul(a, b, **options) if found is None else found
    made = lowprec.plan(a, b, **options)
    x, y = (
        np.asarray(z.dequantize() if hasattr(z, "dequantize") else z, np.float64) for z in (a, b)
    )
    norms = np.linalg.norm(x), np.linalg.norm(y)
    error = np.linalg.norm(np.asarray(c, np.float64) - x @ y)
    assert error <= made.bound.frobenius(*norms, *c.shape[-2:]) + 3 * 2.0**-24 * norms[0] * norms[1]
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("other", [BF16, F32, F16, E4M3, None], ids=str)
def test_products_are_within_the_bound(shape, fmt, other):
    m, n, k = shape
    rng = np.random.default_rng(m + n + k)
    a, b = (
        rng.standard_normal((m, k)).astype(np.float32),
        rng.standard_normal((k, n)).astype(np.float32),
    )
    x = lowprec.quantize(a, fmt) if other is None else a.astype(other)
    modes = ("fp32", "bf16", "tf32", "bf16x3") if other == F32 else (None,)
    for y in (
        lowprec.quantize(b, fmt, axis=0),
        lowprec.quantize(b.T.copy(), fmt).T,
        lowprec.quantize(b, fmt),
    ):
        for mode in modes:
            check(x, y, out_dtype=None if other == F16 else "float32", math_mode=mode)
        prepared = lowprec.prepare(y)
        np.testing.assert_array_equal(lowprec.matmul(x, prepared), lowprec.matmul(x, y))


@pytest.mark.parametrize(
    "fmt", [x for x in FORMATS if BLOCK_FORMATS[x].scales and not BLOCK_FORMATS[x].has_float_scales]
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_every_code_and_scale_is_decoded_as_by_dequantize(fmt, dtype):
    """A product with the identity gives each value; bfloat16 units flush values below 2^-126 to zero."""
    row = BLOCK_FORMATS[fmt]
    per_block = row.block * row.bits // 8
    # All scales along n, all codes along k.
    codes = np.tile(np.arange(256, dtype=np.uint8), 256 * per_block // 256).reshape(256, -1)
    codes = np.concatenate([codes] * (256 // per_block), axis=1)
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, codes.shape[1] // per_block))
    if fmt == "nvfp4":
        scales &= 0x7F
    k = codes.shape[1] * 8 // row.bits
    q = lowprec.QuantizedArray(codes, scales, fmt, (k, 256), 0, 1.0)
    want = q.dequantize()
    identity = np.eye(k, dtype=np.float32)
    picked = np.flatnonzero(np.arange(k) % 3 == 0)[:600]
    a = identity[picked].astype(dtype)
    c = lowprec.matmul(a, q, out_dtype="float32")
    want = want[picked]
    normal = np.isfinite(want) & (np.abs(want) >= 2.0**-126)
    finite_columns = np.isfinite(q.dequantize()).all(0)  # NaN times zero is NaN
    normal &= finite_columns
    assert normal.sum() > 1000
    np.testing.assert_array_equal(c[normal], want[normal])
    assert np.isnan(c[:, ~finite_columns]).all()
    ones = lowprec.QuantizedArray(
        np.full((64, 16), 0x22, np.uint8), np.full((64, 1), 255, np.uint8), "mxfp4", (32, 64), 0
    )
    assert np.isnan(lowprec.matmul(np.ones((40, 32), dtype), ones)).all()
    small = finite_columns & ~normal
    # Flushed, or rounded to a multiple of 2^-133.
    assert (np.abs(c[small]) <= np.abs(want[small]) + 2.0**-134).all()


@pytest.mark.parametrize(
    ("fmt", "scales"),
    [
        ("mxfp8", (0, 1, 7, 9, 10, 119, 127, 245, 246, 247, 250, 254)),
        ("mxfp4", (0, 1, 2, 3, 10, 127, 246, 247, 250, 252, 254)),
        ("nvfp4", (0, 1, 2, 7, 8, 0x38, 0x3F, 0x7D, 0x7E, 0x7F, 0x80, 0x81, 0xB8)),
    ],
)
@pytest.mark.parametrize(("dtype", "m"), [(BF16, 8), (BF16, 40), (F32, 4), (F32, 8)], ids=str)
def test_columns_of_one_extreme_scale_are_decoded_as_by_dequantize(fmt, scales, dtype, m):
    """64 columns for each scale, so that all columns of a vector have it; a block has one code that may overflow."""
    row, k = BLOCK_FORMATS[fmt], 256
    rng = np.random.default_rng(6)
    per, small = 8 // row.bits, 0x60 if row.bits == 8 else 6
    numbers = rng.integers(0, small, (64, k), np.uint8)
    numbers |= rng.integers(0, 2, numbers.shape, np.uint8) << (row.bits - 1)
    largest = 3 + np.arange(64) % 5 * 7
    numbers[np.arange(64), largest] = 0x7E if row.bits == 8 else 7
    codes = numbers if per == 1 else numbers[:, ::2] | numbers[:, 1::2] << 4
    codes = np.tile(codes, (len(scales), 1))
    n, blocks = len(codes), k // row.block
    of_blocks = np.tile(np.repeat(np.array(scales, np.uint8), 64)[:, None], (1, blocks))
    q = lowprec.QuantizedArray(codes, of_blocks, fmt, (k, n), 0, 1.0)
    b = (
        lowprec.prepare(q) if dtype == F32 else q
    )  # FP32 units decode other codes as bfloat16 units do
    values = q.dequantize()
    overflows = (~np.isfinite(values)).sum(0)
    for first in range(0, k, m):
        a = np.zeros((m, k), np.float32)
        picked = np.arange(first, min(first + m, k))
        a[np.arange(len(picked)), picked] = 1
        c, want = (
            lowprec.matmul(a.astype(dtype), b, out_dtype="float32")[: len(picked)],
            values[picked],
        )
        normal, others = np.abs(want) >= 2.0**-126, overflows - ~np.isfinite(want)
        np.testing.assert_array_equal(c[normal & (others == 0)], want[normal & (others == 0)])
        assert np.isnan(c[others > 0]).all()  # Inf times zero
        small = ~normal & (others == 0)
        # Flushed, or rounded to a multiple of 2^-133.
        assert (np.abs(c[small]) <= np.abs(want[small]) + 2.0**-134).all()


def test_batches_vectors_epilogues_and_libraries(torch):
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    rng = np.random.default_rng(3)
    for fmt in FORMATS:
        b = rng.standard_normal((2, 96, 70)).astype(np.float32)
        a = rng.standard_normal((3, 2, 40, 96)).astype(BF16)
        q = lowprec.quantize(b, fmt, axis=-2)
        check(a, q, out_dtype=F32)
        check(a[0, 0], q, out_dtype=F32)
        check(lowprec.quantize(a, fmt), b.astype(BF16), out_dtype=F32)
        check(lowprec.quantize(b.swapaxes(1, 2), fmt), q, out_dtype=F32)
        across = lowprec.quantize(b, fmt, axis=0)
        check(a[0], across, out_dtype=F32)
        check(across.T, b.astype(BF16), out_dtype=F32)
        sliced = lowprec.QuantizedArray(
            q.codes[:, ::2],
            None if q.scales is None else q.scales[:, ::2],
            fmt,
            (2, 96, 35),
            1,
            q.scale,
        )
        check(a[0], sliced, out_dtype=F32)
        for out in ("bfloat16", "float16", "float8_e5m2"):
            check(lowprec.quantize(a[0], fmt), q, out_dtype=out)
        one = lowprec.quantize(b[0, :, 0], fmt)
        assert lowprec.matmul(a[0, 0], one).shape == (40,)
        weight = lowprec.quantize(b[0].T.copy(), fmt)
        bias = rng.standard_normal(70).astype(np.float32)
        found = lowprec.linear(a[0, 0], weight, bias=bias, activation="relu", out_dtype="float32")
        product = lowprec.matmul(a[0, 0], weight.T, out_dtype="float32")
        np.testing.assert_allclose(found, np.maximum(product + bias, 0), rtol=1e-5, atol=1e-5)
        x = torch.from_numpy(a[0, 0].astype(np.float32)).bfloat16()
        for library, made in ((torch, torch.from_numpy(b[0].T.copy())), (jnp, jnp.asarray(b[0].T))):
            theirs = lowprec.quantize(made, fmt)
            c = lowprec.matmul(theirs, theirs.T, out_dtype="float32")
            assert type(c) is type(made)
            assert library is not None
            check(weight, weight.T, np.asarray(c), out_dtype="float32")
        c = lowprec.matmul(
            x, lowprec.quantize(torch.from_numpy(b[0]), fmt, axis=0), out_dtype=torch.float32
        )
        np.testing.assert_array_equal(c.numpy(), product)


def test_the_plan_shows_decoded_and_widened_operands():
    rng = np.random.default_rng(4)
    a, b = (
        rng.standard_normal((64, 256)).astype(BF16),
        rng.standard_normal((256, 128)).astype(np.float32),
    )
    q = lowprec.quantize(b, "mxfp4", axis=0)
    made = lowprec.plan(a, q)
    assert made.b_becomes.startswith("mxfp4 values as bfloat16")
    assert "mxfp4 (256, 128)" in str(made)
    decodes = made.kernel_row.decodes_b
    assert [copy.operand for copy in made.copies] == ([] if decodes else ["b"])
    wrong = lowprec.plan(a, lowprec.quantize(b, "mxfp4"))
    assert [(copy.operand, copy.nbytes) for copy in wrong.copies] == [("b", 2 * b.size)]
    assert "its mxfp4 numbers are widened to bfloat16" in wrong.copies[0].reason
    left = lowprec.plan(lowprec.quantize(a, "mxfp8"), q)
    assert left.copies[0].operand == "a"
    # 17 bytes per 32 codes of 4 bits.
    assert made.bytes_moved == a.nbytes + 17 * b.size // 32 + 64 * 128 * 2


def test_first_products_in_threads_and_pickles():
    rng = np.random.default_rng(5)
    a, b = (
        rng.standard_normal((16, 512)).astype(BF16),
        rng.standard_normal((512, 512)).astype(np.float32),
    )
    for fmt in FORMATS:
        want = lowprec.matmul(a, lowprec.quantize(b, fmt, axis=0))
        q = pickle.loads(pickle.dumps(lowprec.quantize(b, fmt, axis=0)))
        for found in in_threads(6, lambda _, q=q: lowprec.matmul(a, q)):
            np.testing.assert_array_equal(found, want)
        turned = lowprec.prepare(lowprec.quantize(b.T.copy(), fmt)).T
        np.testing.assert_array_equal(lowprec.matmul(a, turned), want)
        assert (turned.dtype, turned.shape) == (fmt, (512, 512))
        assert turned.nbytes - turned.packed_bytes == q.nbytes  # no vector is added to whole strips
        again = pickle.loads(pickle.dumps(lowprec.prepare(q)))
        np.testing.assert_array_equal(lowprec.matmul(a, again), want)


PREPARED = [
    (fmt, shape, axis)
    for fmt in FORMATS
    for shape, axis in (((70, 33), 0), ((2, 33, 96), 2), ((77,), 0))
]


@pytest.mark.parametrize(("fmt", "shape", "axis"), PREPARED)
def test_a_prepared_quantised_array_has_no_reference_to_its_codes(fmt, shape, axis):
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    q = lowprec.quantize(x, fmt, axis=axis)
    prepared = lowprec.prepare(q)
    for found, want in (
        ((prepared, q), (prepared.T.T, q), (prepared.T, q.T))
        if len(shape) > 1
        else ((prepared, q),)
    ):
        restored = found.quantized()
        assert (restored.shape, restored.axis, restored.scale) == (
            want.shape,
            want.axis,
            want.scale,
        )
        np.testing.assert_array_equal(restored.codes, want.codes)
        if want.scales is not None:
            np.testing.assert_array_equal(restored.scales, want.scales)
    codes = weakref.ref(q.codes)
    restored = want = found = None
    del q
    gc.collect()
    is_reordered = bool(native.units()) and fmt != "fp8"
    assert (prepared._view.kept is not None) == is_reordered
    if is_reordered:
        assert codes() is None


@pytest.mark.parametrize("fmt", ["mxfp4", "int8"])
def test_kernels_with_other_vectors_pack_the_restored_codes(fmt):
    if not native.units():
        pytest.skip("lowprec has no kernels")
    x = np.random.default_rng(3).standard_normal((64, 48)).astype(np.float32)
    q = lowprec.quantize(x, fmt, axis=0)
    prepared = lowprec.prepare(q)
    prepared._view.kept = prepared._view.kept._replace(lanes=3)
    np.testing.assert_array_equal(lowprec.matmul(x.T, prepared), lowprec.matmul(x.T, q))
    assert prepared.packed_bytes > 0


def test_restored_codes_are_of_the_library_of_the_codes(torch):
    q = lowprec.quantize(torch.ones(64, 32), "mxfp4", axis=0)
    restored = lowprec.prepare(q).quantized()
    assert torch.equal(restored.codes, q.codes)
    assert torch.equal(restored.dequantize(), q.dequantize())


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_do_not_restore_a_prepared_array(fmt, monkeypatch):
    x = np.random.default_rng(3).standard_normal((64, 48)).astype(np.float32)
    q = lowprec.quantize(x, fmt, axis=0)
    prepared = lowprec.prepare(q)
    modes = (
        ["fp32", "int8_blocks"]
        if native.units() and fmt not in ("fp8", "fp8_rows", "mxfp8")
        else []
    )
    want = [lowprec.matmul(x.T, q, math_mode=mode) for mode in modes]
    monkeypatch.setattr(
        type(prepared._view), "quantized", property(lambda view: pytest.fail("restored"))
    )
    found = [lowprec.matmul(x.T, prepared, math_mode=mode) for mode in modes]
    np.testing.assert_array_equal(found, want)


def test_a_prepared_affine_array_has_its_zeros():
    x = np.random.default_rng(4).standard_normal((70, 33)).astype(np.float32)
    q = lowprec.quantize(x, "int4", axis=0, symmetric=False)
    restored = lowprec.prepare(q).quantized()
    np.testing.assert_array_equal(restored.zeros, q.zeros)
    np.testing.assert_array_equal(restored.dequantize(), q.dequantize())


def test_other_arguments_refuse_quantised_arrays(torch):
    q = lowprec.quantize(np.ones((32, 32), np.float32), "mxfp4")
    x = np.ones((32, 32), np.float32)
    for call in (lambda: lowprec.matmul(x, x, c=q, beta=1.0), lambda: lowprec.matmul(x, x, bias=q),
                 lambda: lowprec.einsum("ij,jk", q, x), lambda: lowprec.linalg.solve(q, x)):  # fmt: skip
        with pytest.raises(
            lowprec.ArrayError,
            match="quantised array, which is accepted only as an operand of matmul",
        ):
            call()
    needs_grad = torch.ones(32, 32, requires_grad=True)
    with pytest.raises(lowprec.ArrayError, match="b is a quantised array"):
        lowprec.matmul(needs_grad, q)
    with pytest.raises(lowprec.ShapeError, match="32"):
        lowprec.matmul(np.ones((4, 31), np.float32), q)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("length", [1, 5, 32, 33])
def test_one_block_along_either_axis(fmt, length):
    """A single block is contiguous in both orders."""
    x = np.random.default_rng(8).standard_normal((length, 63)).astype(np.float32)
    q = lowprec.quantize(x, fmt, axis=0)
    assert q.codes.flags.c_contiguous
    np.testing.assert_array_equal(lowprec.matmul(q, np.eye(63, dtype=np.float32)), q.dequantize())
    np.testing.assert_array_equal(
        lowprec.matmul(np.eye(length, dtype=np.float32), q), q.dequantize()
    )
    other = lowprec.QuantizedArray(np.asfortranarray(q.codes), q.scales, fmt, q.shape, 0, q.scale)
    np.testing.assert_array_equal(
        lowprec.matmul(other, np.eye(63, dtype=np.float32)), q.dequantize()
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_vectors(fmt):
    rng = np.random.default_rng(9)
    v, a = (
        rng.standard_normal(200).astype(np.float32),
        rng.standard_normal((60, 200)).astype(np.float32),
    )
    q = lowprec.quantize(v, fmt)
    values_of_q = q.dequantize().astype(np.float64)
    for x, out in (
        (v, None),
        (a, None),
        (a.astype(BF16), None),
        (q, None),
        (a, np.empty((60, 2), np.float32)[:, 0]),
    ):
        found = lowprec.matmul(x, q, out=out, out_dtype="float32")
        exact = np.asarray(x.dequantize() if x is q else x, np.float64)
        bound = 203 * 2.0**-24 * (np.abs(exact) @ np.abs(values_of_q)) + 2.0**-118
        assert (np.abs(found - exact @ values_of_q) <= bound).all()


def test_the_plan_shows_every_widening(monkeypatch):
    counted = []
    widened = lowprec.QuantizedArray._widened
    monkeypatch.setattr(
        lowprec.QuantizedArray, "_widened", lambda x: counted.append(x.format) or widened(x)
    )
    rng = np.random.default_rng(10)

    def numbers(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    a, q, c = (
        numbers(8, 256),
        lowprec.quantize(numbers(256, 300), "mxfp4", axis=0),
        np.zeros((8, 300), np.float32),
    )
    large, stack = numbers(2, 200, 700), lowprec.quantize(numbers(2, 700, 600), "nvfp4", axis=1)
    small, pair = numbers(3, 8, 64), lowprec.quantize(numbers(3, 64, 70), "mxfp8", axis=1)
    v = lowprec.quantize(numbers(256), "mxfp8")
    cases = [
        (a, q, {}), (a.astype(BF16), q, {}), (a, q, {"math_mode": "bf16"}), (a, q, {"math_mode": "bf16x3"}),
        (a.astype(BF16), q, {"out_dtype": "float8_e4m3fn"}), (a, q, {"math_mode": "fp16"}),
        (a, q, {"math_mode": "bf16x3", "c": c, "beta": 1.0}), (a, q, {"c": c, "beta": 1.0, "activation": "gelu"}),
        (lowprec.quantize(a, "mxfp4"), q, {}), (a, v, {}), (a.astype(BF16), v, {}), (a, q, {"out": c.T.copy().T}),
        (large, stack, {}), (large.astype(BF16), stack, {}), (small, pair, {}), (small.astype(BF16), pair, {}),
        (a.astype(np.float64), q, {}), (a.astype(np.complex64), q, {}),
    ]  # fmt: skip
    for number, (x, y, options) in enumerate(cases):
        counted.clear()
        lowprec.matmul(x, y, **options)
        copies = [copy for copy in lowprec.plan(x, y, **options).copies if "widened" in copy.reason]
        assert len(counted) == len(copies), number


def test_a_format_that_no_kernel_decodes(monkeypatch):
    row = BlockFormat("mxfp8_e5m2", FLOAT8_E5M2, 8, 32, FLOAT8_E8M0FNU, has_scale=False)
    monkeypatch.setitem(BLOCK_FORMATS, row.name, row)
    monkeypatch.setitem(
        recipes.FORMATS, row.name, (recipes.Rule("e5m2", "block", (1, 32), "floor"),) * 2
    )
    rng = np.random.default_rng(12)
    a, b = (
        rng.standard_normal((8, 100)).astype(np.float32),
        rng.standard_normal((100, 70)).astype(np.float32),
    )
    q = lowprec.quantize(b, row.name, axis=0)
    assert 0 < np.abs(q.dequantize() - b).max() < 0.6
    np.testing.assert_array_equal(lowprec.matmul(a, q), lowprec.matmul(a, q.dequantize()))
    assert "widened" in str(lowprec.plan(a, q).copies)


def test_codes_are_read_in_place_and_freed():
    rng = np.random.default_rng(11)
    a, b = (
        rng.standard_normal((8, 256)).astype(np.float32),
        rng.standard_normal((256, 320)).astype(np.float32),
    )
    q = lowprec.quantize(b, "nvfp4", axis=0)
    prepared = lowprec.prepare(q)
    for mode in available_modes():
        lowprec.matmul(a, q, math_mode=mode)
    lowprec.matmul(a.astype(BF16), q)
    if lowprec.plan(a, q).kernel_row.decodes_b:
        assert prepared.packed_bytes == 0
        gaps = lowprec.QuantizedArray(
            *(x[::2] for x in (q.codes, q.scales)), "nvfp4", (256, 160), 0, q.scale
        )
        prepared = lowprec.prepare(gaps)
        for mode in ("fp32", "bf16", "tf32"):
            np.testing.assert_array_equal(
                lowprec.matmul(a, prepared, math_mode=mode), lowprec.matmul(a, gaps, math_mode=mode)
            )
        assert prepared.packed_bytes == 0
        # in the order of the kernels, of 160 columns and 256 of k
        assert prepared.nbytes == gaps.nbytes
        del gaps
    weak = weakref.ref(q)
    gc.disable()
    try:
        del q, prepared
        assert weak() is None
    finally:
        gc.enable()


def test_out_may_share_memory_with_codes_and_scales():
    rng = np.random.default_rng(12)
    a, b = (
        rng.standard_normal((4, 256)).astype(np.float32),
        rng.standard_normal((256, 64)).astype(np.float32),
    )
    a[1, 3] = np.inf
    q = lowprec.quantize(b, "mxfp8", axis=0)
    for part in ("codes", "scales"):
        memory = np.zeros(1 << 15, np.uint8)
        mine = {"codes": q.codes, "scales": q.scales}
        size = mine[part].size
        memory[:size] = mine[part].ravel()
        mine[part] = memory[:size].reshape(mine[part].shape)
        shared = lowprec.QuantizedArray(**mine, format="mxfp8", shape=q.shape, axis=0)
        out = memory[: 4 * 64 * 4].view(np.float32).reshape(4, 64)
        want = lowprec.matmul(a, q, math_mode="bf16x3")
        np.testing.assert_array_equal(lowprec.matmul(a, shared, out=out, math_mode="bf16x3"), want)


@pytest.mark.parametrize("fmt", ["mxfp4", "int8"])
def test_blocks_along_another_axis_give_a_warning(fmt, monkeypatch):
    monkeypatch.setattr("lowprec.errors._given", set())
    a, q = np.ones((8, 64), BF16), lowprec.quantize(np.ones((64, 51), np.float32), fmt)
    if not lowprec.plan(
        a, lowprec.quantize(np.ones((64, 51), np.float32), fmt, axis=0)
    ).kernel_row.decodes_b:
        lowprec.matmul(a, q)
        return
    with pytest.warns(
        lowprec.LowprecWarning, match="summed over: axis=-2, or -1 for the weight of linear$"
    ):
        lowprec.matmul(a, q)


def test_arguments_of_a_quantised_array_are_checked():
    q = lowprec.quantize(
        np.random.default_rng(13).standard_normal((40, 64)).astype(np.float32), "nvfp4"
    )
    parts = {
        "codes": q.codes,
        "scales": q.scales,
        "format": "nvfp4",
        "shape": (40, 64),
        "axis": 1,
        "scale": q.scale,
    }
    same = lowprec.QuantizedArray(**parts | {
        "codes": q.codes.view(np.int8), "scales": q.scales.view(ml_dtypes.float8_e4m3fn), "axis": -1, "shape": [40, 64],
    })  # fmt: skip
    assert (same.axis, same.shape, same.codes.dtype, same.scales.dtype) == (
        1,
        (40, 64),
        np.uint8,
        np.uint8,
    )
    np.testing.assert_array_equal(same.dequantize(), q.dequantize())
    for change, error, words in (
        ({"codes": q.codes.astype(np.int64)}, lowprec.DTypeError, "codes are uint8, .* not int64"),
        (
            {"scales": q.scales.astype(np.float32)},
            lowprec.DTypeError,
            "scales are uint8, .* not float32",
        ),
        ({"codes": q.codes[:, 1:]}, lowprec.ShapeError, "codes of nvfp4 for shape"),
        ({"scales": None}, lowprec.ShapeError, "scales of nvfp4 .* not None"),
        (
            {"codes": q.dequantize().astype(E4M3), "format": "fp8"},
            lowprec.ShapeError,
            "scales of fp8 .* have shape None",
        ),
        ({"shape": 40}, lowprec.ShapeError, "shape is a tuple of integers"),
        ({"axis": 2}, lowprec.ShapeError, "axis: axis 2 is out of bounds"),
        ({"scale": 0.0}, lowprec.SettingError, "scale of nvfp4 is a positive number, got 0.0"),
        ({"scale": "2"}, lowprec.SettingError, "scale of nvfp4 is a positive number"),
        ({"scale": float("nan")}, lowprec.SettingError, "scale of nvfp4 is a positive number"),
    ):
        with pytest.raises(error, match=words):
            lowprec.QuantizedArray(**parts | change)


def random_codes(rng, fmt, vectors, k, axis, *, moderate):
    """Return an array of random codes with scales of moderate size or of any, NaN included."""
    row = BLOCK_FORMATS.get(fmt) or lowprec.quantize(np.ones((2, 2), np.float32), fmt)._row
    blocks = -(-k // row.block) if row.block > 0 else 1
    codes = rng.integers(
        0, 256, (vectors, blocks * row.block * row.bits // 8 if row.block > 0 else k), np.uint8
    )
    if row.has_float_scales:
        scales = np.exp2(rng.uniform(-3, 3, (vectors, blocks))).astype(np.float32)
    else:
        low, high = {"mxfp4": (110, 145), "nvfp4": (40, 80)}[fmt] if moderate else (0, 256)
        scales = rng.integers(low, high, (vectors, blocks), np.uint8)
    shape = (vectors, k) if axis else (k, vectors)
    return lowprec.QuantizedArray(codes, scales, fmt, shape, axis, 1.0)


BLOCKS_OF_B = ["mxfp4", "nvfp4", "int4", "int8"]
INT8_UNITS = [x for x in cpu_units.UNITS if x.startswith("int8") and x != "int8_amx"]


@pytest.mark.parametrize("moderate", [True, False], ids=["moderate", "any scale"])
@pytest.mark.parametrize("fmt", BLOCKS_OF_B)
@pytest.mark.parametrize("of_a", ["mxfp4", "nvfp4"])
def test_integers_in_blocks_have_the_same_bits_everywhere(of_a, fmt, moderate, monkeypatch):
    monkeypatch.setattr(products, "_ALONE", 0)
    rng = np.random.default_rng(8)
    for m, n, k in [(1, 70, 500), (2, 33, 16), (3, 5, 7), (7, 70, 1030), (40, 130, 515)]:
        a = random_codes(rng, of_a, m, k, 1, moderate=moderate)
        b = random_codes(rng, fmt, n, k, 0, moderate=moderate)
        with machines.on("NumPy alone"):
            want = lowprec.matmul(a, b, out_dtype="float32")
        x, y = a.dequantize(), b.dequantize()
        if k <= 32 and fmt == "mxfp4" and moderate:  # one block, whose sum is exact
            np.testing.assert_array_equal(
                want, (x.astype(np.float64) @ y.astype(np.float64)).astype(np.float32)
            )
        if moderate:
            check(a, b, want, out_dtype="float32")
        for unit in filter(cpu_units.has, INT8_UNITS):
            with machines.only(unit):
                assert lowprec.plan(a, b).kernel_row.summation == "blocks"
                for other in (b, lowprec.prepare(b)):
                    found = lowprec.matmul(a, other, out_dtype="float32")
                    np.testing.assert_array_equal(found, want)
                    np.testing.assert_array_equal(
                        np.signbit(found)[found == 0], np.signbit(want)[want == 0]
                    )


@pytest.mark.parametrize("of_b", [None, *BLOCKS_OF_B])
@pytest.mark.parametrize(
    "mode", ["int8_blocks", lowprec.Recipe("int8_blocks", rounding="stochastic", seed=1)], ids=str
)
def test_int8_in_blocks_has_the_same_bits_everywhere(mode, of_b, monkeypatch):
    """Weights by the mode, and quantised ones; int4 with zeros. The first matrix of a batch has the matrix's bits."""
    monkeypatch.setattr(products, "_ALONE", 0)
    rng = np.random.default_rng(9)
    for m, n, k in [(1, 70, 500), (3, 5, 7), (40, 130, 1030)]:
        a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
        weights = [b]
        if of_b:
            weights = [lowprec.quantize(b, of_b, axis=0)]
        if of_b == "int4":
            weights += [
                lowprec.quantize(b, of_b, axis=0, group=g, symmetric=False) for g in (32, 128)
            ]
        for weight in weights:
            with machines.on("NumPy alone"):
                want = lowprec.matmul(a, weight, math_mode=mode)
            made = check(a, weight, want, math_mode=mode)
            assert made.kernel_row.summation == "blocks"
            for unit in filter(cpu_units.has, INT8_UNITS):
                with machines.only(unit):
                    prepared = lowprec.prepare(weight, math_mode=None if of_b else mode)
                    for x in (a, np.asfortranarray(a), np.broadcast_to(a, (2, m, k))):
                        for y in (weight, prepared):
                            found = lowprec.matmul(x, y, math_mode=mode)
                            np.testing.assert_array_equal(found.reshape(-1, m, n)[0], want)


def test_scales_whose_product_overflows_leave_zeros_alone():
    """E8M0 scales of 2^127 and 2^-127; a NaN scale; sums that overflow on the way stay infinite."""
    codes = np.full((1, 32), 0x77, np.uint8)  # 6
    codes[0, 16:] = 0xF7  # 6, -6
    zeros = np.zeros((1, 32), np.uint8)

    def products(a, b, of_a, of_b):
        x = lowprec.QuantizedArray(a, np.array([of_a], np.uint8), "mxfp4", (1, 64), 1)
        y = lowprec.QuantizedArray(b, np.array([of_b], np.uint8), "mxfp4", (64, 1), 0)
        return float(lowprec.matmul(x, y, out_dtype="float32")[0, 0])

    with machines.without(["bf16_amx"]):
        assert products(zeros, codes, (254, 254), (254, 254)) == 0
        assert products(codes, codes, (254, 0), (0, 254)) == 36 * 64
        assert products(codes, codes, (0, 0), (0, 0)) == 0
        assert products(codes, codes, (254, 254), (100, 100)) == 36 * 64 * 2.0**100
        assert products(codes, codes, (254, 254), (254, 254)) == np.inf
        assert np.isnan(products(zeros, codes, (255, 127), (127, 127)))


@pytest.mark.parametrize("name", ["fp8", "fp8_rows", "mxfp8", "mxfp4", "nvfp4", "int8", "int4"])
@pytest.mark.parametrize("mode", ["fp32", "mxfp8", "int8"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_the_result_has_the_type_of_the_other_operand(name, mode, dtype):
    rng = np.random.default_rng(0)
    x, weight = (
        rng.standard_normal((4, 64), np.float32).astype(dtype),
        rng.standard_normal((8, 64), np.float32),
    )
    stored = lowprec.quantize(weight, name).T
    found = lowprec.matmul(x, stored, math_mode=mode)
    wide = lowprec.matmul(x, stored, math_mode=mode, out_dtype="float32")
    assert found.dtype == dtype == lowprec.matmul(stored.T, x.T, math_mode=mode).dtype
    assert np.array_equal(found, wide.astype(dtype)), "rounded once"
    assert lowprec.plan(x, stored, math_mode=mode).out_dtype.label == dtype
