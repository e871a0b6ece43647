"""The schedule of a plan: its products of parts, their ranges of k, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lowprec.modes import ModeRow, Pair


class PartProduct(NamedTuple):
    """One matrix product of a schedule: ``sum (+)= factor * a_part[:, k] @ b_part[k, :]``.

    A product of several terms concatenates parts along k: ``[a_part | a_(part - 1) | ...]`` of ``a``, in descending
    order, and ``[b_part ; b_(part + 1) ; ...]`` of ``b``, in ascending order. Each part has the whole of k.
    """

    a_part: int  # index of the part; 0 is the leading one
    b_part: int
    k_start: int  # range of the inner dimension
    k_stop: int
    factor: float = 1.0
    accumulates: bool = False  # added to the previous products; false for the first
    terms: int = 1

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return tuple((self.a_part - i, self.b_part + i) for i in range(self.terms))

    @property
    def length(self) -> int:
        return self.terms * (self.k_stop - self.k_start)


def make_schedule(
    row: ModeRow,
    rounded: tuple[bool, bool],
    k: int,
    k_chunk: int | None = None,
    *,
    concatenates: bool = False,
) -> tuple[PartProduct, ...]:
    """Return the products of a mode, the smallest first.

    ``rounded``: whether ``a`` and ``b`` are rounded, and so split. The product of the leading parts is summed in chunks
    of ``k_chunk``, added in the accumulator's format; None means one chunk. With ``concatenates``, products with the
    same factor become one product of concatenated parts.
    """
    whole = k or 1
    chunk = min(k_chunk or whole, whole)
    products: list[PartProduct] = []
    for pairs, factor in _groups(row, rounded, concatenates):
        a_part, b_part = pairs[0]
        step = chunk if pairs[0] == (0, 0) else whole
        for start in range(0, whole, step):
            stop = min(start + step, k)
            accumulates = bool(products)
            products.append(
                PartProduct(a_part, b_part, start, stop, factor, accumulates, len(pairs))
            )
    return tuple(products)


def _groups(
    row: ModeRow, rounded: tuple[bool, bool], concatenates: bool
) -> Iterator[tuple[list[Pair], float]]:
    if row.sums_parts and not all(rounded):
        # If one operand has a single part, two ordinary products suffice, fewer than Karatsuba's three.
        if any(rounded):
            rest = (int(rounded[0]), int(rounded[1]))
            yield [rest], 2.0**-row.part_exponent
        yield [(0, 0)], 1.0
        return
    splits_a, splits_b = rounded
    formed = [(i, j) for i, j in row.pairs if (splits_a or i == 0) and (splits_b or j == 0)]
    if not concatenates or row.sums_parts:
        yield from (([pair], row.factor(pair)) for pair in formed)
        return
    for order in dict.fromkeys(map(sum, formed)):
        pairs = [pair for pair in formed if sum(pair) == order]
        pairs.sort(reverse=True)
        yield pairs, row.factor(pairs[0])


def chunk_length(k: int, longest: int) -> int:
    """Return the length of the chunks in which a kernel sums k: equal parts in multiples of 64, or all of k.

    >>> chunk_length(768, 768), chunk_length(769, 768), chunk_length(2000, 768)
    (768, 448, 704)
    """
    if k <= longest:
        return k
    each = -(-k // -(-k // longest))
    return -(-each // 64) * 64
