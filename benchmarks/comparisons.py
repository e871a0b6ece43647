"""Times of `lowprec.compare`, relative to the function's two runs in the mode and in the reference without it.

usage: python benchmarks/comparisons.py [NAME...]

The four programs are a solver of NumPy, small products of NumPy, a training step of GPT-2's layers and the training of
an MLP in JAX, which every run compiles. Variants take turns, and the median of the ratios by round is shown with its
quartiles. Times are those of all threads of the process, which other processes of the machine do not change much. With
names, only programs whose names contain one of them run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import threadpoolctl
import timing
import torch
from torch import nn

import lowprec

AGAINST = "fp32"
#: A function, which returns what is compared.
Program = Callable[[], Any]


def solver(n: int = 600, columns: int = 16, steps: int = 20) -> Program:
    """Return conjugate gradients for several right-hand sides."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((n, n), np.float32)
    a = q @ q.T / n + np.eye(n, dtype=np.float32)
    b = rng.standard_normal((n, columns), np.float32)

    def solve() -> Any:
        x = np.zeros_like(b)
        residual = direction = b
        size = (residual**2).sum(0)
        for _ in range(steps):
            product = a @ direction
            length = size / (direction * product).sum(0)
            x = x + length * direction
            residual = residual - length * product
            size, before = (residual**2).sum(0), size
            direction = residual + size / before * direction
        return x

    return solve


def small_products(n: int = 40, count: int = 6000) -> Program:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, n, n), np.float32) / n**0.5

    def multiply() -> Any:
        x = b
        for _ in range(count):
            x = a @ b
        return x

    return multiply


def gpt2(width: int = 256, layers: int = 3, tokens: int = 64, vocabulary: int = 1000) -> Program:
    """Return a training step of layers in GPT-2's order, with attention in one kernel."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(vocabulary, width),
        nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        nn.Linear(width, vocabulary, bias=False),
    )
    ids = torch.randint(0, vocabulary, (4, tokens))
    mask = nn.Transformer.generate_square_subsequent_mask(tokens)

    def step() -> Any:
        model.zero_grad()
        embedded = model[0](ids)
        out = model[2](model[1](embedded, mask, is_causal=True))
        nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
        return out

    return step


def mlp(width: int = 256, batch: int = 128, layers: int = 4, steps: int = 100) -> Program:
    """Return gradient descent in JAX."""
    rng = np.random.default_rng(0)
    first = [rng.standard_normal((width, width), np.float32) / width**0.5 for _ in range(layers)]
    x, y = rng.standard_normal((2, batch, width), np.float32)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        hidden = x
        for w in weights:
            hidden = jax.numpy.tanh(hidden @ w)
        return ((hidden - y) ** 2).mean()

    def train() -> Any:
        # the data are arguments, so that XLA computes nothing while it compiles
        gradient = jax.jit(lambda *arguments: jax.grad(loss)(*arguments))
        weights = first
        for _ in range(steps):
            gradients = gradient(weights, x, y)
            weights = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        return jax.block_until_ready(weights)

    return train


PROGRAMS = {
    "CG of NumPy, 600 x 600 @ 600 x 16": solver,
    "6,000 products of NumPy, 40 x 40": small_products,
    "GPT-2, 3 layers of 256, a training step": gpt2,
    "MLP of JAX, 4 layers of 256, 100 steps": mlp,
}


def ratios(run: Program, mode: str, rounds: int) -> list[float]:
    """Return the times of comparisons by those of the runs alone."""

    def alone() -> None:
        for each in (mode, AGAINST):
            with lowprec.intercept(each):
                run()

    variants = {"alone": alone, "compared": lambda: lowprec.compare(run, mode, AGAINST)}

    def sample(name: str, _: int) -> float:
        start = time.process_time()
        variants[name]()
        return time.process_time() - start

    for variant in variants.values():
        variant()
    seconds = timing.take_turns(list(variants), sample, rounds=rounds)
    pairs = zip(seconds["compared"], seconds["alone"], strict=True)
    return [compared / plain for compared, plain in pairs]


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name, program in selected(names):
        with threadpoolctl.threadpool_limits(1):
            run = program()
            shown = [
                "{} {median:.2f} ({q1:.2f} to {q3:.2f})".format(
                    mode, **timing.summary(ratios(run, mode, rounds=9))
                )
                for mode in ("bf16", "nvfp4")
            ]
        print(f"{name:40} {', '.join(shown)}", flush=True)


def selected(names: list[str]) -> Iterator[tuple[str, Callable[[], Program]]]:
    for name, program in PROGRAMS.items():
        if not names or any(x in name for x in names):
            yield name, program


if __name__ == "__main__":
    main(sys.argv[1:])
