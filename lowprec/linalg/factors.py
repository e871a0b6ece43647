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
from lowprec.modes import MathMode, Mode

_WIDTH = 512  # most columns of a panel
_ROWS = 16  # rows that fit the cache, also when they are transposed
_STRIP = 1024  # width of a strip of an update

#: Returns the solution for right-hand sides (n, k), which may be changed.
Solver = Callable[[Any], Any]


#: The module with each library's LU factorization and triangular solver.
_LAPACK = {
    "numpy": "scipy.linalg",
    "torch": "torch.linalg",
    "jax": "jax.scipy.linalg",
    "cupy": "cupyx.scipy.linalg",
}


def norms(x: Any) -> Any:
    """Return the 2-norm of each column, without overflow of the squares."""
    largest = np.abs(x).max(axis=0, initial=0.0)
    is_scale = (largest > 0) & np.isfinite(largest)
    scale = np.where(is_scale, largest, 1.0)
    squares = np.abs(x / scale) ** 2
    return scale * np.sqrt(squares.sum(axis=0))


class Operations:
    """Operations of a factorization on the arrays of one library; NumPy's are those in host memory."""

    def __init__(self, like: Any) -> None:
        self._like = like
        self._name = library_name(like)
        self.xp = array_module(like)
        self.is_numpy = self._name == "numpy"
        self._is_torch = self._name == "torch"
        self.in_place = self._name != "jax"  # whether arrays are writable

    @property
    def _linalg(self) -> Any:
        return importlib.import_module(_LAPACK[self._name])

    def from_host(self, x: Any) -> Any:
        """Return a NumPy array as an array on the device of the matrix."""
        if self.is_numpy:
            return x
        if self._is_torch:
            return self.xp.tensor(np.ascontiguousarray(x), device=self._like.device)
        if self._name == "jax":
            return importlib.import_module("jax").device_put(x, self._like.device)
        with self._like.device:
            return self.xp.asarray(x)

    def to_host(self, x: Any) -> Any:
        """Return an array as a NumPy array."""
        if self._name == "cupy":
            return x.get()
        if self._is_torch:
            x = x.cpu()
        return np.asarray(x)

    def adjoint(self, x: Any) -> Any:
        if self._is_torch:
            return x.mH.resolve_conj()
        return x.conj().T

    def magnitudes(self, a: Any) -> tuple[Any, Any, Any]:
        """Return the largest magnitude of each row and each column, and the Frobenius norm."""
        step = _ROWS if self.is_numpy else len(a)
        rows = []
        columns = []
        sizes = []
        for i in range(0, len(a), step):
            part = abs(a[i : i + step])
            of_rows = self.to_host(self.xp.amax(part, 1))
            rows.append(of_rows)
            columns.append(self.to_host(self.xp.amax(part, 0)))
            scale = float(of_rows.max()) or 1.0
            squares = (part / scale) ** 2
            sizes.append(scale * float(squares.sum()) ** 0.5)
        size = float(norms(np.array(sizes)))
        return np.concatenate(rows), np.maximum.reduce(columns), size

    def lowered(self, a: Any, dtype: str, scales: tuple[Any, Any] | None, order: Any = "C") -> Any:
        """Return a copy of a matrix in another type, with rows and columns scaled."""
        if self.is_numpy:
            work = np.empty(a.shape, dtype, order)
            for i in range(0, len(a), _ROWS):
                part = slice(i, i + _ROWS)
                rows = a[part]
                if scales is not None:
                    rows = rows * scales[0][part, None] * scales[1]
                work[part] = rows
            return work
        if scales is not None:
            left, right = scales
            a = a * self.from_host(left[:, None])
            a = a * self.from_host(right)
        if dtype_label(a.dtype) == dtype:
            return self.xp.asarray(a, copy=True)
        return cast(a, dtype)

    def permuted(self, rows: Any, order: Any) -> Any:
        """Return rows in this order; may change the array."""
        if not self.in_place:
            return rows[order]
        moved = np.flatnonzero(order != np.arange(len(order)))
        source = self.from_host(order[moved])
        rows[self.from_host(moved)] = rows[source]
        return rows

    def lu(self, a: Any) -> tuple[Any, Any]:
        """Return both factors, in the memory of a NumPy array stored by columns, and the library's pivots."""
        if self._is_torch:
            both, pivots, _ = self._linalg.lu_factor_ex(a)
        elif self.is_numpy:
            getrf = self._linalg.get_lapack_funcs("getrf", (a,))
            both, pivots, failure = getrf(a, overwrite_a=True)
            if failure > 0:
                raise np.linalg.LinAlgError("a pivot is zero")
        else:
            both, pivots = self._linalg.lu_factor(a, check_finite=False)
        return both, pivots

    def lu_solver(self, a: Any) -> Solver:
        """Factor a matrix, stored in its memory."""
        solve = self._linalg.lu_solve
        if self.is_numpy:
            return partial(solve, self.lu(a.T), trans=1, check_finite=False)
        if self._is_torch:
            return partial(solve, *self.lu(a))
        return partial(solve, self.lu(a), check_finite=False)

    def lu_panel(self, a: Any) -> tuple[Any, Any, Any]:
        """Factor a panel; return its square of both factors, the rows below, and the order of rows as a NumPy array."""
        width = a.shape[1]
        order = list(range(len(a)))
        if self.is_numpy:
            a = self.lowered(a, a.dtype, None, "F")
        both, pivots = self.lu(a)
        pivots = self.to_host(pivots) - self._is_torch  # PyTorch counts from one
        for i, pivot in enumerate(pivots.tolist()):
            order[i], order[pivot] = order[pivot], order[i]
        square = both[:width]
        if self.is_numpy:
            square = np.asfortranarray(square)
        return square, both[width:], np.array(order)

    def cholesky(self, a: Any) -> Any:
        """Return the lower factor of a block; reads its lower triangle."""
        if self.is_numpy:
            return self._linalg.cholesky(a, lower=True, check_finite=False)
        if not self._is_torch:
            return self.xp.linalg.cholesky(a)
        lower, failure = self._linalg.cholesky_ex(a)
        if int(failure):
            raise np.linalg.LinAlgError("the matrix is not positive definite")
        return lower

    def triangular(self, a: Any, b: Any, lower: bool, unit: bool = False) -> Any:
        """Return the solution for a triangle."""
        solve = self._linalg.solve_triangular
        if self._is_torch:
            return solve(a, b, upper=not lower, unitriangular=unit)
        return solve(a, b, lower=lower, unit_diagonal=unit, check_finite=False)


class _Panel(NamedTuple):
    """The part of both factors from one panel of k columns."""

    order: Any  # order of the rows from the panel's first one; None for Cholesky
    lower: Any  # L on the diagonal, in the lower triangle; with a unit diagonal in LU
    upper: Any  # U on the diagonal, in the upper triangle
    below: Any  # L below the block, (m - k, k)
    right: Any  # U to the right of it, (k, m - k)


def factor(rest: Any, ops: Operations, mode: Mode, *, is_positive: bool) -> Solver:
    """Factor a matrix, stored in its memory; of a Hermitian one the lower triangle is read."""
    if not is_positive and mode in (MathMode.FP32, MathMode.FP32_PEDANTIC):
        return ops.lu_solver(rest)
    width = max(32, len(rest) // 128 * 16)
    factor_panel = _cholesky_panel if is_positive else _lu_panel
    update = partial(matmul, alpha=-1.0, beta=1.0, math_mode=mode)
    panels: list[_Panel] = []
    while True:
        panel, rest = factor_panel(rest, ops, min(_WIDTH, width))
        panels.append(panel)
        if not len(rest):
            return partial(_solution, panels, ops)
        if not ops.in_place:
            rest = update(panel.below, panel.right, c=rest)
            continue
        strip = _STRIP if is_positive else len(rest)
        for j in range(0, len(rest), strip):  # for Cholesky little more than the lower triangle
            columns = slice(j, j + strip)
            c = rest[j:, columns]
            update(panel.below[j:], panel.right[:, columns], c=c, out=c)


def _lu_panel(rest: Any, ops: Operations, width: int) -> tuple[_Panel, Any]:
    """Return the panel of the first columns, and the rows and columns that remain to be updated."""
    both, below, order = ops.lu_panel(rest[:, :width])
    rows = ops.permuted(rest[:, width:], order)
    inverse = _inverse(both, ops, True)
    right = matmul(inverse, rows[:width])
    if ops.in_place:
        rows[:width] = right
        right = rows[:width]
    return _Panel(order, both, both, below, right), rows[width:]


def _cholesky_panel(rest: Any, ops: Operations, width: int) -> tuple[_Panel, Any]:
    lower = ops.cholesky(rest[:width, :width])
    inverse = _inverse(lower, ops, False)
    below = matmul(rest[width:, :width], ops.adjoint(inverse))
    panel = _Panel(None, lower, ops.adjoint(lower), below, ops.adjoint(below))
    return panel, rest[width:, width:]


def _inverse(lower: Any, ops: Operations, unit: bool) -> Any:
    identity = np.eye(lower.shape[1], dtype=dtype_label(lower.dtype))
    return ops.triangular(lower, ops.from_host(identity), True, unit)


def _solution(panels: list[_Panel], ops: Operations, b: Any) -> Any:
    parts = []
    for panel in panels:
        k = panel.lower.shape[1]
        is_lu = panel.order is not None
        if is_lu:
            b = ops.permuted(b, panel.order)
        part = ops.triangular(panel.lower, b[:k], True, is_lu)
        parts.append(part)
        b = matmul(panel.below, part, c=b[k:], alpha=-1.0, beta=1.0)
    for panel, part in zip(reversed(panels), reversed(parts), strict=True):
        part = matmul(panel.right, b, c=part, alpha=-1.0, beta=1.0)
        solved = ops.triangular(panel.upper, part, False)
        b = ops.xp.concatenate((solved, b))
    return b
