"""PyTorch's LSTM inside ``lowprec.torch.intercept``: forward and gradients, in the mode of its module."""

import sys
import types
import unittest
from contextlib import nullcontext
from types import MappingProxyType

import pytest

lt = pytest.importorskip("lowprec.torch")
torch = pytest.importorskip("torch")

#: Relative error of rounding to nearest: of a sum in float32, and of an operand.
UNIT = 2.0**-24
OPERAND = MappingProxyType({"fp32": 0.0, "bf16": 2.0**-8})
KINDS = MappingProxyType(
    {
        "one": {},
        "bidirectional layers": {"num_layers": 2, "bidirectional": True},
        "without biases": {"bias": False, "num_layers": 2},
        "projected": {"proj_size": 3, "num_layers": 2},
    }
)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(kind, width=9, **further):
    torch.manual_seed(0)
    return torch.nn.LSTM(width, 7, **KINDS[kind], **further)


def product(x, of_x, weight, operand):
    """Return a product in float64, and the bound of its error."""
    error = 2 * operand + operand**2 + (x.shape[-1] + 3) * UNIT
    return x @ weight.T, (of_x + error * x.abs()) @ weight.abs().T


def steps(x, of_x, weights, operand):
    """Return the outputs of a layer in one direction in float64, and the bounds of their errors to the first order.

    A function errs by 4 units; the derivative of the sigmoid is 1/4 at most, that of tanh is 1.
    """
    of_input, of_state, *others = weights
    projection = others.pop() if len(others) % 2 else None
    bias = sum(others) if others else torch.zeros(1).double()
    h = of_h = torch.zeros(x.shape[1], of_state.shape[1]).double()
    c = of_c = torch.zeros(x.shape[1], of_input.shape[0] // 4).double()
    found = []
    for step, of_step in zip(x, of_x, strict=True):
        both = product(step, of_step, of_input, operand), product(h, of_h, of_state, operand)
        gates = both[0][0] + both[1][0] + bias
        bound = both[0][1] + both[1][1]
        bound += 4 * UNIT * (both[0][0].abs() + both[1][0].abs() + bias.abs())
        i, f, g, o = gates.chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        of_i, of_f, of_g, of_o = (
            b * slope + 4 * UNIT
            for b, slope in zip(bound.chunk(4, 1), (0.25, 0.25, 1, 0.25), strict=True)
        )
        of_c = f * of_c + c.abs() * of_f + i * of_g + g.abs() * of_i
        c = f * c + i * g
        of_c = of_c + 4 * UNIT * c.abs() + 4 * UNIT
        of_h = o * (of_c + 4 * UNIT) + c.tanh().abs() * of_o + UNIT
        h = o * c.tanh()
        if projection is not None:
            h, of_h = product(h, of_h, projection, operand)
        found.append((h, of_h))
    return [torch.stack(each) for each in zip(*found, strict=True)]


def expected(lstm, x, operand):
    x = x.double()
    bound = torch.zeros_like(x)
    directions = 1 + lstm.bidirectional
    for at in range(lstm.num_layers):
        outputs = []
        for direction in range(directions):
            weights = [w.detach().double() for w in lstm.all_weights[at * directions + direction]]
            given = [t.flip(0) if direction else t for t in (x, bound)]
            outputs.append([t.flip(0) if direction else t for t in steps(*given, weights, operand)])
        x, bound = (torch.cat(each, -1) for each in zip(*outputs, strict=True))
    return x, bound


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", OPERAND)
def test_outputs_are_within_their_bounds(mode, kind):
    lstm = layer(kind)
    x = drawn(6, 5, 9)
    value, bound = expected(lstm, x, OPERAND[mode])
    with torch.inference_mode(), lt.intercept(mode) as seen:
        found, _ = lstm(x)
    assert ((found - value).abs() <= 1.1 * bound).all()
    report = seen.report()
    assert not report.passed
    assert {(p.layer, p.mode) for p in report.taken} == {("LSTM", mode)}
    matrices = sum(p.numel() for p in lstm.parameters() if p.ndim == 2)
    assert sum(p.multiplications for p in report.taken) == 6 * 5 * matrices


def results(lstm, x, dtype=torch.float32, forward=nullcontext, backward=nullcontext):
    """Return outputs, states and all gradients."""
    lstm = lstm.to(dtype)
    lstm.zero_grad()
    x = x.to(dtype).requires_grad_()
    states = [drawn(*s, seed=3).to(dtype).requires_grad_() for s in ((lstm.num_layers, 5, 7),) * 2]
    with forward():
        y, (h, c) = lstm(x, tuple(states))
    with backward():
        (y.square().sum() + h.sin().sum() + c.square().sum()).backward()
    leaves = [x, *states, *lstm.parameters()]
    return [t.detach().double() for t in (y, h, c, *(p.grad for p in leaves))]


@pytest.mark.parametrize("inside", ["both", "forward", "backward"])
@pytest.mark.parametrize("kind", ["one", "without biases"])
def test_gradients_are_right_inside_and_outside(kind, inside):
    """The error is that of PyTorch's own float32, up to a factor for another order of sums."""
    lstm = layer(kind, batch_first=True)
    x = drawn(5, 6, 9)
    with lt.intercept("fp32") as seen:
        pass
    scopes = {name: lambda: seen for name in ("forward", "backward") if inside in (name, "both")}
    found = results(lstm, x.clone(), **scopes)
    plain = results(lstm, x.clone())
    exact = results(lstm, x.clone(), torch.float64)
    for mine, own, value in zip(found, plain, exact, strict=True):
        assert (mine - value).norm() <= 4 * (own - value).norm() + 4 * UNIT * value.norm()
        assert mine.stride() == own.stride()
    passed = {p.operator for p in seen.report().passed}
    assert passed == ({"mkldnn_rnn_layer_backward"} if inside == "backward" else set())


def test_the_gradient_of_a_weight_is_one_product_in_its_layer():
    lstm = layer("one")
    x = drawn(6, 5, 9)
    with lt.intercept("mxfp8") as seen:
        lstm(x)[0].square().sum().backward()
    backward = [p for p in seen.report().taken if p.backward]
    assert {(p.layer, p.mode) for p in backward} == {("LSTM", "mxfp8")}
    assert (
        sum(p.count for p in backward) == 5 + 2
    )  # of the states after the first one, and of two weights


@pytest.mark.parametrize("kind", ["one", "bidirectional layers"])
def test_second_derivatives_are_right(kind):
    """Errors of float32, of sums of at most some hundred products."""
    lstm = layer(kind)
    found = []
    for dtype, scope in ((torch.float64, nullcontext()), (torch.float32, lt.intercept("fp32"))):
        lstm = lstm.to(dtype)
        x = drawn(6, 5, 9).to(dtype).requires_grad_()
        with scope:
            first = torch.autograd.grad(lstm(x)[0].square().sum(), x, create_graph=True)[0]
            leaves = [x, *lstm.parameters()]
            found.append(torch.autograd.grad(first.sin().sum(), leaves))
    for exact, mine in zip(*found, strict=True):
        assert (mine - exact).norm() <= 300 * UNIT * exact.norm()


@pytest.mark.parametrize("kind", ["one", "bidirectional layers"])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_sequence_has_the_same_bits_alone_and_in_packed_batches(mode, kind):
    lstm = layer(kind)
    x = drawn(8, 7, 9)
    lengths = [8, 8, 5, 5, 4, 2, 1]
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    with lt.batch_invariant(mode) as seen:
        batch, (h, c) = lstm(packed)
        batch, _ = torch.nn.utils.rnn.pad_packed_sequence(batch)
        for i, length in enumerate(lengths):
            alone, states = lstm(x[:length, i : i + 1])
            assert torch.equal(alone[:, 0], batch[:length, i])
            for state, own in zip((h, c), states, strict=True):
                assert torch.equal(own[:, 0], state[:, i])
    assert not seen.report().passed


class LanguageModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 37)
        self.lstm = torch.nn.LSTM(37, 29, 2, batch_first=True)
        self.head = torch.nn.Linear(29, 50)

    def forward(self, x, states=None):
        y, states = self.lstm(self.embed(x), states)
        return self.head(y), states


@pytest.mark.parametrize("mode", ["fp32", "bf16", "int8", "mxfp8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_language_model_has_the_same_bits_in_any_batch(threads, mode):
    torch.manual_seed(0)
    model = LanguageModel()
    x = torch.randint(0, 50, (32, 12), generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad(), lt.batch_invariant(mode) as seen:
            alone = torch.cat([model(x[i : i + 1])[0] for i in range(32)])
            for rows in (2, 7, 32):
                assert torch.equal(model(x[:rows])[0], alone[:rows])
            states = None
            for at in range(12):
                token, states = model(x[:, at : at + 1], states)
                assert torch.equal(token, alone[:, at : at + 1])
    finally:
        torch.set_num_threads(before)
    assert {(p.layer, p.mode) for p in seen.report().products} == {("lstm", mode), ("head", mode)}


@pytest.mark.parametrize(
    ("rules", "dtype", "why"),
    [
        ({"head": "bf16"}, torch.float32, "no mode for this layer"),
        ("fp32", torch.bfloat16, "does not act on this element type"),
    ],
)
def test_a_layer_left_to_pytorch_is_its_own_kernel(rules, dtype, why):
    lstm = layer("one").to(dtype)
    x = drawn(6, 5, 9).to(dtype)
    plain, _ = lstm(x)
    with lt.intercept(rules) as seen:
        found, _ = lstm(x)
    assert torch.equal(found, plain)
    (passed,) = seen.report().passed
    assert (passed.operator, passed.layer) == ("mkldnn_rnn_layer", "LSTM")
    assert why in passed.reason


def modules():
    stub = types.ModuleType("expecttest")  # needed by PyTorch's own tests
    stub.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.common_modules import module_db

    return [m for m in module_db if m.module_cls in (torch.nn.LSTM, torch.nn.LSTMCell)]


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_pytorchs_own_samples_agree():
    count = 0
    for info in modules():
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
        )
        for sample in samples:
            made = sample.constructor_input
            torch.manual_seed(0)
            module = info.module_cls(*made.args, **made.kwargs)
            given = sample.forward_input
            found = []
            for scope in (nullcontext(), lt.intercept("fp32")):
                with scope:
                    y = module(*given.args, **given.kwargs)
                    y = [t for part in y for t in ([part] if torch.is_tensor(part) else part)]
                    leaves = list(module.parameters())
                    found.append((*y, *torch.autograd.grad(sum(t.sum() for t in y), leaves)))
            for plain, taken in zip(*found, strict=True):
                assert torch.allclose(taken, plain, rtol=2e-5, atol=2e-5)
                assert taken.stride() == plain.stride()
            count += 1
    assert count >= 10
