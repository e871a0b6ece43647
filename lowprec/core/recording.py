"""Records of the products of a run, in their order: their own errors, and sketches to compare two runs.

A sketch has 1,021 sums of the elements of a result with random signs. The norm of the difference of two sketches is
that of the difference of the results, with a standard deviation of 2.2 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lowprec.core.interception_report import NO_STATISTICS, OperandStatistics
from lowprec.modes import Mode
from lowprec.util.strides import Shape

#: Numbers of a sketch. A prime: the elements of a row, and those of a column, belong to different sums.
_SUMS = 1021
_SIGNS = 1024 * _SUMS
#: Positions by which the sums of the next block of signs are rotated, so that equal signs do not meet.
_ROTATION = 17
#: Products of a run that have a sketch, of 8 kB each.
_MOST_SKETCHES = 8192


NO_LAYER = "(no layer)"
#: The pass of products of which it is unknown, as JAX's.
ANY_PASS = "any"


class Observed(NamedTuple):
    """One product of a run."""

    layer: str
    # "forward", "grad_input", "grad_weight", "backward" for other gradients, or ANY_PASS
    phase: str
    operator: str
    mode: str  # empty where the library computed it
    multiplications: int
    shape: Shape  # of the result
    norm: float  # of the result
    sketch: Any  # of the result; None after many products
    # norm of the difference to the reference's product of the same operands
    error: float | None = None
    reference_norm: float = 0.0  # of that product
    fault: str = ""  # "NaN" or "Inf" in the result, and its origin
    a: OperandStatistics = NO_STATISTICS
    b: OperandStatistics = NO_STATISTICS
    calls: int = 1  # after many products several ones are one, without a shape

    @property
    def name(self) -> str:
        return self.layer or NO_LAYER


class Recorder:
    """The products of a run; ``reference`` is the mode in which each is computed again, None for no other one."""

    def __init__(self, reference: Mode | None = None) -> None:
        self.reference = reference
        self.products: list[Observed] = []
        self._calls: dict[tuple[str, str, str], int] = {}

    def sketch(self, result: np.ndarray[Any, Any]) -> Any:
        """Return the sketch of the next product."""
        return sketch(result) if len(self.products) < _MOST_SKETCHES else None

    def measures_next(self, layer: str, phase: str, operator: str) -> bool:
        """Count a product; whether its number among those of a layer and pass is a power of two."""
        key = layer, phase, operator
        count = self._calls[key] = self._calls.get(key, 0) + 1
        return count & (count - 1) == 0


def fault_text(
    fault: str, of_operands: Sequence[str], mode: str, reference: Mode | None, again: str
) -> str:
    """Return the text of a NaN or Inf in a result, and its origin; ``again`` is that of the reference's result."""
    for name, of_operand in zip(("first", "second"), of_operands, strict=False):
        if of_operand:
            return f"{fault}: its {name} operand has {of_operand}"
    if reference is None:
        return f"{fault}: its operands are finite"
    if again:
        return f"{fault}: so is the product in {reference}"
    return f"{fault}: by {mode}; the product is finite in {reference}"


def sketch(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return sums of elements with random signs; those of at most 1,021 elements are the elements."""
    flat = real(x).reshape(-1)
    total = np.zeros(_SUMS)
    with np.errstate(all="ignore"):
        for number, first in enumerate(range(0, flat.size, _SIGNS)):
            total += np.roll(_sums(flat[first : first + _SIGNS]), _ROTATION * number)
    return total


def norm(x: np.ndarray[Any, Any]) -> float:
    """Return the Euclidean norm, without the BLAS."""
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.square(real(x), dtype=np.float64).sum()))


def distance(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Return the Euclidean norm of a difference."""
    with np.errstate(all="ignore"):
        return norm(x - y)


def real(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return real and imaginary parts as one array of real numbers."""
    if np.iscomplexobj(x):
        return np.stack([x.real, x.imag])
    return x


def _sums(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    signed = x * _signs()[: x.size]
    rest = x.size % _SUMS
    whole = x.size - rest
    sums: np.ndarray[Any, Any] = signed[:whole].reshape(-1, _SUMS).sum(0, dtype=np.float64)
    sums[:rest] += signed[whole:]
    return sums


@lru_cache
def _signs() -> Any:
    """Return the random signs, the same in all processes."""
    return (
        np.random.default_rng(1021).integers(0, 2, _SIGNS, dtype=np.int8).astype(np.float32) * 2 - 1
    )
