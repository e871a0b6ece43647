"""``lowprec.matmul`` over every array library: shapes, strides, epilogues, ``out``, and what is refused."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend
from frameworks.conftest import load_or_skip
from lowprec.planning.bounds import MAX_K_INT8
from support import oracles
from support.machines import MACHINES, fixture, on
from support.oracles import Epilogue

DTYPES = ["float32", "float64", "complex64", "complex128", "float16", "bfloat16"]
every_mode = pytest.mark.parametrize("mode", oracles.ALL_MODES)


def make(rng, *shape, dtype="float32"):
    return oracles.random_matrix(rng, shape, dtype)


machine = fixture(*MACHINES)


def frozen(x):
    x.flags.writeable = False
    return x


def assert_result(xp, result, like):
    """Check type, shape and dtype of a result; return its elements."""
    # NumPy's own results without axes are scalars (test_result_types in NumPy's tests).
    scalar = like.ndim == 0 and xp.result_type is np.ndarray
    assert isinstance(result, np.generic if scalar else xp.result_type)
    elements = xp.to_numpy(result)
    assert isinstance(elements, np.ndarray)
    assert elements.shape == like.shape
    assert elements.dtype == like.dtype
    return elements


# -- shapes ---------------------------------------------------------------------------------------

SHAPES = [
    ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)), ((5, 1, 2, 3), (6, 3, 4)), ((1, 2, 3), (5, 3, 4)), ((3,), (5, 3, 4)), ((5, 2, 3), (3,)),
    ((2, 1, 1, 2, 3), (1, 4, 3, 3, 2)), ((1, 1), (1, 1)), ((1, 5), (5, 1)), ((5, 1), (1, 5)),
]  # fmt: skip

EMPTY_SHAPES = [
    ((0,), (0,)), ((2, 0), (0, 3)), ((0, 3), (3, 2)), ((2, 3), (3, 0)), ((0, 0), (0, 0)), ((0, 2, 3), (3, 4)),
    ((0, 2, 3), (1, 3, 4)), ((5, 2, 0), (0, 4)), ((0,), (0, 3)), ((2, 0), (0,)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.sampled(3)
def test_shapes(xp, dtype, shapes, rng):
    a, b = (make(rng, *s, dtype=dtype) for s in shapes)
    like = np.empty(np.matmul(oracles.widen(a), oracles.widen(b)).shape, a.dtype)
    got = assert_result(xp, lowprec.matmul(xp.asarray(a), xp.asarray(b)), like)
    oracles.assert_within_bound(got, a, b)


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
@pytest.mark.parametrize("shapes", EMPTY_SHAPES, ids=str)
@pytest.mark.sampled(3)
def test_zero_size(xp, dtype, shapes, rng):
    a, b = (make(rng, *s, dtype=dtype) for s in shapes)
    like = np.zeros(
        np.matmul(np.zeros(shapes[0]), np.zeros(shapes[1])).shape,
        np.int32 if dtype == "int8" else a.dtype,
    )
    got = assert_result(xp, lowprec.matmul(xp.asarray(a), xp.asarray(b)), like)
    assert (got == 0).all()


def test_an_empty_sum_leaves_the_epilogue(xp, rng):
    a, b, c, bias = make(rng, 2, 0), make(rng, 0, 3), make(rng, 2, 3), make(rng, 3)
    got = lowprec.matmul(
        xp.asarray(a),
        xp.asarray(b),
        c=xp.asarray(c),
        beta=2.0,
        bias=xp.asarray(bias),
        activation="relu",
        alpha=3.0,
    )
    # 2 c is exact, so that the sum is rounded once.
    np.testing.assert_array_equal(xp.to_numpy(got), np.maximum(2 * c + bias, 0))


@every_mode
def test_a_scope_is_an_argument_for_all_calls(xp, mode, rng):
    x, y = make(rng, 20, 30), make(rng, 30, 25)
    a, b = xp.asarray(x), xp.asarray(y)
    argument = assert_result(xp, lowprec.matmul(a, b, math_mode=mode), x @ y)
    oracles.assert_within_bound(argument, x, y, mode)
    with lowprec.math_mode(mode):
        scope = xp.to_numpy(lowprec.matmul(a, b))
    lowprec.set_math_mode(mode)
    try:
        default = xp.to_numpy(lowprec.matmul(a, b))
    finally:
        lowprec.set_math_mode(None)
    assert argument.tobytes() == scope.tobytes() == default.tobytes()
    with lowprec.fp32_guard():
        guarded = xp.to_numpy(lowprec.matmul(a, b, math_mode=mode))
    assert guarded.tobytes() == xp.to_numpy(lowprec.matmul(a, b)).tobytes()


# -- strides --------------------------------------------------------------------------------------

VIEWS = {
    "transposed": lambda x: x[:30, :20].T,
    "fortran": lambda x: np.asfortranarray(x[:20, :30]),
    "columns": lambda x: x[:20, 3:33],
    "every other row": lambda x: x[:40:2, :30],
    "every other column": lambda x: x[:20, :60:2],
    "steps both ways": lambda x: x[1:41:2, 2:62:2],
    "rows reversed": lambda x: x[:20, :30][::-1],
    "columns reversed": lambda x: x[:20, :30][:, ::-1],
    "reversed and stepped": lambda x: x[40:0:-2, 60:0:-2],
    "one row repeated": lambda x: np.broadcast_to(x[0, :30], (20, 30)),
    "one column repeated": lambda x: np.broadcast_to(x[:20, :1], (20, 30)),
    "one number repeated": lambda x: np.broadcast_to(x[0, 0], (20, 30)),
    "sliding window": lambda x: np.lib.stride_tricks.sliding_window_view(x[0, :49], 30),
    "read-only": lambda x: frozen(x[:20, :30].copy()),
    "a batch of one": lambda x: x[None, :20, :30],
    "a batch of columns": lambda x: np.moveaxis(x[:60, :30].reshape(20, 3, 30), 1, 0),
    "a batch, reversed": lambda x: x[:60, :30].reshape(3, 20, 30)[::-1],
    "a batch as the last axis": lambda x: np.moveaxis(
        x[:60, :60].reshape(60, 20, 3)[:30], 2, 0
    ).swapaxes(1, 2),
    "one matrix repeated": lambda x: np.broadcast_to(x[:20, :30], (4, 20, 30)),
}


@pytest.mark.parametrize("mode", ["fp32", "tf32"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64", "int8"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.sampled(4)
def test_strides(xp, mode, dtype, view, rng):
    base = make(rng, 64, 64, dtype=dtype)
    x = VIEWS[view](base)
    assert x.shape[-2:] == (20, 30)
    before = x.copy()
    right, left = make(rng, 30, 12, dtype=dtype), make(rng, 12, 20, dtype=dtype)
    for a, b in ((x, right), (left, x), (right.T, np.swapaxes(x, -1, -2))):
        got = xp.to_numpy(lowprec.matmul(xp.asarray(a), xp.asarray(b), math_mode=mode))
        if dtype == "int8":
            np.testing.assert_array_equal(got, a.astype(np.int32) @ b.astype(np.int32))
        else:
            oracles.assert_within_bound(got, a, b, mode)
    assert x.tobytes() == before.tobytes(), "an operand was written to"


# -- libraries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex128"])
def test_the_result_belongs_to_the_library_of_a(xp, other_xp, dtype, rng):
    a, b = make(rng, 4, 5, dtype=dtype), make(rng, 5, 6, dtype=dtype)
    got = lowprec.matmul(xp.asarray(a), other_xp.asarray(b))
    like = np.empty((4, 6), a.dtype)
    oracles.assert_within_bound(assert_result(xp, got, like), a, b)


def test_out_of_another_library(xp, other_xp, rng):
    a, b = make(rng, 4, 5), make(rng, 5, 6)
    memory = np.full((4, 6), 7.0, np.float32)
    out = other_xp.asarray(memory)
    if not other_xp.mutable:
        with pytest.raises(lowprec.ArrayError, match="out"):
            lowprec.matmul(xp.asarray(a), xp.asarray(b), out=out)
        return
    assert lowprec.matmul(xp.asarray(a), xp.asarray(b), out=out) is out
    oracles.assert_within_bound(memory, a, b)


MIXED = [
    ("float32", "float64", "float64"),
    ("float16", "float32", "float32"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "float16", "float32"),
    ("float16", "float64", "float64"),
    ("float32", "complex64", "complex64"),
    ("float64", "complex64", "complex128"),
    ("complex64", "complex128", "complex128"),
]


@pytest.mark.parametrize(("one", "two", "result"), MIXED)
def test_mixed_dtypes_go_to_the_wider(xp, one, two, result, rng):
    a, b = make(rng, 4, 50, dtype=one), make(rng, 50, 6, dtype=two)
    for x, y in ((a, b), (b.T, a.T)):
        got = xp.to_numpy(lowprec.matmul(xp.asarray(x), xp.asarray(y)))
        assert got.dtype == result
        oracles.assert_within_bound(got, x, y)


# -- the whole expression -------------------------------------------------------------------------

EPILOGUES = {
    "alpha": {"alpha": -0.7},
    "alpha is zero": {"alpha": 0.0},
    "beta": {"beta": 1.3, "c": (20, 25)},
    "beta is one": {"beta": 1.0, "c": (20, 25)},
    "c without beta": {"c": (20, 25)},
    "bias": {"bias": (25,)},
    "relu": {"activation": "relu"},
    "gelu": {"activation": "gelu"},
    "bias and relu": {"bias": (25,), "activation": "relu"},
    "everything": {"alpha": 0.3, "beta": -2.5, "c": (20, 25), "bias": (25,), "activation": "gelu"},
}


def epilogue_of(name, xp, dtype, rng):
    """Return an epilogue as the oracle takes it, and as ``matmul`` takes it."""
    plain = dict(EPILOGUES[name])
    for key in ("c", "bias"):
        if key in plain:
            plain[key] = make(rng, *plain[key], dtype=dtype)
    given = {k: xp.asarray(v) if k in ("c", "bias") else v for k, v in plain.items()}
    return Epilogue(**plain), given


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *itertools.product(["float32", "float64", "bfloat16", "float16"], EPILOGUES),
        *itertools.product(["complex64", "complex128"], ["alpha", "beta", "bias"]),
    ],
)
@pytest.mark.sampled(2)
def test_epilogues(xp, name, dtype, rng):
    a, b = make(rng, 20, 30, dtype=dtype), make(rng, 30, 25, dtype=dtype)
    then, given = epilogue_of(name, xp, dtype, rng)
    got = assert_result(
        xp, lowprec.matmul(xp.asarray(a), xp.asarray(b), **given), np.empty((20, 25), a.dtype)
    )
    oracles.assert_expression(got, a, b, then=then)


def saturated(wide):
    limits = np.iinfo(np.int32)
    return np.clip(wide, limits.min, limits.max).astype(np.int32)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_sum_of_int8_and_bias_beyond_int32_saturates(machine, sign, activation, rng):
    """At the longest inner dimension that is allowed, where the product itself is nearly as large as int32."""
    k = MAX_K_INT8
    a, b = np.full((3, k), -128, np.int8), np.full((k, 12), -128 if sign > 0 else 127, np.int8)
    a[1], a[2] = 0, 127  # 127 * 127 is odd: sums of float32 would round
    product = a.astype(np.int64) @ b.astype(np.int64)
    assert abs(product).max() > 2**31 - 2**25
    top, bottom = 2**31 - 1, -(2**31)
    bias = np.array(
        [0, 1, -1, 16383, 16384, 20000, top, top - 1, bottom, bottom + 1, -(2**24), 2**24]
    )
    want = saturated(product + bias)
    assert (want != product + bias).sum() >= 2
    with on(machine):
        got = lowprec.matmul(a, b, bias=bias.astype(np.int32), activation=activation)
        oracles.assert_equal(got, np.maximum(want, 0) if activation else want)
        few = rng.integers(-128, 128, 12).astype(np.int8)
        oracles.assert_equal(lowprec.matmul(a, b, bias=few), (product + few).astype(np.int32))


@pytest.mark.parametrize("a_shape", [(30,), (4, 20, 30), (20, 30)], ids=str)
@pytest.mark.parametrize("b_shape", [(30, 25), (4, 30, 25)], ids=str)
def test_c_and_bias_broadcast(xp, a_shape, b_shape, rng):
    a, b = make(rng, *a_shape), make(rng, *b_shape)
    shape = np.matmul(a, b).shape
    bias = make(rng, 25)
    for c in (make(rng, *shape), make(rng, 25), np.broadcast_to(np.float32(2), shape)):
        got = lowprec.matmul(
            xp.asarray(a), xp.asarray(b), c=xp.asarray(c), beta=0.5, bias=xp.asarray(bias)
        )
        then = Epilogue(beta=0.5, c=np.broadcast_to(c, shape), bias=bias)
        oracles.assert_expression(xp.to_numpy(got), a, b, then=then)


@pytest.mark.parametrize("given", [{}, {"alpha": 0.5}, {"activation": "relu"}], ids=str)
def test_c_is_not_read_where_beta_is_zero(xp, given, rng):
    a, b = make(rng, 20, 30), make(rng, 30, 25)
    c = np.full((20, 25), np.nan, np.float32)
    got = lowprec.matmul(xp.asarray(a), xp.asarray(b), c=xp.asarray(c), beta=0.0, **given)
    oracles.assert_expression(xp.to_numpy(got), a, b, then=Epilogue(**given))


OUT_DTYPES = [
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float32", "float32"),
]


@pytest.mark.parametrize(("dtype", "out_dtype"), OUT_DTYPES)
def test_out_dtype(xp, dtype, out_dtype, rng):
    a, b = make(rng, 20, 30, dtype=dtype), make(rng, 30, 25, dtype=dtype)
    want = np.dtype(getattr(ml_dtypes, out_dtype, out_dtype))
    got = lowprec.matmul(xp.asarray(a), xp.asarray(b), out_dtype=out_dtype)
    oracles.assert_within_bound(assert_result(xp, got, np.empty((20, 25), want)), a, b)
    for spelling in (want, want.type):
        again = lowprec.matmul(xp.asarray(a), xp.asarray(b), out_dtype=spelling)
        assert xp.to_numpy(again).tobytes() == xp.to_numpy(got).tobytes()


# -- out ------------------------------------------------------------------------------------------


@pytest.fixture(params=[b for b in Backend if b is not Backend.JAX], ids=lambda b: b.value)
def writable(request):
    xp = load_or_skip(request.param)
    assert xp.mutable
    return xp


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [
        *[(dtype, ((20, 30), (30, 25))) for dtype in DTYPES],
        *[("float32", s) for s in (*SHAPES[:5], ((2, 0), (0, 3)))],
    ],
    ids=str,
)
def test_out_is_filled_and_returned(writable, dtype, shapes, rng):
    a, b = (make(rng, *s, dtype=dtype) for s in shapes)
    memory = np.full(np.matmul(*map(oracles.widen, (a, b))).shape, 7, a.dtype)
    out = writable.asarray(memory)
    assert lowprec.matmul(writable.asarray(a), writable.asarray(b), out=out) is out
    oracles.assert_within_bound(memory, a, b)


# Square operands and an ``out`` on the memory of one of them. Each takes a (2n, 2n) base and gives a, b, out.
OVERLAPS = {
    "out is a": lambda x, y, n: (x[:n, :n], y, x[:n, :n]),
    "out is b": lambda x, y, n: (y, x[:n, :n], x[:n, :n]),
    "out is a and b": lambda x, y, n: (x[:n, :n], x[:n, :n], x[:n, :n]),
    "out is a transposed": lambda x, y, n: (x[:n, :n], y, x[:n, :n].T),
    "out is b transposed": lambda x, y, n: (y, x[:n, :n], x[:n, :n].T),
    "out shares rows with a": lambda x, y, n: (x[:n, :n], y, x[n // 2 : n // 2 + n, :n]),
    "out shares columns with b": lambda x, y, n: (y, x[:n, :n], x[:n, n // 2 : n // 2 + n]),
    "out is a reversed": lambda x, y, n: (x[:n, :n], y, x[:n, :n][::-1, ::-1]),
    "out interleaves with a": lambda x, y, n: (x[::2, ::2], y, x[1::2, 1::2]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("n", [6, 260])
@every_mode
def test_out_may_share_memory_with_an_operand(mode, overlap, n, machine, rng):
    base, other = make(rng, 2 * n, 2 * n), make(rng, n, n)
    a, b, out = OVERLAPS[overlap](base, other, n)
    a_before, b_before = a.copy(), b.copy()
    assert lowprec.matmul(a, b, out=out, math_mode=mode) is out
    oracles.assert_within_bound(out, a_before, b_before, mode)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "where", ["c is out", "c is out transposed", "c is out shifted", "bias in out", "all"]
)
@pytest.mark.parametrize("n", [6, 260])
@every_mode
def test_out_may_share_memory_with_c_and_bias(mode, where, n, machine, rng):
    a, b, base = make(rng, n, n), make(rng, n, n), make(rng, n + 1, n)
    out = base[:n]
    c = {"c is out transposed": out.T, "c is out shifted": base[1:]}.get(where, out)
    bias = out[1] if where in ("bias in out", "all") else make(rng, n)
    if where == "all":
        a = b = out
    then = Epilogue(alpha=0.5, beta=-1.5, c=c.copy(), bias=bias.copy())
    x, y = a.copy(), b.copy()
    lowprec.matmul(a, b, out=out, c=c, bias=bias, alpha=0.5, beta=-1.5, math_mode=mode)
    oracles.assert_expression(out, x, y, mode, then)


@pytest.mark.parametrize("n", [6, 260])
def test_out_may_share_the_memory_of_another_dtype(n, machine, rng):
    a, b = make(rng, 3, n, n, dtype="float16"), make(rng, 3, n, n, dtype="float16")
    memory = np.zeros(2 * a.size, np.float16)
    inside = memory[: a.size].reshape(a.shape)
    inside[...] = a
    # The first product of the batch overlaps its second operand.
    out = memory.view(np.float32).reshape(a.shape)
    lowprec.matmul(inside, b, out=out)
    oracles.assert_within_bound(out, a, b)


def test_the_result_is_new_memory(xp, rng):
    a, b = xp.asarray(make(rng, 20, 20)), xp.asarray(make(rng, 20, 20))
    first = lowprec.matmul(a, b)
    kept = xp.to_numpy(first).copy()
    for _ in range(3):
        second = lowprec.matmul(b, a)
        assert not np.shares_memory(xp.to_numpy(first), xp.to_numpy(second))
    np.testing.assert_array_equal(xp.to_numpy(first), kept)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((2, 3), (4, 5)), r"mismatch.*\(2, 3\).*\(4, 5\)"),
        (((3,), (4,)), "mismatch"),
        (((), (3,)), "0-d|does not have enough dimensions"),
        (((3, 3), ()), "0-d|does not have enough dimensions"),
        (((2, 3, 3), (4, 3, 3)), "broadcast"),
        (((2, 0), (3, 2)), "mismatch"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(xp, shapes, match, rng):
    a, b = (xp.asarray(np.ones(s, np.float32)) for s in shapes)
    with pytest.raises(lowprec.ShapeError, match=match):
        lowprec.matmul(a, b)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


BAD_CALLS = [
    ("out", ones(3, 3), lowprec.ShapeError, r"out has shape \(3, 3\).*\(2, 4\)"),
    ("out", ones(2, 4, dtype=np.float64), lowprec.DTypeError, "out.*float64"),
    ("out", np.broadcast_to(ones(4), (2, 4)), lowprec.ArrayError, r"^out: the array is read-only"),
    ("out", frozen(ones(2, 4)), lowprec.ArrayError, r"^out: the array is read-only"),
    ("out", [[1.0] * 4] * 2, lowprec.ArrayError, "list"),
    ("activation", "tanh", lowprec.SettingError, "relu, gelu"),
    ("out_dtype", "int32", lowprec.DTypeError, "int32"),
    ("out_dtype", "float128", lowprec.DTypeError, "float128.*supported"),
    ("math_mode", "half", lowprec.ModeError, "half.*fp32.*tf32"),
    ("math_mode", 3, lowprec.ModeError, "int|3"),
    ("rtol", -1.0, lowprec.ModeError, "rtol.*-1"),
    ("rtol", 1e-12, lowprec.ModeError, "no math mode guarantees"),
    ("alpha", "2", lowprec.DTypeError, "alpha.*str"),
    ("alpha", 1j, lowprec.DTypeError, "alpha is complex"),
    ("beta", 1.0, lowprec.ShapeError, "c is missing"),
]


@pytest.mark.parametrize(("name", "value", "error", "match"), BAD_CALLS, ids=str)
def test_bad_arguments(name, value, error, match):
    with pytest.raises(error, match=match):
        lowprec.matmul(
            ones(2, 3), ones(3, 4), **{name: value, **({"beta": 1.0} if name == "c" else {})}
        )


def test_a_failed_call_leaves_out_alone(writable):
    out = writable.asarray(np.full((2, 4), 7, np.float32))
    with pytest.raises(lowprec.ShapeError, match="bias"):
        lowprec.matmul(
            writable.asarray(ones(2, 3)),
            writable.asarray(ones(3, 4)),
            out=out,
            bias=writable.asarray(ones(9)),
        )
    assert (writable.to_numpy(out) == 7).all()


@pytest.mark.parametrize("math_mode", ["fp32", "bf16"])
def test_axes_of_length_one_may_have_any_stride(torch, math_mode):
    row = torch.arange(4.0).as_strided((1, 4), (2**61, 1))
    column = torch.ones(4).as_strided((4, 1), (1, 2**61))
    assert lowprec.matmul(row, column, math_mode=math_mode).tolist() == [[6.0]]


@pytest.mark.parametrize("math_mode", ["fp32", "bf16"])
def test_more_bytes_than_addresses_are_refused(torch, math_mode):
    one = torch.ones(1, 1)
    with pytest.raises(lowprec.ShapeError, match=r"a of shape .* exceeds the address space"):
        lowprec.matmul(one.expand(1, 2**61), one.expand(2**61, 1), math_mode=math_mode)
    empty = np.empty((2**33, 0), np.float32)
    with pytest.raises(
        lowprec.ShapeError, match=r"the result of shape .* exceeds the address space"
    ):
        lowprec.matmul(empty, empty.T, math_mode=math_mode)
