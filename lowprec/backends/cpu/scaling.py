"""Scaling in mode ``fp16``: rows of ``a`` and columns of ``b`` times powers of two, undone in the result.

Each row is multiplied by 2^e, exactly, such that its largest finite magnitude is in [2^14, 2^15), and rounded to
float16; a row of zeros has e = 0.

Most operands need no scaling. If a number is at most 28 binades below the largest of its row, it is a normal float16
number after scaling, and rounding it to float16's 11 digits without scaling gives the same digits. If this holds for a
whole operand, and products and sums stay in float32's range, scaling makes no difference. The extrema of an operand,
found while it is rounded, decide this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowprec.formats import FLOAT16, TF32

#: Format with the digits of float16 and the range of float32.
FLOAT16_DIGITS = replace(TF32, name="float16 digits")

#: The largest magnitude of a scaled row is in [2^14, 2^15), the second highest binade of float16.
TOP_EXPONENT = 14

#: Binades from there to the smallest normal float16.
_NORMAL = TOP_EXPONENT - FLOAT16.emin

#: Range of biased exponents that need no scaling: products of the bfloat16 parts of two such numbers are multiples of
#: 2^-126, below which tile units flush to zero, and 2^45 of the largest can be summed.
_LEAST, _MOST = 127 - 53, 127 + 40

#: Elements per block, which fits the cache.
_BLOCK = 1 << 16


def needs_scaling(extrema: Any) -> Any:
    """Whether an operand must be scaled; for an array of extrema, an array of answers.

    An integer of ``extrema`` is the bits of the largest magnitude times 2^32, plus the bits of the smallest nonzero one
    minus 1; 0 means that nothing is to be scaled.
    """
    largest, least = extrema >> 32, (extrema & 0xFFFFFFFF) + 1
    top, bottom = largest >> 23, least >> 23
    return (largest != 0) & ((top > _MOST) | (bottom < _LEAST) | (bottom < top - _NORMAL))


def merged(first: int, second: int) -> int:
    """Return the extrema of the union of two pieces."""
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
        magnitudes -= np.uint32(1)  # zero wraps around to the largest integer
        found = merged(found, largest << 32 | int(np.minimum.reduce(magnitudes)))
    return found
