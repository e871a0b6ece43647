"""PyTorch's fused attention inside ``lowprec.torch.intercept``: forward and gradients, in the mode of its module."""

import subprocess
import sys
from contextlib import nullcontext
from types import MappingProxyType

import numpy as np
import pytest

import lowprec
from support.programs import run_python

lt = pytest.importorskip("lowprec.torch")
torch = pytest.importorskip("torch")

attend = torch.nn.functional.scaled_dot_product_attention
#: Relative error of rounding to nearest: of a sum in float32, and of an operand.
UNIT = 2.0**-24
OPERAND = MappingProxyType({"fp32": 0.0, "tf32": 2.0**-11, "bf16": 2.0**-8})
#: images, heads, heads of the keys, queries, keys, width
SHAPES = [(2, 4, 4, 5, 5, 8), (2, 6, 3, 7, 500, 16), (1, 2, 1, 300, 300, 64), (3, 8, 2, 1, 700, 32)]
MASKS = ["none", "causal", "padding", "numbers", "empty rows"]


def drawn(seed, *shape):
    """Return random numbers, with even seeds in the order in which layers have them."""
    images, heads, tokens, width = shape
    numbers = np.random.default_rng(seed).standard_normal((images, tokens, heads, width))
    found = torch.from_numpy(numbers.astype(np.float32)).transpose(1, 2)
    return found.contiguous() if seed % 2 or images == 1 else found


def operands(shape):
    images, heads, few, queries, keys, width = shape
    shapes = ((heads, queries), (few, keys), (few, keys), (heads, queries))
    return [drawn(seed, images, *each, width) for seed, each in enumerate(shapes)]


def masked(name, shape):
    """Return the arguments of a mask, and what it adds to the scores."""
    images, heads, _, queries, keys, _ = shape
    if name == "causal":
        later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        return {"is_causal": True}, torch.zeros(queries, keys).masked_fill(later, -torch.inf)
    if name == "numbers":
        numbers = torch.from_numpy(
            np.random.default_rng(9).standard_normal((images, heads, queries, keys))
        )
        return {"attn_mask": numbers.float()}, numbers.float()
    is_open = torch.ones(images, 1, queries, keys, dtype=torch.bool)
    if name == "padding":
        for image in range(images):
            is_open[image, ..., : 2 * image] = False
    if name == "empty rows":
        is_open[..., : queries // 2, :] = False
    given = {} if name == "none" else {"attn_mask": is_open}
    return given, torch.zeros(is_open.shape).masked_fill(~is_open, -torch.inf)


def results(tensors, given, forward=nullcontext, backward=nullcontext):
    """Return the result of attention, and the gradients for the last tensor as that of the result."""
    *leaves, gradient = (t.detach().clone() for t in tensors)
    for t in leaves:
        t.requires_grad_()
    with forward():
        found = attend(*leaves, **given, enable_gqa=True)
    with backward():
        found.backward(gradient)
    return found.detach(), *(t.grad for t in leaves)


def expected(tensors, added, operand):
    """Return result and gradients in float64, with bounds of their errors to the first order.

    An element of a product errs by ``c = 2 operand + (k + 3) units`` of the sum of magnitudes. An error ``e`` of the
    scores changes a weight by the factor ``exp(2 e)`` at most; its exponential and the sum of a row are rounded.
    """
    q, k, v, g = (t.double() for t in tensors)
    groups = q.shape[1] // k.shape[1]
    few = k.shape[:2]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5

    def error(inner):
        return 2 * operand + operand**2 + (inner + 3) * UNIT

    scores = scale * q @ k.mT + added
    of_scores = scale * q.abs() @ k.mT.abs() * error(q.shape[-1])
    size = scores.masked_fill(scores == -torch.inf, 0).abs()
    of_scores = (of_scores + 4 * size * UNIT).amax(-1, keepdim=True)
    weights = scores.softmax(-1).nan_to_num(0)
    relative = torch.expm1(2 * of_scores) + (k.shape[2] + 8) * UNIT

    def product(a, of_a, b):
        return a @ b, of_a @ b.abs() + a.abs() @ b.abs() * error(a.shape[-1])

    result, of_result = product(weights, weights * relative, v)
    of_v = product(weights.mT, (weights * relative).mT, g)
    change, of_change = product(g, 0 * g, v.mT)
    shift = (g * result).sum(-1, keepdim=True)
    of_shift = (g.abs() * (of_result + result.abs() * error(v.shape[-1]))).sum(-1, keepdim=True)
    gradient = weights * (change - shift)
    of_gradient = weights * (1 + relative) * (of_change + of_shift)
    of_gradient += (relative + 3 * UNIT) * weights * (change.abs() + shift.abs())
    of_q = (scale * t for t in product(gradient, of_gradient, k))
    of_k = (scale * t for t in product(gradient.mT, of_gradient.mT, q))

    def summed(pair):
        """Add those of the heads that share their keys, and the roundings of the sums."""
        value, bound = (t.unflatten(1, (few[1], groups)) for t in pair)
        return value.sum(2), (bound + value.abs() * (groups + 3) * UNIT).sum(2)

    return (result, of_result), tuple(of_q), summed(of_k), summed(of_v)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", OPERAND)
def test_result_and_gradients_are_within_their_bounds(mode, mask, shape):
    tensors = operands(shape)
    given, added = masked(mask, shape)
    with lt.intercept(mode) as seen:
        found = results(tensors, given)
    exact = expected(tensors, added.double(), OPERAND[mode])
    assert [(p.operator, p.mode) for p in seen.report().taken] == [("attention", mode)] * 2
    for name, x, (value, bound), like in zip(
        "oqkv", found, exact, results(tensors, given), strict=True
    ):
        assert ((x - value).abs() <= 1.1 * bound).all(), name
        assert x.stride() == like.stride()


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_the_other_pass_may_be_outside(inside):
    tensors = operands(SHAPES[1])
    with lt.intercept("fp32") as seen:
        pass
    found = results(tensors, {}, **{inside: lambda: seen})
    for x, (value, bound) in zip(found, expected(tensors, torch.zeros(1), 0.0), strict=True):
        assert ((x - value).abs() <= 2 * bound).all()
    (taken,) = seen.report().taken
    assert taken.backward is (inside == "backward")


@pytest.mark.parametrize("mode", ["fp32", "bf16", "tf32"])
@pytest.mark.parametrize("tokens", [3, 100, 385, 800])
def test_a_token_has_the_same_bits_in_decoding_and_in_any_batch(mode, tokens):
    q, k, v, _ = operands((1, 4, 2, tokens, tokens, 32))
    with lt.intercept(mode):
        prompt = attend(q, k, v, is_causal=True, enable_gqa=True)
        for at in {0, tokens // 2, tokens - 1}:
            alone = attend(
                q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1], enable_gqa=True
            )
            assert torch.equal(alone, prompt[:, :, at : at + 1])
        for padding in (1, 40, 400):
            batch = operands((3, 4, 2, *[tokens + padding] * 2, 32))[:3]
            for is_left in (True, False):
                own = slice(padding, None) if is_left else slice(tokens)
                is_open = torch.ones(3, 1, *[tokens + padding] * 2, dtype=torch.bool).tril()
                is_open[1, :, :, :padding] &= not is_left
                for x, alone in zip(batch, (q, k, v), strict=True):
                    x[1, :, own] = alone
                found = attend(*batch, attn_mask=is_open, enable_gqa=True)
                assert torch.equal(found[1:2, :, own], prompt)


@pytest.mark.parametrize("mode", ["fp32", "int8", "mxfp8", "mxfp4"])
def test_a_masked_key_changes_no_bit(mode):
    q, k, v, _ = operands((2, 4, 2, 30, 400, 32))
    is_open = torch.ones(30, 400, dtype=torch.bool)
    is_open[:, 7] = is_open[:, 350:] = is_open[:9, 100:] = False
    with lt.intercept({"attention": mode}):
        found = attend(q, k, v, is_open, enable_gqa=True)
        for x in (k, v):
            x[:, :, 7] = 1e6
            x[:, :, 350:] = -3e4
        assert torch.equal(attend(q, k, v, is_open, enable_gqa=True), found)
        k[:, :, 8] = 1.0
        assert not torch.equal(attend(q, k, v, is_open, enable_gqa=True), found)


def test_each_query_has_its_first_key():
    """Sliding windows: a query has the bits of its keys alone."""
    q, k, v, _ = operands((1, 2, 2, 50, 50, 16))
    near = torch.ones(50, 50, dtype=torch.bool).tril().triu(-9)
    with lt.intercept("fp32"):
        found = attend(q, k, v, near)
        for at in (5, 20, 49):
            keys = slice(max(0, at - 9), at + 1)
            alone = attend(q[:, :, at : at + 1], k[:, :, keys], v[:, :, keys])
            assert torch.equal(found[:, :, at : at + 1], alone)


def test_exponentials_are_within_their_bound():
    """The weight of a key with the value 1 next to one with the score and value 0: exp(x) / (1 + exp(x))."""
    x = -torch.linspace(0, 100, 200_001)
    pair = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    with lt.intercept("fp32"):
        found = attend(x.view(1, 1, -1, 1), pair, pair, scale=1.0).flatten()
    exact = torch.sigmoid(x.double())
    # the exponential, the sum with its error, the inverse, the product
    bound = (2 + 1 + 2 * exact + 1 + 1) * UNIT * exact
    is_zero = x < -87
    assert ((found - exact).abs() <= bound)[~is_zero].all()
    assert (found[is_zero] == 0).all()


_HASHES = """
import hashlib, torch, lowprec.torch as lt
torch.manual_seed(0)
attend = torch.nn.functional.scaled_dot_product_attention
for mode in ("fp32", "tf32", "bf16"):
    for queries, keys, width in ((1, 900, 64), (70, 70, 20), (300, 411, 33)):
        q, k, v = torch.randn(2, 4, queries, width), *torch.randn(2, 2, 2, keys, width)
        mask = torch.randn(queries, keys)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with lt.intercept(mode):
                found = attend(q, k, v, mask, enable_gqa=True)
            print(hashlib.md5(found.numpy().tobytes()).hexdigest(), threads)
"""


def test_units_and_threads_have_the_same_bits():
    """Without the unit for bfloat16, which has bits of its own."""
    wide, narrow = (
        run_python(_HASHES, LOWPREC_MAX_CPU_ISA=isa).split() for isa in ("avx512_vnni", "avx2")
    )
    assert wide == narrow
    assert wide[::4] == wide[2::4]


class Layer(torch.nn.Module):
    """Attention of one head, whose heads have a parameter each."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.project(x)[:, None].chunk(3, -1)
        return attend(q, k, v)


@pytest.mark.parametrize(
    ("rules", "mode"),
    [
        ("mxfp8", "bf16"),
        ({"1*": "mxfp8", "*": "fp32"}, "bf16"),
        ({"1": "mxfp8", "*": "fp32"}, "mxfp8"),
        ({"Layer": "int8", "*": "fp32"}, "int8"),
        ({"attention": "tf32", "*": "int8"}, "tf32"),
        ({"1.project": "mxfp8", "*": "tf32"}, "tf32"),
    ],
)
def test_rules_name_attention_by_its_module(rules, mode):
    model = torch.nn.Sequential(torch.nn.Identity(), Layer())
    with lt.intercept(rules) as seen:
        model(drawn(0, 1, 2, 5, 32)[0]).sum().backward()
    found = {
        (p.layer, p.backward, p.mode) for p in seen.report().taken if p.operator == "attention"
    }
    assert found == {("1", False, mode), ("1", True, mode)}


def test_attention_without_a_rule_is_reported():
    with lt.intercept({"1.project": "bf16"}) as seen:
        torch.nn.Sequential(torch.nn.Identity(), Layer())(drawn(0, 1, 2, 5, 32)[0])
    (passed,) = seen.report().passed
    assert (passed.operator, passed.layer, passed.reason) == (
        "attention",
        "1",
        "no mode for this layer",
    )


def test_quantised_values_are_rounded_along_their_width():
    """Of one key the weight is 1, which all modes have: the result is the rounded value."""
    q, k, v, _ = operands((2, 4, 2, 3, 1, 64))
    for mode in ("mxfp8", "int8", "mxfp4"):
        with lt.intercept({"attention": mode}):
            found = attend(q, k, v, enable_gqa=True)
        values = lowprec.quantize(v, mode).dequantize().repeat_interleave(2, 1)
        # the weight is 1 or, in int8, 127 times its scale: three roundings
        assert torch.allclose(found, values.expand(found.shape), rtol=4 * UNIT, atol=0)


def test_keys_and_values_have_a_format():
    """The products are those of rounded keys and values, in the mode of attention; gradients pass through."""
    tensors = operands((2, 4, 2, 5, 40, 64))
    q, k, v, g = tensors
    narrow = [lowprec.quantize(x, "mxfp8").dequantize() for x in (k, v)]
    with lt.intercept({"kv": "mxfp8", "*": "bf16"}) as seen:
        found = results(tensors, {})
    with lt.intercept("bf16"):
        expected_results = results([q, *narrow, g], {})
    assert all(map(torch.equal, found, expected_results))
    assert "Keys and values of attention are rounded to mxfp8." in seen.report().remarks
    with pytest.raises(lowprec.ModeError, match=r"'kv' is a rule for formats .* got bf16"):
        lt.intercept({"kv": "bf16"})


def test_statistics_and_comparison():
    q, k, v, _ = operands(SHAPES[1])
    with lt.intercept("bf16", statistics=True) as seen:
        attend(q, k, v, enable_gqa=True)
    (taken,) = seen.report().taken
    assert taken.multiplications == 2 * 2 * 6 * 7 * 500 * 16
    assert taken.a.magnitude == float(q[0, :2].abs().max())
    assert 1e-4 < taken.error < 1e-2
    compared = lowprec.compare(lambda: attend(q, k, v, enable_gqa=True), "bf16")
    (layer,) = compared.layers
    assert 1e-4 < layer.own_error < 1e-2


@pytest.mark.sweep
def test_memory_is_linear_in_the_length():
    """All scores of 16,384 tokens are 1 GiB."""
    program = (
        "import resource, torch, lowprec.torch as lt\n"
        "q = torch.randn(1, 1, 16384, 16).requires_grad_()\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "attend = torch.nn.functional.scaled_dot_product_attention\n"
        "with lt.intercept('fp32') as seen:\n"
        "    attend(*[q[:, :, :64]] * 3).sum().backward()\n"
        "    before = peak()\n"
        "    attend(q, q, q, is_causal=True).sum().backward()\n"
        "assert not seen.report().passed\n"
        "print(peak() - before)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300
    )
    assert int(ran.stdout) < 128
