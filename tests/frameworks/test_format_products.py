"""Products of formats as values in all libraries: the same bits, and errors within their bounds, of gradients too."""

import numpy as np
import pytest

import lowprec
from lowprec import Format, Recipe
from lowprec.rounding_rules import NAMED

FORMATS = [
    *NAMED.values(),
    Format(2, 5, block=16, scale="e4m3"), Format(4, 3, "ieee", block="rows"), Format(2, 0, block=32, scale="e8m0"),
    Format(3, 2, bias=1), Format(5, 1, block=32, scale="e5m3", outer="rows", peaks=(3, 2)),
    Format(3, 1, block=128, scale="e4m3"), Format(2, 2, "nan", block=64, scale="e8m0"), Format(1, 6, block="rows"),
    Format(1, 2, block=64), Format(4, 3, block=128), Format(5, 1, "fnuz", block=16), Format(2, 5, block=32),
]  # fmt: skip


def permutation(rng, size):
    """One number a row and a column, so that a sum along either has one term, in any order."""
    return np.diag(rng.standard_normal(size).astype(np.float32))[rng.permutation(size)]


def term_of_each_piece(rng, k, n):
    """One number a column in each 128 rows, so that only the pieces of k with scales of their own are added."""
    b = np.zeros((k, n), np.float32)
    for first in range(0, k, 128):
        rows = rng.integers(first, min(first + 128, k), n)
        b[rows, np.arange(n)] = rng.standard_normal(n)
    return b


def of_numpy(mode, a, b, g):
    recipe = Recipe(mode)
    of_input, of_weight = recipe.of("grad_input"), recipe.of("grad_weight")
    return (
        lowprec.matmul(a, b, math_mode=mode),
        lowprec.matmul(g, b.T, math_mode=of_input),
        lowprec.matmul(a.T, g, math_mode=of_weight),
    )


def of_torch(mode, a, b, g):
    import torch

    x, y = (torch.from_numpy(v).requires_grad_() for v in (a, b))
    out = lowprec.matmul(x, y, math_mode=mode)
    return (out.detach().numpy(), *torch.autograd.grad(out, (x, y), torch.from_numpy(g)))


def of_jax(mode, a, b, g, *, compiled):
    import jax

    def products(x, y, g):
        out, pull = jax.vjp(lambda x, y: lowprec.matmul(x, y, math_mode=mode), x, y)
        return (out, *pull(g))

    if compiled:
        products = jax.jit(products)
    return products(*map(jax.numpy.asarray, (a, b, g)))


@pytest.fixture(params=["torch", "jax", "jax.jit"])
def products(request):
    library = request.param.partition(".")[0]
    pytest.importorskip(library)
    if library == "torch":
        return of_torch
    return lambda *args: of_jax(*args, compiled=request.param == "jax.jit")


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_products_and_gradients_have_the_same_bits_in_all_libraries(products, fmt, rng):
    a, g = (
        rng.standard_normal((50, 50), np.float32) * 2.0 ** rng.integers(-6, 7, (50, 50))
        for _ in range(2)
    )
    a, g = a.astype(np.float32), g.astype(np.float32)
    sparse, other = permutation(rng, 50), permutation(rng, 50)
    for operands, compared in (((a, sparse, g), (0, 1)), ((a, sparse, other), (2,))):
        expected, found = of_numpy(fmt, *operands), products(fmt, *operands)
        for i in compared:
            np.testing.assert_array_equal(np.asarray(found[i]), expected[i], str(i))


@pytest.mark.parametrize(
    "fmt", [Format(2, 5, block=128), "fp8_blocks"], ids=str
)  # fmt: skip
def test_pieces_with_scales_of_their_own_are_added_in_order(products, fmt, rng):
    """Each sum is rounded when it is scaled, and when it is added: XLA must not fuse the two."""
    dense = rng.standard_normal((30, 300), np.float32)
    sparse = term_of_each_piece(rng, 300, 40)
    zeros = np.zeros((30, 40), np.float32)
    weight = rng.standard_normal((30, 40), np.float32)
    calls = [(dense, sparse, zeros), (zeros, sparse.T, dense), (dense.T, weight, sparse)]
    for i, operands in enumerate(calls):
        expected, found = of_numpy(fmt, *operands), products(fmt, *operands)
        np.testing.assert_array_equal(np.asarray(found[i]), expected[i], str(i))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_products_and_gradients_are_within_the_bound(fmt, rng):
    a, b, g = (rng.standard_normal(shape, np.float32) for shape in ((40, 70), (70, 30), (40, 30)))
    for found, x, y in zip(of_numpy(fmt, a, b, g), (a, g, a.T), (b, b.T, g), strict=True):
        error = np.linalg.norm(found - x.astype(float) @ y)
        size = np.linalg.norm(x) * np.linalg.norm(y)
        bound = lowprec.plan(x, y, math_mode=fmt).bound
        assert error <= bound.probable * size <= bound.relative * size
