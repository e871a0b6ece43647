"""A training step of a six-layer transformer in plain PyTorch, in FP32, under autocast and under lowprec's `intercept`.

usage: python docs/examples/training_step.py [--modes MODE ...] [--threads N] [--rounds N] [--layers N] [--width N]
       [--batch N]

The model predicts the next character of Python sources and contains nothing of lowprec. Copies of it start from the
same weights and read the same batches: one trains in PyTorch's FP32, one under
`torch.set_float32_matmul_precision("medium")`, one with its forward pass under `torch.autocast("cpu", torch.bfloat16)`,
and one inside `lowprec.torch.intercept` for each mode. The copies take turns in random order; each timed step follows
an untimed one of the same copy. The table shows the median time of a step, the median and the quartiles of its ratio to
the FP32 step of the same round, and the mean loss of the last three timed steps.

With one thread, times are CPU times of that thread. With more, run it on a machine with no other load.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

import lowprec
import lowprec.torch

TOKENS = 128
FP32, AUTOCAST = "PyTorch, FP32", "PyTorch, autocast to bfloat16"
MEDIUM = 'PyTorch, set_float32_matmul_precision("medium")'


class Characters(nn.Module):
    """From text, shape (batch, tokens), to logits of the next characters: PyTorch's encoder with a causal mask."""

    def __init__(self, layers: int, width: int, characters: int = 128) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, width), nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=8,
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.score = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.embed(text) + self.place.weight
        return self.score(self.encoder(x, mask=self.mask, is_causal=True))


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: torch.Tensor,
    *,
    autocast: bool = False,
) -> float:
    """Train on one batch, shape (batch, tokens + 1), and return the loss."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@contextmanager
def medium() -> Iterator[None]:
    """Let PyTorch round float32 operands to bfloat16 where it can, in the whole process."""
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def batches(count: int, batch: int) -> list[torch.Tensor]:
    """Return pieces of text, the same in every run."""
    files = sorted(Path(lowprec.__file__).parent.glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in files).encode("ascii", "replace")
    generator = torch.Generator().manual_seed(0)
    data = torch.tensor(list(text))
    starts = torch.randint(len(data) - TOKENS - 1, (count, batch), generator=generator)
    return [torch.stack([data[i : i + TOKENS + 1] for i in row]) for row in starts.tolist()]


def main() -> None:
    """Train the copies in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--modes", nargs="+", default=["bf16"], help="modes of lowprec, such as bf16 mxfp8"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch and lowprec")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each copy")
    parser.add_argument("--layers", type=int, default=6, help="layers of the encoder")
    parser.add_argument("--width", type=int, default=512, help="features, a multiple of 8")
    parser.add_argument(
        "--batch", type=int, default=8, help=f"pieces of {TOKENS} characters in a batch"
    )
    options = parser.parse_args()

    clock = time.thread_time if options.threads == 1 else time.perf_counter
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = Characters(options.layers, options.width)
    modes = {f'lowprec.torch.intercept("{mode}")': mode for mode in options.modes}
    names = [FP32, MEDIUM, AUTOCAST, *modes]
    blocks = {MEDIUM: medium} | {
        name: functools.partial(lowprec.torch.intercept, mode) for name, mode in modes.items()
    }
    copies = {name: copy.deepcopy(model) for name in names}
    optimizers = {
        name: torch.optim.AdamW(own.parameters(), lr=3e-4) for name, own in copies.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    texts = batches(2 * options.rounds, options.batch)
    shuffle = random.Random(0).shuffle
    for number, (untimed, timed) in enumerate(zip(texts[::2], texts[1::2], strict=True), 1):
        print(f"round {number} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
        shuffle(names)
        for name in names:
            with blocks.get(name, nullcontext)() as block:
                step(copies[name], optimizers[name], untimed, autocast=name == AUTOCAST)
                start = clock()
                loss = step(copies[name], optimizers[name], timed, autocast=name == AUTOCAST)
                seconds[name].append(clock() - start)
            losses[name].append(loss)
            if block is not None:
                report = block.report()

    shape = f"{options.layers} layers of {options.width} features, {options.batch} x {TOKENS} characters"
    versions = f"lowprec {lowprec.__version__}, torch {torch.__version__}"
    print(f"{shape}, {options.rounds} rounds, threads: {options.threads}; {versions}\n")
    print(
        "| training step | ms | time over FP32's | quartiles | loss |\n| --- | ---: | ---: | ---: | ---: |"
    )
    reference = seconds[FP32]
    for name, taken in seconds.items():
        ratios = [own / fp32 for own, fp32 in zip(taken, reference, strict=True)]
        q1, median, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
        loss = statistics.fmean(losses[name][-3:])
        print(
            f"| {name} | {1e3 * statistics.median(taken):.0f} | {median:.2f} | {q1:.2f} to {q3:.2f} | {loss:.2f} |"
        )
    taken, passed = (
        sum(product.count for product in part) for part in (report.taken, report.passed)
    )
    print(f"\nIn two steps, lowprec computed {taken} products and left {passed} to PyTorch.")


if __name__ == "__main__":
    main()
