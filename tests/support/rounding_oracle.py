"""Rounding to a format, one number at a time and exact: the readable twin, and the oracle, of the fast ones."""

from __future__ import annotations

import math
from fractions import Fraction

from lowprec.formats import NumberFormat


def round_scalar(value: float, to: NumberFormat, *, ties_away: bool = False) -> float:
    """Round one number to the nearest of a format, ties to even or away from zero."""
    if math.isnan(value) or math.isinf(value) or value == 0.0:
        return value
    exponent = max(math.frexp(value)[1] - 1, to.emin)
    spacing = Fraction(2) ** (exponent - to.precision + 1)
    quotient = Fraction(abs(value)) / spacing
    steps = math.floor(quotient + Fraction(1, 2)) if ties_away else round(quotient)
    rounded = steps * spacing
    if rounded > Fraction(to.largest):
        return math.copysign(math.inf if to.has_infinity else math.nan, value)
    return math.copysign(float(rounded), value)
