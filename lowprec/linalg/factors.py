"""Factors in lower precision, and their application to right-hand sides.

LAPACK computes an LU factor with partial pivoting in float32. In other modes, and for Cholesky, the factorization is
right-looking: LAPACK factors panels in float32, and ``lowprec.matmul`` computes the updates, almost all of the
arithmetic. In host memory LAPACK is SciPy's, on a GPU that of the array's library.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays import library_name
from lowprec.arrays.namespaces import array_module, cast, dtype_label
from lowprec.core.dispatch import matmul
from lowprec.modes import MathMode

#: Most columns of a panel; rows that fit the cache, also when they are transposed; width of a strip of an update.
_WIDTH, _ROWS, _STRIP = 512, 16, 1024

#: Returns the solution for right-hand sides (n, k), which may be changed.
Solver = Callable[[Any], Any]


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

    def concatenate(self, parts: Any) -> Any:
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

    def lowered(self, a: Any, dtype: str, scales: tuple[Any, Any] | None, order: Any = "C") -> Any:
        """Return a copy of a matrix in another type, with rows and columns scaled."""
        work = np.empty(a.shape, dtype, order)
        for i in range(0, len(a), _ROWS):
            part = slice(i, i + _ROWS)
            work[part] = a[part] if scales is None else a[part] * scales[0][part, None] * scales[1]
        return work

    def permuted(self, rows: Any, order: Any) -> Any:
        """Return rows in this order; may change the array."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        rows[moved] = rows[order[moved]]
        return rows

    def lu_solver(self, a: Any) -> Solver:
        """Factor a matrix, stored in its memory."""
        both, pivots, _ = self._lapack("getrf", a.T, overwrite_a=True)  # LAPACK stores matrices by columns
        return lambda b: self._lapack("getrs", both, pivots, b, trans=1)[0]

    def lu(self, a: Any) -> tuple[Any, Any]:
        """Factor a panel; return both factors and, in host memory, the row that was exchanged with each one."""
        both, pivots, _ = self._lapack("getrf", self.lowered(a, a.dtype, None, "F"), overwrite_a=True)
        return both, pivots

    def cholesky(self, a: Any) -> Any:
        """Return the lower factor of a block; reads its lower triangle."""
        return self._lapack("potrf", a, lower=True)[0]

    def triangular(self, a: Any, b: Any, lower: bool, unit: bool = False) -> Any:
        """Return the solution for a triangle of the first rows."""
        if not a.flags.f_contiguous:
            return self._lapack("trtrs", a.T, b, lower=not lower, unitdiag=unit, trans=1)[0]
        return self._lapack("trtrs", a, b, lower=lower, unitdiag=unit)[0]

    def _lapack(self, name: str, a: Any, *arrays: Any, **keywords: Any) -> Any:
        found = importlib.import_module("scipy.linalg").get_lapack_funcs(name, (a,))(a, *arrays, **keywords)
        if found[-1] > 0:
            raise np.linalg.LinAlgError("a pivot is zero, or the matrix is not positive definite")
        return found


#: SciPy's counterpart in libraries other than PyTorch.
_SCIPY = {"cupy": "cupyx.scipy.linalg", "jax": "jax.scipy.linalg"}


class _OnDevice(Operations):
    def __init__(self, a: Any) -> None:
        self._like, self._xp, self._name = a, array_module(a), library_name(a)
        self._is_torch, self.in_place = self._name == "torch", self._name != "jax"
        self._linalg = self._xp.linalg if self._is_torch else importlib.import_module(_SCIPY[self._name])

    def from_host(self, x: Any) -> Any:
        if self._is_torch:
            return self._xp.tensor(x, device=self._like.device)  # a copy: the NumPy array may be read-only
        if self._name == "jax":
            return importlib.import_module("jax").device_put(x, self._like.device)
        with self._like.device:
            return self._xp.asarray(x)

    def to_host(self, x: Any) -> Any:
        return x.get() if self._name == "cupy" else np.asarray(x.cpu() if self._is_torch else x)

    def adjoint(self, x: Any) -> Any:
        return x.mH.resolve_conj() if self._is_torch else x.conj().T

    def concatenate(self, parts: Any) -> Any:
        return self._xp.concatenate(parts)

    def magnitudes(self, a: Any) -> tuple[Any, Any, Any]:
        sizes = abs(a)
        rows, columns, squares = self._xp.amax(sizes, 1), self._xp.amax(sizes, 0), (sizes * sizes).sum(1)
        return self.to_host(rows), self.to_host(columns), self.to_host(squares)

    def lowered(self, a: Any, dtype: str, scales: tuple[Any, Any] | None, order: Any = "C") -> Any:
        if scales is not None:
            a = a * self.from_host(scales[0][:, None]) * self.from_host(scales[1])
        return cast(a, dtype) if dtype_label(a.dtype) != dtype else self._xp.asarray(a, copy=True)

    def permuted(self, rows: Any, order: Any) -> Any:
        return rows[self.from_host(order)]

    def lu_solver(self, a: Any) -> Solver:
        if self._is_torch:
            both, pivots, _ = self._linalg.lu_factor_ex(a)
            return lambda b: self._linalg.lu_solve(both, pivots, b)
        factor = self._linalg.lu_factor(a, check_finite=False)
        return lambda b: self._linalg.lu_solve(factor, b, check_finite=False)

    def lu(self, a: Any) -> tuple[Any, Any]:
        if self._is_torch:
            both, pivots, _ = self._linalg.lu_factor_ex(a)
            return both, self.to_host(pivots) - 1
        both, pivots = self._linalg.lu_factor(a, check_finite=False)
        return both, self.to_host(pivots)

    def cholesky(self, a: Any) -> Any:
        if not self._is_torch:
            return self._xp.linalg.cholesky(a)
        found, info = self._linalg.cholesky_ex(a)
        if int(info):
            raise np.linalg.LinAlgError("the matrix is not positive definite")
        return found

    def triangular(self, a: Any, b: Any, lower: bool, unit: bool = False) -> Any:
        a, solve = a[: a.shape[1]], self._linalg.solve_triangular
        if self._is_torch:
            return solve(a, b, upper=not lower, unitriangular=unit)
        return solve(a, b, lower=lower, unit_diagonal=unit, check_finite=False)


def operations(a: Any, on_host: bool) -> Operations:
    """Return the operations on arrays where ``a`` is."""
    return Operations() if on_host else _OnDevice(a)


class _Block(NamedTuple):
    """The part of both factors from one panel of k columns."""

    order: Any  # order of the rows from the panel's first one; None for Cholesky
    lower: Any  # L on the diagonal, in the lower triangle of the first k rows; with a unit diagonal in LU
    upper: Any  # U on the diagonal, in the upper triangle
    below: Any  # L below the block, (m - k, k)
    right: Any  # U to the right of it, (k, m - k)


def factor(rest: Any, ops: Operations, mode: MathMode, *, is_positive: bool) -> Solver:
    """Factor a matrix, stored in its memory; of a Hermitian one the lower triangle is read."""
    if not is_positive and mode in (MathMode.FP32, MathMode.FP32_PEDANTIC):
        return ops.lu_solver(rest)
    width, panel = min(_WIDTH, max(32, len(rest) // 128 * 16)), _cholesky_panel if is_positive else _lu_panel
    strip = _STRIP if is_positive and ops.in_place else len(rest)
    blocks: list[_Block] = []
    while True:
        block, rest = panel(rest, ops, width)
        blocks.append(block)
        if not len(rest):
            return partial(_solution, blocks, ops)
        for j in range(0, len(rest), strip):  # for Cholesky little more than the lower triangle
            c, columns = rest[j:, j : j + strip], slice(j, j + strip)
            out = c if ops.in_place else None
            c = matmul(block.below[j:], block.right[:, columns], c=c, out=out, alpha=-1.0, beta=1.0, math_mode=mode)
        rest = rest if ops.in_place else c


def _lu_panel(rest: Any, ops: Operations, width: int) -> tuple[_Block, Any]:
    """Return the block of the first columns, and the rows and columns that remain to be updated."""
    both, pivots = ops.lu(rest[:, :width])
    order = list(range(len(rest)))
    for i, p in enumerate(pivots.tolist()):
        order[i], order[p] = order[p], order[i]
    rows = ops.permuted(rest[:, width:], np.array(order))
    right = matmul(_inverse(both, ops, True), rows[:width])
    if ops.in_place:
        rows[:width], right = right, rows[:width]
    return _Block(np.array(order), both, both, both[width:], right), rows[width:]


def _cholesky_panel(rest: Any, ops: Operations, width: int) -> tuple[_Block, Any]:
    lower = ops.cholesky(rest[:width, :width])
    below = matmul(rest[width:, :width], ops.adjoint(_inverse(lower, ops, False)))
    return _Block(None, lower, ops.adjoint(lower), below, ops.adjoint(below)), rest[width:, width:]


def _inverse(lower: Any, ops: Operations, unit: bool) -> Any:
    identity = np.eye(lower.shape[1], dtype=dtype_label(lower.dtype))
    return ops.triangular(lower, ops.from_host(identity), True, unit)


def _solution(blocks: list[_Block], ops: Operations, b: Any) -> Any:
    parts = []
    for block in blocks:
        k, is_lu = block.lower.shape[1], block.order is not None
        b = ops.permuted(b, block.order) if is_lu else b
        parts.append(ops.triangular(block.lower, b[:k], True, is_lu))
        b = matmul(block.below, parts[-1], c=b[k:], alpha=-1.0, beta=1.0)
    for block, part in zip(reversed(blocks), reversed(parts), strict=True):
        part = matmul(block.right, b, c=part, alpha=-1.0, beta=1.0)
        b = ops.concatenate((ops.triangular(block.upper, part, False), b))
    return b
