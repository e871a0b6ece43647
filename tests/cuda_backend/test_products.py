"""Every element type, mode, layout and epilogue on a GPU, against float64 under the plan's own bound.

Small integers are exact in every format and every order of summation: a wrong transpose, leading dimension, stride,
factor or addend gives a wrong number.
"""

import ml_dtypes
import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import has_real_gpu
from support import oracles

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
F16, F32, F64, C64, C128, I8 = map(
    np.dtype, ("float16", "float32", "float64", "complex64", "complex128", "int8")
)

FLOATS = (F64, F32, F16, BF16, C64, C128)
MODES = ("fp32", "fp32_pedantic", "tf32", "bf16", "fp16")
CASES = [
    *((dtype, "fp32") for dtype in (*FLOATS, I8, E4M3, E5M2)),
    *((dtype, mode) for dtype in (F32, C64) for mode in MODES[1:]),
]


def integers(rng, shape, dtype):
    """Small integers, of either sign, as this type holds them."""
    drawn = rng.integers(-3, 4, shape).astype(np.float64)
    if np.dtype(dtype).kind == "c":
        return (drawn + 1j * rng.integers(-3, 4, shape)).astype(dtype)
    return drawn.astype(dtype)


def result_dtype(dtype):
    if dtype == I8:
        return np.dtype(np.int32)
    return BF16 if dtype in (E4M3, E5M2) else dtype


def check_exact(found, true):
    np.testing.assert_array_equal(oracles.widen(found), oracles.widen(true))


named = pytest.mark.parametrize


# -- exact products -------------------------------------------------------------------------------


@pytest.mark.feature("stored as {dtype}", "odd extents and addresses")
@named(("dtype", "mode"), CASES, ids=lambda x: getattr(x, "name", x))
@named("size", [(1, 1, 1), (5, 7, 3), (33, 17, 40), (64, 32, 48)], ids=str)
@pytest.mark.sampled(2)
def test_products(gpu, rng, dtype, mode, size):
    m, n, k = size
    a, b = integers(rng, (m, k), dtype), integers(rng, (k, n), dtype)
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode=mode))
    true = oracles.product(a, b)
    assert found.dtype == result_dtype(dtype)
    check_exact(found, true.astype(found.dtype))


LAYOUTS = {
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "rows apart": lambda x: np.repeat(x, 2, -2)[..., ::2, :],
    "columns apart": lambda x: np.repeat(x, 3, -1)[..., ::3],
    "rows backwards": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "batch backwards": lambda x: x[::-1].copy()[::-1],
    "inside a larger one": lambda x: np.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 2), (3, 1)])[..., 1:-2, 3:-1],
}  # fmt: skip


@pytest.mark.feature("transposed and strided views")
@named("layout", LAYOUTS)
@named("which", ["a", "b", "both"])
@named(("dtype", "mode"), CASES, ids=lambda x: getattr(x, "name", x))
@pytest.mark.sampled(3)
def test_views(gpu, rng, dtype, mode, layout, which):
    a, b = integers(rng, (3, 20, 24), dtype), integers(rng, (3, 24, 16), dtype)
    x = gpu.put(LAYOUTS[layout](a) if which in ("a", "both") else a)
    y = gpu.put(LAYOUTS[layout](b) if which in ("b", "both") else b)
    found = gpu.get(lowprec.matmul(x, y, math_mode=mode))
    check_exact(found, oracles.product(a, b).astype(found.dtype))
    call = lowprec.plan(x, y, math_mode=mode).call
    # cuBLASLt does not document negative ones
    assert min(call.first.batch_stride, call.second.batch_stride) >= 0


BATCHES = [
    ((4,), (4,)), ((2, 3), (2, 3)), ((2, 3), ()), ((), (2, 3)), ((2, 1), (1, 3)), ((1, 1), (5, 1)), ((2, 3), (3,)),
]  # fmt: skip


@pytest.mark.feature("batches, and one dimension")
@named("batches", BATCHES, ids=str)
@named(("dtype", "mode"), CASES, ids=lambda x: getattr(x, "name", x))
@pytest.mark.sampled(2)
def test_batches(gpu, rng, dtype, mode, batches):
    a, b = integers(rng, (*batches[0], 6, 9), dtype), integers(rng, (*batches[1], 9, 5), dtype)
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode=mode))
    check_exact(found, oracles.product(a, b).astype(found.dtype))


@named(("dtype", "mode"), CASES, ids=lambda x: getattr(x, "name", x))
@named("left", [(3, 6, 9), (1, 9)], ids=str)
@named("backwards", [False, True])
@pytest.mark.sampled(2)
def test_operands_repeated_by_strides_of_zero(gpu, rng, dtype, mode, left, backwards):
    a, w = integers(rng, left, dtype), integers(rng, (9, 5), dtype)
    if backwards:
        a, w = a[..., ::-1], w[:, ::-1]
    b = np.broadcast_to(w, (3, 9, 5))
    epilogues = [{}]
    if dtype not in (C64, C128, I8):
        epilogues.append({"bias": integers(rng, (5,), result_dtype(dtype)), "activation": "relu"})
    for x, y in ((a, b), (b.swapaxes(-1, -2), a.swapaxes(-1, -2) if a.ndim > 1 else a)):
        for words in epilogues if y is b else [{}]:
            put = {k: gpu.put(v) if isinstance(v, np.ndarray) else v for k, v in words.items()}
            found = gpu.get(lowprec.matmul(gpu.put(x), gpu.put(y), math_mode=mode, **put))
            true = oracles.product(x, y)
            if words:
                true = np.maximum(true + oracles.widen(words["bias"]), 0)
            check_exact(found, true.astype(found.dtype))


@pytest.mark.feature("batches, and one dimension")
@named(("mode", "c"), [("fp32", False), ("fp32", True), ("bf16x3", True)])
def test_more_matrices_than_a_call_has(gpu, rng, mode, c):
    """cuBLASLt takes 65,535; an odd number cannot be divided into calls of one size."""
    a, b, out = (integers(rng, (65_537, *shape), F32) for shape in ((2, 4), (4, 2), (2, 2)))
    true = a @ b + (out if c else 0)
    target = gpu.put(out)
    lowprec.matmul(
        gpu.put(a),
        gpu.put(b),
        out=target,
        **({"c": target, "beta": 1.0} if c else {}),
        math_mode=mode,
    )
    check_exact(gpu.get(target), true)


@pytest.mark.feature("batches, and one dimension")
@named(
    "shapes",
    [((7,), (7,)), ((7,), (7, 3)), ((3, 7), (7,)), ((2, 3, 7), (7,)), ((7,), (2, 7, 3))],
    ids=str,
)
def test_products_with_vectors(gpu, rng, shapes):
    a, b = (integers(rng, shape, F32) for shape in shapes)
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode="bf16"))
    assert found.shape == np.matmul(a, b).shape
    check_exact(found, oracles.product(a, b))


@pytest.mark.feature("size zero")
@named(
    "shapes", [((0, 3), (3, 4)), ((2, 0), (0, 4)), ((2, 3), (3, 0)), ((0, 2, 3), (3, 4))], ids=str
)
@named("dtype", [F32, BF16, I8, C64], ids=lambda d: d.name)
def test_nothing_to_do(gpu, shapes, dtype):
    a, b = (np.ones(shape, dtype) for shape in shapes)
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b)))
    check_exact(found, np.matmul(oracles.widen(a), oracles.widen(b)))


@pytest.mark.feature("two types in one product")
@named(
    "pair",
    [
        *((F32, F16), (BF16, F32), (BF16, F16), (F64, F32), (C64, F32), (C128, F16), (E5M2, E4M3)),
        *((E4M3, BF16), (E5M2, F16), (E4M3, F32), (F64, E5M2), (C64, E4M3), (E4M3, C128)),
    ],
    ids=str,
)
@named("mode", ["fp32", "bf16", "fp16", "bf16x3", "fp64"])
@pytest.mark.sampled(2)
def test_two_element_types(gpu, rng, pair, mode):
    a, b = integers(rng, (6, 16), pair[0]), integers(rng, (16, 5), pair[1])
    for x, y in ((a, b), (b.T.copy(), a.T.copy())):
        found = gpu.get(lowprec.matmul(gpu.put(x), gpu.put(y), math_mode=mode))
        check_exact(found, oracles.product(x, y).astype(found.dtype))


@pytest.mark.feature("a result of another type")
@named(
    ("pair", "out"),
    [
        *(((F16, F16), F32), ((BF16, BF16), F32), ((F32, F32), F16), ((F32, F32), BF16)),
        *(((E4M3, E4M3), out) for out in (F32, F16, E4M3, E5M2)),
        *(((E5M2, E5M2), out) for out in (F32, F16, E4M3, E5M2)),
        *(((E4M3, other), out) for other in (BF16, F32) for out in (BF16, F16, E4M3)),
    ],
    ids=str,
)
@named("mode", ["fp32", "bf16", "fp64"])
@named("size", [(6, 16, 5), (32, 16, 48)], ids=str)
@pytest.mark.sampled(2)
def test_out_dtype(gpu, rng, pair, out, mode, size):
    m, k, n = size
    a, b, c = (
        integers(rng, (m, k), pair[0]),
        integers(rng, (k, n), pair[1]),
        integers(rng, (m, n), BF16),
    )
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), out_dtype=out, math_mode=mode))
    assert found.dtype == out
    check_exact(found, oracles.product(a, b).astype(out))
    if E4M3 in pair or E5M2 in pair:
        target = gpu.put(np.zeros((m, n), out))
        lowprec.matmul(
            gpu.put(a), gpu.put(b), alpha=2.0, beta=-1.0, c=gpu.put(c), out=target, math_mode=mode
        )
        check_exact(gpu.get(target), (2 * oracles.product(a, b) - oracles.widen(c)).astype(out))


# -- epilogues ------------------------------------------------------------------------------------


ACTIVATIONS = {None: lambda x: x, "relu": lambda x: np.maximum(x, 0), "gelu": oracles.gelu}
EPILOGUES = [
    {"alpha": 2.0},
    {"alpha": -0.5, "beta": 2.0},
    {"beta": 1.0},
    {"bias": True},
    {"activation": "relu"},
    {"activation": "relu", "bias": True},
    {"alpha": 2.0, "beta": -1.0, "bias": True, "activation": "relu"},
    {"activation": "gelu"},
    {"activation": "gelu", "bias": True, "beta": 0.5},
]


def text(epilogue):
    return "-".join(f"{k}={v}" for k, v in epilogue.items())


def is_defined(dtype, epilogue):
    """int8 products are exact integers without factors; complex numbers have no activation."""
    if dtype == I8:
        return not epilogue.keys() - {"bias", "activation"} and epilogue.get("activation") != "gelu"
    return dtype.kind != "c" or "activation" not in epilogue


@pytest.mark.feature("`alpha`, `beta`, `c`, `out`", "`bias`, `relu`, `gelu`")
@named(
    ("dtype", "mode", "epilogue"),
    [
        (*case, epilogue)
        for case in CASES
        for epilogue in EPILOGUES
        if is_defined(case[0], epilogue)
    ],
    ids=lambda x: text(x) if isinstance(x, dict) else getattr(x, "name", x),
)
@named("batch", [(), (3,)], ids=str)
@pytest.mark.sampled(3)
def test_epilogues(gpu, rng, dtype, mode, epilogue, batch):
    out = result_dtype(dtype)
    given = dict(epilogue)
    a, b = integers(rng, (*batch, 12, 16), dtype), integers(rng, (16, 8), dtype)
    arrays = {}
    if given.pop("bias", False):
        arrays["bias"] = integers(rng, (8,), out)
    if "beta" in given:
        arrays["c"] = integers(rng, (*batch, 12, 8), out)
    on_gpu = {name: gpu.put(x) for name, x in arrays.items()}
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode=mode, **given, **on_gpu))
    true = given.get("alpha", 1.0) * oracles.product(a, b)
    true = true + given.get("beta", 0.0) * oracles.widen(arrays.get("c", 0.0))
    true = ACTIVATIONS[given.get("activation")](true + oracles.widen(arrays.get("bias", 0.0)))
    if given.get("activation") == "gelu":
        # Exact numbers go in; a few roundings of tanh and products follow, and one to the result's type.
        unit = max(oracles.STORAGE[out.name][0], 2.0**-24)
        np.testing.assert_allclose(oracles.widen(found), true, rtol=16 * unit, atol=16 * 2.0**-24)
    else:
        check_exact(found, true.astype(out))


@pytest.mark.feature("`alpha`, `beta`, `c`, `out`")
@named("shape", [(12, 8), (8,), (12, 1), (1, 8), (1, 1), ()], ids=str)
@named("dtype", [F32, BF16, F16], ids=lambda d: d.name)
def test_addends_broadcast_and_may_be_of_another_type(gpu, rng, shape, dtype):
    a, b = integers(rng, (3, 12, 16), BF16), integers(rng, (16, 8), BF16)
    c = integers(rng, shape, dtype)
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), c=gpu.put(c), beta=2.0))
    check_exact(found, oracles.product(a, b) + 2 * oracles.widen(c))


@pytest.mark.feature("`alpha`, `beta`, `c`, `out`")
def test_complex_factors(gpu, rng):
    for dtype, mode in ((C64, "fp32"), (C64, "bf16"), (C64, "fp16"), (C128, "fp32")):
        a, b, c = (integers(rng, s, dtype) for s in ((5, 8), (8, 6), (5, 6)))
        found = lowprec.matmul(
            gpu.put(a), gpu.put(b), c=gpu.put(c), alpha=1 - 2j, beta=3j, math_mode=mode
        )
        check_exact(gpu.get(found), (1 - 2j) * oracles.product(a, b) + 3j * c)


def apart(x, step):
    """The same matrix with rows ``step`` elements apart."""
    wide = np.zeros((x.shape[0], step), x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


@pytest.mark.feature("odd extents and addresses")
@named(
    ("dtype", "out"), [(BF16, BF16), (F32, F32), (E4M3, BF16), (I8, np.dtype(np.int32))], ids=str
)
def test_a_bias_at_an_odd_address(gpu, rng, dtype, out):
    a, b = integers(rng, (32, 16), dtype), integers(rng, (16, 48), dtype)
    for start in (0, 1, 3):
        bias = integers(rng, (64,), out)[start : start + 48]
        found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), bias=gpu.put(bias)))
        check_exact(found, (oracles.product(a, b) + oracles.widen(bias)).astype(out))


@pytest.mark.feature("transposed and strided views")
@named(("dtype", "out"), [(BF16, BF16), (E4M3, BF16), (I8, np.dtype(np.int32))], ids=str)
@named("step", [48, 49, 56, 64])
def test_rows_at_any_distance(gpu, rng, dtype, out, step):
    a, b = integers(rng, (32, 16), dtype), integers(rng, (16, 48), dtype)
    target = gpu.put(apart(np.zeros((32, 48), out), step))
    c = apart(integers(rng, (32, 48), out), step)
    addend = {} if dtype == I8 else {"c": gpu.put(c), "beta": 1.0}
    lowprec.matmul(gpu.put(a), gpu.put(b), out=target, **addend)
    true = oracles.product(a, b) + (0 if dtype == I8 else oracles.widen(c))
    check_exact(gpu.get(target), true.astype(out))


# -- out ------------------------------------------------------------------------------------------


@pytest.mark.feature("`alpha`, `beta`, `c`, `out`")
@named("layout", LAYOUTS)
@named("dtype", [F32, F16, BF16, C64, I8, F64], ids=lambda d: d.name)
@named("mode", ["fp32", "bf16"])
@pytest.mark.sampled(2)
def test_out(gpu, rng, dtype, layout, mode):
    a, b = integers(rng, (2, 10, 16), dtype), integers(rng, (2, 16, 12), dtype)
    whole = LAYOUTS[layout](np.zeros((2, 10, 12), result_dtype(dtype)))
    out, memory = gpu.put_with_memory(whole)
    before = gpu.get(memory)
    assert lowprec.matmul(gpu.put(a), gpu.put(b), out=out, math_mode=mode) is out
    found = gpu.get(out)
    check_exact(found, oracles.product(a, b).astype(found.dtype))
    # The memory between the elements of out is not written.
    assert gpu.untouched_outside(out, memory, before)


@pytest.mark.feature("an `out` that overlaps an operand")
@named("dtype", [F32, F16], ids=lambda d: d.name)
def test_out_that_is_also_an_operand(gpu, rng, dtype):
    a, b, c = (integers(rng, (8, 8), dtype) for _ in range(3))
    x, y, z = gpu.put(a), gpu.put(b), gpu.put(c)
    lowprec.matmul(x, y, out=x)
    check_exact(gpu.get(x), oracles.product(a, b))
    lowprec.matmul(y, gpu.put(a), out=gpu.transpose(y))
    check_exact(gpu.get(y).T, oracles.product(b, a))
    lowprec.matmul(gpu.put(a), gpu.put(b), out=z, c=z, beta=1.0)
    check_exact(gpu.get(z), oracles.product(a, b) + c)


# -- FP8 ------------------------------------------------------------------------------------------


@pytest.mark.feature("float8 with scales, as numbers and on the device")
@named("pair", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
@named("size", [(16, 32, 48), (5, 7, 9)], ids=str)
def test_fp8_scales(gpu, rng, pair, size):
    m, n, k = size
    a, b = integers(rng, (m, k), pair[0]), integers(rng, (k, n), pair[1])
    true = 0.5 * 4.0 * oracles.product(a, b)
    scale = gpu.put(np.array([4.0], np.float32))
    for factors in ({"scale_a": 0.5, "scale_b": 4.0}, {"scale_a": 0.5, "scale_b": scale}):
        found = lowprec.matmul(gpu.put(a), gpu.put(b), out_dtype="float32", **factors)
        check_exact(gpu.get(found), true)


@pytest.mark.feature("float8 widened, with scales as numbers")
@named("pair", [(E5M2, E5M2), (E4M3, BF16), (F32, E5M2)], ids=str)
def test_scales_of_widened_fp8(gpu, rng, pair):
    """Numbers are factors of the product; cuBLASLt reads scales in device memory of FP8 products alone."""
    a, b = integers(rng, (16, 32), pair[0]), integers(rng, (32, 48), pair[1])
    x, y, scale = gpu.put(a), gpu.put(b), gpu.put(np.array([4.0], np.float32))
    which = "scale_a" if pair[0] in (E4M3, E5M2) else "scale_b"
    found = lowprec.matmul(x, y, out_dtype="float32", alpha=3.0, **{which: 0.5})
    check_exact(gpu.get(found), 1.5 * oracles.product(a, b))
    with pytest.raises(
        lowprec.UnsupportedError,
        match=f"{which} is in device memory, but the operands are multiplied",
    ):
        lowprec.matmul(x, y, **{which: scale})


# -- bounds ---------------------------------------------------------------------------------------

#: On a device cuBLAS was seen to take tensor cores for TF32 only from m = 16 and min(n, k) = 512 on.
SIZES = [(512, 512, 512), (528, 640, 2048)] if has_real_gpu() else [(24, 40, 17), (24, 40, 600)]


@pytest.mark.feature("mode {mode}")
@named(
    ("dtype", "mode"),
    [
        *((F32, m) for m in MODES),
        *((C64, m) for m in MODES),
        (F16, "fp32"),
        (BF16, "fp32"),
        (F64, "fp32"),
    ],
    ids=str,
)
@named("one_sign", [False, True], ids=["N(0,1)", "U(0,1)"])
@named("size", SIZES, ids=str)
@pytest.mark.sampled(2)
def test_errors_are_within_the_plan_s_bound(gpu, rng, dtype, mode, one_sign, size):
    m, n, k = size
    draw = rng.random if one_sign else rng.standard_normal
    a, b = (draw(s).astype(np.float64) for s in ((m, k), (k, n)))
    if dtype.kind == "c":
        a, b = a + 1j * draw(a.shape), b - 1j * draw(b.shape)
    a, b = a.astype(dtype), b.astype(dtype)
    x, y = gpu.put(a), gpu.put(b)
    bound = lowprec.plan(x, y, math_mode=mode).bound
    error = np.linalg.norm(
        oracles.widen(gpu.get(lowprec.matmul(x, y, math_mode=mode))) - oracles.product(a, b)
    )
    norms = [float(np.linalg.norm(oracles.widen(v))) for v in (a, b)]
    limit = bound.frobenius(*norms, m, n)
    assert error <= limit
    if mode in ("tf32", "bf16", "fp16") and dtype in (F32, C64):
        # It is the mode's rounding that was done, and not a better one: at least a hundredth of its unit.
        assert error >= 0.01 * 2.0 ** -(8 if mode == "bf16" else 11) * float(
            np.linalg.norm(oracles.product(a, b))
        )


@pytest.mark.feature("mode fp16 beyond float16's range")
@named("order", ["C", "F"])
@named("size", [12, 64])
def test_float16_is_rounded_alike_on_both_devices(gpu, rng, order, size):
    """A permutation shows the rounded numbers, of rows of every exponent and spread, zeros, subnormals, Inf and NaN."""
    m = 18
    spread = np.where(np.arange(m) % 3 == 0, 0, rng.integers(-60, 1, (size, m))).T
    x = np.ldexp(rng.standard_normal((m, size)), spread + rng.integers(-100, 100, (m, 1)))
    x = np.array(x, np.float32, order=order)
    x[0], x[1], x[2, 1:] = 0, x[1] * np.float32(1e-38), np.float32(1e-45)
    x[3, 2], x[4, 5], x[5] = np.inf, np.nan, np.float32(3.4e38)
    x[6, ::2] = np.ldexp(np.float32(1 + 2.0**-11), -np.arange(size)[::2])  # ties, ever less of them
    p = np.eye(size, dtype=np.float32)[rng.permutation(size)] * rng.choice([-4, 0.25], size)
    p = p.astype(np.float32)
    for a, b in ((x, p), (p, x.T)):
        found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode="fp16"))
        host = lowprec.matmul(a, b, math_mode="fp16")
        np.testing.assert_array_equal(found, host)
        with np.errstate(over="ignore"):
            want = oracles.product(*oracles.round_both(a, b, "fp16")).astype(F32)
        oracles.assert_equal(host, want)


@pytest.mark.feature("Inf and NaN")
def test_inf_and_nan_go_through_as_they_would(gpu):
    a = np.array([[np.inf, 1.0, 2.0], [np.nan, 0.0, 1.0], [1e30, 1.0, -2.0]], np.float32)
    b = np.eye(3, dtype=np.float32) + 1
    for mode in MODES:
        found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode=mode))
        assert np.isposinf(found[0]).all(), mode
        assert np.isnan(found[1]).all(), mode
        assert np.isfinite(found[2]).all(), mode
