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
    recipe = mode if isinstance(mode, Recipe) else Recipe(mode)
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


@pytest.mark.parametrize(
    "mode", ["int8_blocks", ("int8_blocks", "mxfp4"), ("mxfp4", "int8_blocks")], ids=str
)  # fmt: skip
def test_sums_of_integers_in_blocks_have_the_same_bits_in_all_libraries(products, mode, rng):
    """Each block is added with one rounding, in order, and chunks of k after that: 700 are two of these."""
    a, b, g = (
        rng.standard_normal(shape, np.float32) * 2.0 ** rng.integers(-8, 9, shape)
        for shape in ((600, 700), (700, 40), (600, 40))
    )
    operands = [x.astype(np.float32) for x in (a, b, g)]
    recipe = Recipe(mode)
    found = products(recipe, *operands)
    for one, expected in zip(found, of_numpy(recipe, *operands), strict=True):
        np.testing.assert_array_equal(np.asarray(one), expected)


def in_squares(x):
    """Return numbers rounded to FP8 with a scale for each 128 x 128."""
    found = x.copy()
    for i in range(0, x.shape[0], 128):
        for j in range(0, x.shape[1], 128):
            tile = slice(i, i + 128), slice(j, j + 128)
            found[tile] = lowprec.quantize(x[tile], "fp8").dequantize()
    return found


@pytest.mark.parametrize(
    "fmt", ["fp8", "fp8_rows", "fp8_blocks", "mxfp8", "nvfp4", "int8", "mxfp6", "nvfp4_4over6", "nvfp4_rows"]
)  # fmt: skip
def test_gradients_have_the_numbers_of_the_forward_product(products, fmt, rng):
    """Sums along either axis of the gradient have one term, so that any order of these has the same bits."""
    a, b = (rng.standard_normal((150, 150), np.float32) for _ in range(2))
    g = permutation(rng, 150)
    recipe = Recipe(fmt, backward_override="dequantized")
    if fmt == "fp8_blocks":
        x = lowprec.quantize(a, Format(4, 3, block=128)).dequantize()
        y = in_squares(b)
    else:
        x = lowprec.quantize(a, fmt, -1).dequantize()
        y = lowprec.quantize(b, fmt, -2).dequantize()
    _, *found = products(recipe, a, b, g)
    _, *own = products(fmt, a, b, g)
    for one, expected, other in zip(found, (g @ y.T, x.T @ g), own, strict=True):
        np.testing.assert_array_equal(np.asarray(one), expected)
        assert not np.array_equal(np.asarray(other), expected)
    _, *original = products(Recipe(fmt, backward_override="high_precision"), a, b, g)
    for one, expected in zip(original, (g @ b.T, a.T @ g), strict=True):
        np.testing.assert_array_equal(np.asarray(one), expected)


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_stochastic_rounding_is_that_of_the_forward_product(products, batch, rng):
    """The identity is exact in the format, so that its products are the rounded numbers of the other operand."""
    recipe = Recipe("mxfp4", rounding="stochastic", seed=3, backward_override="dequantized").at(2)
    eye = np.eye(40, dtype=np.float32)
    x = rng.standard_normal((*batch, 40, 40), np.float32)
    g = np.zeros_like(x)
    last = (-1,) * len(batch)
    g[last] = eye
    for operands, i in (((eye, x), 1), ((x, eye), 2)):
        found = [np.asarray(v) for v in products(recipe, *operands, g)]
        np.testing.assert_array_equal(found[i], found[0][last].T)
        assert not np.array_equal(found[0], x)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "nvfp4", "fp8_blocks"])
def test_gradients_of_the_forward_numbers_are_within_the_bound(fmt, rng):
    recipe = Recipe(fmt, backward_override="dequantized")
    a, b, g = (rng.standard_normal(shape, np.float32) for shape in ((40, 70), (70, 30), (40, 30)))
    cases = (("grad_input", g, b.T), ("grad_weight", a.T, g))
    for product, x, y in cases:
        plan = lowprec.plan(x, y, math_mode=recipe.of(product))
        assert "in the forward product" in str(plan).replace("\n                ", " ")
        error = np.linalg.norm(lowprec.matmul(x, y, math_mode=plan.mode) - x.astype(float) @ y)
        size = np.linalg.norm(x) * np.linalg.norm(y)
        assert 0 < error <= plan.bound.probable * size <= plan.bound.relative * size
