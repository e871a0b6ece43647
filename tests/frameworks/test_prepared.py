"""Prepared operands with the arrays of every library, and where they are refused."""

import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend
from frameworks.conftest import load_or_skip

_STANDS_FOR = (
    "is a prepared operand, which is accepted only as b of matmul and as the weight of linear"
)


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("left", [Backend.NUMPY, Backend.TORCH, Backend.JAX])
@pytest.mark.parametrize("right", [Backend.NUMPY, Backend.TORCH, Backend.JAX])
def test_the_result_is_of_the_library_of_a(left, right):
    x, y = load_or_skip(left), load_or_skip(right)
    a, b = draw(20, 128), draw(128, 96)
    want = lowprec.matmul(a, b, math_mode="bf16")
    prepared = lowprec.prepare(y.asarray(b), math_mode="bf16")
    turned = lowprec.prepare(y.asarray(b.T.copy()), math_mode="bf16")
    operand = x.asarray(a)
    for _ in range(2):
        for got in (
            lowprec.matmul(operand, prepared, math_mode="bf16"),
            lowprec.linear(operand, turned, math_mode="bf16"),
        ):
            assert type(got) is type(operand)
            np.testing.assert_array_equal(np.asarray(got), want)


def test_torch(torch):
    from lowprec import torch as products

    x, weight = torch.as_tensor(draw(20, 128)), torch.as_tensor(draw(96, 128))
    with pytest.raises(lowprec.ArrayError, match=r"requires grad.*pass tensor\.detach\(\)"):
        lowprec.prepare(torch.nn.Parameter(weight))
    with pytest.raises(lowprec.ArrayError, match=r"on device 'meta', where it has no memory"):
        lowprec.prepare(weight.to("meta"))
    prepared = lowprec.prepare(weight.T)
    recorded = x.clone().requires_grad_()
    want = lowprec.matmul(x, weight.T)
    with torch.no_grad():
        torch.testing.assert_close(lowprec.matmul(recorded, prepared), want, rtol=0, atol=0)
    with pytest.raises(lowprec.ArrayError, match=f"b {_STANDS_FOR}.*read in place"):
        lowprec.matmul(recorded, prepared)
    with pytest.raises(lowprec.ArrayError, match=f"b {_STANDS_FOR}"):
        torch.func.vmap(lambda row: lowprec.matmul(row, prepared))(x)
    torch.testing.assert_close(products.matmul(x, prepared), want, rtol=0, atol=0)
    torch.testing.assert_close(products.linear(x, prepared.T), want, rtol=0, atol=0)
    torch.testing.assert_close(
        products.linear(x, lowprec.quantize(weight, "mxfp8")),
        lowprec.linear(x, lowprec.quantize(weight, "mxfp8")),
    )
    with pytest.raises(lowprec.ArrayError, match=r"^a: expected an array, got a prepared operand"):
        products.matmul(prepared, weight)
    with pytest.raises(lowprec.ArrayError, match=r"^weight: expected an array .*, got list"):
        products.linear(x, [[1.0]])


def test_jax(jax):
    a, prepared = jax.numpy.asarray(draw(20, 128)), lowprec.prepare(draw(128, 96))
    for transform in (jax.jit, jax.vmap, jax.jacfwd):
        with pytest.raises(lowprec.ArrayError, match=f"b {_STANDS_FOR}.*read in place"):
            transform(lambda x: lowprec.matmul(x, prepared))(a)
    assert lowprec.jax.matmul is lowprec.matmul
    with pytest.raises(lowprec.ArrayError, match="tracer"):
        jax.jit(lambda x: lowprec.matmul(x, lowprec.prepare(x.T)))(a)


def test_dask():
    da = pytest.importorskip("dask.array", reason="dask is not installed")
    from lowprec import dask as products

    a, prepared = da.from_array(draw(20, 128)), lowprec.prepare(draw(128, 96))
    for product in (lowprec.matmul, products.matmul):
        with pytest.raises(lowprec.ArrayError, match=f"b {_STANDS_FOR}"):
            product(a, prepared)
    with pytest.raises(lowprec.ArrayError, match="lazy"):
        lowprec.prepare(a)


def test_where_elements_are_asked_for():
    """Whatever is no product refuses it, in words; so does NumPy's own product, which would take it for a scalar."""
    a, prepared = draw(20, 128), lowprec.prepare(draw(128, 96))
    message = (
        "got a prepared operand, which is accepted only as b of matmul and as the weight of linear"
    )
    for call in (
        lambda: lowprec.einsum("ij,jk->ik", a, prepared),
        lambda: lowprec.tensordot(a, prepared, axes=1),
        lambda: lowprec.vecdot(a, prepared),
        lambda: lowprec.linear(prepared, a),
        lambda: lowprec.linear(a, a, prepared),
        lambda: lowprec.linalg.solve(a, prepared),
        lambda: lowprec.check(a, prepared),
        lambda: lowprec.prepare(prepared),
    ):
        with pytest.raises(lowprec.ArrayError, match=message):
            call()
    for product in (np.matmul, lambda x, y: x @ y):
        with pytest.raises(TypeError, match="PreparedOperand"):
            product(a, prepared)
