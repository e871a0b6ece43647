"""Division of a product into panels, each computed by a BLAS on one thread.

If the bits of an element depend on its panel, the panels depend on the shapes only, so that results do not depend on
the number of threads.
"""

from __future__ import annotations

#: Multiplications of the smallest panel: OpenBLAS sums products of up to a million in another order.
SMALLEST_PANEL = 1_024_000

#: The same for panels that depend on the shape only, which one thread may have to compute all.
_SMALLEST_FIXED_PANEL = 8_000_000

#: Panels begin at multiples of this many rows or columns, so that all but the last fill the BLAS's register blocks.
_GRAIN = 16

#: Multiplications per panel, if panels depend on the shape only, that justify packing its operands.
_PANEL_WORK = 250_000_000

#: Elements of a matrix per call that multiplies with a vector.
_VECTOR_WORK = 1 << 20

#: Least rows of such a piece, for a matrix with contiguous rows (True) or columns (False).
_VECTOR_ROWS = {True: 4, False: 1024}

#: First row, rows, first column, columns.
Panel = tuple[int, int, int, int]


def panels_for_threads(m: int, n: int, k: int, workers: int) -> list[Panel]:
    """Divide an m x n result into at most ``workers`` panels."""
    return _cut(m, n, k, min(workers, m * n * k // SMALLEST_PANEL), SMALLEST_PANEL)


def panels_for_shape(m: int, n: int, k: int) -> list[Panel]:
    """Divide an m x n result into panels that depend on its shape only.

    Examples
    --------
    >>> len(panels_for_shape(100, 100, 100)), len(panels_for_shape(1024, 1024, 1024))
    (1, 4)
    """
    work = m * n * k
    wanted = min(max(4, work // _PANEL_WORK), max(16, m * n >> 20))
    return _cut(m, n, k, min(wanted, work // _SMALLEST_FIXED_PANEL), _SMALLEST_FIXED_PANEL)


def rows_for_shape(m: int, k: int, *, by_rows: bool) -> list[tuple[int, int]]:
    """Divide the rows of an m x k matrix into pieces (first, length)."""
    rows = max(_VECTOR_ROWS[by_rows], 4 * (_VECTOR_WORK // max(1, 4 * k)))
    return [(first, min(rows, m - first)) for first in range(0, m, rows)]


#: Number of sums from which a matrix with contiguous columns is divided by rows, so that its sums stay in the cache;
#: largest number of pieces of columns otherwise.
_LONG_COLUMNS, _COLUMN_PIECES = 1 << 16, 16


def columns_for_shape(m: int, k: int, width: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Divide an m x k matrix with contiguous columns, multiplied with ``width`` vectors, by rows and columns.

    Pieces are (first, length). Pieces of columns are contiguous in memory, but give partial sums.
    """
    rows = _LONG_COLUMNS // width
    if m >= rows:
        return [(i, min(rows, m - i)) for i in range(0, m, rows)], [(0, k)]
    columns = max(4, _VECTOR_WORK // m, -(-k // _COLUMN_PIECES))
    return [(0, m)], [(j, min(columns, k - j)) for j in range(0, k, columns)]


def _cut(m: int, n: int, k: int, count: int, smallest_panel: int) -> list[Panel]:
    for pieces in range(count, 1, -1):
        # Nearly square panels reread the least of a and b; among equals, prefer whole columns.
        grids = [(d, pieces // d) for d in range(1, pieces + 1) if pieces % d == 0]
        down, across = min(grids, key=lambda grid: m / grid[0] + n / grid[1])
        rows, columns = _cuts(m, down), _cuts(n, across)
        smallest = min(r for _, r in rows) * min(c for _, c in columns) * k
        if smallest >= smallest_panel:
            return [(i, r, j, c) for i, r in rows for j, c in columns]
    return [(0, m, 0, n)]


def _cuts(extent: int, count: int) -> list[tuple[int, int]]:
    """Divide an extent into at most ``count`` nearly equal pieces (first, length).

    Examples
    --------
    >>> _cuts(200, 2), _cuts(40, 2)
    ([(0, 96), (96, 104)], [(0, 16), (16, 24)])
    """
    bounds = sorted({round(extent * i / count / _GRAIN) * _GRAIN for i in range(count)})
    starts = [start for start in bounds if start < extent]
    return [(start, stop - start) for start, stop in zip(starts, [*starts[1:], extent], strict=True)]
