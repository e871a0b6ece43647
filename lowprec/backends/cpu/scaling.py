"""Mode ``fp16`` on float32: rows of ``a`` and columns of ``b`` are scaled by powers of two, and the result unscaled.

Each row is multiplied by 2^e such that its largest finite magnitude is in [2^14, 2^15), exactly, and rounded to
float16; a row of zeros has e = 0.

Most operands need no factors. A number that is at most 28 binades below its row's largest becomes a normal float16
number when scaled, so that rounding to float16's digits without scaling gives the same bits. If that holds for all of
an operand, and products and sums stay in float32's range, the unscaled sums are those of the scaled numbers, scaled
back. The extrema of all rows, found while the operand is rounded, decide it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowprec.formats import FLOAT16, TF32

#: The digits of float16 and the range of float32.
FLOAT16_DIGITS = replace(TF32, name="float16 digits")

#: The largest magnitude of a scaled row is in [2^14, 2^15): in the top binade but one of float16.
TOP_EXPONENT = 14

#: Binades from there to the smallest normal number.
_NORMAL = TOP_EXPONENT - FLOAT16.emin

#: Biased exponents that need no scaling. The products of two such numbers' parts in bfloat16 are multiples of 2^-126,
#: below which tile units count zero, and 2^45 of the largest can be summed.
_LEAST, _MOST = 127 - 53, 127 + 40

#: Elements at a time, which stay in the cache.
_BLOCK = 1 << 16


def lies_apart(extrema: int) -> bool:
    """Whether an operand must be scaled.

    ``extrema`` holds the bits of the largest magnitude, times 2^32, and those of the smallest nonzero one, less 1; 0
    means that there is nothing to scale.
    """
    largest, least = extrema >> 32, (extrema & 0xFFFFFFFF) + 1
    top, bottom = largest >> 23, least >> 23
    return largest != 0 and (top > _MOST or bottom < _LEAST or bottom < top - _NORMAL)


def merged(first: int, second: int) -> int:
    """Return the extrema of two pieces together."""
    if not first or not second:
        return first or second
    largest, least = max(first, second) >> 32, min(first & 0xFFFFFFFF, second & 0xFFFFFFFF)
    return largest << 32 | least


def extrema_of(x: Any) -> int:
    """Return the extrema of a contiguous float32 array."""
    bits = x.reshape(-1, copy=False).view(np.uint32)
    found = 0
    for first in range(0, bits.size, _BLOCK):
        magnitudes = bits[first : first + _BLOCK] & np.uint32(0x7FFFFFFF)
        largest = int(np.maximum.reduce(magnitudes))
        magnitudes -= np.uint32(1)  # of a zero the largest of all
        found = merged(found, largest << 32 | int(np.minimum.reduce(magnitudes)))
    return found
