"""``lowprec.torch.batch_invariant``: a row has the same bits alone, in a batch, and with any number of threads."""

from types import MappingProxyType

import pytest

import lowprec

lt = pytest.importorskip("lowprec.torch")
torch = pytest.importorskip("torch")

functional = torch.nn.functional
FUNCTIONS = MappingProxyType(
    {
        **{
            name: getattr(functional, name)
            for name in ["gelu", "silu", "softplus", "mish", "elu", "selu"]
        },
        **{
            name: getattr(torch, name)
            for name in ["sigmoid", "exp2", "sinh", "cosh", "rsqrt", "exp", "tanh"]
        },
        "tanh GELU": lambda x: functional.gelu(x, approximate="tanh"),
        "power": lambda x: x.abs() ** 1.7,
        "power of tensors": lambda x: x.abs() ** x,
        "power of a number": lambda x: 10000.0**x,
        "in place": lambda x: functional.silu(x.clone(), inplace=True),
        "out": lambda x: torch.sigmoid(x, out=torch.empty(0, dtype=x.dtype)),
        "scalar": lambda x: x * torch.sigmoid(torch.tensor(2.0)),
    }
)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_row_have_its_bits(name, dtype, threads):
    function = FUNCTIONS[name]
    for rows, width in ((40, 1), (7, 37), (12, 3001)):
        x = random(rows, width).to(dtype)
        plain = function(x)
        with lt.batch_invariant():
            found = function(x)
            alone = torch.cat([function(x[i : i + 1]) for i in range(rows)])
            columns = function(x.T.contiguous().T)
        assert torch.equal(found.nan_to_num(), alone.nan_to_num())
        assert torch.equal(found.nan_to_num(), columns.nan_to_num())
        assert found.stride() == plain.stride()
        # scalar and vector functions err by some units
        assert torch.allclose(
            found.float(), plain.float(), rtol=2**-6 if x.itemsize == 2 else 2**-18, equal_nan=True
        )


class Decoder(torch.nn.Module):
    """A layer of attention and a gated layer, of widths that are no multiples of a vector."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(36, 108)
        self.gate = torch.nn.Linear(36, 53)
        self.up = torch.nn.Linear(36, 53)
        self.down = torch.nn.Linear(53, 36)
        self.norm = torch.nn.RMSNorm(36)

    def forward(self, x, mask=None, cache=None):
        q, k, v = (t.unflatten(-1, (3, 12)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if cache:
            k, v = (torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True))
        is_causal = mask is None and not cache
        found = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        x = self.norm(x + found.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.gate(x)) * self.up(x)), (k, v)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "int8", "mxfp8"])
def test_a_model_in_batches_and_in_decoding(mode, threads):
    torch.manual_seed(0)
    model = Decoder()
    prompts = random(7, 30, 36)
    with torch.no_grad(), lt.batch_invariant(mode) as seen:
        alone = [model(prompts[i : i + 1, : 30 - i])[0][0] for i in range(7)]
        mask = torch.ones(7, 1, 30, 30, dtype=torch.bool).tril()
        padded = torch.zeros(7, 30, 36)
        for i in range(7):
            padded[i, i:] = prompts[i, : 30 - i]
            mask[i, ..., :i] = False
        batch = model(padded, mask)[0]
        first, cache = model(prompts[:2, :10])
        decoded = [first]
        for at in range(10, 29):
            token, cache = model(prompts[:2, at : at + 1], cache=cache)
            decoded.append(token)
    for i in range(7):
        assert torch.equal(batch[i, i:], alone[i])
    for i in range(2):
        assert torch.equal(torch.cat(decoded, 1)[i, : len(alone[i])], alone[i][:29])
    assert not seen.report().passed


def test_images_in_batches(threads):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 10, 3), torch.nn.BatchNorm2d(10), torch.nn.SiLU()]
    layers += [torch.nn.Conv2d(10, 10, 3, groups=10), torch.nn.AdaptiveAvgPool2d(1)]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(10, 5)).eval()
    images = random(9, 3, 17, 19)
    with torch.no_grad(), lt.batch_invariant():
        batch = model(images)
        for i in range(9):
            assert torch.equal(model(images[i : i + 1])[0], batch[i])


@pytest.mark.parametrize(
    "mode", ["fp8", "nvfp4", "fp64", lowprec.Recipe("mxfp8", rounding="stochastic", seed=1)]
)
def test_modes_in_which_rows_depend_on_others_are_refused(mode):
    with pytest.raises(lowprec.SettingError, match=r"batch_invariant: in .*; choose another mode"):
        lt.batch_invariant({"*": mode})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: torch.nn.LSTM(3, 4).half()(random(5, 2, 3).half()),
            "(mkldnn_rnn_layer|addmm).*left to Py",
        ),
        (lambda: random(3, 3).double() @ random(3, 3).double(), "mm of float64 is left"),
        (lambda: torch.linalg.inv(random(3, 3)), "linalg_inv"),
    ],
)
def test_products_left_to_pytorch_raise(call, match):
    with (
        torch.no_grad(),
        lt.batch_invariant(),
        pytest.raises(lowprec.UnsupportedError, match=match),
    ):
        call()


def test_outside_of_the_block_functions_are_pytorchs():
    x = random(5, 37)
    before = torch.sigmoid(x)
    with lt.batch_invariant():
        torch.sigmoid(x)
    assert torch.equal(torch.sigmoid(x), before)
    with lt.intercept("fp32"):
        assert torch.equal(torch.sigmoid(x), before)
