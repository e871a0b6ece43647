"""Blocked factors in lower precision, and their application to right-hand sides.

A right-looking LU factorization with partial pivoting, or Cholesky factorization. Panels are factored in float32; the
products that update the rest of the matrix, all but a share of ``width / n`` of the arithmetic, are
``lowprec.matmul(out=c, c=c, alpha=-1, beta=1)`` in the mode of the factor. Blocks on the diagonal are inverted, so that
every solve is a chain of products (J. Du Croz and N. J. Higham, "Stability of methods for matrix inversion", IMA J.
Numer. Anal. 12, 1992: the forward error is that of substitution, which is what refinement needs).

On the host everything is NumPy and ``lowprec.matmul``: LAPACK's own threads, which spin after their work, would take
cores from lowprec's. Panels are eliminated by recursion (S. Toledo, "Locality of reference in LU decomposition with
partial pivoting", SIAM J. Matrix Anal. Appl. 18, 1997). On a GPU they are factored by the array's library.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays import library_name
from lowprec.arrays.namespaces import array_module, cast
from lowprec.core.dispatch import matmul
from lowprec.modes import MathMode

#: Columns that are eliminated one by one, rows of a block that stays in the cache, least width of a strip of an update.
_LEAF, _ROWS, _STRIP = 16, 32, 1024

#: Elements between the rows of a working array: a power of two would map all rows to the same lines of the cache.
_PADDING = 16


class Block(NamedTuple):
    """The part of both factors that one panel gives."""

    order: Any  # of the rows from the panel's first one on; None: they stay as they are
    lower_inverse: Any  # of the diagonal block of L, (k, k)
    upper_inverse: Any  # of the diagonal block of U
    below: Any = None  # L below the block, (m - k, k)
    right: Any = None  # U to the right of it, (k, m - k)


class Host:
    """Arrays in host memory, of any library, as NumPy's."""

    updates_in_place = True

    def from_host(self, x: Any) -> Any:
        """Return an array of vectors where the matrix is."""
        return x

    def to_host(self, x: Any) -> Any:
        """Return vectors as NumPy's array."""
        return x

    def adjoint(self, x: Any) -> Any:
        """Return the conjugate transpose."""
        return x.conj().T

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Return rows below rows."""
        return np.concatenate(parts)

    def magnitudes(self, a: Any) -> tuple[Any, Any, Any]:
        """Return the largest magnitude of each row and of each column, and the sum of squares of each row."""
        n = len(a)
        rows, columns, squares = np.empty(n), np.zeros(n), np.empty(n)
        for i in range(0, n, _ROWS):
            part = np.abs(a[i : i + _ROWS])
            rows[i : i + _ROWS] = part.max(axis=1)
            np.maximum(columns, part.max(axis=0), out=columns)
            squares[i : i + _ROWS] = np.einsum("ij,ij->i", part, part)
        return rows, columns, squares

    def lowered(self, a: Any, dtype: str, scales: tuple[Any, Any] | None) -> Any:
        """Return a working array: ``a``, its rows and columns scaled, in another type."""
        n = len(a)
        work = np.empty((n, n + _PADDING), dtype)[:, :n]
        for i in range(0, n, _ROWS):
            part = slice(i, i + _ROWS)
            work[part] = a[part] if scales is None else a[part] * scales[0][part, None] * scales[1]
        return work

    def panel(self, a: Any) -> tuple[Any, Any, Any, Any]:
        """Factor a panel; return the order of its rows, both inverses on the diagonal, and L below."""
        m, k = a.shape
        columns = np.empty((k, m + _PADDING), a.dtype)[:, :m]
        for i in range(0, m, 2 * _ROWS):
            columns[:, i : i + 2 * _ROWS] = a[i : i + 2 * _ROWS].T
        order, lower, upper = _eliminated(columns)
        return order, lower, upper, columns[:, k:].T

    def permuted(self, rows: Any, order: Any) -> Any:
        """Return the rows of a working array, or vectors, in this order; a working array is changed."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        rows[moved] = rows[order[moved]]
        return rows

    def cholesky_inverse(self, a: Any) -> Any:
        """Return the inverse of the Cholesky factor of a block; its lower triangle is read."""
        k = len(a)
        if k <= 4 * _LEAF:
            return np.linalg.inv(np.linalg.cholesky(a))
        h = k // 2
        first = self.cholesky_inverse(a[:h, :h])
        below = matmul(a[h:, :h], self.adjoint(first))
        second = self.cholesky_inverse(matmul(below, self.adjoint(below), c=a[h:, h:], alpha=-1.0, beta=1.0))
        return _lower_inverse(first, below, second)


def _lower_inverse(first: Any, below: Any, second: Any) -> Any:
    """Return the inverse of a lower triangle from those of its blocks on the diagonal."""
    h, k = len(first), len(first) + len(second)
    inverse = np.zeros((k, k), first.dtype)
    inverse[:h, :h], inverse[h:, h:] = first, second
    inverse[h:, :h] = matmul(matmul(second, below), first, alpha=-1.0)
    return inverse


def _eliminated(columns: Any) -> tuple[Any, Any, Any]:
    """Factor a panel that is stored by columns, in place; return the order of its rows and the inverses of L and U.

    The rows of ``columns``, shape (k, m), are the columns of the panel.
    """
    k, m = columns.shape
    if k <= _LEAF:
        return _eliminated_one_by_one(columns)
    h = k // 2
    left, right = columns[:h], columns[h:]
    order, lower, upper = _eliminated(left)
    moved = np.flatnonzero(order != np.arange(m))
    right[:, moved] = right[:, order[moved]]
    corner = right[:, :h]
    corner[:] = matmul(corner, lower.T)
    rest = right[:, h:]
    matmul(corner, left[:, h:], c=rest, out=rest, alpha=-1.0, beta=1.0)
    later, second_lower, second_upper = _eliminated(rest)
    left[:, h:] = left[:, h:][:, later]
    order[h:] = order[h:][later]
    below = left[:, h:k].T
    return order, _lower_inverse(lower, below, second_lower), _lower_inverse(upper.T, corner, second_upper.T).T


def _eliminated_one_by_one(columns: Any) -> tuple[Any, Any, Any]:
    k, m = columns.shape
    order = np.arange(m)
    for j in range(k):
        column = columns[j]
        p = j + int(np.abs(column[j:]).argmax())
        if p != j:
            kept = columns[:, j].copy()
            columns[:, j] = columns[:, p]
            columns[:, p] = kept
            order[j], order[p] = order[p], order[j]
        if column[j] == 0:
            raise np.linalg.LinAlgError("a pivot is zero")
        if j + 1 < m:
            column[j + 1 :] /= column[j]
            columns[j + 1 :, j + 1 :] -= columns[j + 1 :, j, None] * column[j + 1 :]
    both = columns[:, :k].T
    lower, upper = np.linalg.inv([np.tril(both, -1) + np.eye(k, dtype=both.dtype), np.triu(both)])
    return order, lower, upper


#: Where a library has its functions of LAPACK's kind.
_TRIANGULAR = {"cupy": "cupyx.scipy.linalg", "jax": "jax.scipy.linalg"}


class OnDevice:
    """Arrays in the memory of a GPU, by the functions of their library."""

    def __init__(self, a: Any) -> None:
        self._like = a
        self._name = library_name(a)
        self._xp = array_module(a)
        self.updates_in_place = self._name != "jax"

    def from_host(self, x: Any) -> Any:
        """Return an array of vectors, or of numbers of rows, where the matrix is."""
        if self._name == "torch":
            return self._xp.as_tensor(x, device=self._like.device)
        if self._name == "jax":
            return importlib.import_module("jax").device_put(x, self._like.device)
        with self._like.device:
            return self._xp.asarray(x)

    def to_host(self, x: Any) -> Any:
        """Return an array as NumPy's."""
        if self._name == "cupy":
            return self._xp.asnumpy(x)
        return np.asarray(x.cpu() if self._name == "torch" else x)

    def adjoint(self, x: Any) -> Any:
        """Return the conjugate transpose."""
        return x.mH.resolve_conj() if self._name == "torch" else x.conj().T

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Return rows below rows."""
        return self._xp.concatenate(parts)

    def magnitudes(self, a: Any) -> tuple[Any, Any, Any]:
        """Return the largest magnitude of each row and of each column, and the sum of squares of each row."""
        sizes = abs(a)
        found = (self._xp.amax(sizes, 1), self._xp.amax(sizes, 0), (sizes * sizes).sum(1))
        return tuple(self.to_host(x).astype(np.float64) for x in found)  # type: ignore[return-value]

    def lowered(self, a: Any, dtype: str, scales: tuple[Any, Any] | None) -> Any:
        """Return a working array: ``a``, its rows and columns scaled, in another type."""
        if scales is not None:
            a = a * self.from_host(scales[0][:, None]) * self.from_host(scales[1])
        found = cast(a, dtype)
        return self._xp.asarray(found, copy=True) if found is self._like else found

    def panel(self, a: Any) -> tuple[Any, Any, Any, Any]:
        """Factor a panel; return the order of its rows, both inverses on the diagonal, and L below."""
        m, k = a.shape
        if self._name == "torch":
            both, pivots, _ = self._xp.linalg.lu_factor_ex(a)
            pivots = self.to_host(pivots) - 1
        else:
            both, pivots = self._library().lu_factor(a, check_finite=False)
            pivots = self.to_host(pivots)
        order = np.arange(m)
        for j, p in enumerate(pivots):
            order[[j, p]] = order[[p, j]]
        inverses = (self._triangular_inverse(both[:k], lower) for lower in (True, False))
        return self.from_host(order), *inverses, both[k:]

    def permuted(self, rows: Any, order: Any) -> Any:
        """Return the rows in this order."""
        return rows[order]

    def cholesky_inverse(self, a: Any) -> Any:
        """Return the inverse of the Cholesky factor of a block; its lower triangle is read."""
        return self._triangular_inverse(self._xp.linalg.cholesky(a), True, unit=False)

    def _library(self) -> Any:
        return importlib.import_module(_TRIANGULAR[self._name])

    def _triangular_inverse(self, a: Any, lower: bool, unit: bool | None = None) -> Any:
        unit = lower if unit is None else unit
        identity = self.from_host(np.eye(a.shape[0], dtype=str(a.dtype).rpartition(".")[2]))
        if self._name == "torch":
            return self._xp.linalg.solve_triangular(a, identity, upper=not lower, unitriangular=unit)
        return self._library().solve_triangular(a, identity, lower=lower, unit_diagonal=unit, check_finite=False)


Operations = Host | OnDevice


def _updated(rest: Any, below: Any, right: Any, mode: MathMode, ops: Operations) -> Any:
    out = rest if ops.updates_in_place else None
    return matmul(below, right, c=rest, out=out, alpha=-1.0, beta=1.0, math_mode=mode)


def lu(rest: Any, ops: Operations, mode: MathMode, width: int) -> tuple[Block, ...]:
    """Return the factors of a working array, whose memory they take."""
    blocks: list[Block] = []
    while True:
        k = min(width, len(rest))
        order, lower, upper, below = ops.panel(rest[:, :k])
        if k == len(rest):
            return (*blocks, Block(order, lower, upper))
        rows = ops.permuted(rest[:, k:], order)
        right = matmul(lower, rows[:k])
        blocks.append(Block(order, lower, upper, below, right))
        rest = _updated(rows[k:], below, right, mode, ops)


def cholesky(rest: Any, ops: Operations, mode: MathMode, width: int) -> tuple[Block, ...]:
    """Return the factors of a Hermitian working array, of which the lower triangle is read, and its memory taken."""
    blocks: list[Block] = []
    while True:
        m = len(rest)
        k = min(width, m)
        lower = ops.cholesky_inverse(rest[:k, :k])
        upper = ops.adjoint(lower)
        if k == m:
            return (*blocks, Block(None, lower, upper))
        below = matmul(rest[k:, :k], upper)
        right = ops.adjoint(below)
        blocks.append(Block(None, lower, upper, below, right))
        rest = rest[k:, k:]
        # Strips of the lower triangle; all of it where it is a new array each time.
        strip = max(_STRIP, width) if ops.updates_in_place else m
        for j in range(0, m - k, strip):
            part = _updated(rest[j:, j : j + strip], below[j:], right[:, j : j + strip], mode, ops)
        rest = rest if ops.updates_in_place else part


def solved(blocks: tuple[Block, ...], b: Any, ops: Operations) -> Any:
    """Return the solution of the factored system for vectors, shape (n, k), which may be changed."""
    parts = []
    for block in blocks:
        b = b if block.order is None else ops.permuted(b, block.order)
        k = len(block.lower_inverse)
        parts.append(matmul(block.lower_inverse, b[:k]))
        if block.below is not None:
            b = matmul(block.below, parts[-1], c=b[k:], alpha=-1.0, beta=1.0)
    x = None
    for block, part in zip(reversed(blocks), reversed(parts), strict=True):
        rest = part if x is None else matmul(block.right, x, c=part, alpha=-1.0, beta=1.0)
        part = matmul(block.upper_inverse, rest)
        x = part if x is None else ops.concatenate((part, x))
    return x
