"""Train a small GPT and a network for digits in plain PyTorch, in FP32 and in every narrow format.

    python docs/examples/train_narrow.py [--full] [--seeds N] [--steps N] [--out FOLDER]

The GPT predicts the next character of the Python manual, which Python contains (`pydoc_data`); the network recognises
scikit-learn's handwritten digits. Nothing in them is of lowprec: `lowprec.torch.intercept` rounds the operands of their
linear layers, in the forward and the backward pass, except the last layer's, which stays in bfloat16. The same seed
gives the same weights and batches in each format. The table shows the loss on held-out data, and the p-value of the
hypothesis that it is FP32's: of Student's test of pairs, corrected by Holm's method. `--full` takes hours.

Needs scikit-learn, SciPy and rich; matplotlib for `--out`, the folder of `narrow.md` and `narrow.svg`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from digits import digits, equal_pairs, holm
from torch import nn

import lowprec.torch
from lowprec import Recipe

Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def variants(seed: int) -> dict[str, Any]:
    """Return the modes by name; the first one is the reference."""
    return {
        "fp32": "fp32",
        "bf16": "bf16",
        "fp8, E5M2 gradients": Recipe.fp8_training(),
        "mxfp8": Recipe.mxfp8_training(),
        "int8": "int8",
        "mxfp4": "mxfp4",
        "nvfp4": "nvfp4",
        "nvfp4 with its measures": Recipe.nvfp4_training(seed=seed),
    }


@dataclass(frozen=True)
class Size:
    """The extents of the GPT, and the number of steps and the learning rate of both models."""

    layers: int
    width: int
    tokens: int
    batch: int
    steps: int
    rate: float


QUICK, FULL = Size(2, 64, 32, 16, 20, 3e-3), Size(6, 256, 128, 32, 3000, 1e-3)


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next features, shape (batch, tokens, width)."""
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.first(x)).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    """From characters, shape (batch, tokens), to logits of the next ones."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.place = (
            nn.Embedding(128, size.width),
            nn.Embedding(size.tokens, size.width),
        )
        self.blocks = nn.Sequential(
            *(Block(size.width) for _ in range(size.layers)), nn.LayerNorm(size.width)
        )
        self.head = nn.Linear(size.width, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.blocks(self.embed(text) + self.place.weight)).transpose(1, 2)


def gpt(size: Size) -> tuple[nn.Module, Batches, tuple[torch.Tensor, torch.Tensor]]:
    """Return a model, batches of the first nine tenths of the text, and a larger one of the rest."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
    cut = len(text) * 9 // 10

    def batch(part: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(part) - size.tokens - 1, (count,)).tolist()
        rows = torch.stack([part[i : i + size.tokens + 1] for i in starts])
        return rows[:, :-1], rows[:, 1:]

    return Gpt(size), lambda _: batch(text[:cut], size.batch), batch(text[cut:], 256)


def network(size: Size) -> tuple[nn.Module, Batches, tuple[torch.Tensor, torch.Tensor]]:
    """Return a network for digits, batches of them, and the held-out digits."""
    x, y, test_x, test_y = (torch.tensor(each) for each in digits())
    model = nn.Sequential()
    for name, layer in (
        ("a", nn.Linear(64, 128)),
        ("b", nn.Linear(128, 128)),
        ("head", nn.Linear(128, 10)),
    ):
        model.add_module(name, layer)
        if name != "head":
            model.add_module(f"{name}_relu", nn.ReLU())

    def batch(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(len(x), (64,))
        return x[rows], y[rows].argmax(1)

    return model, batch, (test_x, test_y)


TASKS = {"GPT": gpt, "digits": network}


def train(task: str, mode: Any, seed: int, size: Size) -> float:
    """Train a model and return its loss on held-out data."""
    torch.manual_seed(seed)
    model, batches, (x, y) = TASKS[task](size)
    optimizer = torch.optim.AdamW(model.parameters(), size.rate)
    modes = {"head": "fp32" if mode == "fp32" else "bf16", "*": mode}
    with lowprec.torch.intercept(modes) as seen:
        for step in range(size.steps):
            inputs, targets = batches(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            seen.step()
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(x), y))


def trainings(seeds: int, size: Size) -> Iterator[tuple[str, str, float]]:
    """Yield task, variant and loss of each training, with a progress bar."""
    from rich.progress import track

    wanted = [(task, name, seed) for task in TASKS for name in variants(0) for seed in range(seeds)]
    for task, name, seed in track(wanted, "training"):
        yield task, name, train(task, variants(seed)[name], seed, size)


def table(losses: dict[tuple[str, str], list[float]]) -> str:
    """Return the losses in Markdown."""
    reference = next(iter(variants(0)))
    compared = {
        key: equal_pairs(losses[key[0], reference], x)
        for key, x in losses.items()
        if key[1] != reference
    }
    p = dict(zip(compared, holm(list(compared.values())), strict=True))
    lines = [
        "| task | mode | loss | std. dev. | to fp32 | p, Holm |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for (task, name), each in losses.items():
        mean, spread = statistics.fmean(each), statistics.stdev(each) if len(each) > 1 else 0.0
        change = mean / statistics.fmean(losses[task, reference]) - 1
        shown = f"{p[task, name]:.2g}" if (task, name) in p else "-"
        lines.append(f"| {task} | {name} | {mean:.4f} | {spread:.4f} | {change:+.2%} | {shown} |")
    return "\n".join(lines) + "\n"


def draw(losses: dict[tuple[str, str], list[float]]) -> Any:
    """Return a figure of the losses relative to FP32 of the same seed: a panel for each task, a point for each seed."""
    from matplotlib.figure import Figure

    names = list(variants(0))
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    for panel, task in zip(figure.subplots(1, len(TASKS), sharey=True), TASKS, strict=True):
        for place, name in enumerate(names):
            changes = [
                100 * (x / y - 1)
                for x, y in zip(losses[task, name], losses[task, names[0]], strict=True)
            ]
            panel.plot(
                changes, [place] * len(changes), "o", alpha=0.4, color="#0072b2", markersize=5
            )
            panel.plot(statistics.fmean(changes), place, "|", markersize=16, color="#d55e00")
        panel.set(title=task, xlabel="loss compared with fp32, %")
        panel.set_yticks(range(len(names)), names)
        panel.grid(axis="x")
    panel.invert_yaxis()
    return figure


def main() -> None:
    """Train all, print the table and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--full",
        action="store_true",
        help="a GPT of 6 layers of 256 features, 3,000 steps, 5 seeds",
    )
    parser.add_argument("--seeds", type=int, help="trainings of each model in each mode")
    parser.add_argument("--steps", type=int, help="steps of each training")
    parser.add_argument("--out", type=Path, help="folder of the table and the plot")
    options = parser.parse_args()
    size = FULL if options.full else QUICK
    if options.steps:
        size = replace(size, steps=options.steps)
    losses: dict[tuple[str, str], list[float]] = {}
    for task, name, loss in trainings(options.seeds or (5 if options.full else 2), size):
        losses.setdefault((task, name), []).append(loss)
    text = table(losses)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "narrow.md").write_text(text, encoding="utf-8")
        draw(losses).savefig(options.out / "narrow.svg")


if __name__ == "__main__":
    main()
