"""Errors of float16 schemes by size, interval and arithmetic: the figures of a talk, reproduced.

J. Schuele asked at GTC 2019 whether 16-bit tensor cores give FP32's accuracy, and showed the absolute error and the
digit that it affects for matrices with elements of three intervals. Each element of a product depends on one row and
one column alone, so a sample of rows and columns shows the errors of a large product at the cost of a small one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import samples

import lowprec

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_SIZES = (16, 64)
SAMPLED = 128

#: Intervals of the uniformly distributed elements of the two operands.
INTERVALS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "[-1, 1] x [-1, 1]": ((-1, 1), (-1, 1)),
    "[-1, 1] x [0, 1]": ((-1, 1), (0, 1)),
    "[-1, 1] x [-4, 4]": ((-1, 1), (-4, 4)),
}

#: Arithmetic of the sums: this CPU's FP32, or tensor cores emulated bit by bit.
ARITHMETICS = {"this CPU": None, "Volta": "volta", "Hopper": "hopper"}


class Scheme(NamedTuple):
    """A curve: the mode, and the length of the chunks of k (None: one piece, as in the talk)."""

    mode: str
    k_chunk: int | None = None


SCHEMES = {
    "fp32": Scheme("fp32"),
    "normal": Scheme("fp16"),
    "three-term": Scheme("fp16x3_unscaled"),
    "binomial": Scheme("fp16x4_unscaled"),
    "Karatsuba": Scheme("fp16_karatsuba"),
    "scaled": Scheme("fp16x4"),
    "scaled, chunks of 256": Scheme("fp16x4", 256),
}


def affected_digit(error: float, largest: float) -> float | None:
    """Return the number of decimal digits before the first one changed by an error; None without an error.

    Counted from the leading digit of the largest element, as a real number.

    Examples
    --------
    >>> affected_digit(0.01, 100.0)
    4.0
    """
    return math.log10(largest / error) if error else None


def measure(arithmetic: str, interval: str, n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one row per scheme for sampled rows and columns of a product of n x n."""
    rng = np.random.default_rng([seed, n, *interval.encode()])
    count = min(SAMPLED, n)
    shapes = (count, n), (n, count)
    a, b = (
        rng.uniform(*ends, shape).astype(np.float32) for ends, shape in zip(INTERVALS[interval], shapes, strict=True)
    )
    exact = samples.product(a, b)
    largest = float(np.max(np.abs(exact)))
    name = ARITHMETICS[arithmetic]
    with contextlib.nullcontext() if name is None else lowprec.emulate(name):
        for scheme, (mode, k_chunk) in SCHEMES.items():
            how: dict[str, Any] = {"math_mode": mode, "k_chunk": min(k_chunk or n, n)}
            plan = lowprec.plan(a, b, **how)
            found = samples.judge(lowprec.matmul(a, b, **how), a, b, plan, exact)
            error = float(np.max(np.abs(found.error)))
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
                "affected_digit": affected_digit(error, largest),
                "normalised": found.normalised,
                "of_bound": found.of_bound,
            }
