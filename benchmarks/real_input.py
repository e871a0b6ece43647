"""Errors of every mode on real operands: a transformer's layers, a Hilbert and a Vandermonde matrix, a covariance."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import machine
import numpy as np
import samples

import lowprec

sys.path.insert(0, str(machine.ROOT / "docs" / "examples"))
import embeddings

ARITHMETICS = {"this CPU": None, "Hopper": "hopper"}

#: Without modes that are aliases of others on some devices or all.
_WITHOUT = ("fp32_pedantic", "fp32_emulated", "fp64_emulated")
MODES = tuple(str(mode) for mode in lowprec.MathMode if mode not in _WITHOUT)

Pair = tuple[Any, Any]


def _layers(weights: dict[str, Any], seed: int) -> Iterator[tuple[str, Pair]]:
    """Yield products of the first layer, on the embeddings of 128 tokens."""
    tokens = np.random.default_rng(seed).integers(1000, 30000, 128)
    words, places = (weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position"))
    x = words[tokens] + places[:128]
    x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
    x = x * weights["embeddings.LayerNorm.weight"] + weights["embeddings.LayerNorm.bias"]
    layer = "encoder.layer.0."
    yield "query", (x, weights[layer + "attention.self.query.weight"].T)
    up = weights[layer + "intermediate.dense.weight"].T
    yield "feed-forward, up", (x, up)
    hidden = samples.product(x, up) + weights[layer + "intermediate.dense.bias"]
    hidden *= (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
    yield "feed-forward, down", (hidden, weights[layer + "output.dense.weight"].T)
    centred = words - words.mean(axis=0)
    # 96 of the 384 columns: each element of a covariance depends on two columns only.
    yield "covariance of embeddings", (centred[:, ::4].T, centred[:, ::4])


def pairs(seed: int, *, quick: bool = False) -> Iterator[tuple[str, Pair]]:
    """Yield the operands by name, in float32; those of the transformer if its weights are installed."""
    n = 32 if quick else 512
    weights = None if quick else embeddings.weights()
    found = [] if weights is None else list(_layers(weights, seed))
    hilbert = 1 / (np.arange(n)[:, None] + np.arange(n) + 1)
    vandermonde = np.vander(np.linspace(0, 1, n), n // 8, increasing=True)
    found += [("Hilbert", (hilbert, hilbert)), ("Vandermonde", (vandermonde.T, vandermonde))]
    for name, operands in found:
        a, b = (np.ascontiguousarray(x, np.float32) for x in operands)
        yield name, (a, b)


def measure(arithmetic: str, seed: int, *, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Yield one row per input and mode."""
    name = ARITHMETICS[arithmetic]
    with contextlib.nullcontext() if name is None else lowprec.emulate(name):
        for what, (a, b) in pairs(seed, quick=quick):
            exact = samples.product(a, b)
            for mode in MODES:
                plan = lowprec.plan(a, b, math_mode=mode)
                found = samples.judge(lowprec.matmul(a, b, math_mode=mode), a, b, plan, exact)
                yield {
                    "arithmetic": arithmetic,
                    "input": what,
                    "m": a.shape[0],
                    "k": a.shape[1],
                    "n": b.shape[1],
                    "mode": mode,
                    "kernel": str(plan.kernel),
                    "frobenius_relative": found.relative,
                    "normalised": found.normalised,
                    "of_bound": found.of_bound,
                }
