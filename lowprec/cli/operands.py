"""Seeded random operands."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.checking.accuracy import Array
from lowprec.checking.measure import rotation
from lowprec.formats import DType

#: Exponents of the wide distribution are between -20 and 20; float16 ranges from 2^-24 to 2^16.
_WIDE = 20


class Distribution(NamedTuple):
    """A description of random elements, and the function that draws them in float64."""

    words: str
    draw: Callable[[np.random.Generator, tuple[int, ...]], Array]


def _wide(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    exponents = rng.integers(-_WIDE, _WIDE, shape, endpoint=True)
    return np.ldexp(rng.standard_normal(shape), exponents)


#: By the names of the command line.
DISTRIBUTIONS: dict[str, Distribution] = {
    "normal": Distribution("normal, mean 0, variance 1", lambda rng, shape: rng.standard_normal(shape)),
    "positive": Distribution("uniform between 0 and 1", lambda rng, shape: rng.random(shape)),
    "wide": Distribution(f"normal times 2^e, e from -{_WIDE} to {_WIDE}", _wide),
}


def operand(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, distribution: str = "normal") -> Array:
    """Return a random array, also for both parts of complex numbers; int8 is uniform over all its values."""
    if math.prod(shape) > sys.maxsize // 16:  # the bytes of a complex128
        raise MemoryError(f"an array of {'x'.join(map(str, shape))} elements")
    if dtype is DType.INT8:
        return rng.integers(-128, 127, shape, dtype=np.int8, endpoint=True)
    draw = DISTRIBUTIONS[distribution].draw
    values = draw(rng, shape)
    if dtype.is_complex:
        values = values + 1j * draw(rng, shape)
    with np.errstate(over="ignore"):
        converted: Array = values.astype(NUMPY_DTYPES[dtype])
    return converted


def pairs(
    rng: np.random.Generator, extents: tuple[int, ...], dtype: DType, distribution: str = "normal"
) -> list[tuple[Array, Array]]:
    """Return pairs of operands to rotate, for a product of extents ``(n,)`` or ``(m, k, n)``."""
    m, k, n = extents * 3 if len(extents) == 1 else extents
    shapes = (m, k), (k, n)
    return [
        (operand(rng, shapes[0], dtype, distribution), operand(rng, shapes[1], dtype, distribution))
        for _ in range(rotation((m * k + k * n) * dtype.itemsize))
    ]
