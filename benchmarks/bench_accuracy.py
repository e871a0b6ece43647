"""Error of each math mode by size and distribution, against float64, beside its guaranteed bound.

usage: python benchmarks/bench_accuracy.py [--quick] [--output DIR] [--seed N]

A float64 product of 8192 x 8192 is heavy, so the oracle is one of up to 256 sampled rows and columns: a random part of
the result that is itself the product of the sampled rows and columns, so that the bound holds for it as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import common
import ml_dtypes
import numpy as np

import lowprec

MODES = ("fp32", "tf32", "bf16", "fp16")
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_SIZES = (16, 64)
SAMPLED = 256

#: A mode must be off by this share of what rounding the operands alone must cause; FP32 in disguise would not be.
LEAST_SHARE = 0.5


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


#: Drawn afresh for each size: N(0, 1); U(0, 1); N(0, 1) times a power of two from 2^-12 to 2^12, each equally likely.
#: The largest of these is still inside float16: below it, fp16 loses digits and says so in its bound.
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Any]] = {
    "normal": _normal,
    "positive": lambda rng, shape: rng.random(shape, dtype=np.float32),
    "wide": lambda rng, shape: np.ldexp(
        _normal(rng, shape), rng.integers(-12, 13, shape, dtype=np.int32)
    ),
}


def _tf32(x: Any) -> Any:
    # To nearest with ties away from zero, as the GPU's conversion instruction; the operands here are finite.
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


#: Rounding done without lowprec, to know what it must cause.
ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "tf32": _tf32,
    "bf16": lambda x: x.astype(ml_dtypes.bfloat16),
    "fp16": lambda x: x.astype(np.float16),
}


def _product(a: Any, b: Any) -> Any:
    return a.astype(np.float64) @ b.astype(np.float64)


def _norm(x: Any) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


def measure(distribution: str, n: int, seed: int) -> list[dict[str, Any]]:
    """Return one row per mode for products of n x n, judged by a sample of its rows and columns."""
    rng = np.random.default_rng([seed, n, *distribution.encode()])
    a, b = (DISTRIBUTIONS[distribution](rng, (n, n)) for _ in range(2))
    i, j = (rng.choice(n, min(SAMPLED, n), replace=False) for _ in range(2))
    sampled_a, sampled_b = a[i], b[:, j]
    exact = _product(sampled_a, sampled_b)
    norm_a, norm_b = _norm(sampled_a), _norm(sampled_b)
    rows = []
    for mode in MODES:
        plan = lowprec.plan(a, b, math_mode=mode)
        error = _norm(lowprec.matmul(a, b, math_mode=mode)[i][:, j] - exact)
        # None where the mode rounds nothing.
        rounded, rounding = ROUNDINGS.get(mode), None
        if rounded is not None:
            rounding = _norm(_product(rounded(sampled_a), rounded(sampled_b)) - exact)
        bound = plan.bound.frobenius(norm_a, norm_b, *exact.shape)
        rows.append(
            {
                "distribution": distribution,
                "n": n,
                "mode": mode,
                "kernel": str(plan.kernel),
                "sampled": len(i),
                "frobenius_relative": error / _norm(exact),
                "normalised": error / (norm_a * norm_b),
                "bound": bound / (norm_a * norm_b),
                "rounding": None if rounding is None else rounding / (norm_a * norm_b),
                "within_bound": error <= bound,
                "shows_rounding": None if rounding is None else error >= LEAST_SHARE * rounding,
            }
        )
    return rows


def accuracy_claims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, per mode, how close errors come to the bound, and how little of the rounding they show."""
    made = []
    for mode in MODES:
        own = [r for r in rows if r["mode"] == mode]
        closest = max(r["normalised"] / r["bound"] for r in own)
        what = f"{mode}: largest error over its bound"
        made.append(common.claim(what, closest, 1.0, at_most=True))
        if mode in ROUNDINGS:
            least = min(r["normalised"] / r["rounding"] for r in own)
            what = f"{mode}: smallest error over that of rounding the operands"
            made.append(common.claim(what, least, LEAST_SHARE))
    return made


def main() -> None:
    """Measure, print and write."""
    arguments = common.parser(__doc__).parse_args()
    sizes = QUICK_SIZES if arguments.quick else SIZES
    rows = [row for d in DISTRIBUTIONS for n in sizes for row in measure(d, n, arguments.seed)]
    common.report("accuracy", arguments, rows, accuracy_claims(rows), sampled=SAMPLED)


if __name__ == "__main__":
    main()
