"""Numbers rounded to a `lowprec.Format` one by one and exactly, by its definition: the oracle of formats as values.

A number of a format or of an 8-bit scale is looked up in the list of all. Numbers are Python's, with 53 bits: sums,
products and quotients of float32 numbers that are rounded to float32 from these are those that are rounded once (S.
Figueroa, "When is double rounding innocuous?", 1995).
"""

import bisect
import math
from fractions import Fraction

import numpy as np

from support.narrow_twin import E4M3

#: The numbers of unsigned E5M3: 5 bits of the exponent with bias 15, 3 of the mantissa; all bits one is NaN.
E5M3 = [
    Fraction(2) ** (max(code >> 3, 1) - 15) * ((code >> 3 > 0) + Fraction(code & 7, 8))
    for code in range(0xFF)
]
SCALES = {"e4m3": [*map(float, E4M3)], "e5m3": [*map(float, E5M3)]}


def float32(x):
    return float(np.float32(x))


def floor_log2(x):
    return math.frexp(x)[1] - 1


def nearest(x, numbers):
    """The code of the nearest number to ``x >= 0``, of two the even code; of the largest number beyond it."""
    above = bisect.bisect_left(numbers, x)
    if above == 0 or above == len(numbers):
        return min(above, len(numbers) - 1)
    low, high = x - numbers[above - 1], numbers[above] - x
    return above - 1 if low < high or (low == high and above % 2) else above


def magnitudes(fmt):
    """The numbers of the elements that are not negative, as fractions."""
    bias = fmt.bias
    if bias is None:
        bias = 2 ** (fmt.exponent - 1) - (fmt.specials not in ("fnuz", "p3109"))
    found = []
    for code in range(2 ** (fmt.exponent + fmt.mantissa)):
        exponent, mantissa = divmod(code, 2**fmt.mantissa)
        is_top = exponent == 2**fmt.exponent - 1
        if is_top and (
            fmt.specials == "ieee"
            or (fmt.specials in ("nan", "p3109") and mantissa == 2**fmt.mantissa - 1)
        ):
            continue
        size = Fraction(mantissa, 2**fmt.mantissa) + (exponent > 0)
        found.append(size * Fraction(2) ** (max(exponent, 1) - bias))
    return found


def float_scale(peak, largest):
    return max(float32(peak / largest), 2.0**-126) if peak else 1.0


def _truncated(x):
    """The leading 12 bits."""
    step = 2.0 ** (floor_log2(x) - 11)
    return x // step * step if x > 2.0**-50 else 0.0


def _pairwise(x):
    while len(x) > 1:
        x = [float32(low + high) for low, high in zip(x[::2], x[1::2], strict=True)]
    return x[0]


def _of_block(block, fmt, numbers, whole):
    """The factor after rounding, and the numbers, of a block with 8-bit scales."""
    peak, best, unit = max(block), None, None
    for target in fmt.peaks or (numbers[-1],):
        scale = SCALES[fmt.scale][
            nearest(float32(float32(peak / target) / whole), SCALES[fmt.scale])
        ]
        if not scale:
            continue
        divisor = float32(scale * whole)
        quotients = [float32(x / divisor) for x in block]
        found = [numbers[nearest(q, numbers)] for q in quotients]
        if not fmt.peaks:
            return scale, found
        errors = [
            _truncated(float32(abs(q - v))) ** 2 for q, v in zip(quotients, found, strict=True)
        ]
        if unit is None:
            unit = divisor if target == fmt.peaks[0] else 1.0
        ratio = float32(divisor / unit)
        error = float32(float32(_pairwise(errors) * ratio) * ratio)
        if best is None or error < best[0]:
            best = error, scale, found
    return best[1:] if best else (0.0, [0.0] * len(block))


def rounded_exactly(x, fmt):
    """The rounded numbers of float32 vectors along k, without float32 scales, and these scales of the vectors."""
    numbers = [*map(float, magnitudes(fmt))]
    exact = [[float(abs(v)) for v in row] for row in x]
    length = fmt.block if isinstance(fmt.block, int) else x.shape[1]
    largest = numbers[-1]
    if fmt.scale in SCALES:
        top = SCALES[fmt.scale][-1]
        if fmt.peaks:
            top = 2.0 ** floor_log2(top * min(fmt.peaks) / fmt.peaks[0])
        largest = (fmt.peaks[0] if fmt.peaks else largest) * top
    whole = float_scale(max(max(row) for row in exact), largest)
    values, scales = [], []
    for row in exact:
        if fmt.block == "rows" or fmt.outer == "rows":
            whole = float_scale(max(row), largest)
        of_row = []
        for block in (row[i : i + length] for i in range(0, len(row), length)):
            block = block + [0.0] * (length - len(block))
            factor, scale = 1.0, whole
            if fmt.scale == "e8m0":
                peak = max(block)
                exponent = floor_log2(peak) - floor_log2(numbers[-1]) if peak else -127
                factor = scale = 2.0 ** max(-127, min(127, exponent))
            if fmt.scale in SCALES:
                factor, found = _of_block(block, fmt, numbers, whole)
            else:
                if fmt.scale == "float32" and isinstance(fmt.block, int):
                    scale = float_scale(max(block), largest)
                found = [numbers[nearest(float32(v / scale), numbers)] for v in block]
            of_row += [v * factor for v in found]
        values.append(of_row[: len(row)])
        scales.append(whole if fmt.scale in SCALES or isinstance(fmt.block, str) else 1.0)
    found = np.array(values)
    return np.where(np.signbit(x), -found, found), np.array(scales)
