"""GELU (tanh form) for float32, with the operations, and therefore the bits, of the compiled kernels.

``0.5 (1 + tanh y)`` is ``1 / (1 + exp(-2 y))``, which needs one exponential and does not cancel for negative y. The
exponential is the polynomial of the Cephes library, good to two units in the last place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts; the first has few bits, so that its products with integers are exact.
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer
COEFFICIENTS = tuple(
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
LEAST_EXPONENT, LARGEST_EXPONENT = np.float32(-87), np.float32(88)
OUTER, INNER = np.float32(0.7978845608028654), np.float32(0.044715)
#: Lower limit of y: below it exp(-2y) overflows float32, and the result is below the smallest normal number.
LEAST = np.float32(-44)


def gelu_float32(x: Any) -> Any:
    """Return GELU of float32 numbers; NaN stays NaN."""
    one = np.float32(1)
    y = OUTER * (x + INNER * x * x * x)
    result = x / (one + _exp(np.float32(-2) * y))
    np.copyto(result, np.float32(-0.0), where=y < LEAST)
    return result


def _exp(x: Any) -> Any:
    x = np.minimum(np.maximum(x, LEAST_EXPONENT), LARGEST_EXPONENT)
    n = (x * LOG2E + MAGIC) - MAGIC
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:]:
        p = p * r + coefficient
    power = (n.astype(np.int32) + np.int32(127)) << np.int32(23)
    return (p * r * r + r + np.float32(1)) * power.view(np.float32)
