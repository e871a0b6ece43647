"""The operands of a product as the array twins read them: values that float64 multiplies exactly, and exponents."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

#: Exponent of what is not there: a zero never is the largest term. It stays below all when two of them are added.
NOWHERE = -(2**20)

#: What a tensor core makes of every NaN.
NAN = np.uint32(0x7FFFFFFF)


class Operand(NamedTuple):
    """A matrix of numbers of one format."""

    values: Any  # float64; zero where a number is not finite
    exponents: Any  # int32; ``NOWHERE`` where the value is zero
    raw: Any  # float32: the numbers as they are
    is_finite: bool  # whether all are

    @classmethod
    def of(cls, x: Any, emin: int) -> Operand:
        """Return the operand of a float32 matrix of numbers whose smallest normal exponent is ``emin``."""
        raw = np.array(x, np.float32, order="C")
        finite = np.isfinite(raw)
        values = np.where(finite, raw, 0).astype(np.float64)
        exponents = np.maximum(np.frexp(values)[1] - 1, emin)
        exponents = np.where(values == 0, NOWHERE, exponents).astype(np.int32)
        return cls(values, exponents, raw, bool(finite.all()))
