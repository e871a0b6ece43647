"""The example that trains in every precision, on small data of its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from frameworks.backends import Backend
from frameworks.conftest import load_or_skip
from lowprec import amp

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_example", ROOT / "docs/examples/digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits_example"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def data() -> tuple[Any, ...]:
    """Ten classes that are far apart."""
    rng = np.random.default_rng(0)
    y = np.arange(400) % 10
    x = (rng.standard_normal((10, 64))[y] + 0.3 * rng.standard_normal((400, 64))) / 4
    x = x.astype(np.float32)
    return x[:300], np.eye(10, dtype=np.float32)[y[:300]], x[300:], y[300:]


def variants(module: ModuleType) -> list[Any]:
    return [v for group in module.GROUPS.values() for v in group]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_all_variants_learn_but_the_one_that_underflows(digits: ModuleType, library: str) -> None:
    base: Any = np if library == "numpy" else load_or_skip(Backend.TORCH).torch
    found = {v.name: digits.train(base, v, data(), 0, 12)[0] for v in variants(digits)}
    underflows = found.pop("tiny: FP16 without scaling")
    assert underflows < 0.4
    assert min(found.values()) > 0.9, found


def test_gradients_underflow_to_nothing_without_a_scale(digits: ModuleType) -> None:
    policy = amp.Policy.parse("O1")
    x, y, _, _ = data()
    w = digits.start(np.random.default_rng(0))
    for factor, expected in ((1.0, True), (65536.0, False)):
        xp = amp.autocast(np, policy)
        grads = digits.gradients(xp, policy, w, x[:64], y[:64], digits.TINY * factor)
        # The last bias takes part in no product, and adds up in float32.
        assert all((grads[name] == 0).all() for name in ("w1", "b1", "w2")) is expected


def test_the_gradients_are_those_of_the_loss(digits: ModuleType) -> None:
    """Beside autograd's, in float32: some 100 terms a sum, so errors of about 100 units of roundoff, 1e-5."""
    torch = load_or_skip(Backend.TORCH).torch
    policy = amp.Policy.parse("O0")
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


def results(module: ModuleType) -> list[Any]:
    """Accuracies of 90, 92 and 94 %, and 10 % of the one that underflows."""
    worse = "tiny: FP16 without scaling"
    return [
        module.Result("numpy", v.name, seed, 15, 0.1 if v.name == worse else value, 1, 8.0, 0.5)
        for v in variants(module)
        for seed, value in enumerate((0.9, 0.92, 0.94))
    ]


def test_table_and_statistics(digits: ModuleType) -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    rows = {row["variant"]: row for row in digits.summaries(results(digits))}
    assert "p" not in rows["FP32 (O0)"]
    assert rows["TF32 (O1)"]["p"] == rows["TF32 (O1)"]["p_paired"] == 1.0
    worse = rows["tiny: FP16 without scaling"]
    assert worse["p"] < 0.001
    assert worse["p_holm"] == pytest.approx(8 * worse["p_paired"])
    assert rows["TF32 (O1)"]["mean"] == pytest.approx(0.92)
    assert rows["TF32 (O1)"]["std"] == pytest.approx(0.02)
    text = digits.table(list(rows.values()))
    assert text.count("\n") == 2 + len(rows)
    assert "| numpy | TF32 (O1) | 92.00% | 92.00% | 2.00% | 1 | 1 | 1 | 1.0 |" in text
    assert "| numpy | FP32 (O0) | 92.00% | 92.00% | 2.00% | - | - | - | 1.0 |" in text


def test_the_tests_are_scipys(digits: ModuleType) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    first, second = [0.9, 0.95, 0.93, 0.97], [0.8, 0.92, 0.9]
    expected = stats.ttest_ind(first, second, equal_var=False).pvalue
    assert digits.equal_means(first, second) == pytest.approx(expected, rel=1e-9)
    expected = stats.ttest_rel(first[1:], second).pvalue
    assert digits.equal_pairs(first[1:], second) == pytest.approx(expected, rel=1e-9)
    for test in (digits.equal_means, digits.equal_pairs):
        assert test([1.0, 1.0], [1.0, 1.0]) == 1.0
        assert test([1.0, 1.0], [0.5, 0.5]) == 0.0
        assert test([1.0], [0.5]) == 1.0, "one training tells nothing"


def test_holms_method(digits: ModuleType) -> None:
    assert digits.holm([]) == []
    # The smallest times 4, the next times 3, and none smaller than the one before it.
    assert digits.holm([0.02, 0.5, 0.001, 0.015]) == pytest.approx([0.045, 0.5, 0.004, 0.045])
    assert digits.holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_command_goes_on_where_it_was_stopped(
    digits: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rich", "matplotlib", "scipy"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    monkeypatch.setattr(digits, "digits", data)
    real, trained = digits.train, []

    def train(base: Any, variant: Any, *rest: Any) -> Any:
        trained.append(variant.name)
        if len(trained) == 6:
            raise KeyboardInterrupt
        return real(base, variant, *rest)

    monkeypatch.setattr(digits, "train", train)
    command = ["--seeds", "2", "--epochs", "1", "--libraries", "numpy", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        digits.main(command)
    lines = tmp_path / "digits.jsonl"
    assert lines.read_text().count("\n") == 5
    with open(lines, "a") as file:
        file.write('{"library": "num')  # as a full disk leaves it
    digits.main(command)
    assert len(trained) == 6 + 15
    assert len(digits.done(lines)) == 20
    table = (tmp_path / "digits.md").read_text()
    assert table == digits.table(digits.summaries(list(digits.done(lines).values())))
    assert "<svg" in (tmp_path / "digits.svg").read_text()
    # Other trainings than those in the file.
    digits.main([*command[:3], "2", *command[4:]])
    assert len(trained) == 21 + 20
