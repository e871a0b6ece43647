"""Guaranteed and probable errors of products of parts.

A number x is split into parts, x = p_0 + p_1 + ... + rest. Part i is x minus the previous parts, rounded to
nearest with p bits, u = 2^-p. After p_0 at most u 2^e is left for |x| in [2^e, 2^(e+1)), a power of two. Hence

    |p_0| <= (1 + u) |x|,   |p_1| <= 2^-p |x|,   |p_2| <= 2^-(2p+1) |x|,   |rest| <= 2^-(n p + n - 1) |x| for n parts,

and the rest of a float32, a multiple of 2^(e-23), is zero once n p + n - 1 > 24: three bfloat16 parts are exact. With
bounds w of the parts and s of the rest, for every element

    |C - AB| <= (s_a + s_b + s_a s_b  +  sum of w_i w_j over the omitted pairs
                 +  sum of w_i w_j gamma_d over the computed pairs) |A| |B|,

where d counts the roundings of a product: those of its own sum over k, and one for each addition of it or of a later
product. A factor that is not a power of two adds a rounding. Scheme and chunks: Ootomo and Yokota, "Recovering single
precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance" (2022); bfloat16 parts:
Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations"
(2019); Fasi, Higham, Lopez, Mary and Mikaitis, "Matrix multiplication in multiword arithmetic: error analysis and
application to GPU tensor cores" (2023).

*Scaled rows* (float16): the largest number of a row is at least 2^14, and a number below the normal range loses at most
2^-25, in the last part divided by its scale. Over a row of k numbers this adds sqrt(k) 2^-39 to u and, with 2^t the
scale of the last part, sqrt(k) 2^-(39 + t) to s. The bound then holds for norms only.

*Karatsuba*: the sum of the parts is rounded to float16 with u. This error enters with weight 2^-11.

*Probable*: if each rounding error has mean zero given the previous ones, the error of d roundings to nearest exceeds
expm1(lambda sqrt(d) u + d u^2 / (1 - u)) with probability at most 2 exp(-lambda^2 (1 - u)^2 / 2) per sum (Higham and
Mary, "A new approach to probabilistic rounding error analysis", 2019, Theorem 2.4; without independence Ipsen and Zhou,
"Probabilistic error analysis for inner products", 2020). lambda is chosen so that the probability for all sums of the
product, with all of their prefixes, is ``FAILURE``. The errors of truncation do not have mean zero, so those of tensor
cores are counted in full, as in the guaranteed bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from math import expm1, frexp, inf, log, sqrt
from typing import NamedTuple, TypeAlias

from lowprec.formats import NumberFormat
from lowprec.modes import ModeRow, Pair
from lowprec.planning.schedule import PartProduct
from lowprec.planning.tensor_cores import Cores, roundings, tensor_cores_multiply

#: Largest probability with which a probable bound fails for a product.
FAILURE = 1e-3

#: Lengths of chunks of k, the longest first.
CHUNKS = (1024, 512, 256)

_SINGLE_BITS = 24
_SCALED_EXPONENT = 39


def gamma(count: float, fmt: NumberFormat) -> float:
    """Return gamma_count = count u / (1 - count u), infinite if count u >= 1."""
    step = count * fmt.unit_roundoff
    if step < 1:
        return step / (1 - step)
    return inf


def gamma_text(fmt: NumberFormat) -> str:
    return f"gamma_d = d u / (1 - d u) bounds d roundings, u = 2^-{fmt.precision}"


@lru_cache(maxsize=1024)
def confidence(sums: int) -> float:
    """Return the lambda with which the probability that one of these sums exceeds its bound is ``FAILURE``."""
    odds = 2 * max(sums, 1) / FAILURE
    return sqrt(2 * log(odds)) * (1 + 2.0**-23)


class Depth(NamedTuple):
    """Largest number of roundings of a term: to nearest, and by truncation, both in units of a rounding to nearest."""

    nearest: int
    truncations: int = 0

    @property
    def total(self) -> int:
        return self.nearest + self.truncations

    def worst(self, fmt: NumberFormat) -> float:
        return gamma(self.total, fmt)

    def probable(self, fmt: NumberFormat, size: float) -> float:
        """Return the probable error, at most the worst; ``size`` is lambda of :func:`confidence`."""
        u = fmt.unit_roundoff
        deviation = size * sqrt(self.nearest) * u
        drift = self.nearest * u * u / (1 - u)
        spread = expm1(min(deviation + drift, 1.0))
        truncated = gamma(self.truncations, fmt)
        return min(self.worst(fmt), spread + truncated * (1 + spread))


#: By pair of parts: the depth of its sums, and its factor.
Depths: TypeAlias = dict[Pair, tuple[Depth, float]]


def on_tensor_cores(terms: int, fmt: str, capability: Cores) -> Depth:
    """Return the depth of a sum on tensor cores, or on FP32 units if tensor cores do not support the format."""
    if tensor_cores_multiply(fmt, capability):
        return Depth(0, roundings(terms, fmt, capability))
    return Depth(terms)


def depths(schedule: tuple[PartProduct, ...], of_sum: Callable[[int], Depth]) -> Depths:
    """Return for each pair of parts the depth of its sums, including additions of products, and its factor."""
    sums: Depths = {}
    for number, product in enumerate(schedule):
        added = len(schedule) - max(number, 1)
        nearest, truncations = of_sum(product.length)
        depth = Depth(nearest + added + _rounds(product), truncations)
        for pair in product.pairs:
            before = sums.get(pair)
            if before is None or before[0].total < depth.total:
                sums[pair] = depth, product.factor
    return sums


def depths_by_chunks(
    schedule: tuple[PartProduct, ...], of_chunk: int, chunks: int, sums: int
) -> Depths:
    """Return the result of :func:`depths` for products that are summed over chunks of k.

    For each chunk each product is summed from zero, in ``sums`` sums of ``of_chunk`` roundings, and then added.
    """
    additions = len(schedule) * chunks * sums
    found: Depths = {}
    for number, product in enumerate(schedule):
        added = additions - max(number, 1)
        depth = Depth(of_chunk + added + _rounds(product))
        found |= dict.fromkeys(product.pairs, (depth, product.factor))
    return found


def _rounds(product: PartProduct) -> bool:
    """Whether the factor of a product is no power of two, so that multiplying by it rounds."""
    mantissa, _ = frexp(product.factor)
    return abs(mantissa) != 0.5


def chunk_for(k: int, fmt: str, capability: Cores) -> int | None:
    """Return the length of the chunks of k in which tensor cores sum the leading product, None for one chunk.

    Return the longest chunk whose error on data of one sign, where truncations add up, is about that of an FP32 sum, or
    the shortest of ``CHUNKS`` if there is none. On such data the observed error of d truncations is a seventh of the
    worst case, and that of k roundings to nearest is sqrt(k) u / 4; the bounds do not predict this ratio.
    """
    for chunk in (k, *CHUNKS):
        depth = on_tensor_cores(min(chunk, k), fmt, capability)
        if depth.truncations <= 2 * sqrt(k):
            return chunk if chunk < k else None
    if k > CHUNKS[-1]:
        return CHUNKS[-1]
    return None


#: Guaranteed and probable bound of the relative error, and the formula of the guaranteed one.
RelativeError: TypeAlias = tuple[float, float, str]


def _parts(row: ModeRow, is_split: bool, scaled_over: int) -> tuple[tuple[float, ...], float]:
    """Return the bounds of the parts of a number, and that of the rest."""
    if not is_split:
        return (1.0,), 0.0
    p = row.operand_format.precision
    count = row.parts
    lost = 2.0**-_SCALED_EXPONENT * sqrt(scaled_over)
    bits = count * p + count - 1
    rest = 0.0
    if bits <= _SINGLE_BITS:
        rest = 2.0**-bits
    rest += lost * 2.0 ** (-row.part_exponent * (count - 1))
    u = 2.0**-p
    weights = (1 + u + lost, u + lost, 2.0 ** -(2 * p + 1))
    return weights[:count], rest


def split_error(
    row: ModeRow,
    is_split: tuple[bool, bool],
    sums: Depths,
    accumulator: NumberFormat,
    *,
    growth: float,
    scaled_over: int,
    size: float,
) -> RelativeError:
    """Return the error of a product of which ``a``, ``b`` or both are split.

    ``sums`` has the depth of the sums and the factor of each computed pair of parts. ``growth`` is the sum of the
    magnitudes of the terms relative to ``|A| |B|``: sqrt(2) for complex numbers. ``scaled_over`` is the length of
    scaled rows, 0 without scaling, and ``size`` lambda of :func:`confidence`.
    """
    splits_a, splits_b = is_split
    a, rest_a = _parts(row, splits_a, scaled_over)
    b, rest_b = _parts(row, splits_b, scaled_over)
    if row.sums_parts and all(is_split):
        dropped = _karatsuba_rounding(row, a, b)
    else:
        pairs = itertools.product(range(len(a)), range(len(b)))
        dropped = sum(a[i] * b[j] for i, j in pairs if (i, j) not in sums)
    fixed = rest_a + rest_b + rest_a * rest_b + dropped
    worst = probable = fixed
    for (i, j), (depth, factor) in sums.items():
        of_parts = _weight(row, a, i) * _weight(row, b, j)
        weight = of_parts * abs(factor) * growth
        worst += weight * depth.worst(accumulator)
        probable += weight * depth.probable(accumulator, size)
    leading = sums[0, 0][0].total
    formula = (
        f"{fixed:.3g} by the split, gamma_{leading} of the leading product's sums, weighted ones of the others; "
        f"{gamma_text(accumulator)}"
    )
    return worst, probable, formula


def _weight(row: ModeRow, parts: tuple[float, ...], index: int) -> float:
    """Return the bound of a scaled part; the index after the last part means the sum of all parts."""
    count = len(parts)
    if index < count:
        return float(parts[index] * 2.0 ** (row.part_exponent * index))
    u = row.operand_format.unit_roundoff
    return (1 + u) * sum(_weight(row, parts, i) for i in range(count))


def _karatsuba_rounding(row: ModeRow, a: tuple[float, ...], b: tuple[float, ...]) -> float:
    u = row.operand_format.unit_roundoff
    # Sums below the normal range are exact, because parts are multiples of 2^-24.
    x = _weight(row, a, len(a))
    y = _weight(row, b, len(b))
    exact = x * y / (1 + u) ** 2
    return float(2.0**-row.part_exponent * (x * y - exact))
