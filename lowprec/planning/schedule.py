"""The schedule of a plan: its products of parts, their ranges of k, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lowprec.modes import ModeRow, Pair


class Product(NamedTuple):
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
    row: ModeRow, rounded: tuple[bool, bool], k: int, k_chunk: int | None = None, *, concatenates: bool = False
) -> tuple[Product, ...]:
    """Return the products of a mode, the smallest first.

    ``rounded``: whether ``a`` and ``b`` are rounded, and so split. The product of the leading parts is summed in chunks
    of ``k_chunk``, added in the accumulator's format; None means one chunk. With ``concatenates``, products with the
    same factor become one product of concatenated parts.
    """
    step = min(k_chunk or k, k) or 1
    products: list[Product] = []
    for pairs, factor in _groups(row, rounded, concatenates):
        a_part, b_part = pairs[0]
        starts = range(0, k or 1, step if (a_part, b_part) == (0, 0) else k or 1)
        for start in starts:
            stop = min(start + starts.step, k)
            products.append(Product(a_part, b_part, start, stop, factor, bool(products), len(pairs)))
    return tuple(products)


def _groups(row: ModeRow, rounded: tuple[bool, bool], concatenates: bool) -> Iterator[tuple[list[Pair], float]]:
    if row.sums_parts and not all(rounded):
        # If one operand has a single part, two ordinary products suffice, fewer than Karatsuba's three.
        pairs = [(int(rounded[0]), int(rounded[1])), (0, 0)] if any(rounded) else [(0, 0)]
        yield from (([pair], 2.0 ** (-row.part_exponent * sum(pair))) for pair in pairs)
        return
    formed = [(i, j) for i, j in row.pairs if (rounded[0] or i == 0) and (rounded[1] or j == 0)]
    if not concatenates or row.sums_parts:
        yield from (([pair], row.factor(pair)) for pair in formed)
        return
    for order in dict.fromkeys(map(sum, formed)):
        pairs = sorted((pair for pair in formed if sum(pair) == order), reverse=True)
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
