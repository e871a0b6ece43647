"""Blocked factors in lower precision, and their application to right-hand sides.

Right-looking LU with partial pivoting, or Cholesky. Panels are in float32; the updates, almost all of the arithmetic,
are by ``lowprec.matmul`` in the mode of the factor. Diagonal blocks are inverted, so that solves are products; their
forward error, which limits refinement, is that of substitution (J. Du Croz and N. J. Higham, "Stability of methods for
matrix inversion", IMA J. Numer. Anal. 12, 1992).

On a GPU the array's library factors the panels. In host memory recursion in NumPy does (S. Toledo, "Locality of
reference in LU decomposition with partial pivoting", SIAM J. Matrix Anal. Appl. 18, 1997): LAPACK's threads spin after
their work and would take cores from lowprec's.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays import library_name
from lowprec.arrays.namespaces import array_module, cast, dtype_label
from lowprec.core.dispatch import matmul
from lowprec.modes import MathMode

#: Columns eliminated one by one; rows that fit the cache; width of a strip of an update; largest extent of a product,
#: which limits the number of planned shapes.
_LEAF, _ROWS, _STRIP, _EXTENT = 16, 32, 1024, 2048

#: Elements between rows: with a power of two as row stride, a column would map to few cache lines.
_PADDING = 16


class Block(NamedTuple):
    """The part of both factors from one panel."""

    order: Any  # order of the rows from the panel's first one; None if unchanged
    lower_inverse: Any  # inverse of the diagonal block of L, (k, k)
    upper_inverse: Any  # inverse of the diagonal block of U
    below: Any = None  # L below the block, (m - k, k)
    right: Any = None  # U to the right of it, (k, m - k)


class Operations:
    """Operations of a factorization on NumPy arrays, as which all arrays in host memory are read."""

    in_place = True  # whether arrays are writable

    def from_host(self, x: Any) -> Any:
        """Return a NumPy array as an array on the device of the matrix."""
        return x

    def to_host(self, x: Any) -> Any:
        """Return an array as a NumPy array."""
        return x

    def adjoint(self, x: Any) -> Any:
        """Return the conjugate transpose."""
        return x.conj().T

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Return the parts concatenated along the rows."""
        return np.concatenate(parts)

    def magnitudes(self, a: Any) -> tuple[Any, Any, Any]:
        """Return the largest magnitude of each row and each column, and the sum of squares of each row."""
        rows, columns, squares = np.empty(len(a)), np.zeros(len(a)), np.empty(len(a))
        for i in range(0, len(a), _ROWS):
            part = np.abs(a[i : i + _ROWS])
            rows[i : i + _ROWS] = part.max(axis=1)
            np.maximum(columns, part.max(axis=0), out=columns)
            squares[i : i + _ROWS] = np.einsum("ij,ij->i", part, part)
        return rows, columns, squares

    def lowered(self, a: Any, dtype: str, scales: tuple[Any, Any] | None) -> Any:
        """Return a copy of a matrix in another type, with rows and columns scaled."""
        work = np.empty((len(a), len(a) + _PADDING), dtype)[:, : len(a)]
        for i in range(0, len(a), _ROWS):
            part = slice(i, i + _ROWS)
            work[part] = a[part] if scales is None else a[part] * scales[0][part, None] * scales[1]
        return work

    def panel(self, a: Any) -> tuple[Any, Any, Any, Any]:
        """Factor a panel; return the order of its rows, the inverses on the diagonal, and L below."""
        m, k = a.shape
        # The row stride of the matrix, so that all panels have one stride.
        columns = np.empty((k, a.strides[0] // a.itemsize), a.dtype)[:, :m]
        for i in range(0, m, 2 * _ROWS):
            columns[:, i : i + 2 * _ROWS] = a[i : i + 2 * _ROWS].T
        return *_eliminated(columns), columns[:, k:].T

    def permuted(self, rows: Any, order: Any) -> Any:
        """Return rows in this order; may change the array."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        rows[moved] = rows[order[moved]]
        return rows

    def reduced(self, c: Any, a: Any, b: Any) -> Any:
        """Return ``c - a @ b``; may change ``c``."""
        for i in range(0, len(a), _EXTENT):
            for k in range(0, len(b), _EXTENT):
                for j in range(0, b.shape[1], _EXTENT):
                    rows, inner, columns = (slice(x, x + _EXTENT) for x in (i, k, j))
                    out = c[rows, columns]
                    matmul(a[rows, inner], b[inner, columns], c=out, out=out, alpha=-1.0, beta=1.0)
        return c

    def cholesky_inverse(self, a: Any) -> Any:
        """Return the inverse of a block's Cholesky factor; reads the lower triangle."""
        if len(a) <= 4 * _LEAF:
            return np.linalg.inv(np.linalg.cholesky(a))
        h = len(a) // 2
        first = self.cholesky_inverse(a[:h, :h])
        below = matmul(a[h:, :h], self.adjoint(first))
        second = self.cholesky_inverse(matmul(below, self.adjoint(below), c=a[h:, h:], alpha=-1.0, beta=1.0))
        return _joined(first, below, second)


def _joined(first: Any, below: Any, second: Any) -> Any:
    """Return the inverse of a lower triangle from the inverses of its diagonal blocks."""
    h, k = len(first), len(first) + len(second)
    inverse = np.zeros((k, k), first.dtype)
    inverse[:h, :h], inverse[h:, h:] = first, second
    inverse[h:, :h] = -_product(_product(second, below), first)
    return inverse


def _product(a: Any, b: Any) -> Any:
    """Return a product of square matrices; NumPy computes the smallest ones, in one thread."""
    return a @ b if len(a) <= 4 * _LEAF else matmul(a, b)


def _eliminated(columns: Any) -> tuple[Any, Any, Any]:
    """Factor a transposed panel in place; return the order of its rows and the inverses of the diagonal blocks."""
    k, m = columns.shape
    if k <= _LEAF:
        return _eliminated_one_by_one(columns)
    h = k // 2
    left, right = columns[:h], columns[h:]
    order, lower, upper = _eliminated(left)
    moved = np.flatnonzero(order != np.arange(m))
    right[:, moved] = right[:, order[moved]]
    corner, rest = right[:, :h], right[:, h:]
    corner[:] = _product(corner, lower.T)
    Operations().reduced(rest, corner, left[:, h:])
    later, second_lower, second_upper = _eliminated(rest)
    left[:, h:] = left[:, h:][:, later]
    order[h:] = order[h:][later]
    return order, _joined(lower, left[:, h:k].T, second_lower), _joined(upper.T, corner, second_upper.T).T


def _eliminated_one_by_one(columns: Any) -> tuple[Any, Any, Any]:
    k, m = columns.shape
    order = np.arange(m)
    for j, column in enumerate(columns):
        p = j + int(np.abs(column[j:]).argmax())
        if column[p] == 0:
            raise np.linalg.LinAlgError("a pivot is zero")
        if p != j:
            kept = columns[:, j].copy()
            columns[:, j] = columns[:, p]
            columns[:, p] = kept
            order[j], order[p] = order[p], order[j]
        column[j + 1 :] /= column[j]
        columns[j + 1 :, j + 1 :] -= columns[j + 1 :, j, None] * column[j + 1 :]
    both = columns[:, :k].T
    lower, upper = np.linalg.inv([np.tril(both, -1) + np.eye(k, dtype=both.dtype), np.triu(both)])
    return order, lower, upper


#: SciPy's counterpart in libraries other than PyTorch.
_SCIPY = {"cupy": "cupyx.scipy.linalg", "jax": "jax.scipy.linalg"}


class _OnDevice(Operations):
    def __init__(self, a: Any) -> None:
        self._like, self._xp, self._name = a, array_module(a), library_name(a)
        self.in_place = self._name != "jax"

    def from_host(self, x: Any) -> Any:
        if self._name == "torch":
            return self._xp.tensor(x, device=self._like.device)  # a copy: the NumPy array may be read-only
        if self._name == "jax":
            return importlib.import_module("jax").device_put(x, self._like.device)
        with self._like.device:
            return self._xp.asarray(x)

    def to_host(self, x: Any) -> Any:
        return x.get() if self._name == "cupy" else np.asarray(x.cpu() if self._name == "torch" else x)

    def adjoint(self, x: Any) -> Any:
        return x.mH.resolve_conj() if self._name == "torch" else x.conj().T

    def concatenate(self, parts: Sequence[Any]) -> Any:
        return self._xp.concatenate(parts)

    def magnitudes(self, a: Any) -> tuple[Any, Any, Any]:
        sizes = abs(a)
        rows, columns, squares = self._xp.amax(sizes, 1), self._xp.amax(sizes, 0), (sizes * sizes).sum(1)
        return self.to_host(rows), self.to_host(columns), self.to_host(squares)

    def lowered(self, a: Any, dtype: str, scales: tuple[Any, Any] | None) -> Any:
        if scales is not None:
            a = a * self.from_host(scales[0][:, None]) * self.from_host(scales[1])
        return cast(a, dtype) if dtype_label(a.dtype) != dtype else self._xp.asarray(a, copy=True)

    def panel(self, a: Any) -> tuple[Any, Any, Any, Any]:
        if self._name == "torch":
            both, pivots, _ = self._xp.linalg.lu_factor_ex(a)
            pivots = self.to_host(pivots) - 1
        else:
            both, pivots = importlib.import_module(_SCIPY[self._name]).lu_factor(a, check_finite=False)
        order = np.arange(len(a))
        for j, p in enumerate(self.to_host(pivots) if self._name != "torch" else pivots):
            order[[j, p]] = order[[p, j]]
        k = a.shape[1]
        return self.from_host(order), self._inverse(both[:k], True, True), self._inverse(both[:k], False), both[k:]

    def permuted(self, rows: Any, order: Any) -> Any:
        return rows[order]

    def reduced(self, c: Any, a: Any, b: Any) -> Any:
        return matmul(a, b, c=c, alpha=-1.0, beta=1.0)

    def cholesky_inverse(self, a: Any) -> Any:
        if self._name != "torch":
            return self._inverse(self._xp.linalg.cholesky(a), True)
        found, info = self._xp.linalg.cholesky_ex(a)
        if int(info):
            raise np.linalg.LinAlgError("not positive definite")
        return self._inverse(found, True)

    def _inverse(self, a: Any, lower: bool, unit: bool = False) -> Any:
        identity = self.from_host(np.eye(len(a), dtype=dtype_label(a.dtype)))
        if self._name == "torch":
            return self._xp.linalg.solve_triangular(a, identity, upper=not lower, unitriangular=unit)
        solve = importlib.import_module(_SCIPY[self._name]).solve_triangular
        return solve(a, identity, lower=lower, unit_diagonal=unit, check_finite=False)


def operations(a: Any, on_host: bool) -> Operations:
    """Return the operations on arrays where ``a`` is."""
    return Operations() if on_host else _OnDevice(a)


def _updated(rest: Any, below: Any, right: Any, mode: MathMode, ops: Operations) -> Any:
    out = rest if ops.in_place else None
    return matmul(below, right, c=rest, out=out, alpha=-1.0, beta=1.0, math_mode=mode)


def lu(rest: Any, ops: Operations, mode: MathMode, width: int) -> tuple[Block, ...]:
    """Return the factors of a matrix, stored in its memory."""
    blocks: list[Block] = []
    while True:
        order, lower, upper, below = ops.panel(rest[:, :width])
        if len(rest) <= width:
            return (*blocks, Block(order, lower, upper))
        rows = ops.permuted(rest[:, width:], order)
        right = matmul(lower, rows[:width])
        if ops.in_place:
            rows[:width], right = right, rows[:width]
        blocks.append(Block(order, lower, upper, below, right))
        rest = _updated(rows[width:], below, right, mode, ops)


def cholesky(rest: Any, ops: Operations, mode: MathMode, width: int) -> tuple[Block, ...]:
    """Return the factors of a Hermitian matrix; reads its lower triangle and overwrites it."""
    blocks: list[Block] = []
    while True:
        lower = ops.cholesky_inverse(rest[:width, :width])
        upper = ops.adjoint(lower)
        if len(rest) <= width:
            return (*blocks, Block(None, lower, upper))
        below = matmul(rest[width:, :width], upper)
        right = ops.adjoint(below)
        blocks.append(Block(None, lower, upper, below, right))
        rest = rest[width:, width:]
        if not ops.in_place:
            rest = _updated(rest, below, right, mode, ops)
            continue
        for j in range(0, len(rest), _STRIP):  # little more than the lower triangle
            _updated(rest[j:, j : j + _STRIP], below[j:], right[:, j : j + _STRIP], mode, ops)


def solved(blocks: tuple[Block, ...], b: Any, ops: Operations) -> Any:
    """Return the solution for right-hand sides (n, k), which may be changed."""
    parts = []
    for block in blocks:
        b = b if block.order is None else ops.permuted(b, block.order)
        k = len(block.lower_inverse)
        parts.append(matmul(block.lower_inverse, b[:k]))
        if block.below is not None:
            b = ops.reduced(b[k:], block.below, parts[-1])
    x = None
    for block, part in zip(reversed(blocks), reversed(parts), strict=True):
        part = matmul(block.upper_inverse, part if x is None else ops.reduced(part, block.right, x))
        x = part if x is None else ops.concatenate((part, x))
    return x
