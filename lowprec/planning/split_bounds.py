"""Guaranteed errors of products of parts, and errors that are met with a stated probability.

A number x is split into parts, x = p_0 + p_1 + ... + rest: each part is the rest of the parts before, rounded to
nearest with p bits, u = 2^-p. The rest after p_0 is at most u 2^e for |x| in [2^e, 2^(e+1)), a power of two, and so

    |p_0| <= (1 + u) |x|,   |p_1| <= 2^-p |x|,   |p_2| <= 2^-(2p+1) |x|,   |rest| <= 2^-(n p + n - 1) |x| for n parts,

and no rest is left of a float32, a multiple of 2^(e-23), once n p + n - 1 > 24: three bfloat16 parts are exact. With w
the bounds of the parts and s that of the rest, for every element

    |C - AB| <= (s_a + s_b + s_a s_b  +  sum of w_i w_j over the pairs that are not formed
                 +  sum of w_i w_j gamma_d over those that are) |A| |B|,

where a product that is formed goes through d roundings: those of its own sum over k, and one for each time that it, or
a later product, is added. A factor that is no power of two adds a rounding. Scheme and idea of the chunks: Ootomo and
Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance"
(2022); bfloat16 parts: Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for
higher-precision computations" (2019); Fasi, Higham, Lopez, Mary and Mikaitis, "Matrix multiplication in multiword
arithmetic: error analysis and application to GPU tensor cores" (2023).

*Scaled rows* (float16): numbers below the normal range lose at most 2^-25 of numbers whose row reaches 2^14, in the
last part divided by its scale. Over a row of k numbers, 2^-39 (of the rest: 2^-(39 + t), t the scale of
the last part) times sqrt(k) joins u and s; the bound is then one of norms.

*Karatsuba*: the sum of the parts is rounded to float16 with u. Its error reaches the middle products, of weight 2^-11.

*Probable*: where each rounding error has mean zero given the ones before, those of d roundings to nearest together
exceed expm1(lambda sqrt(d) u + d u^2 / (1 - u)) with probability at most 2 exp(-lambda^2 (1 - u)^2 / 2) for each sum
that is formed (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019, Theorem 2.4; without
independence Ipsen and Zhou, "Probabilistic error analysis for inner products", 2020). lambda makes that
``FAILURE`` for all sums of the product together, each with all of its prefixes. Errors of truncation have no mean of
zero: cuts of tensor cores count in full.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import expm1, frexp, inf, log, sqrt
from typing import NamedTuple

from lowprec.formats import NumberFormat
from lowprec.modes import ModeRow, Pair
from lowprec.planning.schedule import Product
from lowprec.planning.tensor_cores import roundings, tensor_cores_multiply

#: Probability with which a probable bound may fail, for the whole product.
FAILURE = 1e-3

#: Pieces of k, the longest first.
CHUNKS = (1024, 512, 256)

_SINGLE_BITS = 24
_SCALED_EXPONENT = 39


def gamma(count: float, fmt: NumberFormat) -> float:
    """Return gamma_count = count u / (1 - count u), infinite once count u reaches 1."""
    step = count * fmt.unit_roundoff
    return step / (1 - step) if step < 1 else inf


@lru_cache(maxsize=1024)
def confidence(sums: int) -> float:
    """Return lambda for so many rounded sums, exceeded by any with probability ``FAILURE`` at most."""
    return sqrt(2 * log(2 * max(sums, 1) / FAILURE)) * (1 + 2.0**-23)


class Depth(NamedTuple):
    """Roundings that a term of a sum goes through at most: to nearest, and cut by tensor cores in the same units."""

    nearest: int
    cut: int = 0

    def and_nearest(self, more: int) -> Depth:
        """Return the depth with so many more roundings to nearest."""
        return Depth(self.nearest + more, self.cut)

    @property
    def total(self) -> int:
        """All of them, in units of a rounding to nearest."""
        return self.nearest + self.cut

    def worst(self, fmt: NumberFormat) -> float:
        """Return gamma of all."""
        return gamma(self.total, fmt)

    def probable(self, fmt: NumberFormat, size: float) -> float:
        """Return their error with ``size`` the lambda of :func:`confidence`; never more than the worst."""
        u = fmt.unit_roundoff
        spread = expm1(min(size * sqrt(self.nearest) * u + self.nearest * u * u / (1 - u), 1.0))
        return min(self.worst(fmt), spread + gamma(self.cut, fmt) * (1 + spread))


def on_tensor_cores(terms: int, fmt: str, capability: tuple[int, int]) -> Depth:
    """Return the depth of a sum on tensor cores; in FP32 units of a GPU where they do not multiply the format."""
    if tensor_cores_multiply(fmt, capability):
        return Depth(0, roundings(terms, fmt, capability))
    return Depth(terms)


def depths(schedule: tuple[Product, ...], of_sum: Callable[[int], Depth]) -> dict[Pair, tuple[Depth, float]]:
    """Return of each pair of parts the depth of its sums, additions of products included, and its factor."""
    found: dict[Pair, tuple[Depth, float]] = {}
    for number, product in enumerate(schedule):
        added = len(schedule) - max(number, 1)
        inexact = int(abs(frexp(product.factor)[0]) != 0.5)
        depth = of_sum(product.length).and_nearest(added + inexact)
        for pair in product.pairs:
            before = found.get(pair)
            if before is None or before[0].total < depth.total:
                found[pair] = depth, product.factor
    return found


def in_one_pass(
    schedule: tuple[Product, ...], of_chunk: Callable[[int, int], int], chunk: int, more: int
) -> dict[Pair, tuple[Depth, float]]:
    """Return the same where all products share their sums, each over a chunk of k, which are then added.

    ``of_chunk`` is the depth in a sum of the products from a number on over so many k; ``more`` roundings follow.
    """
    length = schedule[0].length
    added = -(-length // chunk) - 1 + more if length else 0
    return {
        product.pairs[0]: (Depth(of_chunk(number, min(length, chunk)) + added), product.factor)
        for number, product in enumerate(schedule)
    }


def chunk_for(k: int, fmt: str, capability: tuple[int, int]) -> int | None:
    """Return in which pieces of k tensor cores sum the leading product, None for one piece.

    The longest whose error on data of one sign, on which cuts add up, is about that of an FP32 sum; where none
    is, the shortest. Such data show about a seventh of the worst that d cuts may do, and of k roundings to nearest
    sqrt(k) u / 4. (Bounds do not help: the guaranteed one takes roundings, which mostly cancel, for as bad as cuts,
    the probable one the rarest of them for the rule.)

    Examples
    --------
    >>> [chunk_for(k, "bfloat16", (9, 0)) for k in (256, 1024, 16384, 65536, 2**18)]
    [None, 256, 256, 512, 1024]
    """
    for chunk in (k, *CHUNKS):
        if on_tensor_cores(min(chunk, k), fmt, capability).cut <= 2 * sqrt(k):
            return chunk if chunk < k else None
    return CHUNKS[-1] if k > CHUNKS[-1] else None


class RelativeError(NamedTuple):
    """Bounds of the relative error, and the expression of the first."""

    worst: float
    probable: float
    formula: str


class _Parts(NamedTuple):
    weights: tuple[float, ...]
    rest: float


def _parts(row: ModeRow, is_split: bool, scaled_over: int) -> _Parts:
    if not is_split:
        return _Parts((1.0,), 0.0)
    p, count = row.operand_format.precision, row.parts
    lost = 2.0**-_SCALED_EXPONENT * sqrt(scaled_over)
    bits = count * p + count - 1
    rest = 0.0 if bits > _SINGLE_BITS else 2.0**-bits
    rest += lost * 2.0 ** (-row.part_exponent * (count - 1))
    weights = (1 + 2.0**-p + lost, 2.0**-p + lost, 2.0 ** -(2 * p + 1))
    return _Parts(weights[:count], rest)


def split_error(
    row: ModeRow,
    is_split: tuple[bool, bool],
    found: dict[Pair, tuple[Depth, float]],
    accumulator: NumberFormat,
    *,
    growth: float,
    scaled_over: int,
    size: float,
) -> RelativeError:
    """Return the error of a product of which ``a``, ``b`` or both are split.

    ``found`` has of each pair of parts that is multiplied the depth of its sums, and its factor; ``growth`` are the
    magnitudes of the terms of a sum together, over ``|A| |B|``: sqrt(2) for complex numbers. ``scaled_over`` is the
    length of the rows that were scaled, 0 where none was, and ``size`` the lambda of :func:`confidence`.
    """
    a, b = (_parts(row, split, scaled_over if split else 0) for split in is_split)
    sums = row.sums_parts and all(is_split)
    if sums:
        dropped = _karatsuba_rounding(row, a, b)
    else:
        dropped = sum(x * y for i, x in enumerate(a.weights) for j, y in enumerate(b.weights) if (i, j) not in found)
    fixed = a.rest + b.rest + a.rest * b.rest + dropped
    worst = probable = fixed
    for (i, j), (depth, factor) in found.items():
        weight = _weight(row, a, i) * _weight(row, b, j) * abs(factor) * growth
        worst += weight * depth.worst(accumulator)
        probable += weight * depth.probable(accumulator, size)
    leading = found[0, 0][0].total
    formula = (
        f"{fixed:.3g} of the split, gamma_{leading} of the leading products' sums, the others' with their weights; "
        f"gamma_d = d u / (1 - d u), u = 2^-{accumulator.precision}"
    )
    return RelativeError(worst, probable, formula)


def _weight(row: ModeRow, parts: _Parts, index: int) -> float:
    """Return the bound of a part as it is multiplied: scaled; the part after the last is the sum of all."""
    if index < len(parts.weights):
        return float(parts.weights[index] * 2.0 ** (row.part_exponent * index))
    u = row.operand_format.unit_roundoff
    return (1 + u) * sum(_weight(row, parts, i) for i in range(len(parts.weights)))


def _karatsuba_rounding(row: ModeRow, a: _Parts, b: _Parts) -> float:
    u = row.operand_format.unit_roundoff
    # A sum below the normal range is exact: parts are multiples of 2^-24.
    x, y = (_weight(row, parts, len(parts.weights)) for parts in (a, b))
    exact = x * y / (1 + u) ** 2
    return float(2.0**-row.part_exponent * (x * y - exact))
