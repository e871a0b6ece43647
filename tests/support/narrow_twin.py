"""Quantised blocks one number at a time and exactly, from the text of the specifications: the oracle of ``quantize``.

An element or scale is looked up in the list of all numbers of its format, and divisions are of fractions, rounded to
float32 where the rule says so. Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6.3; OCP 8-bit
Floating Point Specification 1.0; NVIDIA's description of NVFP4.
"""

import bisect
import math
from fractions import Fraction

SMALLEST_NORMAL, LARGEST = Fraction(1, 2**126), Fraction(2**24 - 1) * 2**104


def e4m3(code):
    """The number of a code without sign: 4 bits of the exponent with bias 7, 3 of the mantissa; 0x7F is NaN."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(2) ** -6 * Fraction(mantissa, 8)
    return Fraction(2) ** (exponent - 7) * (1 + Fraction(mantissa, 8))


E4M3 = [e4m3(code) for code in range(0x7F)]
#: As in the table of the specification.
E2M1 = [Fraction(x) for x in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def float32(x):
    """Round a fraction to the nearest float32, ties to even."""
    if x == 0:
        return x
    exponent = max(floor_log2(abs(x)), -126)
    step = Fraction(2) ** (exponent - 23)
    return round(x / step) * step


def floor_log2(x):
    """The exponent of the largest power of two that is not above ``x``."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def nearest(x, numbers):
    """The code of the nearest number to ``x >= 0``, of two the even code; of the largest number beyond it."""
    above = bisect.bisect_left(numbers, x)
    if above == 0 or above == len(numbers):
        return min(above, len(numbers) - 1)
    low, high = x - numbers[above - 1], numbers[above] - x
    return above - 1 if low < high or (low == high and above % 2) else above


def _signed(x, code, width):
    return code | (1 << (width - 1) if math.copysign(1, x) < 0 else 0)


def microscaled(block, numbers, width, rule="floor"):
    """The E8M0 code and the elements' codes of a block, as the specification converts, rounded up, or even."""
    if not all(map(math.isfinite, block)):
        return 255, [0] * len(block)
    values = [Fraction(x) for x in block]
    peak = max(map(abs, values))
    exponent = floor_log2(peak) - floor_log2(numbers[-1]) if peak else -127
    if peak and rule == "rceil":
        exponent = -floor_log2(numbers[-1] / peak)
    if peak and rule == "even":  # the peak is rounded to the bits of an element, ties up
        half = Fraction(2) ** (floor_log2(peak) - {8: 4, 4: 2}[width])
        exponent = floor_log2(peak + half) - floor_log2(numbers[-1])
    exponent = max(-127, min(127, exponent))
    codes = [nearest(abs(v) / Fraction(2) ** exponent, numbers) for v in values]
    return exponent + 127, [_signed(x, code, width) for x, code in zip(block, codes, strict=True)]


def array_scale(x, largest):
    """The float32 scale of an array whose largest magnitude becomes ``largest``."""
    peak = max((Fraction(abs(v)) for v in x if math.isfinite(v)), default=Fraction(0))
    return max(float32(peak / largest), SMALLEST_NORMAL) if peak else Fraction(1)


def nvfp4(block, scale):
    """The E4M3 code of the scale and the elements' codes of a block."""
    if not all(map(math.isfinite, block)):
        return 0x7F, [0] * len(block)
    peak = max(Fraction(abs(x)) for x in block)
    code = nearest(float32(float32(peak / 6) / scale), E4M3)
    divisor = float32(E4M3[code] * scale)
    if not divisor:
        return code, [0] * len(block)
    return code, [_signed(x, nearest(float32(abs(Fraction(x)) / divisor), E2M1), 4) for x in block]


def fp8(x, scale):
    """The E4M3 code of a number."""
    code = nearest(float32(abs(Fraction(x)) / scale), E4M3) if math.isfinite(x) else 0x7F
    return _signed(x, code, 8)


def quantized(x, name, rule="floor"):
    """The codes, one by one, the scales' codes and the scale of float32 numbers along one axis."""
    if name == "fp8":
        scale = array_scale(x, 448)
        return [fp8(v, scale) for v in x], None, scale
    length = 16 if name == "nvfp4" else 32
    padded = [*x, *[0.0] * (-len(x) % length)]
    blocks = [padded[i : i + length] for i in range(0, len(padded), length)]
    if name == "nvfp4":
        scale = array_scale(x, 6 * 448)
        found = [nvfp4(block, scale) for block in blocks]
    else:
        scale = Fraction(1)
        found = [
            microscaled(b, *((E4M3, 8) if name == "mxfp8" else (E2M1, 4)), rule) for b in blocks
        ]
    return [code for _, codes in found for code in codes], [code for code, _ in found], scale


def value(code, width):
    """The number of a code with its sign; None if it is NaN."""
    magnitude = code & ((1 << (width - 1)) - 1)
    numbers = E4M3 if width == 8 else E2M1
    if magnitude >= len(numbers):
        return None
    return -numbers[magnitude] if code >> (width - 1) else numbers[magnitude]


def dequantized(code, block, name, scale):
    """The float32 value of a code: every product is rounded to float32."""
    number = value(code, 4 if name.endswith("4") else 8)
    if number is None or block == (0x7F if name == "nvfp4" else 255):
        return math.nan
    if block is not None:
        factor = value(block, 8) if name == "nvfp4" else Fraction(2) ** (block - 127)
        number = None if factor is None else float32(number * factor)
    if number is None:
        return math.nan
    found = abs(float32(number * scale))
    negative = code >> (3 if name.endswith("4") else 7) != (
        block is not None and name == "nvfp4" and block >> 7
    )
    return math.copysign(math.inf if found > LARGEST else float(found), -1 if negative else 1)
