"""Modes that quantise under ``intercept``: linear layers, their three products, and the others in bfloat16."""

import itertools
import math
import weakref
import zlib

import pytest

import lowprec
from lowprec.modes import Recipe

pytestmark = pytest.mark.usefixtures("torch")

RECIPES = {
    "fp8": Recipe.fp8_training(),
    "mxfp8": Recipe.mxfp8_training(),
    "nvfp4": Recipe.nvfp4_training(seed=3),
    "blocks": Recipe("fp8_blocks", grad_input="fp8_blocks_e5m2"),
    "stochastic": Recipe("mxfp8", rounding="stochastic", seed=1),
}


def network(torch, make):
    torch.manual_seed(0)
    return torch.nn.Sequential(make(48, 64), torch.nn.GELU(), make(64, 32), torch.nn.GELU(), make(32, 16))


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


def test_first_and_last_layers_in_another_mode(torch, lt):
    net = network(torch, torch.nn.Linear)
    with lt.intercept({"0": "bf16", "4": "bf16", "*": "mxfp4"}) as seen:
        results(torch, net)
    assert {p.layer: p.mode for p in seen.report().taken} == {"0": "bf16", "2": "mxfp4", "4": "bf16"}
    with lowprec.fp32_guard(), lt.intercept(RECIPES["nvfp4"]) as seen:
        results(torch, net)
    assert {p.mode for p in seen.report().taken} == {"fp32"}


def test_attention_and_vectors_are_in_bfloat16(torch, lt):
    x, v, layer = torch.randn(2, 16, 16), torch.randn(16), torch.nn.Linear(16, 16)

    def modes(**options):
        with torch.no_grad(), lt.intercept("mxfp8", **options) as seen:
            torch.bmm(x, x), torch.dot(v, v), torch.mv(x[0], v), layer(v), layer(x[0])
            torch.mv(layer.weight, v)
        return {f"{p.operator} {p.layer}": p.mode for p in seen.report().taken}

    names = ("bmm ", "dot ", "addmv ", "addmv Linear", "addmm Linear")
    assert modes() == {**dict.fromkeys(names, "bf16"), "addmm Linear": "mxfp8"}
    assert modes(attention=True) == dict.fromkeys(names, "mxfp8")


def test_gradients_of_attention(torch, lt):
    recipe = RECIPES["fp8"]
    a, b = (torch.randn(2, 24, 24, requires_grad=True) for _ in range(2))
    g = torch.randn(2, 24, 24)
    with lt.intercept(recipe, attention=True) as seen:
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
    with lt.intercept(RECIPES["fp8"], attention=True):
        x = x @ x
        assert alive() is None


def test_statistics_of_quantised_operands(torch, lt):
    """E4M3 with a scale of 2^-8 ends at 1.75; a block of 32 has one number beyond, and one that becomes zero."""
    a, b = torch.zeros(1, 64), torch.ones(64, 16)
    a[0, :32], a[0, 32], a[0, 0], a[0, 1] = 1.0, 2.0**-10, 1.9, 1e-9
    with lt.intercept("mxfp8", attention=True, statistics=True) as seen:
        a @ b
    (row,) = seen.report().taken
    assert row.a == lt.OperandStatistics(pytest.approx(1.9), 1 / 64, 1 / 64, pytest.approx(math.log2(1.9 * 2**10)))
    assert row.b == lt.OperandStatistics(1, 0, 0, 0)
    assert row.error == pytest.approx(0.15 / float(a.double().sum()), rel=1e-5)
    assert " 1.6%, 0.0% " in str(seen.report())


@pytest.mark.parametrize("mode", ["fp8", "fp8_rows", "fp8_blocks", "mxfp8", "mxfp4", "nvfp4", "int8"])
def test_statistics_of_each_format(torch, lt, mode):
    """The rounded operands that underflow is counted in are those of the product: the share is that of its zeros."""
    torch.manual_seed(0)
    a, b = torch.randn(48, 160) * torch.logspace(-9, 0, 160), torch.eye(160)
    with lt.intercept(mode, attention=True, statistics=True) as seen:
        c = a @ b
    (row,) = seen.report().taken
    assert row.a.underflow == pytest.approx(float((c == 0).float().mean()))
    assert (row.a.underflow > 0) == (mode != "mxfp8")
    assert row.error == pytest.approx(float((c.double() - a.double()).norm() / a.double().norm()), rel=1e-6)
    assert (row.a.clipped > 0) == (mode in ("mxfp8", "mxfp4"))
    assert (row.a.block_range > 0) == (mode != "fp8")
