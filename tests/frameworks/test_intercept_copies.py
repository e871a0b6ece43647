"""Products with copies of weights have the layer of the weight, and the bits of a product with its numbers."""

import pytest

pytestmark = [
    pytest.mark.usefixtures("torch"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
]

MODES = ("nvfp4", "bf16", "mxfp8(rounding=stochastic,seed=1)")
ROWS = 4
COLUMNS = 16


def linear(torch, dtype=None):
    return torch.nn.Linear(COLUMNS, 8, bias=False, dtype=dtype)


class Custom:
    """A module whose ``forward`` multiplies by a function of the weights of its layers."""

    def __new__(cls, torch, weight, **layers):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                for name, layer in layers.items():
                    setattr(self, name, layer)

            def forward(self, x):
                return torch.nn.functional.linear(x, weight(self))

        return Model()


def hooked(torch):
    model = torch.nn.ModuleDict({"head": torch.nn.utils.weight_norm(linear(torch))})
    model.forward = lambda x: model["head"](x)
    return model, lambda: model["head"].weight


def parametrized(name):
    def make(torch):
        model = torch.nn.ModuleDict(
            {"head": getattr(torch.nn.utils.parametrizations, name)(linear(torch)).eval()}
        )
        model.forward = lambda x: model["head"](x)
        return model, lambda: model["head"].weight

    return make


def orthogonal(map_name):
    def make(torch):
        head = torch.nn.Linear(COLUMNS, 8, bias=False)
        orthogonal = torch.nn.utils.parametrizations.orthogonal
        model = torch.nn.ModuleDict({"head": orthogonal(head, orthogonal_map=map_name)})
        model.forward = lambda x: model["head"](x)
        return model, lambda: model["head"].weight

    return make


def custom(weight, dtype=None):
    def make(torch):
        a = torch.nn.Linear(COLUMNS, 2, bias=False)
        b = torch.nn.Linear(2, 8, bias=False)
        model = Custom(
            torch,
            lambda m: weight(torch, m),
            head=linear(torch, dtype and getattr(torch, dtype)),
            a=a,
            b=b,
        )
        return model, lambda: weight(torch, model)

    return make


def foreign(needs_gradient):
    def make(torch):
        head, w = linear(torch), torch.randn(8, COLUMNS, requires_grad=needs_gradient)
        model = torch.nn.ModuleDict({"head": head})
        model.forward = lambda x: torch.func.functional_call(head, {"weight": w}, (x,))
        return model, lambda: w

    return make


def buffer(torch):
    head = torch.nn.Module()
    head.register_buffer("weight", torch.randn(8, COLUMNS))
    return Custom(torch, lambda m: m.head.weight, head=head), lambda: head.weight


COPIES = {
    "weight_norm": parametrized("weight_norm"),
    "spectral_norm": parametrized("spectral_norm"),
    "orthogonal, matrix_exp": orthogonal("matrix_exp"),
    "orthogonal, cayley": orthogonal("cayley"),
    "weight_norm by hooks": hooked,
    "LoRA": custom(lambda t, m: m.head.weight + m.b.weight @ m.a.weight),
    "scaled": custom(lambda t, m: m.head.weight * 0.3),
    "scaled by rows": custom(lambda t, m: m.head.weight * t.arange(1.0, 9)[:, None]),
    "transposed and cloned": custom(lambda t, m: m.head.weight.T.clone().T),
    "cast": custom(lambda t, m: m.head.weight.float(), "bfloat16"),
    "functional_call": foreign(False),
    "functional_call of a leaf": foreign(True),
    "a buffer": buffer,
}


def products(seen):
    """Return the products with the copy, of the output and of the gradients of both operands."""
    extents = {ROWS, COLUMNS, 8}
    return [
        p for p in seen.report().products if {n for shape in p.shapes for n in shape} == extents
    ]


def step(torch, run, records):
    x = torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS).requires_grad_(records)
    with torch.set_grad_enabled(records):
        y = run(x)
    if records:
        (y * torch.linspace(1, 2, 8)).sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_the_layer_and_the_bits_of_its_weight(torch, lt, name, mode, records):
    torch.manual_seed(0)
    model, weight = COPIES[name](torch)
    rules = {"head": mode, "*": "fp32"}
    with lt.intercept(rules) as seen:
        torch.eye(2) @ torch.eye(2)  # modules and parameters are known from here on
        found = step(torch, model, records)
        with torch.no_grad():
            numbers = weight().clone()
    rows = products(seen)
    assert {(p.layer, p.mode) for p in rows} == {("head", mode)}
    plain = torch.nn.ModuleDict({"head": linear(torch)})
    plain["head"].weight = torch.nn.Parameter(numbers)
    with lt.intercept(rules) as seen:
        expected = step(torch, plain["head"], records)
    for x, y in zip(found, expected, strict=True):
        assert x is y is None or torch.equal(x, y)
    if weight().requires_grad:
        assert {p.backward: p.count for p in rows} == {p.backward: p.count for p in products(seen)}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_in_a_compiled_graph_is_reported(torch, lt, name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, _ = COPIES[name](torch)
    run = torch.compile(model.forward, backend="aot_eager")
    with lt.intercept("nvfp4") as seen:
        step(torch, run, records=True)
    torch._dynamo.reset()
    rows = products(seen)
    assert rows
    for p in rows:
        assert (p.layer, p.mode) == ("head", "nvfp4") or (p.mode, p.reason) == (
            "bf16", "no parameter found: computed in bf16",
        )  # fmt: skip


def test_weights_that_are_joined_name_both_layers(torch, lt):
    first, second = torch.nn.Linear(COLUMNS, 4), torch.nn.Linear(COLUMNS, 4)
    model = Custom(
        torch, lambda m: torch.cat([m.first.weight, m.second.weight]), first=first, second=second
    )
    with lt.intercept({"first": "nvfp4", "*": "bf16"}) as seen:
        step(torch, model, records=True)
    assert {(p.layer, p.mode) for p in products(seen)} == {("first|second", "nvfp4")}
    assert "have different modes, and share an operand" in str(seen.report())
    with lt.intercept("nvfp4") as seen:
        step(torch, model, records=False)
    assert {(p.layer, p.mode) for p in products(seen)} == {("Model", "nvfp4")}
    model.third = torch.nn.Linear(COLUMNS, 4)  # so that the two are not all matrices of the module
    with lt.intercept("nvfp4") as seen:
        torch.eye(2) @ torch.eye(2)
        step(torch, model, records=False)
    assert {p.reason for p in products(seen)} == {"no parameter found: computed in bf16"}


@pytest.mark.parametrize("records", [True, False])
def test_functions_of_data_are_no_copies(torch, lt, records):
    """Attention, also that of one sequence, of embeddings, and of learned queries."""
    nn = torch.nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 12)
            self.q, self.k, self.v = (nn.Linear(12, 12, bias=bias) for bias in (False, True, False))
            self.queries = nn.Parameter(torch.randn(5, 12))

        def forward(self, tokens):
            x = self.embed(tokens) * self.queries[0]
            q = self.q(x) if tokens.ndim == 1 else self.q(self.queries.expand(len(tokens), -1, -1))
            scores = torch.softmax(q @ self.k(x).mT, -1)
            return scores @ self.v(x) + scores @ x

    torch.manual_seed(0)
    model = Attention()
    with torch.set_grad_enabled(records), lt.intercept("nvfp4") as seen:
        model(torch.tensor([1, 2, 3]))
        model(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    found = {(p.layer, p.mode) for p in seen.report().taken}
    assert found == {("q", "nvfp4"), ("k", "nvfp4"), ("v", "nvfp4"), ("", "bf16")}
    assert sum(p.count for p in seen.report().taken if not p.layer) == 6


@pytest.mark.parametrize("mode", ["bf16", "nvfp4"])
def test_activations_at_the_place_of_a_product_stay_activations(torch, lt, mode):
    """Where the modes do not depend on layers, the second product at a place is not searched for its layer."""
    linear = torch.nn.Linear(COLUMNS, COLUMNS)
    model = Custom(torch, lambda m: m.head(torch.ones(8, COLUMNS)) * 2, head=linear)
    x = torch.ones(ROWS, COLUMNS)
    with lt.intercept(mode) as seen:
        for _ in range(3):
            model(x)
    rows = {p.shapes: p for p in seen.report().products}
    of_activations = rows[(ROWS, COLUMNS), (COLUMNS, 8)]
    assert (of_activations.layer, of_activations.count, of_activations.mode) == ("", 3, "bf16")
    weight = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(COLUMNS, 8, bias=False))
    with lt.intercept(mode) as seen:
        weight(x)
        weight(x)
    assert [p.layer for p in seen.report().products if p.operator == "mm"] == ["Linear"]
