"""The example that trains in every precision, on small data of its own."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from frameworks.backends import Backend
from frameworks.conftest import load_or_skip
from lowprec import amp

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def digits(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    return importlib.import_module("digits")


def data():
    """Ten classes that are far apart."""
    rng = np.random.default_rng(0)
    y = np.arange(400) % 10
    x = (rng.standard_normal((10, 64))[y] + 0.3 * rng.standard_normal((400, 64))) / 4
    x = x.astype(np.float32)
    return x[:300], np.eye(10, dtype=np.float32)[y[:300]], x[300:], y[300:]


def variants(module):
    return [v for group in module.GROUPS.values() for v in group]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_all_variants_learn_but_the_one_that_underflows(digits, library):
    base = np if library == "numpy" else load_or_skip(Backend.TORCH).torch
    found = {v.name: digits.train(base, v, data(), 0, 12)[0] for v in variants(digits)}
    underflows = found.pop("tiny: FP16 without scaling")
    assert underflows < 0.4
    assert min(found.values()) > 0.9, found


def test_the_gradients_are_those_of_the_loss(torch, digits):
    """Against autograd's, in float32: some 100 terms a sum, so errors of about 100 units of roundoff, 1e-5."""
    policy = amp.Policy.preset("O0")
    x, y, _, _ = data()
    start = digits.start(np.random.default_rng(0))
    w = {name: torch.from_numpy(value).requires_grad_() for name, value in start.items()}
    x, y = torch.from_numpy(x[:64]), torch.from_numpy(y[:64])
    xp = amp.autocast(torch, policy)
    logits = digits.forward(xp, w, x)[1]
    loss = torch.nn.functional.cross_entropy(logits, y) * 3
    loss.backward()
    found = digits.gradients(xp, policy, {n: v.detach() for n, v in w.items()}, x, y, 3.0)
    for name, value in w.items():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-5, atol=1e-6)
