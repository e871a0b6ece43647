"""Errors of the math modes against float64: by size and scheme, on real operands, with bounds and speed.

usage: python benchmarks/bench_accuracy.py [--parts {sizes,schemes,real,speed} ...] [--quick] [--output DIR] [--seed N]

Each element of a product depends on one row and one column alone, so sampled rows and columns show the errors of a
large product at the cost of a small one, and the bound holds for the sample.

`schemes` reproduces the figures of J. Schuele's talk at GTC 2019: the absolute error of float16 schemes and the digit
that it affects, for matrices with elements of three intervals.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import common
import embeddings
import numpy as np
import timing

import lowprec
from lowprec import recipes
from lowprec.checking.accuracy import Reference

SIZES, QUICK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192), (16, 64)
#: Largest number of rows and of columns of the result that are compared.
SAMPLED, SAMPLED_OF_SCHEMES = 256, 128


def sampled(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    """Return indices of rows and columns of a result."""
    return rng.choice(n, min(SAMPLED, n), replace=False), rng.choice(
        n, min(SAMPLED, n), replace=False
    )


def errors(
    a: Any, b: Any, i: Any = slice(None), j: Any = slice(None), **how: Any
) -> dict[str, Any]:
    """Return the errors of a product, or of its rows i and columns j, and the plan's bound.

    Norms are relative to ``|A| |B|``; ``largest_error`` is that of an element, and
    ``largest_element`` of the exact product.
    """
    plan, result = lowprec.plan(a, b, **how), lowprec.matmul(a, b, **how)[i][:, j]
    exact = Reference(a[i], b[:, j])
    compared = exact.compare(result, plan)
    return {
        "mode": how["math_mode"],
        "kernel": str(plan.kernel),
        "normalised": compared.normalised,
        "bound": compared.bound,
        "of_bound": compared.normalised / compared.bound,
        "largest_error": float(np.max(np.abs(result - exact.product))),
        "largest_element": float(np.max(np.abs(exact.product))),
    }


def bound_claim(rows: Iterable[dict[str, Any]], prefix: str = "") -> dict[str, Any]:
    """Return how close the errors come to their bounds."""
    closest = max(row["of_bound"] for row in rows)
    return common.claim(f"{prefix}largest error over its bound", closest, 1.0, at_most=True)


def _emulated(architecture: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if architecture is None else lowprec.emulate(architecture)


# -- modes that round once, by size and distribution ----------------------------------------------


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


#: N(0, 1); U(0, 1); N(0, 1) times a power of two from 2^-12 to 2^12, each equally likely. The largest is within
#: float16's range; for small ones fp16 loses digits, which its bound includes.
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Any]] = {
    "normal": _normal,
    "positive": lambda rng, shape: rng.random(shape, dtype=np.float32),
    "wide": lambda rng, shape: np.ldexp(
        _normal(rng, shape), rng.integers(-12, 13, shape, dtype=np.int32)
    ),
}

#: Modes that round once.
SINGLE = ("fp32", "tf32", "bf16", "fp16")


def measure_sizes(distribution: str, n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one row per mode for products of n x n, by a sample of their rows and columns."""
    rng = np.random.default_rng([seed, n, *distribution.encode()])
    a, b = (DISTRIBUTIONS[distribution](rng, (n, n)) for _ in range(2))
    sample = sampled(rng, n)
    for mode in SINGLE:
        yield {"distribution": distribution, "n": n, **errors(a, b, *sample, math_mode=mode)}


def sizes(arguments: argparse.Namespace) -> None:
    cases = product(DISTRIBUTIONS, QUICK_SIZES if arguments.quick else SIZES)
    rows = [row for case in cases for row in measure_sizes(*case, arguments.seed)]
    claims = [bound_claim((r for r in rows if r["mode"] == mode), f"{mode}: ") for mode in SINGLE]
    common.report("accuracy", arguments, rows, claims, sampled=SAMPLED)


# -- schemes that recover FP32, by size, interval and arithmetic ----------------------------------

#: Intervals of the uniformly distributed elements of the two operands.
INTERVALS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "[-1, 1] x [-1, 1]": ((-1, 1), (-1, 1)),
    "[-1, 1] x [0, 1]": ((-1, 1), (0, 1)),
    "[-1, 1] x [-4, 4]": ((-1, 1), (-4, 4)),
}

#: Arithmetic of the sums: this CPU's FP32, or tensor cores emulated bit by bit.
ARITHMETICS = {"this CPU": None, "Volta": "volta", "Hopper": "hopper"}

#: By curve: the mode, and the length of the chunks of k (None: one piece, as in the talk).
SCHEMES: dict[str, tuple[str, int | None]] = {
    "fp32": ("fp32", None),
    "normal": ("fp16", None),
    "three-term": ("fp16x3_unscaled", None),
    "binomial": ("fp16x4_unscaled", None),
    "Karatsuba": ("fp16_karatsuba", None),
    "scaled": ("fp16x4", None),
    "scaled, chunks of 256": ("fp16x4", 256),
}


def measure_schemes(arithmetic: str, interval: str, n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one row per scheme for sampled rows and columns of a product of n x n."""
    rng = np.random.default_rng([seed, n, *interval.encode()])
    count = min(SAMPLED_OF_SCHEMES, n)
    a, b = (
        rng.uniform(*ends, shape).astype(np.float32)
        for ends, shape in zip(INTERVALS[interval], ((count, n), (n, count)), strict=True)
    )
    with _emulated(ARITHMETICS[arithmetic]):
        for scheme, (mode, k_chunk) in SCHEMES.items():
            chunk = min(k_chunk or n, n)
            row = errors(a, b, math_mode=mode, k_chunk=chunk)
            error, largest = row["largest_error"], row["largest_element"]
            # Decimal digits before the first changed one, counted from the leading digit of the largest element.
            digit = math.log10(largest / error) if error else None
            words = {
                "arithmetic": arithmetic,
                "interval": interval,
                "n": n,
                "scheme": scheme,
                "k_chunk": chunk,
            }
            yield {**words, **row, "affected_digit": digit}


def schemes(arguments: argparse.Namespace) -> None:
    cases = product(ARITHMETICS, INTERVALS, QUICK_SIZES if arguments.quick else SIZES)
    rows = [row for case in cases for row in measure_schemes(*case, arguments.seed)]
    common.report("recovery", arguments, rows, [bound_claim(rows)], sampled=SAMPLED_OF_SCHEMES)


# -- real operands --------------------------------------------------------------------------------

#: Without modes that are aliases of others on some devices or all.
_OTHERS = ("fp32_pedantic", "fp32_emulated", "fp64_emulated", *recipes.MODES)
MODES = tuple(str(m) for m in lowprec.MathMode if m not in _OTHERS)


def _layers(weights: dict[str, Any], seed: int) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield products of a transformer's first layer, on the embeddings of 128 tokens."""
    tokens = np.random.default_rng(seed).integers(1000, 30000, 128)
    words, positions = (
        weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position")
    )
    x = words[tokens] + positions[:128]
    x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
    x = x * weights["embeddings.LayerNorm.weight"] + weights["embeddings.LayerNorm.bias"]
    layer = "encoder.layer.0."
    yield "query", (x, weights[layer + "attention.self.query.weight"].T)
    up = weights[layer + "intermediate.dense.weight"].T
    yield "feed-forward, up", (x, up)
    hidden = x.astype(np.float64) @ up + weights[layer + "intermediate.dense.bias"]
    hidden *= (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
    yield "feed-forward, down", (hidden, weights[layer + "output.dense.weight"].T)
    centred = words - words.mean(axis=0)
    # 96 of the 384 columns: each element of a covariance depends on two columns only.
    yield "covariance of embeddings", (centred[:, ::4].T, centred[:, ::4])


def real_operands(seed: int, *, quick: bool) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the operands by name; those of the transformer if its weights are installed."""
    weights = None if quick else embeddings.weights()
    if weights is not None:
        yield from _layers(weights, seed)
    n = 32 if quick else 512
    hilbert = 1 / (np.arange(n)[:, None] + np.arange(n) + 1)
    yield "Hilbert", (hilbert, hilbert)
    vandermonde = np.vander(np.linspace(0, 1, n), n // 8, increasing=True)
    yield "Vandermonde", (vandermonde.T, vandermonde)


def measure_real(seed: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    for arithmetic, (what, operands) in product(
        ("this CPU", "Hopper"), real_operands(seed, quick=quick)
    ):
        a, b = (np.ascontiguousarray(x, np.float32) for x in operands)
        extents = dict(zip("mkn", (*a.shape, b.shape[1]), strict=True))
        with _emulated(ARITHMETICS[arithmetic]):
            for mode in MODES:
                yield {
                    "arithmetic": arithmetic,
                    "input": what,
                    **extents,
                    **errors(a, b, math_mode=mode),
                }


def real(arguments: argparse.Namespace) -> None:
    rows = list(measure_real(arguments.seed, quick=arguments.quick))
    common.report("real", arguments, rows, [bound_claim(rows)])


# -- speed against error --------------------------------------------------------------------------


def front(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Return the names of the points (speed, error) on the Pareto front: none is faster with at most the error.

    Examples
    --------
    >>> points = {"a": (1.0, 1e-7), "b": (2.0, 1e-3), "c": (1.5, 1e-2), "d": (0.5, 1e-7), "same as a": (1.0, 1e-7)}
    >>> sorted(front(points))
    ['a', 'b', 'same as a']
    """

    def beats(other: tuple[float, float], point: tuple[float, float]) -> bool:
        return other != point and other[0] >= point[0] and other[1] <= point[1]

    return {
        name
        for name, point in points.items()
        if not any(beats(other, point) for other in points.values())
    }


def measure_speed(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one row per mode for products of n x n of N(0, 1): speed over ``fp32``, and the error."""
    rng = np.random.default_rng([seed, n])
    sets = [[_normal(rng, (n, n)) for _ in "ab"] for _ in range(3)]
    sample = sampled(rng, n)
    rows = {mode: errors(*sets[0], *sample, math_mode=mode) for mode in MODES}
    variants = {
        mode: lambda number, mode=mode: lowprec.matmul(*sets[number], math_mode=mode)
        for mode in MODES
    }
    seconds = timing.interleave(variants, rounds=9, sets=len(sets), seed=seed, budget_s=120.0)
    speeds = {mode: timing.speed_ratio(seconds["fp32"], seconds[mode]) for mode in MODES}
    best = front({m: (speeds[m]["median"], rows[m]["normalised"]) for m in MODES})
    for mode, row in rows.items():
        times = {
            "seconds": timing.summary(seconds[mode]),
            "rounds": len(seconds[mode]),
            "speed": speeds[mode],
        }
        yield {"n": n, **row, **times, "on_front": mode in best}


def speed(arguments: argparse.Namespace) -> None:
    rows = [
        row
        for n in ((64,) if arguments.quick else (1024, 2048))
        for row in measure_speed(n, arguments.seed)
    ]
    common.report("tradeoff", arguments, rows, [bound_claim(rows)], sampled=SAMPLED)


if __name__ == "__main__":
    # Only the last measures times, which depend on other load.
    common.run_parts(__doc__, {"sizes": sizes, "schemes": schemes, "real": real, "speed": speed})
