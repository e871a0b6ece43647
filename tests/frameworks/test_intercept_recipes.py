"""Modes that quantise under ``intercept``: linear layers, their three products, and the others in bfloat16."""

import copy
import dataclasses
import itertools
import math
import weakref
import zlib

import pytest

import lowprec
from lowprec import recipes
from lowprec.modes import Recipe, of_pass, parse_mode

pytestmark = pytest.mark.usefixtures("torch")

RECIPES = {
    "fp8": Recipe.fp8_training(),
    "mxfp8": Recipe.mxfp8_training(),
    "nvfp4": Recipe.nvfp4_training(seed=3),
    "blocks": Recipe("fp8_blocks", grad_input="fp8_blocks_e5m2"),
    "stochastic": Recipe("mxfp8", rounding="stochastic", seed=1),
    "dequantized": Recipe("mxfp4", rounding="stochastic", seed=1, backward_override="dequantized"),
}


def network(torch, make):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        make(48, 64), torch.nn.GELU(), make(64, 32), torch.nn.GELU(), make(32, 16)
    )


def results(torch, net):
    """Return the output of a step, and the gradients of the input and of the parameters."""
    torch.manual_seed(1)
    x = torch.randn(24, 48, requires_grad=True)
    y = net(x)
    (y * torch.randn(24, 16)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def remarks(report):
    """Return the remarks but for the one on compiled graphs, which other tests cause."""
    return [text for text in report.remarks if not text.startswith("Compiled graphs ran")]


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_of_layers_that_know_their_passes(torch, lt, name):
    """The operands and the products of PyTorch's layers are in another order than those of ``lowprec.torch.Linear``."""

    def layer(number):
        at = RECIPES[name].at(step=2, layer=zlib.crc32(number.encode()) % 2**20)
        return lambda m, n: lt.Linear(m, n, math_mode=at)

    numbers = iter("024")
    expected = results(torch, network(torch, lambda m, n: layer(next(numbers))(m, n)))
    plain = network(torch, torch.nn.Linear)
    with lt.intercept(RECIPES[name], step=1, statistics=True) as seen:
        seen.step()
        found = results(torch, plain)
    assert len(found) == len(expected) == 8
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    report = seen.report()
    assert {p.mode for p in report.taken} == {str(RECIPES[name])}
    products = itertools.product("024", ("", "grad_input", "grad_weight"))
    assert {(p.layer, p.gradient): p.count for p in report.taken} == dict.fromkeys(products, 1)
    assert all(0 < p.error < 0.3 for p in report.taken)
    assert not remarks(report)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mode", ["fp8", *map(str, (*RECIPES.values(), Recipe("nvfp4")))])
def test_each_expert_of_a_grouped_product_has_its_own_scales(torch, lt, mode, transposed):
    """Rows sorted by expert: the products of an expert, and of its gradients, are those of its rows and its matrix."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.experts = torch.nn.Parameter(torch.randn(3, 64, 32))
    ends = (3, 3, 10)
    x = torch.randn(10, 32 if transposed else 64, requires_grad=True)
    x.data[3:] *= 1e-3
    with lt.intercept(mode) as seen:
        weights = model.experts.mT if transposed else model.experts
        y = torch.nn.functional.grouped_mm(x, weights, offs=torch.tensor(ends, dtype=torch.int32))
        g = torch.randn_like(y)
        y.backward(g)
    report = seen.report()
    assert {(p.layer, p.mode) for p in report.taken} == {("Module", mode)}
    recipe = parse_mode(mode)
    if isinstance(recipe, Recipe):
        recipe = recipe.at(layer=zlib.crc32(b"Module") % 2**20)
        recipe = dataclasses.replace(recipe, knows_weight=recipe.weight_block is not None)
    forward, of_input, of_weight = (of_pass(recipe, x) for x in recipes._PAIRS)
    matrices = weights.detach()
    gradients = model.experts.grad.mT if transposed else model.experts.grad
    for expert, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        rows, matrix, above = x.detach()[first:end], matrices[expert], g[first:end]
        for found, expected in (
            (y[first:end], lowprec.matmul(rows, matrix, math_mode=forward)),
            (x.grad[first:end], lowprec.matmul(above, matrix.T, math_mode=of_input)),
            (gradients[expert], lowprec.matmul(rows.T, above, math_mode=of_weight)),
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_first_and_last_layers_in_another_mode(torch, lt):
    net = network(torch, torch.nn.Linear)
    with lt.intercept({"0": "bf16", "4": "bf16", "*": "mxfp4"}) as seen:
        results(torch, net)
    assert {p.layer: p.mode for p in seen.report().taken} == {
        "0": "bf16",
        "2": "mxfp4",
        "4": "bf16",
    }
    with lowprec.fp32_guard(), lt.intercept(RECIPES["nvfp4"]) as seen:
        results(torch, net)
    assert {p.mode for p in seen.report().taken} == {"fp32"}


#: Products and sums in one operator, by the weight, the rows and the addend of the result.
SUMS = {
    "linear": lambda t, w, x, c: t.nn.functional.linear(x, w, c[0]),
    "addmm": lambda t, w, x, c: t.addmm(c, x, w.T, beta=2, alpha=0.5),
    "addmm, a column": lambda t, w, x, c: t.addmm(c[:, :1], x, w.T),
    "addmm_": lambda t, w, x, c: c.clone().addmm_(x, w.T),
    "addmm, out": lambda t, w, x, c: t.addmm(c[0], x, w.T, out=t.empty_like(c)),
    "weight first": lambda t, w, x, c: t.addmm(c.T, w, x.T).T,
    "weight first, a row": lambda t, w, x, c: t.addmm(c[:1].T, w, x.T, alpha=2).T,
    "baddbmm": lambda t, w, x, c: t.baddbmm(c, x[None], w.T[None], beta=2)[0],
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_of_16_bits_is_rounded_once(torch, lt, dtype, name):
    """A row does not depend on the number of rows.

    The factors are powers of two; float32 operands of the same values have the same codes and FP32 sums.
    """
    torch.manual_seed(0)
    narrow = getattr(torch, dtype)
    layer = torch.nn.Linear(256, 512).to(narrow)
    x, c = torch.randn(64, 256).to(narrow), torch.randn(64, 512).to(narrow)

    def sums(layer, *operands):
        with torch.no_grad(), lt.intercept(RECIPES["blocks"]) as seen:
            found = SUMS[name](torch, layer.weight, *operands)
        assert [p.mode for p in seen.report().taken] == [RECIPES["blocks"].value]
        return found

    whole, alone = sums(layer, x, c), sums(layer, x[:1], c[:1])
    assert torch.equal(whole[:1], alone)
    assert torch.equal(whole, sums(layer.float(), x.float(), c.float()).to(narrow))


@pytest.mark.parametrize(
    "case", ["enable_grad", "frozen", "checkpoint", "no_grad", "inference_mode", "cached"]
)
def test_autocast_multiplies_casts_of_the_same_layers(torch, lt, case):
    """The products are those of a model in bfloat16, with the random numbers of the same layers."""
    from torch.utils.checkpoint import checkpoint

    net = network(torch, torch.nn.Linear).requires_grad_(case != "frozen")
    g, inputs = torch.randn(24, 16), torch.randn(24, 48)
    found = []
    for model, autocast in ((copy.deepcopy(net).bfloat16(), False), (net, True)):
        x = inputs.clone().requires_grad_()
        with (
            torch.autocast("cpu", torch.bfloat16, autocast),
            getattr(torch, case, torch.enable_grad)(),
        ):
            if case == "cached":
                net(x)
            with lt.intercept(RECIPES["stochastic"]) as seen:
                given = x if autocast else x.bfloat16()
                y = (
                    checkpoint(model, given, use_reentrant=False)
                    if case == "checkpoint"
                    else model(given)
                )
                if y.requires_grad:
                    (y * g).sum().backward()
        rows = {(p.layer, p.backward, p.mode): p.count for p in seen.report().products}
        found.append((rows, [y, x.grad, *(p.grad for p in model.parameters())]))
    (expected_rows, expected), (rows, tensors) = found
    assert rows == expected_rows
    assert {layer for layer, *_ in rows} == set("024")
    assert {mode for *_, mode in rows} == {str(RECIPES["stochastic"])}
    for z, e in zip(tensors, expected, strict=True):
        assert (z is None) == (e is None)
        assert z is None or torch.equal(z.float(), e.float())


def test_numbers_are_cast_under_autocast(torch, lt):
    x, layer = torch.ones(4), torch.nn.Linear(4, 4)
    numbers = (3, 2.5, True, 1 + 2j)
    expected = [x * n for n in numbers]
    with lt.intercept("mxfp8"), torch.autocast("cpu"), torch.no_grad():
        layer(x[None])
        found = [x * n for n in numbers]
    assert [(y.dtype, y.tolist()) for y in found] == [(y.dtype, y.tolist()) for y in expected]


def test_a_forward_pass_without_its_layers_is_reported_first(torch, lt):
    """The layer of a weight gradient is known from autograd, that of a product with a copy in a graph is not."""
    layer, x = torch.nn.Linear(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    torch._dynamo.reset()
    product = torch.compile(
        lambda x, w: torch.nn.functional.linear(x, w.clone()), backend="aot_eager"
    )
    with lt.intercept("mxfp8") as seen:
        product(x, layer.weight).sum().backward()
        torch.mm(x.double(), x.double())
    first, second, *_ = str(seen.report()).splitlines()
    assert first.startswith("lowprec.torch.intercept('mxfp8'): 1 taken (1 in backward passes)")
    assert (
        second == "Of 1 layers only backward products were taken; forward products were passed by."
    )
    reasons = {p.dtype: p.reason for p in seen.report().passed}
    assert reasons["bfloat16"].startswith("no product with a known parameter")
    assert reasons["float64"] == "the mode does not act on this element type"
    with lt.intercept("mxfp8") as seen:
        layer(x).sum().backward()
    assert "only backward" not in str(seen.report())


def test_attention_and_products_with_vectors_are_in_bfloat16_unless_a_rule_names_them(torch, lt):
    x, v, layer = torch.randn(2, 16, 16), torch.randn(16), torch.nn.Linear(16, 16)

    def modes(rules):
        with torch.no_grad(), lt.intercept(rules) as seen:
            torch.bmm(x, x), torch.dot(v, v), torch.mv(x[0], v), layer(v), layer(x[0])
            torch.mv(layer.weight, v)
        reasons = {
            p.operator: p.reason for p in seen.report().taken if not p.layer and p.mode == "bf16"
        }
        assert set(reasons.values()) <= {"no parameter found: computed in bf16"}
        return {f"{p.operator} {p.layer}": p.mode for p in seen.report().taken}

    names = ("bmm ", "addmv ", "addmv Linear", "addmm Linear")
    assert modes("mxfp8") == {**dict.fromkeys(names, "bf16"), "addmm Linear": "mxfp8"}
    assert modes({"": "mxfp8", "addmv": "mxfp8", "*": "mxfp8"}) == dict.fromkeys(names, "mxfp8")
    named = modes("bmm=mxfp8,dot=mxfp4,addmv=fp32,*=mxfp8")
    assert named == {
        "bmm ": "mxfp8", "dot ": "mxfp4", "addmv ": "fp32", "addmv Linear": "fp32", "addmm Linear": "mxfp8",
    }  # fmt: skip


def test_gradients_of_attention(torch, lt):
    recipe = RECIPES["fp8"]
    a, b = (torch.randn(2, 24, 24, requires_grad=True) for _ in range(2))
    g = torch.randn(2, 24, 24)
    with lt.intercept({"bmm": recipe}) as seen:
        torch.bmm(a, b).backward(g)
    x, y = a.detach(), b.detach()
    assert torch.equal(a.grad, lowprec.matmul(g, y.mT, math_mode=recipe.of("grad_input")))
    assert torch.equal(b.grad, lowprec.matmul(x.mT, g, math_mode=recipe.of("grad_weight")))
    assert not remarks(seen.report())


@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing_changes_nothing(torch, lt, name):
    """The operands of the forward pass are gone, and others of the same numbers are multiplied again."""
    from torch.utils.checkpoint import checkpoint

    net = network(torch, torch.nn.Linear)
    with lt.intercept(RECIPES[name]):
        expected = results(torch, net)
    net.zero_grad()
    again = torch.nn.ModuleList([net])
    again.forward = lambda x: checkpoint(net, x, use_reentrant=False)
    with lt.intercept(RECIPES[name]) as seen:
        found = results(torch, again)
    assert all(map(torch.equal, found, expected))
    assert not remarks(seen.report())


def test_compiled_backward_passes_have_the_forward_formats(torch, lt):
    recipe, x, g = RECIPES["fp8"], torch.randn(24, 48), torch.randn(24, 64)
    layer = torch.nn.Linear(48, 64)
    with lt.intercept(recipe) as seen:
        torch.compile(layer, backend="aot_eager")(x).backward(g)
    assert any("gradients are not distinguished" in text for text in seen.report().remarks)
    assert torch.equal(layer.weight.grad, lowprec.matmul(g.mT, x, math_mode="fp8"))


def test_forward_operands_are_not_kept_alive(torch, lt):
    x = torch.randn(16, 16)
    alive = weakref.ref(x.untyped_storage())
    with lt.intercept({"mm": RECIPES["fp8"]}):
        x = x @ x
        assert alive() is None


def test_statistics_of_quantised_operands(torch, lt):
    """E4M3 with a scale of 2^-8 ends at 1.75; a block of 32 has one number beyond, and one that becomes zero."""
    a, b = torch.zeros(1, 64), torch.ones(64, 16)
    a[0, :32], a[0, 32], a[0, 0], a[0, 1] = 1.0, 2.0**-10, 1.9, 1e-9
    with lt.intercept({"mm": "mxfp8"}, statistics=True) as seen:
        a @ b
    (row,) = seen.report().taken
    assert row.a == lt.OperandStatistics(
        pytest.approx(1.9), 1 / 64, 1 / 64, pytest.approx(math.log2(1.9 * 2**10))
    )
    assert row.b == lt.OperandStatistics(1, 0, 0, 0)
    assert row.error == pytest.approx(0.15 / float(a.double().sum()), rel=1e-5)
    assert " 1.6%, 0.0% " in str(seen.report())


@pytest.mark.parametrize(
    "mode", ["fp8", "fp8_rows", "fp8_blocks", "mxfp8", "mxfp4", "nvfp4", "int8"]
)
def test_statistics_of_each_format(torch, lt, mode):
    """The rounded operands that underflow is counted in are those of the product: the share is that of its zeros."""
    torch.manual_seed(0)
    a, b = torch.randn(48, 160) * torch.logspace(-9, 0, 160), torch.eye(160)
    with lt.intercept({"": mode}, statistics=True) as seen:
        c = a @ b
    (row,) = seen.report().taken
    assert row.a.underflow == pytest.approx(float((c == 0).float().mean()))
    assert (row.a.underflow > 0) == (mode != "mxfp8")
    assert row.error == pytest.approx(
        float((c.double() - a.double()).norm() / a.double().norm()), rel=1e-6
    )
    assert (row.a.clipped > 0) == (mode in ("mxfp8", "mxfp4"))
    assert (row.a.block_range > 0) == (mode != "fp8")
