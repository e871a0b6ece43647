"""Common parts of the accuracy benchmarks: operands, a float64 product of sampled rows and columns, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lowprec.planning import GemmPlan

#: Largest number of rows and of columns of the result that are compared.
SAMPLED = 256


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


#: Drawn for each size: N(0, 1); U(0, 1); N(0, 1) times a power of two from 2^-12 to 2^12, each equally likely. The
#: largest is within float16's range; for small ones fp16 loses digits, which its bound includes.
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Any]] = {
    "normal": _normal,
    "positive": lambda rng, shape: rng.random(shape, dtype=np.float32),
    "wide": lambda rng, shape: np.ldexp(_normal(rng, shape), rng.integers(-12, 13, shape, dtype=np.int32)),
}


def product(a: Any, b: Any) -> Any:
    """Return the product in float64."""
    return a.astype(np.float64) @ b.astype(np.float64)


def norm(x: Any) -> float:
    """Return the Frobenius norm."""
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


def judge(found: Any, a: Any, b: Any, plan: GemmPlan, exact: Any = None) -> Judged:
    """Return the errors of a plan's result for two matrices, or for the given rows and columns of it."""
    exact = product(a, b) if exact is None else exact
    error, scale = found - exact, norm(a) * norm(b)
    bound = plan.bound.frobenius(norm(a), norm(b), *exact.shape)
    return Judged(error, norm(error) / norm(exact), norm(error) / scale, bound / scale)
