"""``emulate`` around ``matmul``, and ``emulation.mma``: products, scopes, refusals."""

import contextlib
import re

import ml_dtypes
import numpy as np
import pytest

import lowprec
import lowprec.planning
from backends.tensor_core_oracle import dot
from lowprec import ArrayError, DTypeError, SettingError, ShapeError, UnsupportedError, emulate
from lowprec.architectures import Architecture
from lowprec.backends.cpu.emulation.arithmetic import FORMATS, arithmetic
from lowprec.emulation import TensorCore, mma
from lowprec.formats import BFLOAT16, FLOAT16, TF32
from lowprec.modes import TABLE
from lowprec.planning.gpus import MODELS
from lowprec.planning.tensor_cores import accumulation
from lowprec.policy.resolution import emulated_architecture
from support.oracles import bfloat16
from support.rounding_oracle import round_to_format

MODES = {"tf32": TF32, "bf16": BFLOAT16, "fp16": FLOAT16}
M, N, K = 33, 17, 100


def rounded(x, fmt):
    return round_to_format(x, MODES[fmt])


def in_float32(a, b, arch, fmt):
    """Return the product of the rounded operands, by the instruction itself."""
    x, y = rounded(a, fmt), rounded(b, fmt)
    return mma(x, y, np.zeros((*x.shape[:-1], y.shape[-1]), np.float32), arch=arch, format=fmt)


def identical(x, y):
    return bool(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())


@pytest.fixture
def operands(rng):
    # Of one sign, so that rounding toward zero shows.
    return rng.random((M, K), np.float32), rng.random((K, N), np.float32)


# -- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ["ampere", "ada", "hopper", "blackwell"])
def test_a_mode_sums_as_the_tensor_core_does(arch, mode, operands):
    a, b = operands
    without = lowprec.matmul(a, b, math_mode=mode)
    with emulate(arch):
        found = lowprec.matmul(a, b, math_mode=mode)
        again = lowprec.matmul(a, b, math_mode=mode)
    assert identical(found, in_float32(a, b, arch, mode))
    assert identical(again, found)
    assert not identical(found, without)
    assert identical(lowprec.matmul(a, b, math_mode=mode), without)


@pytest.mark.parametrize(("dtype", "fmt"), [(np.float16, "fp16"), (bfloat16, "bf16")])
def test_so_do_16_bit_operands(dtype, fmt, operands):
    a, b = (x.astype(dtype) for x in operands)
    with emulate("hopper"):
        found = lowprec.matmul(a, b, out_dtype="float32")
        narrow = lowprec.matmul(a, b)
    expected = in_float32(a.astype(np.float32), b.astype(np.float32), "hopper", fmt)
    assert identical(found, expected)
    assert identical(narrow, expected.astype(dtype))


@pytest.mark.parametrize("arch", ["ada", "hopper", "blackwell"])
def test_so_do_float8_operands(arch, operands):
    a, b = (x.astype(ml_dtypes.float8_e4m3fn) for x in operands)
    x, y, zero = a.astype(np.float32), b.astype(np.float32), np.zeros((M, N), np.float32)
    with emulate(arch):
        found = lowprec.matmul(a, b, out_dtype="float32")
        chunked = lowprec.matmul(a, b, out_dtype="float32", k_chunk=64)
    assert identical(found, mma(x, y, zero, arch=arch, format="e4m3"))
    parts = [
        mma(x[:, k], y[k], zero, arch=arch, format="e4m3") for k in (slice(0, 64), slice(64, K))
    ]
    assert identical(chunked, parts[0] + parts[1])
    with emulate("ampere"):  # multiplies their numbers in bfloat16
        assert identical(
            lowprec.matmul(a, b, out_dtype="float32"), in_float32(x, y, "ampere", "bf16")
        )


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("arch", ["ada", "hopper", "blackwell"])
def test_e4m3_by_e5m2(arch, turned, rng):
    """Subnormal numbers among them: each type has its least exponent."""
    a = np.ldexp(rng.standard_normal((6, 70)), rng.integers(-12, 3, (6, 70)))
    a[:3] = np.ldexp(rng.integers(-7, 8, (3, 70)), -9)  # groups of subnormal numbers alone
    a = a.astype(ml_dtypes.float8_e4m3fn)
    b = np.ldexp(rng.standard_normal((70, 5)), rng.integers(-20, 3, (70, 5))).astype(
        ml_dtypes.float8_e5m2
    )
    model = arithmetic(Architecture(arch), "float8_e4m3fn")
    rows, columns = a.astype(float).tolist(), b.astype(float).T.tolist()
    expected = np.float32([[dot(x, y, 0.0, model, (-6, -14)) for y in columns] for x in rows])
    with emulate(arch):
        found = (
            lowprec.matmul(b.T, a.T, out_dtype="float32").T
            if turned
            else lowprec.matmul(a, b, out_dtype="float32")
        )
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("arch", ["ada", "hopper", "blackwell"])
def test_so_does_a_gradient_in_e5m2(arch, operands):
    a, b = operands
    scales = np.abs(a).max() / np.float32(57344), np.abs(b).max() / np.float32(448)
    x, y = (
        (a / scales[0]).astype(ml_dtypes.float8_e5m2),
        (b / scales[1]).astype(ml_dtypes.float8_e4m3fn),
    )
    with emulate(arch):
        found = lowprec.matmul(a, b, math_mode=lowprec.Recipe.fp8_training().of("grad_input"))
        expected = lowprec.matmul(x, y, out_dtype="float32") * np.float32(
            float(scales[0]) * float(scales[1])
        )
    assert identical(found, expected)


@pytest.mark.parametrize("arch", ["ada", "hopper", "blackwell"])
def test_so_do_modes_that_round_to_float8(arch, operands):
    a, b = operands
    zero = np.zeros((M, N), np.float32)
    scales = [np.abs(x).max() / np.float32(448) for x in (a, b)]
    x, y = (
        (v / s).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        for v, s in zip((a, b), scales, strict=True)
    )
    alpha = np.float32(float(scales[0]) * float(scales[1]))
    with emulate(arch):
        found = lowprec.matmul(a, b, math_mode="fp8")
        chunked = lowprec.matmul(a, b, math_mode="fp8", k_chunk=64)
        assert lowprec.plan(a, b, math_mode="fp8").kernel == f"{arch}_float8_e4m3fn"
        rows = lowprec.matmul(a, b, math_mode="fp8_rows")
        per_row, per_column = (
            np.abs(v).max(axis) / np.float32(448) for v, axis in ((a, 1), (b, 0))
        )
    assert identical(found, mma(x, y, zero, arch=arch, format="e4m3") * alpha)
    parts = [
        mma(x[:, k], y[k], zero, arch=arch, format="e4m3") for k in (slice(0, 64), slice(64, K))
    ]
    assert identical(chunked, (parts[0] + parts[1]) * alpha)
    x = (a / per_row[:, None]).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    y = (b / per_column).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    sums = mma(x, y, zero, arch=arch, format="e4m3")
    assert identical(rows, sums * (per_row[:, None] * per_column))
    assert not identical(rows, lowprec.matmul(a, b, math_mode="fp8_rows"))


def test_pieces_of_k_limit_the_cost_of_float8_sums(rng):
    """Hopper keeps 13 fraction bits of a sum; DeepSeek-V3 adds sums of 128 products in FP32."""
    a, b = rng.random((8, 4096), dtype=np.float32), rng.random((4096, 8), dtype=np.float32)

    def difference(**options):
        with emulate("hopper"):
            found = lowprec.matmul(a, b, **options)
        want = lowprec.matmul(a, b, math_mode=options["math_mode"])
        return float(np.linalg.norm(found - want) / np.linalg.norm(want))

    whole, chunked = (difference(math_mode=mode) for mode in ("fp8(fast_accum=forward)", "fp8"))
    assert 10 * chunked < whole
    assert 10 * difference(math_mode="fp8_blocks") < whole
    with emulate("hopper"):
        for mode in ("fp8", "fp8_blocks"):
            bound = lowprec.plan(a, b, math_mode=mode).bound.relative
            exact = a.astype(np.float64) @ b
            error = np.linalg.norm(lowprec.matmul(a, b, math_mode=mode) - exact)
            assert error < bound * np.linalg.norm(a) * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("core", "arch", "mode"),
    [
        (TensorCore(group=8, fraction_bits=24, least_exponent=-132), "ampere", "fp16"),
        (TensorCore(group=8, fraction_bits=24, least_exponent=-132), "ampere", "bf16x3"),
        (TensorCore(group=8, fraction_bits=25), "hopper", "tf32"),
        (TensorCore(group=32, fraction_bits=13, result_bits=13), "hopper", "fp8(fast_accum=forward)"),
    ],
)  # fmt: skip
def test_a_model_is_emulated_as_an_architecture(core, arch, mode, operands):
    """The numbers of an architecture's row give its bits, and others give other bits within their bound."""
    a, b = operands
    with emulate(arch):
        want = lowprec.matmul(a, b, math_mode=mode)
    with emulate(core):
        found = lowprec.matmul(a, b, math_mode=mode)
        assert emulated_architecture() == core
    np.testing.assert_array_equal(found, want)
    narrow = TensorCore(group=4, fraction_bits=12, result_bits=12)
    with emulate(narrow) as scope:
        other = lowprec.matmul(a, b, math_mode=mode)
        plan = lowprec.plan(a, b, math_mode=mode)
    assert repr(scope).startswith("emulate(TensorCore(group=4, fraction_bits=12,")
    assert plan.kernel.startswith("tensor_core_")
    assert not np.array_equal(other, want)
    error = np.linalg.norm(other - a.astype(float) @ b)
    assert error <= plan.bound.relative * np.linalg.norm(a) * np.linalg.norm(b)


def test_complex_components_are_one_chain_each(rng):
    a, b = (rng.random((9, 9, 2), np.float32).view(np.complex64)[..., 0] for _ in range(2))
    with emulate("ampere"):
        found = lowprec.matmul(a, b, math_mode="tf32")
    zero = np.zeros((9, 9), np.float32)

    def chain(x, y, z):
        return mma(rounded(x, "tf32"), rounded(y, "tf32"), z, arch="ampere", format="tf32")

    real = chain(-a.imag, b.imag, chain(a.real, b.real, zero))
    imag = chain(a.imag, b.real, chain(a.real, b.imag, zero))
    assert identical(found.real.copy(), real)
    assert identical(found.imag.copy(), imag)


def test_the_epilogue_follows_in_float32(operands, rng):
    a, b = operands
    c, bias = rng.random((M, N), np.float32), rng.random(N, np.float32)
    out = np.empty((N, M), np.float32).T
    with emulate("hopper"):
        lowprec.matmul(
            a, b, out=out, c=c, alpha=-0.5, beta=2.0, bias=bias, activation="relu", math_mode="bf16"
        )
    product = in_float32(a, b, "hopper", "bf16")
    expected = np.maximum(product * np.float32(-0.5) + c * np.float32(2) + bias, np.float32(0))
    assert np.array_equal(out, expected)


def test_batches_vectors_and_strides(rng):
    a, b = rng.random((2, 1, K, 7), np.float32), rng.random((3, 2 * N, K), np.float32)
    a, b = a.swapaxes(-1, -2), b[:, ::-2].swapaxes(-1, -2)
    with emulate("hopper"):
        found = lowprec.matmul(a, b, math_mode="tf32")
        vector = lowprec.matmul(a[0, 0, 0], b[1], math_mode="tf32")
    for i in np.ndindex(2, 3):
        assert identical(found[i], in_float32(a[i[0], 0], b[i[1]], "hopper", "tf32"))
    assert identical(vector, found[0, 1, 0])


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        (np.float32, "fp32"),
        (np.float32, "fp32_pedantic"),
        (np.float64, "tf32"),
        (np.int8, "fp32"),
        (np.complex128, "bf16"),
    ],
)
def test_the_rest_stays_as_it_is(dtype, mode, rng):
    a, b = ((rng.random(shape) * 100).astype(dtype) for shape in ((M, K), (K, N)))
    expected = lowprec.matmul(a, b, math_mode=mode)
    with emulate("hopper"):
        assert identical(lowprec.matmul(a, b, math_mode=mode), expected)
        plan = lowprec.plan(a, b, math_mode=mode)
    assert plan.kernel_row.imitates is None
    assert "nothing here: Hopper's tensor cores" in " ".join(str(plan).split())


@pytest.mark.parametrize("mode", ["tf32", "bf16"])
def test_numbers_that_volta_does_not_multiply(mode, operands):
    expected = lowprec.matmul(*operands, math_mode=mode)
    with emulate("volta"):
        assert identical(lowprec.matmul(*operands, math_mode=mode), expected)
        assert lowprec.plan(*operands, math_mode=mode).kernel_row.imitates is None
        assert lowprec.plan(*operands, math_mode="fp16").kernel == "volta_float16"


def guaranteed(plan, x, y):
    """Return the bound of a plan for operands in float64, element by element."""
    bound, k = plan.bound, x.shape[-1]
    sums = np.abs(x).sum(1)[:, None] + np.abs(y).sum(0) + k * bound.operand_absolute
    absolute = bound.operand_absolute * sums + bound.result_absolute
    return bound.relative * (np.abs(x) @ np.abs(y)) + absolute


@pytest.mark.parametrize(("dtype", "fmt"), [(np.float16, "float16"), (bfloat16, "bfloat16")])
@pytest.mark.parametrize("arch", Architecture)
def test_the_bound_holds_for_subnormal_numbers(arch, dtype, fmt):
    model = accumulation(fmt, arch.capability)
    if model is None:
        with pytest.raises(UnsupportedError, match="do not support"):
            arithmetic(arch, fmt)
        return
    # The first factor is subnormal and aligned like the smallest normal number, so that all other products, each half
    # of what is kept then, are cut off; and they are not small next to the first product.
    first, second = {"float16": (2.0**-24, 2.0**-19), "bfloat16": (2.0**-133, 2.0**-126)}[fmt]
    scale, smallest = {"float16": (1.0, 2.0**-14), "bfloat16": (2.0**100, 2.0**-126)}[fmt]
    a, b = np.full((1, 64), second), np.zeros((64, 1))
    a[0, 0], b[0, 0] = first, scale
    b[1:] = scale * smallest * 2.0 ** (-1 - model.fraction_bits) / second
    x, y = a.astype(dtype), b.astype(dtype)
    assert (x.astype(float) == a).all()
    assert (y.astype(float) == b).all()
    with emulate(arch):
        found = lowprec.matmul(x, y, out_dtype="float32")
        plan = lowprec.plan(x, y, out_dtype="float32")
    error = np.abs(found - a @ b)
    assert (error > 4 * plan.bound.relative * (a @ b)).all()
    assert (error <= guaranteed(plan, a, b)).all()


@pytest.mark.parametrize("mode", ["bf16x3", "tf32x3"])
def test_non_finite_results_are_recomputed_in_fp32(mode):
    # Rounded, the first number is infinite. Rounded toward zero, the sum would be the next smaller number.
    a, b = np.float32([[2.0**128 - 2.0**104, -(2.0**102)]]), np.ones((2, 1), np.float32)
    with emulate("hopper"):
        assert lowprec.matmul(a, b, math_mode=mode)[0, 0] == a[0, 0]


@pytest.mark.parametrize("arch", [None, "hopper"])
@pytest.mark.parametrize("mode", ["fp16x3", "fp16x4_unscaled", "fp16_karatsuba", "bf16x3", "tf32"])
def test_the_bound_holds_where_results_are_subnormal(mode, arch):
    # A product that is one and a half times the smallest float32.
    x, y = np.full((1, 1), 1.5 * 2.0**-75), np.full((1, 1), 2.0**-74)
    with emulate(arch) if arch else contextlib.nullcontext():
        found = lowprec.matmul(x.astype(np.float32), y.astype(np.float32), math_mode=mode)
        plan = lowprec.plan(x.astype(np.float32), y.astype(np.float32), math_mode=mode)
    error = abs(found - x * y)
    assert 2.0**-151 < error <= guaranteed(plan, x, y)


ROUNDED = [row.mode for row in TABLE if row.operand_format.name in FORMATS and not row.quantizes]


@pytest.mark.parametrize("mode", ROUNDED)
def test_bounds_hold_on_data_of_all_magnitudes(mode, rng):
    # Exponents from where all is subnormal to where float16 ends; signs alike or not; short sums and longer ones.
    ranges = [(0, 1), (-30, 3), (-140, 14), (-70, 14)]
    for low, high in ranges * 8:
        k = int(rng.choice([1, 3, 17, 100]))
        sign = rng.choice([abs, lambda x: x])
        x, y = (
            sign(rng.standard_normal(shape) * 2.0 ** rng.integers(low, high, shape))
            .astype(np.float32)
            .astype(np.float64)
            for shape in ((4, k), (k, 3))
        )
        a, b = x.astype(np.float32), y.astype(np.float32)
        with emulate(rng.choice(list(Architecture))):
            found, plan = (f(a, b, math_mode=mode) for f in (lowprec.matmul, lowprec.plan))
        allowed = guaranteed(plan, x, y)
        if plan.bound.by_norms:
            norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=0)
            allowed += plan.bound.relative * (norms - np.abs(x) @ np.abs(y))
        # float64 itself is off by k 2^-53 at most.
        assert (np.abs(found - x @ y) <= allowed + k * 2.0**-53 * (np.abs(x) @ np.abs(y))).all()


# -- plans, modes and the guard -------------------------------------------------------------------


def test_the_plan_shows_it(operands):
    with emulate("hopper"):
        plan = lowprec.plan(*operands, math_mode="tf32")
    assert plan.resolved is not None
    assert plan.resolved.emulates is plan.kernel_row.imitates is Architecture.HOPPER
    text = " ".join(str(plan).split())  # however lines are broken
    assert "emulates Hopper's tensor cores" in text
    assert "hopper_tf32: Hopper's tensor cores, emulated bit by bit: groups of 8 products" in text
    assert plan.to_dict()["resolved"]["emulates"] == "hopper"
    # 100 products are 13 groups of 8, of which each counts 9/2 + 2 roundings.
    assert "gamma_85" in plan.bound.formula
    assert "emulates" not in str(lowprec.plan(*operands, math_mode="tf32"))


def test_the_guard_and_rtol_decide_as_ever(operands):
    with emulate("hopper"), lowprec.fp32_guard():
        guarded = lowprec.plan(*operands, math_mode="tf32")
    assert (str(guarded.mode), guarded.kernel_row.imitates) == ("fp32", None)
    assert guarded.resolved is not None
    assert guarded.resolved.emulates is Architecture.HOPPER
    with emulate("hopper"):
        plan = lowprec.plan(*operands, rtol=1e-2)
        assert plan.resolved is not None
        assert plan.resolved.emulates is Architecture.HOPPER
        assert {str(c.mode) for c in plan.candidates} >= {"fp32", "tf32", "bf16"}
        lowprec.matmul(*operands, rtol=1e-2)


def test_it_leaves_the_mode_and_the_guard_alone():
    with lowprec.math_mode("bf16"), emulate("ada"):
        assert str(lowprec.get_math_mode()) == "bf16"
        with lowprec.math_mode("tf32"):
            assert (str(lowprec.get_math_mode()), emulated_architecture()) == (
                "tf32",
                Architecture.ADA,
            )
    with lowprec.fp32_guard(frameworks=False), emulate("ada"), lowprec.math_mode("fp16"):
        assert str(lowprec.get_math_mode()) == "fp32"


# -- scopes ---------------------------------------------------------------------------------------


def test_the_innermost_counts():
    assert emulated_architecture() is None
    with emulate("Volta") as outer:
        assert repr(outer) == "emulate('volta')"
        with emulate("hopper"):
            assert emulated_architecture() is Architecture.HOPPER
        assert emulated_architecture() is Architecture.VOLTA
    assert emulated_architecture() is None


@pytest.mark.parametrize("name", ["kepler", "", None, 8])
def test_other_architectures_are_refused(name):
    with pytest.raises(SettingError, match="choose one of: volta, ampere, ada, hopper, black"):
        emulate(name)


# -- the instruction ------------------------------------------------------------------------------

ONE = np.ones((1, 1), np.float32)


def test_mma_gives_an_array_of_the_library(torch):
    a = torch.full((2, 3), 0.5)
    found = mma(a, a.T, torch.ones(2, 2), arch="hopper", format="tf32")
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [[1.75, 1.75], [1.75, 1.75]]


def test_mma_reads_its_operands_only(rng):
    a, b, c = (rounded(rng.random(shape), "bf16") for shape in ((4, 3), (3, 5), (4, 5)))
    copies = [x.copy() for x in (a, b, c)]
    for x in (a, b, c):
        x.flags.writeable = False
    found = mma(a, b, c, arch="HOPPER", format="bfloat16")
    assert all(identical(x, y) for x, y in zip((a, b, c), copies, strict=True))
    assert not any(np.shares_memory(found, x) for x in (a, b, c))


@pytest.mark.parametrize("name", ["a", "b"])
def test_mma_refuses_numbers_of_another_format(name):
    given = {"a": ONE, "b": ONE, "c": ONE, name: ONE + np.float32(2.0**-11)}
    with pytest.raises(
        ArrayError, match=rf"{name}\[0, 0\] is .*1.0004.*, which is not a tf32 number"
    ):
        mma(given["a"], given["b"], given["c"], arch="hopper", format="tf32")
    given[name] = ONE * np.float32(2.0**17)
    with pytest.raises(ArrayError, match="which is not a float16 number"):
        mma(given["a"], given["b"], given["c"], arch="hopper", format="fp16")


def test_mma_takes_non_finite_numbers():
    a = np.array([[np.nan, 1, -np.inf]], np.float32)
    found = mma(a.T, ONE, np.zeros((3, 1), np.float32), arch="hopper", format="fp16")
    assert found.view(np.uint32).tolist() == [[0x7FFFFFFF], [0x3F800000], [0xFF800000]]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3), (2, 3), (2, 3)), "these have shapes a (2, 3), b (2, 3), c (2, 3)"),
        (((2, 3), (3, 2), (2, 3)), "these have shapes"),
        (((3,), (3, 2), (2,)), "these have shapes"),
        (((2, 2, 3), (3, 3, 2), (2, 2)), "the batches do not broadcast"),
    ],
)
def test_mma_refuses_shapes(shapes, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        mma(*(np.zeros(shape, np.float32) for shape in shapes), arch="hopper", format="fp16")


def test_mma_refuses_the_rest():
    with pytest.raises(DTypeError, match="b has dtype float64; mma takes float32"):
        mma(ONE, ONE.astype(np.float64), ONE, arch="hopper", format="fp16")
    with pytest.raises(UnsupportedError, match=r"Volta do not support tf32; .* float16$"):
        mma(ONE, ONE, ONE, arch="volta", format="tf32")
    with pytest.raises(SettingError, match="format 'fp8' is not emulated; choose one of: fp16"):
        mma(ONE, ONE, ONE, arch="hopper", format="fp8")
    with pytest.raises(SettingError, match="format 16 is not emulated"):
        mma(ONE, ONE, ONE, arch="hopper", format=16)  # type: ignore[arg-type]
    with pytest.raises(ArrayError, match="list"):
        mma([[1.0]], ONE, ONE, arch="hopper", format="fp16")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.key)
def test_a_model_of_a_gpu_has_its_generation_as_suggestion(model):
    generations = [str(x) for x in Architecture if x.capability == model.compute_capability]
    end = f"; did you mean '{generations[0]}'\\?" if generations else "blackwell"
    with pytest.raises(SettingError, match=f"not emulated; choose one of: volta.*{end}$"):
        emulate(model.key)
