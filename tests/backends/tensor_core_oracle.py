"""Tensor-core arithmetic, one element at a time and exact: the readable twin, and the oracle, of the fast ones."""

from dataclasses import replace
from fractions import Fraction
from math import copysign, frexp, inf, isfinite

import numpy as np

from lowprec.formats import FLOAT32


def dot(a, b, c, arithmetic, emins=None):
    """Return ``c + a_1 b_1 + a_2 b_2 + ...`` as a tensor core chains it: the result of a group is the c of the next.

    ``a`` and ``b`` are numbers of the format of ``arithmetic``, or of two formats whose least exponents are ``emins``;
    ``c`` and the result are float32.
    """
    for first in range(0, len(a), arithmetic.group):
        group = slice(first, first + arithmetic.group)
        c = _add_group(
            a[group], b[group], c, arithmetic, emins or (arithmetic.emin, arithmetic.emin)
        )
    return c


def scaled_dot(a, b, of_a, of_b, kind, emins):
    """Return the sum of products of numbers with scales of blocks; ``of_a`` and ``of_b`` are those of each number.

    MXFP8: scales are powers of two. A product of MXFP4 or NVFP4 has an exponent of its scales alone, and 16 are added
    exactly. ``emins`` are the least exponents of both formats, or of the scales of these.
    """
    c = 0.0
    group, dot, bits = {"mxf8f6f4": (32, 1, 25), "mxf4nvf4": (64, 16, 35)}[kind]
    for first in range(0, len(a), group):
        terms = [(Fraction(c), _exponent(c, FLOAT32.emin) if c else FLOAT32.emin)]
        for i in range(first, min(first + group, len(a)), dot):
            s, t = of_a[i], of_b[i]
            pairs = list(zip(a[i : i + dot], b[i : i + dot], strict=True))
            exponent = _of_scale(s, emins[0]) + _of_scale(t, emins[1])
            if dot == 1:
                ((x, y),) = pairs
                exponent = frexp(s)[1] + frexp(t)[1] - 2
                exponent += _exponent(x, emins[0]) + _exponent(y, emins[1])
            value = sum(Fraction(x) * Fraction(y) for x, y in pairs) * Fraction(s) * Fraction(t)
            if value or dot > 1:
                terms.append((value, exponent))
        grid = Fraction(2) ** (max(exponent for _, exponent in terms) - bits)
        c = _toward_zero(sum(_cut(value, grid) for value, _ in terms), FLOAT32)
        if not isfinite(c):
            return c
    return c


def _of_scale(x, emin):
    return max(frexp(x)[1] - 1, emin) if x else FLOAT32.emin


def _add_group(a, b, c, arithmetic, emins):
    # float64 holds all products; the sum of those that are not finite is what IEEE 754 says.
    special = [x for x in (*map(float.__mul__, a, b), c) if not isfinite(x)]
    if special:
        return sum(special)
    terms = [
        (Fraction(x) * Fraction(y), _exponent(x, emins[0]) + _exponent(y, emins[1]))
        for x, y in zip(a, b, strict=True)
    ]
    if not arithmetic.adds_after:
        terms.append((Fraction(c), _exponent(c, FLOAT32.emin)))
    exponents = [exponent for value, exponent in terms if value]
    if not exponents:
        return c + 0.0 if arithmetic.adds_after else 0.0
    largest = max(*exponents, arithmetic.least_exponent)
    grid = Fraction(2) ** (largest - arithmetic.fraction_bits)
    total = sum((_cut(value, grid) for value, _ in terms), Fraction(0))
    # Fewer fraction bits, in the range of float32.
    rounded = _toward_zero(total, replace(FLOAT32, precision=arithmetic.result_bits + 1))
    if not arithmetic.adds_after:
        return rounded
    with np.errstate(over="ignore"):
        return float(np.float32(c) + np.float32(rounded))


def _exponent(x, emin):
    """Return the exponent of a number in a format, which for a subnormal number is that of the smallest normal one."""
    return max(frexp(x)[1] - 1, emin)


def _cut(value, grid):
    """Return the multiple of ``grid`` next to ``value`` on the side of zero."""
    return int(value / grid) * grid


def _toward_zero(value, fmt):
    """Return the number of a format next to ``value`` on the side of zero; an infinity beyond the largest one."""
    if not value:
        return 0.0
    # A sum of a group has few enough digits to be a float64.
    exponent = _exponent(float(value), fmt.emin)
    if exponent > fmt.emax:
        return copysign(inf, value)
    return copysign(float(_cut(value, Fraction(2) ** (exponent - fmt.precision + 1))), value)
