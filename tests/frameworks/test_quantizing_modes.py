"""Modes that quantise in PyTorch, JAX and Dask: one call has the same bits, and each product its own rounding."""

import numpy as np
import pytest

import lowprec
from lowprec import recipes
from lowprec.modes import of_pass, parse_mode
from lowprec.recipes import Recipe
from support import cpu_units, machines

RECIPES = [
    *recipes.MODES,
    Recipe.fp8_training(),
    Recipe.mxfp8_training(),
    Recipe.nvfp4_training(seed=1).at(2),
    Recipe("nvfp4", grad_input="mxfp8", rounding="stochastic", seed=9),
    Recipe("fp8_blocks", scale_rule="rceil"),
    Recipe("mxfp4", scale_rule="even", grad_input="bf16", grad_weight="fp32"),
    Recipe("mxfp6", grad_input="mxfp6_e2m3", rounding="stochastic_gradients", seed=2),
    "fp8_fnuz",
    Recipe("nvfp4", backward_override="dequantized"),
]


def operands(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def gradients(a, b, g, mode):
    """Return the two products of the backward pass of ``a @ b``."""
    of_a, of_b = (of_pass(parse_mode(mode), x) for x in ("grad_input", "grad_weight"))
    return lowprec.matmul(g, b.T, math_mode=of_a), lowprec.matmul(a.T, g, math_mode=of_b)


# -- PyTorch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", RECIPES, ids=str)
def test_pytorch_has_numpys_bits_and_each_gradient_its_own_rounding(torch, mode):
    a, b, g = operands((40, 100), (100, 30), (40, 30))
    x, w = (torch.from_numpy(v).requires_grad_() for v in (a, b))
    y = lowprec.matmul(x, w, math_mode=mode)
    assert np.array_equal(y.detach().numpy(), lowprec.matmul(a, b, math_mode=mode))
    found = torch.autograd.grad(y, (x, w), torch.from_numpy(g))
    expected = gradients(a, b, g, mode)
    assert all(np.array_equal(u.numpy(), v) for u, v in zip(found, expected, strict=True))
    pulled = torch.func.vjp(lambda x, w: lowprec.matmul(x, w, math_mode=mode), x, w)[1](
        torch.from_numpy(g)
    )
    assert all(np.array_equal(u.detach().numpy(), v) for u, v in zip(pulled, expected, strict=True))


def test_a_small_column_of_gradients_keeps_its_precision_in_fp8_blocks(torch):
    """Gradients have a scale for 128 numbers along the rows, not for a square with their neighbours."""
    a, b, g = operands((256, 64), (64, 128), (256, 128))
    g[:, 7] *= 1e-6
    x, w = (torch.from_numpy(v).requires_grad_() for v in (a, b))
    (found,) = torch.autograd.grad(
        lowprec.matmul(x, w, math_mode="fp8_blocks"), w, torch.from_numpy(g)
    )
    exact = a.T.astype(float) @ g
    error = np.linalg.norm(found.numpy()[:, 7] - exact[:, 7]) / np.linalg.norm(exact[:, 7])
    assert error < 0.06, "each operand within 2^-4 of its numbers, half of them on average"


def test_compiled_graphs_have_the_same_bits_and_follow_the_step(torch):
    a, b, g = operands((16, 64), (64, 8), (16, 8))
    x, w = (torch.from_numpy(v).requires_grad_() for v in (a, b))
    graphs = []

    def backend(graph, example):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, example)

    torch._dynamo.reset()
    multiply = torch.compile(lambda x, w: lowprec.matmul(x, w), backend=backend)
    recipe = Recipe.nvfp4_training(seed=1)
    for step in (1, 2, 3):
        with lowprec.math_mode(recipe.at(step)):
            found = torch.autograd.grad(multiply(x, w), (x, w), torch.from_numpy(g))
        expected = gradients(a, b, g, recipe.at(step))
        assert all(np.array_equal(u.numpy(), v) for u, v in zip(found, expected, strict=True)), step
    assert len(graphs) == 1, "one graph for all steps"
    named = torch.compile(lambda x, w: lowprec.matmul(x, w, math_mode=recipe), backend=backend)
    assert np.array_equal(named(x, w).detach().numpy(), lowprec.matmul(a, b, math_mode=recipe))


def test_a_layer_knows_its_weight(torch, lt):
    recipe = Recipe("nvfp4", weight_block=(16, 16))
    torch.manual_seed(0)
    layer, x = lt.Linear(64, 32, math_mode=recipe), torch.randn(5, 64)
    square = Recipe("nvfp4", weight_block=(16, 16), knows_weight=True)
    expected = lowprec.matmul(
        x, layer.weight.detach().T, bias=layer.bias.detach(), math_mode=square
    )
    assert torch.equal(layer(x), expected)
    assert not torch.equal(
        expected, lowprec.linear(x, layer.weight.detach(), layer.bias.detach(), math_mode=recipe)
    )
    shared = lt.Linear.sharing(layer)
    compiled = torch.compile(shared, backend="eager")
    with lowprec.math_mode(recipe):
        assert torch.equal(shared(x), expected)
        assert torch.equal(compiled(x), expected)
    weight = layer.weight.detach()
    x = torch.eye(64, requires_grad=True)
    layer(x).sum().backward()
    forward = lowprec.matmul(torch.eye(64), weight.T, math_mode=square)
    backward = lowprec.matmul(torch.ones(64, 32), weight, math_mode=square.of("grad_input"))
    assert torch.equal(x.grad, backward)
    assert torch.allclose(backward[0], forward.sum(1), atol=1e-5), (
        "both products see the same numbers of the weight"
    )


def test_each_layer_has_its_random_numbers(torch, lt):
    recipe, x = Recipe("mxfp4", rounding="stochastic", seed=1), torch.randn(5, 64)
    first = lt.Linear(64, 32, math_mode=recipe)
    second, again = (
        lt.Linear.sharing(first, math_mode=recipe, number=n) for n in (None, first.number)
    )
    assert not torch.equal(first(x), second(x))
    assert torch.equal(first(x), again(x))
    expected = lowprec.linear(
        x, first.weight.detach(), first.bias.detach(), math_mode=recipe.at(layer=first.number)
    )
    assert torch.equal(first(x), expected)
    first, second = (lt.Linear.sharing(first) for _ in range(2))
    with lowprec.math_mode(recipe):
        assert not torch.equal(first(x), second(x))
    both = [
        Recipe.nvfp4_training(seed=1),
        Recipe("nvfp4", weight_block=(16, 16), rounding="stochastic", seed=1),
    ]
    for recipe in both:
        found = []
        for layer in (1, 2):
            with lowprec.math_mode(recipe.at(3, layer)):
                g = torch.autograd.grad((first(x) ** 2).sum(), first.weight)[0]
                assert torch.equal(
                    g, torch.autograd.grad((second(x) ** 2).sum(), second.weight)[0]
                ), "a given layer"
                found.append(g)
        assert not torch.equal(*found)
    with pytest.raises(lowprec.ModeError, match="layer of a recipe must be an integer"):
        lt.Linear(4, 4, math_mode=recipe, number=1 << 20)


def test_vmap_and_half_precision(torch):
    a, b = operands((3, 8, 64), (3, 64, 5))
    for mode in ("mxfp8", "int8", "fp8_blocks"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x, w = (torch.from_numpy(v).to(dtype) for v in (a, b))
            found = torch.vmap(lambda x, w: lowprec.matmul(x, w, math_mode=mode))(x, w)  # noqa: B023
            assert found.dtype == dtype
            assert torch.equal(
                found,
                torch.stack([lowprec.matmul(*y, math_mode=mode) for y in zip(x, w, strict=True)]),
            )


#: Shapes of operands, with axes along which one of them is broadcast.
BROADCAST = [
    ((1, 5, 40), (3, 40, 8)),
    ((3, 5, 40), (1, 40, 8)),
    ((5, 40), (3, 40, 8)),
    ((3, 5, 40), (40, 8)),
    ((2, 3, 5, 40), (2, 1, 40, 8)),
    ((2, 1, 5, 40), (2, 3, 40, 8)),
    ((1, 3, 5, 40), (2, 3, 40, 8)),
    ((2, 1, 5, 40), (1, 3, 40, 8)),
    ((40,), (3, 40, 8)),
    ((3, 5, 40), (40,)),
]
STOCHASTIC = Recipe("mxfp4", rounding="stochastic", seed=1)


@pytest.mark.parametrize("hidden", [(), cpu_units.UNITS], ids=["kernels", "numpy"])
@pytest.mark.parametrize(
    "mode", [STOCHASTIC, Recipe(("int8_blocks", "mxfp4"), rounding="stochastic", seed=1), "mxfp4"]
)
def test_a_broadcast_view_has_the_bits_of_its_copy(mode, hidden):
    a, b = operands((2, 1, 5, 40), (3, 40, 8))
    square, batch = b[0, :5, :5], (2, 3, 4)
    with machines.without(hidden):
        for x, y in [
            (np.broadcast_to(a, (2, 3, 5, 40)), b),
            (np.broadcast_to(a, (4, 2, 3, 5, 40)), b),
            (a, np.broadcast_to(b[0], (2, 3, 40, 8))),
            (np.broadcast_to(a[..., :1, :], a.shape), np.broadcast_to(b[..., :1], b.shape)),
            (np.broadcast_to(a.swapaxes(-1, -2), (2, 3, 40, 5)).swapaxes(-1, -2), b),
            (np.broadcast_to(square.T, (*batch, 5, 5)), np.broadcast_to(square, (*batch, 5, 5))),
        ]:
            expected = lowprec.matmul(x.copy(), y.copy(), math_mode=mode)
            assert np.array_equal(lowprec.matmul(x, y, math_mode=mode), expected), (
                x.shape,
                y.shape,
            )


@pytest.mark.parametrize("mode", [STOCHASTIC, "fp8_blocks", "nvfp4"], ids=str)
@pytest.mark.parametrize(("of_a", "of_b"), BROADCAST, ids=str)
def test_jax_rounds_a_broadcast_operand_once(jax, of_a, of_b, mode):
    a, b = operands(of_a, of_b)
    found = jax.jit(lambda x, y: lowprec.matmul(x, y, math_mode=mode))(a, b)
    assert np.allclose(found, lowprec.matmul(a, b, math_mode=mode), rtol=1e-5, atol=1e-4)


RANDOM = Recipe("mxfp8", rounding="stochastic", seed=1)
#: JAX sums over the broadcast axis of `b` in another order of axes, and so with other random numbers.
GRADIENTS = [
    (*operands, mode)
    for operands in BROADCAST
    for mode in ("mxfp4", "nvfp4", RANDOM)
    if mode is not RANDOM or not operands[0][0] < operands[1][0] == 2
]


@pytest.mark.parametrize(("of_a", "of_b", "mode"), GRADIENTS, ids=str)
def test_gradients_of_broadcast_operands_are_one_product(torch, jax, of_a, of_b, mode):
    a, b = operands(of_a, of_b)
    x, y = (torch.from_numpy(v).requires_grad_() for v in (a, b))
    out = lowprec.matmul(x, y, math_mode=mode)
    (g,) = operands(tuple(out.shape), seed=1)
    found = torch.autograd.grad(out, (x, y), torch.from_numpy(g))
    _, pull = jax.vjp(
        lambda x, y: lowprec.matmul(x, y, math_mode=mode), *map(jax.numpy.asarray, (a, b))
    )
    for one, other in zip(found, pull(g), strict=True):
        assert np.allclose(one.numpy(), other, rtol=1e-5, atol=1e-4), "sums in another order"
    if (of_a, of_b) == ((5, 40), (3, 40, 8)):
        of = parse_mode(mode)
        wide = [v.reshape(-1, 24) for v in (g.swapaxes(0, 1), b.swapaxes(0, 1))]
        assert np.array_equal(
            found[0], lowprec.matmul(wide[0], wide[1].T, math_mode=of_pass(of, "grad_input"))
        )


def test_jax_maps_any_axis_as_the_first(jax):
    a, b = operands((5, 40, 3), (40, 3, 8))
    for mode in (STOCHASTIC, "fp8_blocks"):
        found = jax.vmap(lambda x, y: lowprec.matmul(x, y, math_mode=mode), (2, 1))(a, b)  # noqa: B023
        expected = lowprec.matmul(np.moveaxis(a, 2, 0), np.moveaxis(b, 1, 0), math_mode=mode)
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-4)


# -- JAX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", RECIPES, ids=str)
def test_jax_eagerly_has_numpys_bits_and_under_jit_their_bound(jax, mode):
    a, b, g = operands((40, 100), (100, 30), (40, 30))
    plain = lowprec.matmul(a, b, math_mode=mode)
    x, w = jax.numpy.asarray(a), jax.numpy.asarray(b)
    assert np.array_equal(np.asarray(lowprec.matmul(x, w, math_mode=mode)), plain)

    def multiply(x, w):
        return lowprec.matmul(x, w, math_mode=mode)

    def near(found, expected):
        """Whether products of the same codes were summed in another order."""
        return bool(np.allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-4))

    assert near(jax.jit(multiply)(x, w), plain)
    out, pull = jax.vjp(multiply, x, w)
    assert near(out, plain)
    assert all(near(*pair) for pair in zip(pull(g), gradients(a, b, g, mode), strict=True))


@pytest.mark.parametrize("mode", ["mxfp8", "fp8_rows", "int8", "fp8_blocks"])
def test_jax_maps_and_scans(jax, mode):
    a, b = operands((3, 8, 64), (64, 64))
    expected = lowprec.matmul(a, b, math_mode=mode)
    found = jax.jit(jax.vmap(lambda x: lowprec.matmul(x, b, math_mode=mode)))(a)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)
    carried, _ = jax.lax.scan(
        lambda x, _: (lowprec.matmul(x, b, math_mode=mode), None), jax.numpy.asarray(a[0]), length=2
    )
    twice = lowprec.matmul(lowprec.matmul(a[0], b, math_mode=mode), b, math_mode=mode)
    assert np.linalg.norm(carried - twice) < 1e-2 * np.linalg.norm(twice), (
        "roundings may differ by the order of sums"
    )


@pytest.mark.parametrize("mode", recipes.MODES)
def test_jax_sums_of_zero_with_large_scales_are_zero(jax, mode):
    a, b = np.array([[1e30, 0]], np.float32), np.array([[0], [1e30]], np.float32)
    assert jax.jit(lambda a, b: lowprec.matmul(a, b, math_mode=mode))(a, b) == 0


@pytest.mark.parametrize("mode", [
    Recipe("mxfp4", rounding="stochastic", seed=3),
    Recipe("nvfp4", rounding="stochastic_gradients", seed=4, hadamard=16),
], ids=str)  # fmt: skip
def test_jax_compiles_once_for_all_steps(jax, mode):
    """The step as an array has the bits of the recipe with this step; a function inside is not shared by two blocks."""
    from lowprec.jax import at_step

    x, w = operands((24, 70), (70, 12))
    compilations = []
    inner = jax.jit(lambda x, w: lowprec.matmul(x, w, math_mode=mode))

    @jax.jit
    def train(x, w, step):
        compilations.append(1)
        with at_step(step):
            return jax.grad(lambda x, w: (inner(x, w) ** 2).sum(), (0, 1))(x, w)

    @jax.jit
    def twice(x, w, step):
        with at_step(step):
            first = inner(x, w)
        with at_step(step + 1):
            return first, inner(x, w)

    for step in (1, 2**31 - 1):
        chosen = mode.at(step)
        product = jax.jit(lambda x, w, chosen=chosen: lowprec.matmul(x, w, math_mode=chosen))
        expected = jax.jit(
            jax.grad(lambda x, w, product=product: (product(x, w) ** 2).sum(), (0, 1))
        )(x, w)
        assert all(np.array_equal(*pair) for pair in zip(train(x, w, step), expected, strict=True))
        assert np.array_equal(twice(x, w, step)[0], product(x, w))
    assert len(compilations) == 1
    if mode.rounding == "stochastic":
        assert not np.array_equal(*twice(x, w, 1))
        assert np.array_equal(twice(x, w, 0)[1], twice(x, w, 1)[0])
    fixed = jax.jit(
        lambda x, w, step: _at(at_step, step, lambda: lowprec.matmul(x, w, math_mode=mode.at(7)))
    )
    assert np.array_equal(fixed(x, w, 1), fixed(x, w, 2)), "a recipe's own step"


def _at(at_step, step, function):
    with at_step(step):
        return function()


def test_jax_refuses_steps_that_are_not_traced_integers(jax):
    from lowprec.jax import at_step

    for step in (3, jax.numpy.int32(3)):
        with pytest.raises(lowprec.ArrayError, match=r"recipe\.at"):
            at_step(step).__enter__()
    with pytest.raises(lowprec.ArrayError, match="not a traced integer"):
        jax.jit(lambda step: _at(at_step, step, lambda: step))(1.5)
    x = np.ones((2, 2), np.float32)
    mode = Recipe("mxfp8", rounding="stochastic", seed=3)

    @jax.jit
    def each(steps, x):
        return jax.vmap(
            lambda step: _at(at_step, step, lambda: lowprec.matmul(x, x, math_mode=mode))
        )(steps)

    with pytest.raises(lowprec.UnsupportedError, match="differs along an axis"):
        each(np.arange(2), x)


def test_dask_rounds_each_chunk():
    da = pytest.importorskip("dask.array", reason="dask is not installed")
    a, b = operands((32, 256), (256, 16))
    x, y = da.from_array(a, chunks=(16, 128)), da.from_array(b, chunks=(128, 16))
    recipe = Recipe("mxfp8", scale_rule="rceil")
    for mode in ("mxfp8", "int8", recipe):
        found = lowprec.matmul(x, y, math_mode=mode).compute(scheduler="synchronous")
        first = lowprec.matmul(a[:, :128], b[:128], math_mode=mode)
        assert np.array_equal(
            found, lowprec.matmul(a[:, 128:], b[128:], c=first, beta=1.0, math_mode=mode)
        )
