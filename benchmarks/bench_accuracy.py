"""Errors of the math modes against float64: by size and scheme, on real operands, with bounds and speed.

usage: python benchmarks/bench_accuracy.py [--parts {sizes,schemes,real,speed} ...] [--quick] [--output DIR] [--seed N]

The oracle is a float64 product of up to 256 sampled rows and columns, since one of 8192 x 8192 takes too long. It is a
product itself, so the bound holds for the sample.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import common
import ml_dtypes
import numpy as np
import real_input
import recovery
import samples
import tradeoff
from samples import DISTRIBUTIONS, SAMPLED

import lowprec

MODES = ("fp32", "tf32", "bf16", "fp16")
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_SIZES = (16, 64)

#: Least error of a mode, relative to that of rounding the operands; a smaller one means that the mode ran as FP32.
LEAST_SHARE = 0.5


def _tf32(x: Any) -> Any:
    # To nearest, ties away from zero, as the GPU's conversion instruction; the operands are finite.
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


#: Rounding without lowprec, for the error that it must cause.
ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "tf32": _tf32,
    "bf16": lambda x: x.astype(ml_dtypes.bfloat16),
    "fp16": lambda x: x.astype(np.float16),
}


def measure(distribution: str, n: int, seed: int) -> list[dict[str, Any]]:
    """Return one row per mode for products of n x n, judged by a sample of its rows and columns."""
    rng = np.random.default_rng([seed, n, *distribution.encode()])
    a, b = (DISTRIBUTIONS[distribution](rng, (n, n)) for _ in range(2))
    i, j = (rng.choice(n, min(SAMPLED, n), replace=False) for _ in range(2))
    sampled_a, sampled_b = a[i], b[:, j]
    exact = samples.product(sampled_a, sampled_b)
    rows = []
    for mode in MODES:
        plan = lowprec.plan(a, b, math_mode=mode)
        result = lowprec.matmul(a, b, math_mode=mode)[i][:, j]
        found = samples.judge(result, sampled_a, sampled_b, plan, exact)
        # None where the mode rounds nothing.
        rounded, rounding = ROUNDINGS.get(mode), None
        if rounded is not None:
            alone = samples.product(rounded(sampled_a), rounded(sampled_b))
            rounding = samples.judge(alone, sampled_a, sampled_b, plan, exact).normalised
        rows.append(
            {
                "distribution": distribution,
                "n": n,
                "mode": mode,
                "kernel": str(plan.kernel),
                "sampled": len(i),
                "frobenius_relative": found.relative,
                "normalised": found.normalised,
                "bound": found.bound,
                "rounding": rounding,
                "within_bound": found.of_bound <= 1,
                "shows_rounding": rounding and found.normalised >= LEAST_SHARE * rounding,
            }
        )
    return rows


def accuracy_claims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, per mode, the largest error relative to the bound, and the smallest relative to that of rounding."""
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


def bound_claim(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how close the errors come to their bounds."""
    closest = max(row["of_bound"] for row in rows)
    return common.claim("largest error over its bound", closest, 1.0, at_most=True)


def sizes(arguments: argparse.Namespace) -> None:
    """Measure the modes that round once, by size and distribution, with their bounds."""
    own = QUICK_SIZES if arguments.quick else SIZES
    rows = [row for d in DISTRIBUTIONS for n in own for row in measure(d, n, arguments.seed)]
    common.report("accuracy", arguments, rows, accuracy_claims(rows), sampled=SAMPLED)


def schemes(arguments: argparse.Namespace) -> None:
    """Measure the schemes that recover FP32, by size, interval and arithmetic."""
    own = recovery.QUICK_SIZES if arguments.quick else recovery.SIZES
    cases = product(recovery.ARITHMETICS, recovery.INTERVALS, own)
    rows = [row for case in cases for row in recovery.measure(*case, arguments.seed)]
    common.report("recovery", arguments, rows, [bound_claim(rows)], sampled=recovery.SAMPLED)


def real(arguments: argparse.Namespace) -> None:
    """Measure every mode on real operands."""
    rows = [
        row
        for arithmetic in real_input.ARITHMETICS
        for row in real_input.measure(arithmetic, arguments.seed, quick=arguments.quick)
    ]
    common.report("real", arguments, rows, [bound_claim(rows)])


def speed(arguments: argparse.Namespace) -> None:
    """Measure the speed of every mode against its error."""
    own = tradeoff.QUICK_SIZES if arguments.quick else tradeoff.SIZES
    rows = [row for n in own for row in tradeoff.measure(n, arguments.seed)]
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
