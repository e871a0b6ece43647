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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import common
import ml_dtypes
import numpy as np
import timing

import lowprec
from lowprec import recipes
from lowprec.planning import GemmPlan

sys.path.insert(0, str(common.ROOT / "docs" / "examples"))
import embeddings

SIZES, QUICK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192), (16, 64)
#: Largest number of rows and of columns of the result that are compared.
SAMPLED, SAMPLED_OF_SCHEMES = 256, 128


def exact_product(a: Any, b: Any) -> Any:
    """Return the product in float64."""
    return a.astype(np.float64) @ b.astype(np.float64)


def _norm(x: Any) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


class Judged(NamedTuple):
    """The error of a result and its bound, as norms relative to ``|A| |B|``."""

    error: Any  # of each element
    relative: float  # |C - AB| / |AB|
    normalised: float  # |C - AB| / (|A| |B|)
    bound: float

    @property
    def of_bound(self) -> float:
        """The error over its guaranteed bound."""
        return self.normalised / self.bound


def judge(result: Any, a: Any, b: Any, plan: GemmPlan, exact: Any) -> Judged:
    """Return the errors of a plan's result for two matrices, or for the given rows and columns of it."""
    error, scale = result - exact, _norm(a) * _norm(b)
    bound = plan.bound.frobenius(_norm(a), _norm(b), *exact.shape)
    return Judged(error, _norm(error) / _norm(exact), _norm(error) / scale, bound / scale)


def bound_claim(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how close the errors come to their bounds."""
    closest = max(row["of_bound"] for row in rows)
    return common.claim("largest error over its bound", closest, 1.0, at_most=True)


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
    "wide": lambda rng, shape: np.ldexp(_normal(rng, shape), rng.integers(-12, 13, shape, dtype=np.int32)),
}


def tf32(x: Any) -> Any:
    """Round finite float32 numbers to TF32 as a GPU's conversion does: to nearest, ties away from zero."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


#: Rounding without lowprec, for the error that it must cause; fp32 rounds nothing.
ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "tf32": tf32,
    "bf16": lambda x: x.astype(ml_dtypes.bfloat16),
    "fp16": lambda x: x.astype(np.float16),
}

#: Least error of a mode, relative to that of rounding the operands; a smaller one means that the mode ran as FP32.
LEAST_SHARE = 0.5


def measure_sizes(distribution: str, n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one row per mode for products of n x n, judged by a sample of its rows and columns."""
    rng = np.random.default_rng([seed, n, *distribution.encode()])
    a, b = (DISTRIBUTIONS[distribution](rng, (n, n)) for _ in range(2))
    i, j = (rng.choice(n, min(SAMPLED, n), replace=False) for _ in range(2))
    sampled_a, sampled_b = a[i], b[:, j]
    exact = exact_product(sampled_a, sampled_b)
    for mode in ("fp32", *ROUNDINGS):
        plan = lowprec.plan(a, b, math_mode=mode)
        judged = judge(lowprec.matmul(a, b, math_mode=mode)[i][:, j], sampled_a, sampled_b, plan, exact)
        rounding = None
        if mode in ROUNDINGS:
            alone = exact_product(*(ROUNDINGS[mode](x) for x in (sampled_a, sampled_b)))
            rounding = judge(alone, sampled_a, sampled_b, plan, exact).normalised
        yield {
            "distribution": distribution,
            "n": n,
            "mode": mode,
            "kernel": str(plan.kernel),
            "sampled": len(i),
            "frobenius_relative": judged.relative,
            "normalised": judged.normalised,
            "bound": judged.bound,
            "rounding": rounding,
            "within_bound": judged.of_bound <= 1,
            "shows_rounding": rounding and judged.normalised >= LEAST_SHARE * rounding,
        }


def size_claims(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield, per mode, the largest error relative to the bound, and the smallest relative to that of rounding."""
    for mode in ("fp32", *ROUNDINGS):
        of_mode = [r for r in rows if r["mode"] == mode]
        closest = max(r["normalised"] / r["bound"] for r in of_mode)
        yield common.claim(f"{mode}: largest error over its bound", closest, 1.0, at_most=True)
        if mode in ROUNDINGS:
            least = min(r["normalised"] / r["rounding"] for r in of_mode)
            yield common.claim(f"{mode}: smallest error over that of rounding the operands", least, LEAST_SHARE)


def sizes(arguments: argparse.Namespace) -> None:
    """Measure the modes that round once, by size and distribution, with their bounds."""
    cases = product(DISTRIBUTIONS, QUICK_SIZES if arguments.quick else SIZES)
    rows = [row for case in cases for row in measure_sizes(*case, arguments.seed)]
    common.report("accuracy", arguments, rows, size_claims(rows), sampled=SAMPLED)


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
    exact = exact_product(a, b)
    largest = float(np.max(np.abs(exact)))
    with _emulated(ARITHMETICS[arithmetic]):
        for scheme, (mode, k_chunk) in SCHEMES.items():
            how: dict[str, Any] = {"math_mode": mode, "k_chunk": min(k_chunk or n, n)}
            plan = lowprec.plan(a, b, **how)
            judged = judge(lowprec.matmul(a, b, **how), a, b, plan, exact)
            error = float(np.max(np.abs(judged.error)))
            yield {
                "arithmetic": arithmetic,
                "interval": interval,
                "n": n,
                "scheme": scheme,
                "mode": mode,
                "k_chunk": how["k_chunk"],
                "kernel": str(plan.kernel),
                "largest_error": error,
                "largest_element": largest,
                # Decimal digits before the first changed one, counted from the leading digit of the largest element.
                "affected_digit": math.log10(largest / error) if error else None,
                "normalised": judged.normalised,
                "of_bound": judged.of_bound,
            }


def schemes(arguments: argparse.Namespace) -> None:
    """Measure the schemes that recover FP32, by size, interval and arithmetic."""
    cases = product(ARITHMETICS, INTERVALS, QUICK_SIZES if arguments.quick else SIZES)
    rows = [row for case in cases for row in measure_schemes(*case, arguments.seed)]
    common.report("recovery", arguments, rows, [bound_claim(rows)], sampled=SAMPLED_OF_SCHEMES)


# -- real operands --------------------------------------------------------------------------------

#: Without modes that are aliases of others on some devices or all.
_OTHERS = ("fp32_pedantic", "fp32_emulated", "fp64_emulated", *recipes.MODES)
MODES = tuple(str(m) for m in lowprec.MathMode if m not in _OTHERS)

Pair = tuple[Any, Any]


def _layers(weights: dict[str, Any], seed: int) -> Iterator[tuple[str, Pair]]:
    """Yield products of a transformer's first layer, on the embeddings of 128 tokens."""
    tokens = np.random.default_rng(seed).integers(1000, 30000, 128)
    words, positions = (weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position"))
    x = words[tokens] + positions[:128]
    x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
    x = x * weights["embeddings.LayerNorm.weight"] + weights["embeddings.LayerNorm.bias"]
    layer = "encoder.layer.0."
    yield "query", (x, weights[layer + "attention.self.query.weight"].T)
    up = weights[layer + "intermediate.dense.weight"].T
    yield "feed-forward, up", (x, up)
    hidden = exact_product(x, up) + weights[layer + "intermediate.dense.bias"]
    hidden *= (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
    yield "feed-forward, down", (hidden, weights[layer + "output.dense.weight"].T)
    centred = words - words.mean(axis=0)
    # 96 of the 384 columns: each element of a covariance depends on two columns only.
    yield "covariance of embeddings", (centred[:, ::4].T, centred[:, ::4])


def real_operands(seed: int, *, quick: bool) -> Iterator[tuple[str, Pair]]:
    """Yield the operands by name; those of the transformer if its weights are installed."""
    weights = None if quick else embeddings.weights()
    if weights is not None:
        yield from _layers(weights, seed)
    n = 32 if quick else 512
    hilbert = 1 / (np.arange(n)[:, None] + np.arange(n) + 1)
    yield "Hilbert", (hilbert, hilbert)
    vandermonde = np.vander(np.linspace(0, 1, n), n // 8, increasing=True)
    yield "Vandermonde", (vandermonde.T, vandermonde)


def measure_real(arithmetic: str, seed: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield one row per input and mode."""
    with _emulated(ARITHMETICS[arithmetic]):
        for what, operands in real_operands(seed, quick=quick):
            a, b = (np.ascontiguousarray(x, np.float32) for x in operands)
            exact = exact_product(a, b)
            for mode in MODES:
                plan = lowprec.plan(a, b, math_mode=mode)
                judged = judge(lowprec.matmul(a, b, math_mode=mode), a, b, plan, exact)
                yield {
                    "arithmetic": arithmetic,
                    "input": what,
                    **dict(zip("mkn", (*a.shape, b.shape[1]), strict=True)),
                    "mode": mode,
                    "kernel": str(plan.kernel),
                    "frobenius_relative": judged.relative,
                    "normalised": judged.normalised,
                    "of_bound": judged.of_bound,
                }


def real(arguments: argparse.Namespace) -> None:
    """Measure every mode on real operands."""
    rows = [
        row
        for arithmetic in ("this CPU", "Hopper")
        for row in measure_real(arithmetic, arguments.seed, quick=arguments.quick)
    ]
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
    return {
        name
        for name, (speed, error) in points.items()
        if not any(s >= speed and e <= error and (s, e) != (speed, error) for s, e in points.values())
    }


def measure_speed(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one row per mode for products of n x n of N(0, 1): speed over ``fp32``, and the error."""
    rng = np.random.default_rng([seed, n])
    sets = [[_normal(rng, (n, n)) for _ in "ab"] for _ in range(3)]
    a, b = sets[0]
    i, j = (rng.choice(n, min(SAMPLED, n), replace=False) for _ in range(2))
    exact = exact_product(a[i], b[:, j])
    plans = {mode: lowprec.plan(a, b, math_mode=mode) for mode in MODES}
    errors = {
        mode: judge(lowprec.matmul(a, b, math_mode=mode)[i][:, j], a[i], b[:, j], plan, exact)
        for mode, plan in plans.items()
    }
    variants = {mode: lambda number, mode=mode: lowprec.matmul(*sets[number], math_mode=mode) for mode in MODES}
    seconds = timing.interleave(variants, rounds=9, sets=len(sets), seed=seed, budget_s=120.0)
    speeds = {mode: timing.speed_ratio(seconds["fp32"], seconds[mode]) for mode in MODES}
    best = front({m: (speeds[m]["median"], errors[m].normalised) for m in MODES})
    for mode, plan in plans.items():
        yield {
            "n": n,
            "mode": mode,
            "kernel": str(plan.kernel),
            "seconds": timing.summary(seconds[mode]),
            "rounds": len(seconds[mode]),
            "speed": speeds[mode],
            "normalised": errors[mode].normalised,
            "of_bound": errors[mode].of_bound,
            "on_front": mode in best,
        }


def speed(arguments: argparse.Namespace) -> None:
    """Measure the speed of every mode against its error."""
    rows = [row for n in ((64,) if arguments.quick else (1024, 2048)) for row in measure_speed(n, arguments.seed)]
    common.report("tradeoff", arguments, rows, [bound_claim(rows)], sampled=SAMPLED)


#: Each writes a result file; only the last measures times, which depend on other load.
PARTS = {"sizes": sizes, "schemes": schemes, "real": real, "speed": speed}


def main() -> None:
    """Measure, print and write."""
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    for part in arguments.parts:
        PARTS[part](arguments)


if __name__ == "__main__":
    main()
