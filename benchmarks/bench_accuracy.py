"""Error of each math mode by size and distribution, against float64, beside its guaranteed bound.

usage: python benchmarks/bench_accuracy.py [--quick] [--output DIR] [--seed N]

A float64 product of 8192 x 8192 is heavy, so the oracle is one of up to 256 sampled rows and columns: a random part of
the result that is itself the product of the sampled rows and columns, so that the bound holds for it as it stands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import common
import ml_dtypes
import numpy as np

import lowprec

NAME = "accuracy"
MODES = ("fp32", "tf32", "bf16", "fp16")
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_SIZES = (16, 64)
SAMPLED = 256

#: A mode must be off by this share of what rounding the operands alone must cause; FP32 in disguise would not be.
LEAST_SHARE = 0.5


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def _positive(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    return rng.random(shape, dtype=np.float32)


def _wide(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    # 24 powers of two, the largest still inside float16: below it, fp16 loses digits and says so in its bound.
    return np.ldexp(_normal(rng, shape), rng.integers(-12, 13, shape, dtype=np.int32))


#: Drawn afresh for each size: N(0, 1); U(0, 1); N(0, 1) times a power of two from 2^-12 to 2^12, each equally likely.
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Any]] = {
    "normal": _normal,
    "positive": _positive,
    "wide": _wide,
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


class Oracle:
    """A sampled part of a product of float32 matrices, in float64."""

    def __init__(self, a: Any, b: Any, rng: np.random.Generator) -> None:
        sampled = min(SAMPLED, a.shape[0])
        self.rows = rng.choice(a.shape[0], sampled, replace=False)
        self.columns = rng.choice(b.shape[1], sampled, replace=False)
        self.a, self.b = a[self.rows], b[:, self.columns]
        self.exact = _product(self.a, self.b)
        self.norms = tuple(float(np.linalg.norm(x.astype(np.float64))) for x in (self.a, self.b))

    def error(self, result: Any) -> float:
        """Return the Frobenius norm of the error of a whole result."""
        return float(np.linalg.norm(result[self.rows][:, self.columns] - self.exact))

    def rounding_error(self, mode: str) -> float | None:
        """Return the Frobenius norm of what rounding the operands causes; None where the mode rounds nothing."""
        if mode not in ROUNDINGS:
            return None
        rounded = ROUNDINGS[mode]
        return float(np.linalg.norm(_product(rounded(self.a), rounded(self.b)) - self.exact))


def _product(a: Any, b: Any) -> Any:
    return a.astype(np.float64) @ b.astype(np.float64)


def measure(distribution: str, n: int, seed: int) -> list[dict[str, Any]]:
    """Return one row per mode for products of n x n."""
    rng = np.random.default_rng([seed, n, *distribution.encode()])
    a, b = (DISTRIBUTIONS[distribution](rng, (n, n)) for _ in range(2))
    oracle = Oracle(a, b, rng)
    norm_a, norm_b = oracle.norms
    rows = []
    for mode in MODES:
        plan = lowprec.plan(a, b, math_mode=mode)
        error = oracle.error(lowprec.matmul(a, b, math_mode=mode))
        rounding = oracle.rounding_error(mode)
        bound = plan.bound.frobenius(norm_a, norm_b, *oracle.exact.shape)
        rows.append(
            {
                "distribution": distribution,
                "n": n,
                "mode": mode,
                "kernel": str(plan.kernel),
                "sampled": oracle.exact.shape[0],
                "frobenius_relative": error / float(np.linalg.norm(oracle.exact)),
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
        made.append(
            common.claim(f"{mode}: largest error over its bound", closest, 1.0, at_most=True)
        )
        if mode in ROUNDINGS:
            least = min(r["normalised"] / r["rounding"] for r in own)
            what = f"{mode}: smallest error over that of rounding the operands"
            made.append(common.claim(what, least, LEAST_SHARE))
    return made


def main() -> int:
    """Measure, print and write."""
    arguments = common.parser(__doc__).parse_args()
    sizes = QUICK_SIZES if arguments.quick else SIZES
    rows = [row for d in DISTRIBUTIONS for n in sizes for row in measure(d, n, arguments.seed)]
    settings = {"quick": arguments.quick, "seed": arguments.seed, "sampled": SAMPLED}
    result = common.document(NAME, settings, rows, accuracy_claims(rows))
    common.finish(common.result_path(arguments.output, NAME), result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
