"""The cheapest mode of each layer: a value for ``intercept`` and for ``lowprec run``, within the tolerance."""

import io
import sys
from itertools import product

import pytest

from lowprec.errors import ModeError, SettingError

pytestmark = pytest.mark.usefixtures("torch")


def model(torch):
    """Return three layers of which the last one alone changes in bfloat16, and a batch."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16, bias=False) for _ in range(3)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(16) * 2)
        layers[-1].weight.copy_(torch.eye(16) * (1 + 2.0**-9))  # exact in TF32
    return torch.nn.Sequential(*layers), torch.ones(4, 16)


def test_the_sensitive_layer_has_the_better_mode(torch, lt):
    net, x = model(torch)
    found = lt.search_modes(lambda: net(x), rtol=2.0**-10)
    assert next(iter(found.sensitivity)) == "2"
    assert found.sensitivity["2"] == {"bf16": pytest.approx(2.0**-9, rel=0.01), "tf32": 0}
    assert found.sensitivity["0"] == {"bf16": 0, "tf32": 0}
    assert found["2"] == "tf32"
    assert found["0"] == "bf16"
    assert list(found)[-1] == "*"
    with lt.intercept(found):
        y = net(x)
    assert torch.equal(y, net(x))
    assert found.change == 0
    assert "2      33.3%  tf32" in str(found)


@pytest.mark.parametrize("rtol", [1e-2, 1e-3, 3e-4, 1e-6])
def test_the_change_is_within_the_tolerance(torch, lt, rtol):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.5)
    x = torch.randn(2, 4, 16)

    def run():
        layer.zero_grad()
        y = layer(x)  # with dropout, whose random numbers are the same in each call
        y.square().mean().backward()
        return [y, layer.linear1.weight.grad]

    state = torch.get_rng_state()
    found = lt.search_modes(run, rtol=rtol)
    assert torch.equal(state, torch.get_rng_state())
    assert found.change <= rtol
    costs = {"bf16": 0, "tf32": 1, "fp32": 2}
    lower = lt.search_modes(run, rtol=10 * rtol)
    assert all(costs[lower[name]] <= costs[found[name]] for name in found)


def test_no_cheaper_choice_of_two_layers_fits(torch, lt):
    """The search is compared with all choices."""
    torch.manual_seed(1)
    net, x = (
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)),
        torch.randn(8, 16),
    )
    modes = ("bf16", "tf32", "fp32")
    true = net(x).detach()
    for rtol in (3e-3, 1e-3, 3e-4):
        found = lt.search_modes(lambda: net(x), rtol=rtol)
        cost = modes.index(found["0"]) + modes.index(found["2"])
        for a, b in product(modes, repeat=2):
            with lt.intercept({"0": a, "2": b}):
                change = float((net(x).detach() - true).norm() / true.norm())
            assert change > rtol or modes.index(a) + modes.index(b) >= cost, (rtol, a, b)


def test_changes_that_add_up_are_corrected_by_the_measured_one():
    """Four layers are expected to change the result by 2, and change it by 4."""
    from lowprec.torch.mode_search import _choose

    measured = []

    def measure(chosen):
        measured.append(sum((1.0, 0.1, 0.0)[i] for i in chosen.values()))
        return measured[-1]

    chosen, change = _choose(
        dict.fromkeys("abcd", (1.0, 0.1)), dict.fromkeys("abcd", 0.25), 2.15, measure
    )
    assert sorted(chosen.values()) == [0, 1, 1, 1]
    assert measured == [4.0, change] == [4.0, pytest.approx(1.3)]


def test_saved_modes_are_read_by_lowprec_run(torch, lt, tmp_path):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    from lowprec.core.rules import parse_rules

    net = torch.nn.ModuleDict({"a[0]": torch.nn.Linear(4, 4)})
    x = torch.ones(4, 4)
    found = lt.search_modes(lambda: net["a[0]"](x @ x), rtol=0.1)
    found.save(tmp_path / "modes.toml")
    saved = tomllib.loads((tmp_path / "modes.toml").read_text())["rules"]
    assert saved == dict(found) == dict(parse_rules(tmp_path / "modes.toml"))
    assert list(saved.items())[-1] == ("*", "fp32")
    with lt.intercept(saved) as seen:
        net["a[0]"](x @ x)
    assert {p.layer: p.mode for p in seen.report().taken} == {"a[0]": "bf16", "": "bf16"}


def test_refusals(torch, lt):
    net, x = model(torch)
    with pytest.raises(SettingError, match="rtol must be positive, got 0"):
        lt.search_modes(lambda: net(x), rtol=0)
    with pytest.raises(ModeError, match="not a math mode"):
        lt.search_modes(lambda: net(x), rtol=1, modes=["bf17"])
    with pytest.raises(SettingError, match="no product that a mode acts on"):
        lt.search_modes(lambda: x + 1, rtol=1)
    with pytest.raises(SettingError, match="zero or not finite"):
        lt.search_modes(lambda: 0 * net(x), rtol=1)
    with pytest.raises(SettingError, match="the function returned None; return tensors or numbers"):
        lt.search_modes(lambda: [net(x)].clear(), rtol=1)
    results = iter(range(10))
    with pytest.raises(
        SettingError, match=r"two calls of the function in FP32 differ by 1\.0e\+00"
    ):
        lt.search_modes(lambda: net(x) * (1 + next(results)), rtol=0.1)


def test_a_terminal_shows_the_progress(torch, lt, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    net, x = model(torch)
    lt.search_modes(lambda: net(x), rtol=1)
    assert ": 2, tf32" in terminal.getvalue()
