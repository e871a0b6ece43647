"""GELU in its tanh form for float32, as operations that NumPy and native code round alike.

``0.5 (1 + tanh y)`` is ``1 / (1 + exp(-2 y))``, which needs one exponential and does not cancel for negative y. The
exponential is the polynomial of the Cephes library, good to two units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

#: 1.5 * 2^23: added to a small number it leaves the nearest integer in the last bits.
MAGIC = 12582912.0

# ln 2 in two parts: the first has few bits, so that an integer times it is exact.
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_POLYNOMIAL = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5,
)  # fmt: skip
_SLOPE, _CUBE = 0.7978845608028654, 0.044715


class Operations(NamedTuple):
    """What the formula needs beside ``+ - * /`` and comparisons."""

    number: Callable[[float], Any]  # a float32 beside many
    where: Callable[[Any, Any, Any], Any]  # of a condition and two values
    power_of_two: Callable[[Any], Any]  # 2^n of an integer n to which `MAGIC` was added


def gelu(x: Any, by: Operations) -> Any:
    """Return GELU of many float32; NaN stays NaN."""
    number = by.number
    y = (x * x * x * number(_CUBE) + x) * number(_SLOPE)
    # From there on exp(-2y) leaves float32, and the result is below 1e-37, whatever x is.
    return by.where(y < number(-44.0), number(-0.0), x / (_exp(y * number(-2.0), by) + number(1.0)))


def _exp(x: Any, by: Operations) -> Any:
    """Return e^x; that of NaN is any number."""
    number = by.number
    x = by.where(x > number(-87.0), x, number(-87.0))
    x = by.where(x < number(88.0), x, number(88.0))
    shifted = x * number(_LOG2E) + number(MAGIC)
    n = shifted - number(MAGIC)
    r = x - n * number(_LN2_HIGH) - n * number(_LN2_LOW)
    p = number(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = p * r + number(coefficient)
    return (p * r * r + r + number(1.0)) * by.power_of_two(shifted)


def _power_of_two(shifted: Any) -> Any:
    n = shifted.view(np.int32) - np.float32(MAGIC).view(np.int32)
    return ((n + np.int32(127)) << np.int32(23)).view(np.float32)


#: On arrays.
NUMPY = Operations(np.float32, np.where, _power_of_two)
