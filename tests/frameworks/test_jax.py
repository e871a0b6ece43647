"""The product inside JAX: every way in which JAX transforms, compiles, partitions and exports operations.

In float64, where modes do not act, each cell of the matrix compares with ``jax.numpy.matmul``. With float32 and
complex64 operands each product of a cell is within the bound that ``lowprec.plan`` gives for its mode. What needs a
process of its own (several devices, the first import) is in ``test_jax_processes``.
"""

import contextvars
import functools
import importlib
import warnings
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import formats
from lowprec.backends.cpu import numpy_products
from lowprec.modes import MathMode, row
from lowprec.policy import environment
from support.rounding_oracle import round_to_format

MODES = [mode.value for mode in MathMode]
#: One of each kind: widened, rounded, split and scaled.
KINDS = ["fp64", "bf16", "fp16x3"]


@pytest.fixture
def jax(jax):
    importlib.import_module("lowprec.jax")
    return jax


SHAPES = [
    ((3, 4), (4, 2)), ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 2)), ((2, 3, 4), (4,)),
    ((4,), (2, 4, 3)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (3, 4, 2)), ((3, 4), (2, 4, 2)), ((0, 4), (4, 2)),
    ((3, 0), (0, 2)), ((0, 3, 4), (4, 2)),
]  # fmt: skip


def operands(a, b, dtype="float64"):
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(shape) for shape in (a, b)]
    if "complex" in dtype:
        made = [x + 1j * rng.standard_normal(x.shape) for x in made]
    return [x.astype(dtype) for x in made]


def close(found, true):
    """Equal but for the order of sums of at most 20 products and three products in a row, far below 1e-12."""
    np.testing.assert_allclose(np.asarray(found), np.asarray(true), rtol=1e-12, atol=1e-12)


# -- the rules, in float64 ------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_values_and_derivatives_of_every_shape(jax, a, b):
    x, y = operands(a, b)
    u, v = np.cos(x), np.sin(y)

    def of(multiply):
        def call(x, y, u, v):
            out, tangent = jax.jvp(multiply, (x, y), (u, v))
            return out, tangent, *jax.vjp(multiply, x, y)[1](jax.numpy.cos(out))

        return jax.jit(call)(x, y, u, v)

    for found, true in zip(of(lowprec.matmul), of(jax.numpy.matmul), strict=True):
        assert (found.shape, found.dtype) == (true.shape, true.dtype)
        close(found, true)


def test_derivatives_of_complex_operands_and_factors(jax):
    x, y = operands((3, 4), (4, 2), "complex128")

    def loss(multiply):
        return jax.grad(lambda a, b: abs(multiply(a, b).sum()) ** 2, argnums=(0, 1))(x, y)

    found = loss(lambda a, b: lowprec.matmul(a, b, alpha=1 + 2j))
    for mine, true in zip(found, loss(lambda a, b: (1 + 2j) * (a @ b)), strict=True):
        close(mine, true)


def exported(jax, f, x):
    return jax.export.export(jax.jit(f))(x).call(x)


FUNCTIONS = {
    "at once": lambda jax, f, x: f(x),
    "jit": lambda jax, f, x: jax.jit(f)(x),
    "ahead of time": lambda jax, f, x: jax.jit(f).lower(x).compile()(x),
    "without jit": lambda jax, f, x: without_jit(jax, f, x),
    "grad": lambda jax, f, x: jax.grad(f)(x),
    "grad of grad": lambda jax, f, x: jax.jit(jax.grad(lambda y: jax.grad(f)(y).sum()))(x),
    "vjp": lambda jax, f, x: jax.vjp(f, x)[1](np.float64(2))[0],
    "jvp": lambda jax, f, x: jax.jvp(f, (x,), (jax.numpy.sin(x),))[1],
    "jvp of jvp": lambda jax, f, x: jax.jvp(
        lambda y: jax.jvp(f, (y,), (jax.numpy.sin(x),))[1], (x,), (x,)
    )[1],
    "linearize": lambda jax, f, x: jax.linearize(f, x)[1](jax.numpy.cos(x)),
    "hessian": lambda jax, f, x: jax.jit(jax.hessian(f))(x),
    "vmap": lambda jax, f, x: jax.vmap(f)(jax.numpy.stack([x, 2 * x])),
    "vmap of vmap": lambda jax, f, x: jax.vmap(jax.vmap(f))(
        jax.numpy.array([[x, 2 * x], [x.T, -x]])
    ),
    "vmap of grad": lambda jax, f, x: jax.jit(jax.vmap(jax.grad(f)))(jax.numpy.stack([x, 2 * x])),
    "jacrev of vmap": lambda jax, f, x: jax.jacrev(jax.vmap(f))(jax.numpy.stack([x, 2 * x])),
    "checkpoint": lambda jax, f, x: jax.jit(jax.grad(jax.checkpoint(f)))(x),
    "scan": lambda jax, f, x: jax.lax.scan(
        lambda y, _: (y * jax.numpy.tanh(f(y)), f(y)), x, None, 3
    ),
    "grad of scan": lambda jax, f, x: jax.grad(
        lambda y: jax.lax.scan(lambda z, _: (z * jax.numpy.tanh(f(z)), None), y, None, 3)[0].sum()
    )(x),
    "while": lambda jax, f, x: jax.lax.fori_loop(0, 3, lambda _, y: y * jax.numpy.tanh(f(y)), x),
    "cond": lambda jax, f, x: jax.jit(
        lambda y: jax.lax.cond(y[0, 0] > 9, lambda z: f(z), lambda z: f(2 * z), y)
    )(x),
    "map": lambda jax, f, x: jax.lax.map(f, jax.numpy.stack([x, 2 * x])),
    "custom_vjp": lambda jax, f, x: with_custom_vjp(jax, f, x),
    "export": exported,
    "grad exported": lambda jax, f, x: exported(jax, jax.grad(f), x),
    "donated": lambda jax, f, x: jax.jit(f, donate_argnums=0)(jax.numpy.array(x)),
}


NOT_COMPILED = {
    "at once", "jit", "ahead of time", "without jit", "vmap", "grad", "linearize", "export", "grad exported", "donated",
}  # fmt: skip


def without_jit(jax, f, x):
    with jax.disable_jit():
        return jax.grad(f)(jax.numpy.asarray(x))


def with_custom_vjp(jax, f, x):
    made = jax.custom_vjp(f)
    made.defvjp(lambda y: (f(y), y), lambda y, g: (g * jax.grad(f)(y),))
    return jax.jit(jax.grad(made))(x)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable:UserWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(2)
def test_transformed(jax, name):
    x, _ = operands((4, 4), (1,))

    def cubic(multiply):
        return lambda x: (multiply(multiply(x, x), jax.numpy.sin(x)) * x).sum()

    def run(f):
        # Compiled as a whole, which is quicker than operation by operation.
        whole = jax.jit if name not in NOT_COMPILED else lambda g: g
        return whole(lambda x: FUNCTIONS[name](jax, f, x))(x)

    found, true = run(cubic(lowprec.jax.matmul)), run(cubic(jax.numpy.matmul))
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        # Values grow up to 1e3 by three products of 4 x 4 matrices.
        np.testing.assert_allclose(np.asarray(mine), np.asarray(other), rtol=1e-11, atol=1e-11)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0), (1, 2), (2, 1), (2, None)])
@pytest.mark.parametrize(
    ("a", "b"), [((4, 4, 4), (4, 4, 4)), ((4, 4, 4, 4), (4, 4, 4)), ((4, 4, 4), (4, 4, 4, 4))]
)
def test_vmap(jax, a, b, in_axes):
    x, y = operands(a, b)
    found = jax.vmap(lowprec.matmul, in_axes=in_axes)(x, y)
    close(found, jax.vmap(jax.numpy.matmul, in_axes=in_axes)(x, y))


def test_contractions(jax):
    x, y = operands((2, 3, 4), (2, 4, 5))

    def loss(einsum, **keywords):
        return jax.jit(jax.grad(lambda a: (einsum("bij,bjk->ik", a, y, **keywords) ** 2).sum()))(x)

    close(loss(lowprec.einsum, math_mode="bf16"), loss(jax.numpy.einsum))
    close(jax.jit(lowprec.linear)(x[0], y[0].T), x[0] @ y[0])


def test_exported_with_sizes_known_by_name(jax):
    x, y = operands((3, 4), (4, 2))
    shapes = jax.export.symbolic_shape("m, k, n")
    args = [
        jax.ShapeDtypeStruct(shapes[:2], np.float32),
        jax.ShapeDtypeStruct(shapes[1:], np.float32),
    ]
    made = jax.export.export(jax.jit(lambda a, b: lowprec.matmul(a, b, math_mode="fp16x3")))(*args)
    found = made.call(x.astype(np.float32), y.astype(np.float32))
    np.testing.assert_allclose(found, x @ y, rtol=1e-5, atol=1e-5)
    with pytest.raises(lowprec.ShapeError, match="core dimension"):
        jax.export.export(jax.jit(lowprec.matmul))(args[0], args[0])
    with pytest.raises(lowprec.ShapeError, match=r"some of shape \(m, k\) are only symbols"):
        jax.export.export(jax.jit(lambda a: lowprec.einsum("ij->j", a)))(args[0])


# -- each mode within its bound -------------------------------------------------------------------


def in_jit(jax, f, a, b):
    return [(jax.jit(f)(a, b), a, b)]


def in_vmap(jax, f, a, b):
    both, rows, columns = jax.jit(
        lambda a, b: (
            jax.vmap(f)(jax.numpy.stack([a, 3 * a]), jax.numpy.stack([b, b])),
            jax.vmap(f, in_axes=(0, None))(a[:, None], b),
            jax.vmap(f, in_axes=(None, 1), out_axes=1)(a, b[:, :, None])[..., 0],
        )
    )(a, b)
    return [(both[0], a, b), (both[1], 3 * a, b), (rows[:, 0], a, b), (columns, a, b)]


def in_grad(jax, f, a, b):
    g = a @ b
    of_a, of_b = jax.jit(lambda a, b: jax.vjp(f, a, b)[1](g))(a, b)
    return [(of_a, g, b.T), (of_b, a.T, g)]


def in_jvp(jax, f, a, b):
    u = np.flip(a)
    return [(jax.jit(lambda u: jax.jvp(lambda a: f(a, b), (a,), (u,))[1])(u), u, b)]


def at_once(jax, f, a, b):
    found, pull = jax.vjp(f, a, b)
    return [(found, a, b), (pull(found)[0], np.asarray(found), b.T)]


CELLS = {f.__name__: f for f in (in_jit, in_vmap, in_grad, in_jvp, at_once)}


def within_bound(found, a, b, mode):
    a, b = np.asarray(a), np.asarray(b)
    assert found.dtype == a.dtype
    bound = lowprec.plan(a, b, math_mode=mode).bound
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    error = np.linalg.norm(np.asarray(found, wide) - a.astype(wide) @ b.astype(wide))
    norms = [np.linalg.norm(x.astype(wide)) for x in (a, b)]
    lost = bound.operand_absolute * np.sqrt(a.shape[-1]) * sum(norms) * np.sqrt(max(found.shape))
    assert 0 < error <= bound.relative * norms[0] * norms[1] + lost


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("cell", "mode", "dtype"),
    [
        *[("in_jit", mode, "float32") for mode in MODES],
        *[("in_jit", mode, "complex64") for mode in ("fp32", "tf32", "fp16_karatsuba", *KINDS)],
        *[(cell, mode, "float32") for cell in CELLS if cell != "in_jit" for mode in KINDS],
        ("in_grad", "bf16x3", "complex64"),
    ],
)
def test_modes(jax, cell, mode, dtype):
    a, b = operands((9, 33), (33, 7), dtype)
    multiply = functools.partial(lowprec.jax.matmul, math_mode=mode)
    for found, x, y in CELLS[cell](jax, multiply, a, b):
        within_bound(found, x, y, mode)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_fp64_emulated_is_native_in_graphs(jax, dtype):
    """Float64 in FP64, and float32 as in mode fp32: the same algorithm of XLA."""
    a, b = operands((9, 33), (33, 7), dtype)
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", lowprec.LowprecWarning)
        found, plain = (
            jax.jit(functools.partial(lowprec.jax.matmul, math_mode=mode))(a, b)
            for mode in ("fp64_emulated", "fp32")
        )
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, plain)
    exact = a.astype(np.clongdouble) @ b.astype(np.clongdouble)
    # Sums of 33 products, two components each.
    u = 2.0 ** -(53 if dtype in ("float64", "complex128") else 24)
    assert (np.abs(np.asarray(found) - exact) <= 2 * 68 * u * (np.abs(a) @ np.abs(b))).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["fp16", "fp16x3", "fp16x4_unscaled", "fp16_karatsuba"])
def test_rows_of_any_size_are_scaled(jax, mode):
    a, b = operands((9, 33), (33, 7), "float32")
    a *= np.ldexp(np.float32(1), np.linspace(-100, 100, 9).astype(int))[:, None]
    b *= np.ldexp(np.float32(1), np.linspace(-20, 20, 7).astype(int))
    found = jax.jit(lambda a, b: lowprec.matmul(a, b, math_mode=mode))(a, b)
    for i in range(9):
        for j in range(7):
            within_bound(found[i : i + 1, j : j + 1], a[i : i + 1], b[:, j : j + 1], mode)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_operands_are_summed_in_fp32_and_rounded_once(jax, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b = (np.abs(x).astype(kind) for x in operands((3, 2000), (2000, 5), "float32"))
    wide = [x.astype(np.float64) for x in (a, b)]
    exact = wide[0] @ wide[1]  # of one sign: also the sum of the magnitudes
    unit, summed = float(ml_dtypes.finfo(kind).eps) / 2, 2000 * 2.0**-24 / (1 - 2000 * 2.0**-24)
    found = jax.jit(lowprec.matmul)(a, b)
    assert found.dtype == kind
    error = np.abs(np.asarray(found, np.float64) - exact)
    assert (error <= (unit + summed + unit * summed) * exact).all()
    found = jax.jit(lambda a, b: lowprec.matmul(a, b, out_dtype="float32", math_mode="bf16"))(a, b)
    assert found.dtype == np.float32
    assert (np.abs(np.asarray(found, np.float64) - exact) <= summed * exact).all()
    singles = [x.astype(np.float32) for x in wide]
    half = jax.jit(lambda a, b: lowprec.matmul(a, b, out_dtype=dtype))(*singles)
    np.testing.assert_array_equal(np.asarray(half), np.asarray(found).astype(kind))
    gradients = jax.grad(lambda a, b: lowprec.matmul(a, b, out_dtype="float32").sum(), (0, 1))(a, b)
    assert [g.dtype for g in gradients] == [kind, kind]
    rows = wide[1].sum(axis=1)
    error = np.abs(np.asarray(gradients[0], np.float64) - rows)
    assert (error <= (unit + 5 * 2.0**-24) * rows * (1 + unit)).all()


def test_int8(jax):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (2, 30, 30), np.int8) for _ in "ab")
    true = a.astype(np.int64) @ b.astype(np.int64)
    found = jax.jit(jax.vmap(lowprec.matmul))(a, b)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, true)
    bias = np.full(30, 2**31 - 5, np.int32)
    found = jax.jit(lambda a, b: lowprec.matmul(a, b, bias=bias, activation="relu"))(a, b)
    np.testing.assert_array_equal(found, np.clip(true + bias.astype(np.int64), 0, 2**31 - 1))
    with pytest.raises(lowprec.UnsupportedError, match="alpha cannot be used with int8"):
        jax.jit(lambda a: lowprec.matmul(a, a, alpha=2.0))(a)
    with pytest.raises(lowprec.UnsupportedError, match="alpha cannot be used with int8"):
        jax.jit(lambda a, s: lowprec.matmul(a, a, alpha=s))(a, 0.5)


# -- rounding, bit for bit ------------------------------------------------------------------------


def same_numbers(found, true):
    """The same bits, or both NaN."""
    found, true = np.asarray(found), np.asarray(true)
    differ = (found.view(np.uint32) != true.view(np.uint32)) & ~(np.isnan(found) & np.isnan(true))
    assert not differ.any(), (found[differ][:5], true[differ][:5])


@pytest.mark.parametrize(
    "to", [formats.TF32, formats.BFLOAT16, formats.FLOAT16], ids=lambda f: f.name
)
def test_rounding_is_lowprecs(jax, to):
    """Of each upper half of a float32 with lower halves around each format's ties."""
    from lowprec.jax.rounding import round_to

    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    x = (upper | np.array(lower, np.uint32)).ravel().view(np.float32)
    true = round_to_format(x, to)
    same_numbers(jax.jit(lambda x: round_to(x, to))(x), true)
    assert (np.isnan(true) == np.isnan(x)).all()


@pytest.mark.parametrize("mode", [m for m in MODES if row(MathMode(m)).parts > 1])
def test_parts_are_lowprecs(jax, mode):
    """For numbers whose parts are normal numbers, scaled ones included; of infinities the second part is NaN."""
    from lowprec.jax import rounding as in_jax

    rng, found = np.random.default_rng(0), row(MathMode(mode))
    x = np.ldexp(rng.standard_normal((64, 64)), rng.integers(-30, 30, (64, 64)))
    x = x.astype(np.float32)
    x[0, :3], x[1] = (np.inf, -np.inf, np.nan), 0
    axis = -1 if found.operand_format is formats.FLOAT16 else None
    count = found.parts + found.sums_parts
    with np.errstate(invalid="ignore"):  # Inf - Inf
        true, true_exponents = numpy_products.split(
            x, x.dtype, found, found.operand_format, count, axis
        )

    def parts(x):
        x, e = in_jax.scaled(x, (1,)) if axis else (x, None)
        return in_jax.split(x, found), e

    mine, exponents = jax.jit(parts)(x)
    assert len(mine) == len(true)
    for part, other in zip(mine, true, strict=True):
        same_numbers(np.asarray(part) + np.float32(0), other + np.float32(0))
    if axis:
        np.testing.assert_array_equal(exponents, true_exponents)
    assert np.isnan(mine[1][0, :3]).all()


@pytest.mark.parametrize("mode", ["bf16x3", "fp16_karatsuba"])
def test_infinities_and_nan_are_those_of_fp32(jax, mode):
    values = np.array([1, 0, -0.0, -2, np.inf, -np.inf, np.nan], np.float32)
    a, b = np.repeat(values, 7).reshape(49, 1), np.tile(values, 7).reshape(49, 1)
    with np.errstate(invalid="ignore"):
        true = a * b
    one = functools.partial(lowprec.jax.matmul, math_mode=mode)
    found = np.asarray(jax.jit(jax.vmap(one))(a[..., None], b[..., None]))[:, 0]
    np.testing.assert_array_equal(found, true)
    x, y = operands((4, 5), (5, 3), "float32")
    x[1, 2] = np.inf
    found = np.asarray(jax.jit(one)(x, y))
    np.testing.assert_array_equal(found[1], np.sign(y[2]) * np.inf)
    within_bound(found[2:], x[2:], y, mode)


# -- what follows the product ---------------------------------------------------------------------


def test_gradients_of_everything_that_follows_the_product(jax):
    a, b = operands((3, 4), (4, 2))
    c, bias = operands((3, 2), (2,))

    def call(a, b, c, bias, alpha, beta):
        out = lowprec.matmul(a, b, c=c, bias=bias, alpha=alpha, beta=beta, activation="gelu")
        return (out**2).sum()

    def true(a, b, c, bias, alpha, beta):
        return (jax.nn.gelu(alpha * (a @ b) + beta * c + bias, approximate=True) ** 2).sum()

    x = (a, b, c, bias, 0.5, 2.0)
    found = jax.jit(jax.value_and_grad(call, tuple(range(6))))(*x)
    for mine, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.value_and_grad(true, tuple(range(6)))(*x)), strict=True
    ):  # fmt: skip
        close(mine, other)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_epilogue_is_computed_in_float32_and_rounded_once(jax, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b, bias = np.array([[1.0]], kind), np.array([[1.0]], kind), np.array([1e-4], kind)
    found = jax.jit(lambda a, b: lowprec.matmul(a, b, bias=bias, alpha=3.0, c=b, beta=-3.0))(a, b)
    assert found.dtype == kind
    assert found[0, 0] == bias[0]


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_complex_factor_of_real_operands_is_refused_where_it_is_traced(jax, name):
    x = np.eye(3, dtype=np.float32)
    with pytest.raises(lowprec.DTypeError, match=f"{name} is complex, but the operands are"):
        jax.jit(lambda x, s: lowprec.matmul(x, x, c=x, **{name: s}))(x, 1j)


def test_factors_are_arrays_of_no_axes_in_and_out_of_traces(jax):
    """Also where nothing but the factor is traced."""
    x = jax.numpy.asarray(operands((3, 4), (4, 2), "float32")[0])
    true = np.asarray(x, np.float64) @ np.asarray(x, np.float64).T

    def scaled(s):
        return lowprec.matmul(x, x.T, alpha=s, c=jax.numpy.ones((3, 3), "float32"), beta=2 * s)

    def off(s, found):
        return np.abs(np.asarray(found) - (s * true + 2 * s)).max()

    # |x_ij| < 4: sums of 4 products below 16, then two factors up to 3 and a sum, each rounded once.
    bound = 3 * 7 * 2.0**-24 * 66
    for s in (jax.numpy.float32(3), jax.numpy.asarray(3), jax.numpy.bfloat16(3)):
        assert off(3, scaled(s)) <= bound
        assert off(3, jax.jit(scaled)(s)) <= bound
    for s, found in enumerate(jax.vmap(scaled)(jax.numpy.arange(3.0, dtype="float32"))):
        assert off(s, found) <= bound
    slope = jax.grad(lambda s: scaled(s).sum())(jax.numpy.float32(1))
    assert abs(slope - (true + 2).sum()) <= 9 * bound
    with pytest.raises(lowprec.DTypeError, match="alpha must be a number, got ArrayImpl"):
        lowprec.matmul(x, x.T, alpha=jax.numpy.ones(3))
    with pytest.raises(lowprec.DTypeError, match="alpha must be a number, got PRNGKeyArray"):
        lowprec.matmul(x, x.T, alpha=jax.random.key(0))
    with pytest.raises(lowprec.DTypeError, match="alpha must be a number, got DynamicJaxprTracer"):
        jax.jit(scaled)(jax.numpy.ones(3))


def test_where_jax_refuses_to_add_axes_by_itself(jax):
    a, b = operands((2, 3, 4), (4, 2))
    with jax.numpy_rank_promotion("raise"):
        found = jax.jit(lambda a, b: lowprec.matmul(a, b, bias=b[0], c=b[1], beta=2.0))(a, b)
        jax.jit(lambda a: lowprec.matmul(a, a[0].T, math_mode="fp16x3"))(a.astype(np.float32))
    close(found, a @ b + 2 * b[1] + b[0])


def test_c_is_not_read_where_beta_is_zero(jax):
    a, b = operands((3, 4), (4, 2))
    c = np.full((3, 2), np.nan)
    close(jax.jit(lambda a: lowprec.matmul(a, b, c=c, beta=0))(a), a @ b)


# -- the mode in force ----------------------------------------------------------------------------


class Counted:
    """A jitted product that counts its traces, and shows the mode that it was traced in."""

    def __init__(self, jax, **keywords):
        self.traces = 0
        self._jax = jax

        def traced(a):
            self.traces += 1
            return lowprec.matmul(a, a, **keywords)

        self._call = jax.jit(traced)

    def mode(self):
        """Return which of four modes it ran in, by what becomes of numbers between those of bfloat16 and TF32."""
        x = np.array([[1 + 2.0**-9 + 2.0**-12]], np.float32)
        found = float(self._call(x)[0, 0])
        known = {"bf16": 1.0, "tf32": 1 + 2.0**-9, "fp32": float(x[0, 0])}
        return next(
            (mode for mode, value in known.items() if found == np.float32(value**2)), str(found)
        )


def test_a_scope_recompiles_once_and_is_left_again(jax):
    f = Counted(jax)
    assert f.mode() == "fp32"
    with lowprec.math_mode("fp32"):  # the mode that is there
        assert f.mode() == "fp32"
    assert f.traces == 1
    for _ in range(2):
        for mode in ("bf16", "tf32", "bf16"):
            with lowprec.math_mode(mode):
                assert f.mode() == mode
                with lowprec.fp32_guard():
                    assert f.mode() == "fp32"
                assert f.mode() == mode
            assert f.mode() == "fp32"
    assert f.traces == 4  # two modes, none, and the guard


def test_the_guard_takes_precedence_over_an_argument_in_compiled_functions(jax):
    f = Counted(jax, math_mode="bf16")
    assert f.mode() == "bf16"
    with lowprec.fp32_guard():
        assert f.mode() == "fp32"
    assert f.mode() == "bf16"
    assert f.traces == 2


def test_set_math_mode_reaches_compiled_functions_in_every_thread(jax):
    f = Counted(jax)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(f.mode).result() == f.mode() == "fp32"
        try:
            lowprec.set_math_mode("tf32")
            assert pool.submit(f.mode).result() == f.mode() == "tf32"
        finally:
            lowprec.set_math_mode(None)
        with lowprec.math_mode("bf16"):
            assert pool.submit(f.mode).result() == "fp32"
            assert pool.submit(lowprec.math_mode("tf32").wrap(f.mode)).result() == "tf32"
        assert pool.submit(f.mode).result() == f.mode() == "fp32"


def test_a_scope_in_the_traced_function(jax):
    @jax.jit
    def f(x):
        with lowprec.math_mode("bf16"):
            inner = lowprec.matmul(x, x)
        return inner, lowprec.matmul(x, x)

    x = np.array([[1 + 2.0**-9 + 2.0**-12]], np.float32)
    assert [float(y[0, 0]) for y in f(x)] == [1.0, np.float32(float(x[0, 0]) ** 2)]


def test_the_environment_is_seen_where_it_is_read_again(jax, monkeypatch):
    f = Counted(jax)
    assert f.mode() == "fp32"
    try:
        monkeypatch.setenv("LOWPREC_MATH_MODE", "bf16")
        environment.refresh()
        assert f.mode() == "bf16"
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        environment.refresh()
        with lowprec.math_mode("tf32"):
            assert f.mode() == "fp32"
    finally:
        monkeypatch.undo()
        environment.refresh()
    assert f.mode() == "fp32"
    with lowprec.math_mode("tf32"):
        assert f.mode() == "tf32"


def test_a_scope_that_jax_could_not_see_is_refused_once(jax):
    f = Counted(jax)
    with ThreadPoolExecutor(1) as pool, lowprec.math_mode("bf16"):
        carried = contextvars.copy_context()
        with pytest.raises(lowprec.ModeError, match="opened in another task or thread"):
            pool.submit(carried.run, f.mode).result()
        assert pool.submit(carried.run, f.mode).result() == "bf16"


def test_backward_mode(jax):
    a, b = operands((3, 4), (4, 2), "float32")

    def modes_of(f, *x):
        return [
            str(e.params["mode"])
            for e in jax.make_jaxpr(f)(*x).eqns
            if "lowprec" in str(e.primitive)
        ]

    def loss(**keywords):
        return jax.grad(lambda a, b: (lowprec.jax.matmul(a, b, **keywords) ** 2).sum(), (0, 1))

    assert modes_of(loss(math_mode="bf16"), a, b) == ["bf16"] * 3
    assert modes_of(loss(math_mode="bf16", backward_mode="tf32x3"), a, b) == [
        "bf16", "tf32x3", "tf32x3",
    ]  # fmt: skip
    with lowprec.math_mode("tf32"):
        assert modes_of(loss(backward_mode="high"), a, b) == ["tf32"] * 3
    _, pull = jax.vjp(lambda a: lowprec.matmul(a, b, math_mode="bf16"), a)
    g = np.ones((3, 2), np.float32)
    assert modes_of(pull, g) == ["bf16"]
    with lowprec.fp32_guard():
        assert modes_of(pull, g) == ["fp32"]
    with pytest.raises(lowprec.ModeError, match="backward_mode 'half' is not a math mode"):
        loss(backward_mode="half")(a, b)


# -- GPUs: what is asked of XLA, which nothing here can run ---------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_requests_to_a_gpu(jax, mode):
    a, b = operands((3, 4), (4, 2), "float32")
    made = jax.export.export(
        jax.jit(lambda a, b: lowprec.matmul(a, b, math_mode=mode)), platforms=["cuda"]
    )(a, b)
    dots = [line for line in made.mlir_module().splitlines() if "stablehlo.dot_general" in line]
    found = row(MathMode(mode))
    assert len(dots) == (len(found.pairs) if found.operand_format is formats.FLOAT16 else 1)
    if found.operand_format is formats.FLOAT16:
        texts = ["tensor<3x4xf16>, tensor<4x2xf16>) -> tensor<3x2xf32>"]
    elif found.widens:
        texts = ["tensor<3x4xf64>, tensor<4x2xf64>) -> tensor<3x2xf64>"]
    elif found.quantizes:
        kind = "f32" if mode in ("int8", "int8_blocks") else "bf16"
        texts = [f"x{kind}>) -> tensor<1x3x2xf32>", f"lhs_precision_type = {kind}"]
    else:
        kind = (found.jax_preset or "F32").split("_")[0].lower()
        count = f"num_primitive_operations = {len(found.pairs)}"
        texts = [f"lhs_precision_type = {kind}", count, "accumulation_type = f32"]
    assert all(text in dot for dot in dots for text in texts)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "error", "match"),
    [
        (None, lowprec.ArrayError, "b: expected an array .*, got NoneType"),
        ([[1.0]], lowprec.ArrayError, "b: expected an array .*, got list"),
        (np.ones((2, 2), object), lowprec.DTypeError, "dtype 'object' is not supported"),
        (np.ma.ones((2, 2)), lowprec.ArrayError, "MaskedArray is not accepted"),
    ],
)
def test_unsupported_constants(jax, b, error, match):
    x = jax.numpy.ones((2, 2), "float32")
    with pytest.raises(error, match=match):
        jax.jit(lambda x: lowprec.matmul(x, b))(x)
    with pytest.raises(error, match=match):
        lowprec.jax.matmul(x, b)


def test_constants_in_the_other_byte_order(jax):
    a, b = operands((3, 4), (4, 2))
    close(jax.jit(lambda a: lowprec.matmul(a, b.astype(">f8")))(a), a @ b)


def test_imitated_tensor_cores_are_refused(jax):
    f = Counted(jax)
    assert f.mode() == "fp32"
    with (
        lowprec.emulate("hopper"),
        pytest.raises(lowprec.UnsupportedError, match=r"lowprec.emulate"),
    ):
        f.mode()


def test_without_64_bit_types(jax):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((9, 999), np.float32), rng.standard_normal((999, 7), np.float32)
    true = a.astype(float) @ b
    with jax.enable_x64(False):
        found = jax.jit(lambda a, b: lowprec.matmul(a, b, math_mode="fp64"))(a, b)
        loss = lambda b: (lowprec.matmul(a, b, math_mode="fp64") * true.astype(np.float32)).sum()  # noqa: E731
        of_b = jax.jit(jax.grad(loss))(b)
        for wide in (np.ones((9, 9)), np.ones((9, 9), complex)):
            with pytest.raises(lowprec.DTypeError, match="jax_enable_x64"):
                jax.jit(lambda a, wide=wide: lowprec.matmul(wide, a))(a)
    assert found.dtype == np.float32
    # One rounding of the sum in FP64: its own errors, 999 x 2^-53, are far below that of float32.
    assert (np.abs(found - true) <= 1.001 * 2.0**-24 * np.abs(true)).all()
    exact = a.T.astype(float) @ true.astype(np.float32)
    assert (np.abs(of_b - exact) <= 2.0**-23 * np.abs(exact) + 1e-12).all()


# -- weak types -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2, 2.0, 2j])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64"])
@pytest.mark.sampled(3)
def test_weak_types_follow_jax(jax, dtype, value):
    strong, weak = jax.numpy.ones((3, 4), dtype), jax.numpy.full((4, 5), value)
    common = jax.numpy.result_type(strong, weak)  # jnp.matmul itself fails for a weak complex128
    true = jax.numpy.matmul(strong.astype(common), weak.astype(common))
    for multiply in (lowprec.matmul, jax.jit(lowprec.matmul), lowprec.jax.matmul):
        for found in (multiply(strong, weak), multiply(weak.T, strong.T).T):
            assert found.dtype == true.dtype
            np.testing.assert_array_equal(found, true)
    assert lowprec.einsum("ij,jk->ik", strong, weak).dtype == true.dtype
    assert lowprec.plan(strong, weak).out_dtype.label == true.dtype.name
    assert lowprec.matmul(np.asarray(strong), weak).dtype == true.dtype
    addend = jax.numpy.full((5,), 1.0)
    for multiply in (lowprec.matmul, lowprec.jax.matmul):
        assert multiply(strong, weak, bias=addend).dtype == true.dtype


def test_jet(jax):
    """The Taylor coefficients are those of jax.numpy's product, in exact arithmetic of small integers."""
    from jax.experimental import jet

    x, y, u, v = (np.arange(4.0).reshape(2, 2) + i for i in range(4))
    for mine, true in zip(
        jax.tree.leaves(jet.jet(lambda a, b: lowprec.matmul(a, b) @ b, (x, y), ([u, v], [v, u]))),
        jax.tree.leaves(jet.jet(lambda a, b: a @ b @ b, (x, y), ([u, v], [v, u]))),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, true)


def test_sums_of_fp64_reach_the_bias_in_float64(jax):
    a, b = np.full((1, 2), 2.0**12, np.float32), np.full((2, 1), 2.0**12, np.float32)
    bias = np.full(1, 3, np.float32)
    with jax.enable_x64(True):
        product = jax.jit(lambda *x: lowprec.matmul(*x[:2], bias=x[2], math_mode="fp64"))(
            a, b, bias
        )
    assert product.dtype == np.float32
    assert product == np.float32(2.0**25 + 3)
