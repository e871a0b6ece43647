"""``autocast`` over namespaces of the Array API: a transformer block and a convolution, in all levels."""

import logging
import math

import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend
from frameworks.conftest import load_or_skip
from lowprec import ArrayError, fp32_guard
from lowprec.amp import AutocastNamespace, Policy, autocast
from support.programs import in_threads

NAMESPACES = ["numpy", "torch", "jax.numpy", "array_api_strict"]


def namespace(name):
    if name == "numpy":
        return np
    if name == "torch":
        return load_or_skip(Backend.TORCH).torch
    if name == "jax.numpy":
        return load_or_skip(Backend.JAX).jax.numpy
    return pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.fixture(params=NAMESPACES)
def base(request):
    return namespace(request.param)


def values_of(x):
    if type(x).__module__ == "torch":
        return x.detach().double().numpy()
    return np.asarray(x).astype(np.float64)


def dtype_of(x):
    return str(getattr(x.dtype, "name", x.dtype)).rpartition(".")[2]


@pytest.mark.parametrize("name", ["numpy", "torch", "jax.numpy"])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_the_lists_are_seen_in_the_types(name, half):
    base = namespace(name)
    xp = autocast(base, Policy.preset("O1", half=half))
    x = base.ones((3, 3), dtype=base.float32)
    narrow = xp.matmul(x, x)
    assert dtype_of(narrow) == half
    for function in (xp.exp, xp.log, xp.sum, xp.mean, xp.sqrt):
        assert dtype_of(function(narrow)) == "float32", function
    assert dtype_of(xp.add(narrow, x)) == "float32"
    assert dtype_of(xp.add(narrow, narrow)) == half
    assert dtype_of(xp.concat([narrow, x])) == "float32"
    assert dtype_of(xp.tanh(narrow)) == half, "on no list"


@pytest.mark.parametrize("dtype", ["int64", "int32", "bool"])
def test_products_that_lowprec_has_not_are_the_library_s(torch, dtype):
    a = np.array([[1, 0], [1, 1]]).astype(dtype)
    # PyTorch has no product of booleans.
    for base, x in ((np, a), *([] if dtype == "bool" else [(torch, torch.from_numpy(a))])):
        xp = autocast(base, "O1")
        for found in (xp.matmul(x, x), xp.linalg.matmul(x, x)):
            assert found.dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(found), a @ a)
        assert [(r.function, r.calls, r.by_lowprec) for r in xp.report().rows] == [("matmul", 2, 0)]


def test_float64_integers_and_complex_numbers_stay():
    xp = autocast(np, "O1")
    assert xp.matmul(np.eye(2), np.eye(2)).dtype == np.float64
    assert xp.exp(np.ones(2)).dtype == np.float64
    assert xp.add(np.ones(2, np.int8), np.ones(2, np.int8)).dtype == np.int8
    assert xp.astype(np.ones(2, np.float16), np.float32).dtype == np.float32
    x = np.ones((2, 2), np.complex64)
    assert xp.matmul(x, x).dtype == np.complex64


@pytest.mark.parametrize(
    ("compute", "mode"), [("float16", "fp16"), ("bfloat16", "bf16"), ("tf32", "tf32")]
)
def test_a_library_without_the_type_rounds_by_the_mode(compute, mode):
    strict = namespace("array_api_strict")
    a, b = np.random.default_rng(4).standard_normal((2, 8, 8)).astype(np.float32)
    for level in ["O1", *(["O2", "O3"] if compute != "tf32" else [])]:
        xp = autocast(strict, Policy.preset(level, half=compute))
        found = np.asarray(xp.matmul(strict.asarray(a), strict.asarray(b)))
        np.testing.assert_array_equal(found, lowprec.matmul(a, b, math_mode=mode))
        assert (found != lowprec.matmul(a, b, math_mode="fp32")).any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_out_is_written_and_not_cast(dtype, by_name):
    xp = autocast(np, "O1")
    x, half = np.full((2, 2), 1.5, np.float32), np.full((2, 2), 1.5, np.float16)
    for function, operands in ((xp.matmul, (x, x)), (xp.exp, (half,)), (xp.add, (x, half))):
        out = np.zeros((2, 2), dtype)
        found = function(*operands, out=out) if by_name else function(*operands, out)
        assert found is out
        np.testing.assert_allclose(out, function(*operands), rtol=2.0**-10)


def test_linalg_products_are_lowprecs_too():
    a, b = np.random.default_rng(4).standard_normal((2, 8, 8)).astype(np.float32)
    xp = autocast(np, Policy.preset("O1", half="tf32"))
    expected = lowprec.matmul(a, b, math_mode="tf32")
    np.testing.assert_array_equal(xp.linalg.matmul(a, b), expected)
    np.testing.assert_array_equal(xp.linalg.tensordot(a, b, axes=1), expected)
    found = xp.linalg.vecdot(a, b)
    np.testing.assert_array_equal(found, lowprec.vecdot(a, b, math_mode="tf32"))
    assert xp.linalg.vector_norm(a.astype(np.float16)).dtype == np.float32
    assert xp.report().calls == 4


def test_functions_that_torch_has_under_other_names(torch):
    xp, x = autocast(torch, "O1"), torch.arange(6.0).reshape(2, 3)
    assert xp.max(x, axis=-1, keepdims=True).tolist() == [[2.0], [5.0]]
    assert xp.min(x, axis=0).tolist() == [0.0, 1.0, 2.0]
    assert xp.matrix_transpose(x).shape == xp.permute_dims(x, (1, 0)).shape == (3, 2)
    assert (xp.astype(x, torch.float16).dtype, xp.expand_dims(x, axis=1).shape) == (
        torch.float16,
        (2, 1, 3),
    )
    for found in (xp.tensordot(x, x.mT, dims=1), xp.tensordot(x, x.mT, 1)):
        assert found.tolist() == (x @ x.mT).tolist(), "integers below 2048 are exact"


def test_functions_of_torch_nn(torch):
    """``nn.functional`` casts by the lists; classes and what is no function are PyTorch's own."""
    xp, x = autocast(torch, Policy.preset("O1", half="bfloat16")), torch.ones(2, 3)
    w, bias = torch.ones(4, 3, requires_grad=True), torch.ones(4)
    found = xp.nn.functional.linear(x, w, bias)
    assert (found.dtype, found.tolist()) == (torch.bfloat16, [[4.0] * 4] * 2)
    assert xp.nn.functional.softmax(found, dim=-1).dtype == torch.float32
    assert xp.nn.functional.relu(found).dtype == torch.bfloat16, "on no list"
    assert xp.nn.functional.layer_norm(found, (4,)).dtype == torch.float32
    xp.nn.functional.mse_loss(found, torch.zeros(2, 4)).backward()
    assert w.grad.dtype == torch.float32
    assert xp.nn.Linear is torch.nn.Linear
    assert xp.nn.init is torch.nn.init
    with fp32_guard():
        assert xp.nn.functional.linear(x, w).dtype == torch.float32
    rows = {row.function: (row.list, row.cast) for row in xp.report().rows}
    assert rows["linear"] == ("allow", 1)
    assert rows["relu"] == ("-", 0)


@pytest.mark.parametrize("compute", ["bfloat16", "tf32"])
def test_under_jit_and_grad(compute):
    jnp = namespace("jax.numpy")
    jax = load_or_skip(Backend.JAX).jax
    xp = autocast(jnp, Policy.preset("O1", half=compute))
    w = jnp.full((3, 3), 1 + 2.0**-12, jnp.float32)  # in these types 1
    gradient = jax.jit(jax.grad(lambda w: xp.sum(xp.matmul(w, w))))(w)
    assert gradient.dtype == jnp.float32
    assert (gradient == 6).all()
    row = next(row for row in xp.report().rows if row.function == "matmul")
    assert (row.cast, row.by_lowprec, row.to) == (1, 1, compute)


def test_the_guard_wins(base):
    a, b = np.random.default_rng(4).standard_normal((2, 8, 8)).astype(np.float32)
    x, y = (
        base.asarray(a.tolist(), dtype=base.float32),
        base.asarray(b.tolist(), dtype=base.float32),
    )
    exact = lowprec.matmul(a, b, math_mode="fp32")
    for compute in ("float16", "tf32"):
        xp = autocast(base, Policy.preset("O1", half=compute))
        with fp32_guard():
            found = xp.matmul(x, y)
        assert dtype_of(found) == "float32"
        np.testing.assert_array_equal(values_of(found), exact)
        assert (values_of(xp.matmul(x, y)) != exact).any(), "and ends with its block"


def test_the_inner_policy_holds():
    outer = autocast(np, "O1")
    inner = autocast(outer, Policy.preset("O1", half="bfloat16"))
    full = autocast(inner, "O0")
    x = np.ones((2, 2), np.float32)
    types = [xp.matmul(x, x).dtype.name for xp in (outer, inner, full, outer)]
    assert types == ["float16", "bfloat16", "float32", "float16"]
    assert [xp.report().calls for xp in (outer, inner, full)] == [2, 1, 1]
    assert isinstance(inner, AutocastNamespace)


def test_threads_share_a_namespace():
    xp, x = autocast(np, "O1"), np.ones((2, 2), np.float32)
    types = in_threads(8, lambda _: {xp.exp(xp.matmul(x, x)).dtype for _ in range(50)})
    assert types == [{np.dtype(np.float32)}] * 8
    assert {row.function: row.calls for row in xp.report().rows} == {"matmul": 400, "exp": 400}


def test_it_logs_how_many_calls_it_cast(caplog):
    x = np.ones((2, 2), np.float32)
    with caplog.at_level(logging.INFO, "lowprec.amp"), autocast(np, "O1") as xp:
        xp.reshape(xp.exp(xp.matmul(x, x)), (4,))
    assert [r.getMessage() for r in caplog.records] == ["converted 2 of 3 calls"]
    report = xp.report()
    assert str(report).startswith("converted 2 of 3 calls (compute=float16)")
    assert report._repr_html_().count("<tr>") == 4
    assert [row.function for row in report.rows] == ["exp", "matmul", "reshape"]


def test_the_types_of_the_casts_are_listed_once():
    xp = autocast(np, "O1")
    for other in (np.float16, np.float64, np.float16, np.float32):
        xp.add(np.ones(2, np.float32), np.ones(2, other))
    (row,) = xp.report().rows
    assert (row.calls, row.cast, row.to) == (4, 3, "float32, float64")


def test_non_functions_pass():
    xp = autocast(np, "O1")
    assert xp.float32 is np.float32
    assert xp.pi == np.pi
    assert xp.finfo(np.float16).max == 65504
    assert "matmul" in dir(xp)
    assert repr(xp).startswith("autocast(numpy, Policy(params='float32', compute='float16'")
    with pytest.raises(AttributeError, match="matmull"):
        _ = xp.matmull


def test_mistakes():
    with pytest.raises(ArrayError, match="autocast takes a namespace of arrays, such as numpy"):
        autocast(math)
