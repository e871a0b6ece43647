"""The error of a product against float64, and its guaranteed bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import unique
from typing import Any

import numpy as np
import numpy.typing as npt

from lowprec.core.blas import untaken
from lowprec.formats import FLOAT32
from lowprec.planning import GemmPlan
from lowprec.util.plain import StrEnum

Array = npt.NDArray[Any]


@unique
class Verdict(StrEnum):
    """The result of comparing an error with its bound.

    >>> str(Verdict.WITHIN)
    'within'
    """

    WITHIN = "within"
    ABOVE = "ABOVE"
    OVERFLOW = "overflow"  # to Inf, as reported by the plan
    NO_NUMBERS = "Inf or NaN"  # in the operands


@dataclass(frozen=True)
class Errors:
    """Errors of a product.

    >>> Errors(1e-3, 2e-4, 4e-3, Verdict.WITHIN).normalised < 4e-3
    True
    """

    relative: float  #: ``|C - AB| / |AB|`` in the Frobenius norm: the correct digits of the result.
    #: ``|C - AB| / (|A| |B|)``, limited by the bound; independent of cancellation.
    normalised: float
    bound: float  #: Guaranteed upper bound of ``normalised``.
    verdict: Verdict

    @property
    def is_above(self) -> bool:
        """Whether the error is above its bound."""
        return self.verdict is Verdict.ABOVE


class Reference:
    """The float64 product of two operands as stored, whose own error is at most k 2^-53."""

    def __init__(self, a: Array, b: Array) -> None:
        x = _wide(a)
        y = _wide(b)
        with np.errstate(all="ignore"):
            self.product = np.asarray(untaken(np.matmul, x, y))
        self._norm = _norm(self.product)
        if x.ndim == 1:
            x = x[None, :]
        if y.ndim == 1:
            y = y[:, None]
        norms_a = np.linalg.norm(x, axis=(-2, -1))
        norms_b = np.linalg.norm(y, axis=(-2, -1))
        self._norms_a, self._norms_b = np.broadcast_arrays(norms_a, norms_b)
        self._m = x.shape[-2]
        self._n = y.shape[-1]
        squares = (self._norms_a * self._norms_b) ** 2
        self._norm_ab = float(np.sqrt(np.sum(squares)))

    def compare(self, result: Array, plan: GemmPlan) -> Errors:
        guaranteed = plan.bound
        squares = 0.0
        for norm_a, norm_b in zip(self._norms_a.flat, self._norms_b.flat, strict=True):
            largest_error = guaranteed.frobenius(float(norm_a), float(norm_b), self._m, self._n)
            squares += largest_error**2
        bound = _ratio(math.sqrt(squares), self._norm_ab)
        if not math.isfinite(self._norm_ab):
            return Errors(math.nan, math.nan, bound, Verdict.NO_NUMBERS)
        with np.errstate(all="ignore"):
            error = _norm(_wide(result) - self.product)
        relative = _ratio(error, self._norm)
        normalised = _ratio(error, self._norm_ab)
        # Inf is possible if a format's range is too small, or sums exceed that of the result.
        out_format = plan.out_dtype.format or FLOAT32
        largest = min(out_format.largest, FLOAT32.largest)
        may_overflow = not guaranteed.unconditional or self._norm_ab > largest
        if normalised <= bound:
            verdict = Verdict.WITHIN
        elif not math.isfinite(error) and may_overflow:
            verdict = Verdict.OVERFLOW
        else:
            verdict = Verdict.ABOVE
        return Errors(relative, normalised, bound, verdict)


def _wide(x: Array) -> Array:
    dtype = np.complex128 if x.dtype.kind == "c" else np.float64
    return x.astype(dtype)


def _norm(x: Array) -> float:
    return float(np.linalg.norm(x.reshape(-1)))


def _ratio(error: float, scale: float) -> float:
    if scale:
        return error / scale
    return math.inf if error else 0.0
