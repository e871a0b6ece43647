"""Emulation with NumPy: without the compiled library, and for models beyond its kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from lowprec.formats import FLOAT32
from lowprec.planning.tensor_cores import Accumulation

#: Exponent of a zero; it, and the sum of two of them, is below all others.
NOWHERE = -(2**20)

#: The NaN that tensor cores return.
NAN = np.uint32(0x7FFFFFFF)


class Operand(NamedTuple):
    """A matrix of numbers of one format."""

    values: Any  # float64; non-finite numbers are zero
    exponents: Any  # int32; ``NOWHERE`` for zeros
    raw: Any  # float32: the numbers themselves
    is_finite: bool  # whether all numbers are finite

    @classmethod
    def of(cls, x: Any, emin: int, scales: Any = 0) -> Operand:
        """Return a float32 matrix of numbers of a format with exponent ``emin`` as an operand.

        ``scales`` are exponents of factors of the numbers.
        """
        raw = np.array(x, np.float32, order="C")
        finite = np.isfinite(raw)
        values = np.where(finite, raw, 0).astype(np.float64)
        exponents = np.maximum(np.frexp(values)[1] - 1, emin)
        exponents = np.where(values == 0, NOWHERE, exponents + scales).astype(np.int32)
        return cls(np.ldexp(values, scales), exponents, raw, bool(finite.all()))


#: Bits of a float64 beyond the significand of a float32.
_BEYOND_FLOAT32 = np.int64((1 << 29) - 1)


#: Rows and columns of a block of the result, whose intermediate results fit the L2 cache.
_ROWS, _COLUMNS = 16, 512


def accumulate(a: Any, b: Any, c: Any, arithmetic: Accumulation, scales: Any = None) -> None:
    """Compute ``c += a @ b`` in place, group by group as a tensor core; ``c`` is float32 and contiguous.

    ``scales`` are the exponents of the scales of groups of both, None for zeros.
    """
    of_a: Any = 0
    of_b: Any = 0
    if scales is not None:
        of_a, of_b = scales
        k = a.shape[1]
        of_a = np.repeat(of_a, arithmetic.group, 1)[:, :k]
        of_b = np.repeat(of_b, arithmetic.group, 0)[:k]
    x = Operand.of(a, arithmetic.emin, of_a)
    y = Operand.of(b, arithmetic.emin, of_b)
    m, n = c.shape
    with np.errstate(all="ignore"):
        for i in range(0, m, _ROWS):
            rows = slice(i, i + _ROWS)
            for j in range(0, n, _COLUMNS):
                columns = slice(j, j + _COLUMNS)
                _accumulate_block(x, y, c, rows, columns, arithmetic)
    c.view(np.uint32)[np.isnan(c)] = NAN


def _accumulate_block(
    a: Operand, b: Operand, c: Any, rows: slice, columns: slice, arithmetic: Accumulation
) -> None:
    total = c[rows, columns].astype(np.float64)
    for first in range(0, a.values.shape[1], arithmetic.group):
        inner = slice(first, first + arithmetic.group)
        x = _part(a, rows, inner)
        y = _part(b, inner, columns)
        total = _add_group(x, y, total, arithmetic)
    c[rows, columns] = total


def _part(x: Operand, rows: slice, columns: slice) -> Operand:
    values, exponents, raw = (y[rows, columns] for y in x[:3])
    return Operand(values, exponents, raw, x.is_finite)


def _add_group(a: Operand, b: Operand, c: Any, arithmetic: Accumulation) -> Any:
    finite = np.isfinite(c)
    value = np.where(finite, c, 0)
    exponent = np.maximum(np.frexp(value)[1] - 1, FLOAT32.emin)
    exponent = np.where((value == 0) | arithmetic.adds_after, NOWHERE, exponent)
    exponents = a.exponents[:, :, None] + b.exponents[None, :, :]
    largest = np.maximum(exponents.max(axis=1), exponent)
    shift = arithmetic.fraction_bits - np.maximum(largest, arithmetic.least_exponent)
    scale = np.ldexp(1.0, shift)
    # Integers below 2^33, whose sum is exact.
    total = np.trunc(value * scale) * (not arithmetic.adds_after)
    for i in range(a.values.shape[1]):
        total += np.trunc(a.values[:, i, None] * b.values[i, :] * scale)
    # Adding +0 removes a -0 from terms that were truncated to zero.
    total = _toward_zero(np.ldexp(total + 0.0, -shift)).astype(np.float32)
    dropped = 23 - arithmetic.result_bits
    total.view(np.uint32)[...] &= np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    if arithmetic.adds_after:
        total = value.astype(np.float32) + total
    special = np.where(finite, 0, c)
    if not (a.is_finite and b.is_finite):
        products = a.raw[:, :, None].astype(np.float64) * b.raw[None, :, :]
        not_finite = np.where(np.isfinite(products), 0, products)
        special = special + not_finite.sum(axis=1)
    return np.where(special == 0, total, special)


def sum_dots(a: Any, b: Any, scales: Any, emins: Any, arithmetic: Accumulation) -> Any:
    """Return the product of numbers in blocks along k, whose exact sums of products are terms, as float32.

    ``scales`` are those of each block, ``emins`` their least exponents. The exponent of a term is that of its scales.
    """
    of_a, of_b = scales
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    with np.errstate(all="ignore"):
        for group in range(0, a.shape[-1], arithmetic.group):
            terms = [total.astype(np.float64)]
            exponents = [exponents_of(terms[0], FLOAT32.emin)]
            for first in range(group, min(group + arithmetic.group, a.shape[-1]), arithmetic.dot):
                inner = slice(first, first + arithmetic.dot)
                block = first // arithmetic.dot
                x = of_a[..., block, None]
                y = of_b[..., block, :][..., None, :]
                dots = a[..., inner] @ b[..., inner, :]
                terms.append(dots * x * y)
                exponent_of_x = exponents_of(x, emins[0])
                exponents.append(exponent_of_x + exponents_of(y, emins[1]))
            largest = functools.reduce(np.maximum, exponents)
            shift = arithmetic.fraction_bits - largest
            kept = sum(np.trunc(np.ldexp(term, shift)) for term in terms)
            total = _toward_zero(np.ldexp(kept + 0.0, -shift)).astype(np.float32)
    total.view(np.uint32)[np.isnan(total)] = NAN
    return total


def exponents_of(x: Any, emin: int) -> Any:
    """Return the exponents, those of subnormal numbers being ``emin``, that of zero the least of float32."""
    _, exponents = np.frexp(x)
    exponents = np.maximum(exponents - 1, emin)
    return np.where(x == 0, FLOAT32.emin, exponents)


def _toward_zero(x: Any) -> Any:
    rounded = (x.view(np.int64) & ~_BEYOND_FLOAT32).view(np.float64)
    subnormal = np.trunc(x * 2.0**149) * 2.0**-149
    rounded = np.where(np.abs(x) < FLOAT32.smallest_normal, subnormal, rounded)
    return np.where(np.abs(x) >= 2.0**128, np.copysign(np.inf, x), rounded)
