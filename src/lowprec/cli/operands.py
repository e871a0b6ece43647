"""Seeded random operands of known kinds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowprec.cli.files import Array, numpy_dtype
from lowprec.formats import DType

__all__ = ["DISTRIBUTIONS", "Distribution", "operand", "sizes"]

#: Exponents of the wide distribution reach this far up and down. float16 ends at 2^16 and 2^-24.
WIDE_EXPONENT = 20


@dataclass(frozen=True)
class Distribution:
    """How random elements are drawn.

    Parameters
    ----------
    words : str
        For people.
    draw : callable
        ``(generator, shape)`` to a float64 array.
    """

    words: str
    draw: Callable[[np.random.Generator, tuple[int, ...]], Array]


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape)


def _positive(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.random(shape)


def _wide(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    exponents = rng.integers(-WIDE_EXPONENT, WIDE_EXPONENT, shape, endpoint=True)
    return np.ldexp(rng.standard_normal(shape), exponents)


#: By the names of the command line.
DISTRIBUTIONS: dict[str, Distribution] = {
    "normal": Distribution("normal, mean 0, variance 1", _normal),
    "positive": Distribution("uniform between 0 and 1", _positive),
    "wide": Distribution(f"normal times 2^e, e from -{WIDE_EXPONENT} to {WIDE_EXPONENT}", _wide),
}


def operand(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, distribution: str = "normal"
) -> Array:
    """Return a random array.

    Parameters
    ----------
    rng : numpy.random.Generator
    shape : tuple of int
    dtype : DType
        For int8 the elements are all its values with equal probability, whatever the distribution.
    distribution : str
        A key of ``DISTRIBUTIONS``; complex numbers have such real and imaginary parts.

    Raises
    ------
    MemoryError
        If no machine has room for it.
    """
    if math.prod(shape) > sys.maxsize // 16:  # the bytes of a complex128
        raise MemoryError(f"an array of {'x'.join(map(str, shape))} elements")
    if dtype is DType.INT8:
        return rng.integers(-128, 127, shape, dtype=np.int8, endpoint=True)
    draw = DISTRIBUTIONS[distribution].draw
    values = draw(rng, shape)
    if dtype.is_complex:
        values = values + 1j * draw(rng, shape)
    with np.errstate(over="ignore"):
        converted: Array = values.astype(numpy_dtype(dtype))
    return converted


def sizes(extents: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the operands for ``N`` or ``MxKxN``.

    Examples
    --------
    >>> sizes((64,)), sizes((8, 16, 32))
    (((64, 64), (64, 64)), ((8, 16), (16, 32)))
    """
    m, k, n = extents * 3 if len(extents) == 1 else extents
    return (m, k), (k, n)
