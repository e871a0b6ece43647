"""Rounding to a format: one number at a time and exact, and as products by NumPy round their operands."""

import math
from fractions import Fraction

import numpy as np

from lowprec.backends.cpu import numpy_rounding


def round_to_format(x, to):
    """Return numbers as float32, rounded as the operands of products by NumPy."""
    with np.errstate(all="ignore"):
        return numpy_rounding.rounded(np.atleast_2d(x), np.dtype(np.float32), to).reshape(
            np.shape(x)
        )


def round_scalar(value, to, *, ties_away=False):
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
