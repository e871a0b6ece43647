"""One linear system by a factor in lower precision and iterative refinement in the working precision.

Sources, next to those of ``solve``: M. Arioli and I. S. Duff, "Using FGMRES to obtain backward stability in mixed
precision", ETNA 33, 2009 (the flexible form of GMRES, whose preconditioner may vary); N. J. Higham, S. Pranesh and M.
Zounon, "Squeezing a matrix into half precision", SIAM J. Sci. Comput. 41(4), 2019 (scaling); C. S. Kenney and A. J.
Laub, "Small-sample statistical condition estimates for general matrix functions", SIAM J. Sci. Comput. 15(1), 1994.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec.core.dispatch import matmul
from lowprec.linalg import factors
from lowprec.linalg.report import Reason
from lowprec.modes import MathMode

MAX_STEPS = 50  # applications of the factor to a right-hand side, in classical refinement and in GMRES
_TRIAL_STEPS = 20  # after these GMRES stops unless the residual has fallen to a tenth
_PROGRESS = 0.5  # a step that leaves more than this share of the error is the last of its kind
_GMRES_COLUMNS = 8  # largest number of right-hand sides that GMRES solves
_PROBES = 2  # random vectors that estimate the norm of the inverse
_EVEN = 1e-3  # rows and columns whose largest magnitudes are within this ratio are not scaled


class Unsolved(Exception):
    """Refinement does not apply to a system, or does not converge; the argument is the reason."""


def norms(x: Any) -> Any:
    """Return the 2-norm of each column, without overflow of the squares."""
    largest = np.abs(x).max(axis=0, initial=0.0)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return scale * np.sqrt((np.abs(x / scale) ** 2).sum(axis=0))


def backward_errors(r: Any, size: float, x: Any, b: Any) -> Any:
    """Return ``|r| / (size |x| + |b|)`` of each column."""
    return np.where((r == 0).all(axis=0), 0.0, norms(r) / (size * norms(x) + norms(b)))


def _power(x: Any) -> Any:
    """Return a power of two near the reciprocal of each number."""
    return np.ldexp(1.0, -np.clip(np.frexp(x)[1], -1000, 1000))


class System:
    """A scaled matrix and its factor. Vectors are NumPy arrays, shape (n, k)."""

    def __init__(self, a: Any, dtype: np.dtype[Any], ops: factors.Operations, *, is_positive: bool) -> None:
        self.n = int(a.shape[0])
        self._a, self._dtype, self._ops, self._is_positive = a, dtype, ops, is_positive
        self._real = np.dtype(dtype.char.lower())
        self._narrow = "complex64" if dtype.kind == "c" else "float32"
        self._scales: tuple[Any, Any] | None = None
        self._work = ops.lowered(a, self._narrow, None)
        rows, columns, squares = ops.magnitudes(self._work)
        self.norm = self._scaled_norm = float(np.sqrt(squares.sum()))
        if not (min(rows.min(), columns.min()) > _EVEN * rows.max() and 2.0**-40 < rows.max() < 2.0**40):
            self._scale()

    def _scale(self) -> None:
        """Set scales and norms if the matrix is uneven or exceeds float32's range."""
        ops, a = self._ops, self._a
        rows, columns, _ = ops.magnitudes(a)
        if not np.isfinite(rows.max()):
            raise Unsolved(Reason.NOT_FINITE)
        if self._is_positive:
            diagonal = ops.to_host(a.diagonal()).real
            left = np.ldexp(1.0, -(np.frexp(diagonal)[1] >> 1))
        else:
            diagonal, left = rows, _power(rows)
        if not min(diagonal.min(), columns.min()) > 0:
            raise Unsolved(Reason.BREAKDOWN)
        left = left.astype(self._real)
        _, columns, squares = ops.magnitudes(ops.lowered(a, self._dtype.name, (left, np.ones_like(left))))
        self.norm = float(norms(np.sqrt(squares)[:, None] / left[:, None])[0])
        self._scales = left, left if self._is_positive else _power(columns).astype(self._real)
        self._work = ops.lowered(a, self._narrow, self._scales)
        self._scaled_norm = float(np.sqrt(ops.magnitudes(self._work)[2].sum()))

    def factor(self, mode: MathMode) -> None:
        """Factor the scaled matrix; replaces an earlier factor."""
        work, self._work = self._work, None
        work = self._ops.lowered(self._a, self._narrow, self._scales) if work is None else work
        try:
            self._solve = factors.factor(work, self._ops, mode, is_positive=self._is_positive)
        except np.linalg.LinAlgError:
            raise Unsolved(Reason.BREAKDOWN) from None

    def correction(self, r: Any) -> Any:
        """Return the solution for right-hand sides in the precision of the factor."""
        r = r if self._scales is None else r * self._scales[0][:, None]
        power = _power(np.abs(r).max(axis=0)).astype(self._real)
        low = self._ops.from_host((r * power).astype(self._narrow))
        x = self._ops.to_host(self._solve(low)).astype(self._dtype) / power
        return x if self._scales is None else x * self._scales[1][:, None]

    def product(self, x: Any) -> Any:
        """Return the product of the matrix and vectors."""
        return self._ops.to_host(matmul(self._a, self._ops.from_host(x)))

    def backward_errors(self, r: Any, x: Any, b: Any) -> Any:
        """Return each column's backward error, the larger of those of the matrix and of the scaled matrix."""
        found = backward_errors(r, self.norm, x, b)
        if self._scales is None:
            return found
        left, right = (s[:, None] for s in self._scales)
        return np.maximum(found, backward_errors(r * left, self._scaled_norm, x / right, b * left))

    def first(self, b: Any) -> tuple[Any, float]:
        """Return a first solution and the estimated condition of the scaled matrix, in the Frobenius norm."""
        probes = np.random.default_rng(0).standard_normal((self.n, _PROBES)).astype(self._dtype)
        left, right = (1.0, 1.0) if self._scales is None else (s[:, None] for s in self._scales)
        found = self.correction(np.hstack([b, probes / left]))
        x, inverse = found[:, :-_PROBES].copy(), found[:, -_PROBES:] / right
        condition = self._scaled_norm * float(np.sqrt(np.mean(norms(inverse) ** 2)))
        if not (np.isfinite(condition) and np.isfinite(x).all()):
            raise Unsolved(Reason.BREAKDOWN)
        return x, condition


class Refinement:
    """The iteration from a first solution: ``x``, its residual and backward errors, and the steps taken."""

    def __init__(self, system: System, b: Any, x: Any) -> None:
        self._system, self._b, self.x = system, b, x
        self._r = b - system.product(x)
        self.errors = system.backward_errors(self._r, x, b)
        self.steps, self.gmres_steps = 1, 0

    def run(self) -> None:
        """Reduce the backward errors to the level of the working precision, or raise Unsolved."""
        unit = float(np.finfo(self._b.dtype).eps) / 2
        active = np.flatnonzero(self.errors > 0)
        while active.size and self.steps < MAX_STEPS:
            active = active[self._step(active, self._system.correction(self._r[:, active]))]
            self.steps += 1
        slow = np.flatnonzero(~(self.errors <= unit))
        for j in slow if slow.size <= _GMRES_COLUMNS else ():
            self._run_gmres(slice(j, j + 1), unit)
        # The limit of LAPACK's dsgesv.
        if not (self.errors <= 2 * unit * np.sqrt(self._system.n)).all():
            raise Unsolved(Reason.NO_CONVERGENCE)

    def _run_gmres(self, column: slice, unit: float) -> None:
        steps, goes_on = 0, bool(np.isfinite(self.errors[column]))
        while goes_on and steps < MAX_STEPS and self.errors[column] > unit:
            reduction = max(0.1 * unit / float(self.errors[column][0]), 1e-8)
            system = self._system
            d, taken = gmres(system.product, system.correction, self._r[:, column], reduction, MAX_STEPS - steps)
            steps += taken
            goes_on = bool(self._step(np.arange(column.start, column.stop), d)[0])
        self.gmres_steps = max(self.gmres_steps, steps)

    def _step(self, columns: Any, d: Any) -> Any:
        """Add corrections to columns whose error they reduce; return the columns that a further step may improve."""
        x, b = self.x[:, columns] + d, self._b[:, columns]
        r = b - self._system.product(x)
        found, before = self._system.backward_errors(r, x, b), self.errors[columns]
        taken = found < before
        at = columns[taken]
        self.x[:, at], self._r[:, at], self.errors[at] = x[:, taken], r[:, taken], found[taken]
        return (found > 0) & (found < _PROGRESS * before)


def gmres(
    product: Callable[[Any], Any], correction: Callable[[Any], Any], r: Any, reduction: float, limit: int
) -> tuple[Any, int]:
    """Solve for a vector (n, 1) by flexible GMRES until the residual falls by ``reduction``; return x and the steps."""
    size = norms(r)[0]
    basis, found = r / size, np.empty((len(r), 0), r.dtype)
    hessenberg = np.zeros((limit + 1, limit), r.dtype)
    for j in range(1, limit + 1):
        z = correction(basis[:, -1:])
        w, found = product(z), np.hstack([found, z])
        for _ in range(2):  # Gram-Schmidt, twice
            h = matmul(basis.conj().T, w)
            w = w - matmul(basis, h)
            hessenberg[:j, j - 1] += h[:, 0]
        hessenberg[j, j - 1] = length = norms(w)[0]
        small, target = hessenberg[: j + 1, :j], np.eye(j + 1, 1, dtype=r.dtype) * size
        if not np.isfinite(small).all():
            return np.zeros_like(r), j
        y = np.linalg.lstsq(small, target)[0]
        left = norms(target - small @ y)[0] / size
        if left <= reduction or length == 0 or (j == _TRIAL_STEPS and left > 0.1):
            break
        basis = np.hstack([basis, w / length])
    return found @ y, j
