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
from lowprec.linalg.factors import Operations, factor, norms
from lowprec.linalg.results import SolveReason
from lowprec.modes import Mode

# applications of the factor to a right-hand side, in classical refinement and in GMRES
MAX_STEPS = 50
_TRIAL_STEPS = 20  # after these GMRES stops unless the residual has fallen to a tenth
_PROGRESS = 0.5  # a step that leaves more than this share of the error is the last of its kind
_GMRES_COLUMNS = 8  # largest number of right-hand sides that GMRES solves
_PROBES = 2  # random vectors that estimate the norm of the inverse
_EVEN = 1e-3  # rows and columns whose largest magnitudes are within this ratio are not scaled
# products of matrices whose largest magnitude is between these two numbers neither overflow
_SMALLEST = 2.0**-40
_LARGEST = 2.0**40  # nor underflow

#: Accepted backward errors in units of the rounding error, at most 4 times those of direct solves (measured): of a
#: rounded solution, divided by sqrt(n), and of the residual of a double precision system.
_ROUNDING = 1.0
_RESIDUAL = 0.5


class Unsolved(Exception):
    """Refinement does not apply to a system, or does not converge; the argument is the reason."""


def _ratios(r: Any, size: float, x: Any, b: Any) -> Any:
    """Return ``|r| / (size |x| + |b|)`` of each column."""
    is_exact = (r == 0).all(axis=0)
    largest = size * norms(x) + norms(b)
    return np.where(is_exact, 0.0, norms(r) / largest)


def _power(x: Any) -> Any:
    """Return a power of two near the reciprocal of each number."""
    limit = np.finfo(x.dtype).maxexp - 24
    _, exponents = np.frexp(x)
    exponents = np.clip(exponents, -limit, limit)
    return np.ldexp(x.dtype.type(1.0), -exponents)


def _product(a: Any, x: Any, ops: Operations, b: Any = None) -> Any:
    """Return ``a x``, or ``b - a x``, of single precision operands in float64 and rounded once."""
    x = ops.from_host(x)
    if b is None:
        result = matmul(a, x, math_mode="fp64")
    else:
        c = ops.from_host(b)
        result = matmul(a, x, c=c, alpha=-1.0, beta=1.0, math_mode="fp64")
    return ops.to_host(result)


def backward_errors(a: Any, x: Any, b: Any, ops: Operations) -> Any:
    """Return ``|b - a x| / (|a| |x| + |b|)`` of each column, of operands scaled by powers of two."""
    rows, _, size = ops.magnitudes(a)
    if not _SMALLEST < rows.max() < _LARGEST:
        power = _power(rows.max())
        left = np.full_like(rows, power)
        a = ops.lowered(a, b.dtype.name, (left, np.ones_like(rows)))
        b = b * power
        size *= power
    power = _power(np.abs(x).max(axis=0))
    x = x * power
    b = b * power
    residual = _product(a, x, ops, b)
    return _ratios(residual, size, x, b)


class System:
    """A matrix, scaled if it is uneven, and its factor. Vectors are NumPy arrays (n, k) of the scaled system."""

    def __init__(self, a: Any, dtype: Any, ops: Operations, *, is_positive: bool) -> None:
        self.n = int(a.shape[0])
        self._a = a
        self._dtype = dtype
        self._ops = ops
        self._is_positive = is_positive
        self._real = np.dtype(dtype.char.lower())
        self._unit = float(np.finfo(dtype).eps) / 2
        self._narrow = "complex64" if dtype.kind == "c" else "float32"
        #: Factors of rows and columns; the norms of the scaled and of the given matrix.
        self.left: Any = 1.0
        self.right: Any = 1.0
        self._work = ops.lowered(a, self._narrow, None)
        rows, columns, self._norm = ops.magnitudes(self._work)
        self._given_norm = self._norm
        largest = rows.max()
        least = min(rows.min(), columns.min())
        is_even = least > _EVEN * largest
        if not (is_even and _SMALLEST < largest < _LARGEST):
            self._scale()

    def _scale(self) -> None:
        """Scale the matrix and set its norms."""
        ops = self._ops
        a = self._a
        name = self._dtype.name
        rows, columns, self._given_norm = ops.magnitudes(a)
        if not np.isfinite(rows.max()):
            raise Unsolved(SolveReason.NOT_FINITE)
        if self._is_positive:
            rows = ops.to_host(a.diagonal()).real
        if not min(rows.min(), columns.min()) > 0:
            raise Unsolved(SolveReason.BREAKDOWN)
        if self._is_positive:
            _, exponents = np.frexp(rows)
            roots = np.ldexp(1.0, -(exponents >> 1))
            left = right = roots.astype(self._real)
        else:
            left = _power(rows)
            even_rows = ops.lowered(a, name, (left, np.ones_like(left)))
            _, columns, _ = ops.magnitudes(even_rows)
            right = _power(columns)
        self._a = ops.lowered(a, name, (left, right))
        self._work = ops.lowered(self._a, self._narrow, None)
        _, _, self._norm = ops.magnitudes(self._work)
        self.left = left[:, None]
        self.right = right[:, None]

    def factor(self, mode: Mode) -> None:
        """Factor the scaled matrix; replaces an earlier factor."""
        work = self._work
        self._work = None
        if work is None:
            work = self._ops.lowered(self._a, self._narrow, None)
        try:
            self._solve = factor(work, self._ops, mode, is_positive=self._is_positive)
        except np.linalg.LinAlgError:
            raise Unsolved(SolveReason.BREAKDOWN) from None

    def correction(self, r: Any) -> Any:
        """Return the solution for right-hand sides in the precision of the factor."""
        narrow = self._ops.from_host(r.astype(self._narrow))
        solution = self._ops.to_host(self._solve(narrow))
        return solution.astype(self._dtype)

    def product(self, x: Any, b: Any = None) -> Any:
        """Return the product of the matrix and vectors, or the residual ``b - a x``."""
        return _product(self._a, x, self._ops, b)

    def errors(self, r: Any, x: Any, b: Any) -> Any:
        """Return each column's backward error, of the scaled matrix and of the given one, over the accepted one."""
        limit = _ROUNDING / np.sqrt(self.n)
        if self._real == np.float64:
            limit = max(limit, _RESIDUAL)
        scaled = _ratios(r, self._norm, x, b)
        # In the given matrix one row or column may outweigh the others, as if n were 1.
        given = _ratios(r / self.left, self._given_norm, x * self.right, b / self.left)
        return np.maximum(scaled / (self._unit * limit), given / (self._unit * _ROUNDING))

    def first(self, b: Any) -> tuple[Any, float]:
        """Return a first solution and the estimated condition of the scaled matrix, in the Frobenius norm."""
        random = np.random.default_rng(0)
        probes = random.standard_normal((self.n, _PROBES)).astype(self._dtype)
        columns = self.correction(np.hstack([b, probes]))
        x = columns[:, :-_PROBES].copy()
        of_probes = norms(columns[:, -_PROBES:])
        inverse = float(np.sqrt(np.mean(of_probes**2)))
        condition = self._norm * inverse
        # else singular in the working precision
        if not (condition * self._unit < 1 and np.isfinite(x).all()):
            raise Unsolved(SolveReason.BREAKDOWN)
        return x, condition


class Refinement:
    """The iteration from a first solution: its residual and errors over the accepted ones, and the steps taken."""

    def __init__(self, system: System, b: Any) -> None:
        self._system = system
        b = b * system.left
        self._power = _power(np.abs(b).max(axis=0))
        self._b = b * self._power
        self._x, self.condition = system.first(self._b)
        self._r = np.array(system.product(self._x, self._b))  # JAX arrays are read-only
        self._errors = system.errors(self._r, self._x, self._b)
        self.steps = 1
        self.gmres_steps = 0

    def run(self) -> Any:
        """Return the solution, with backward errors as small as those of a direct solve, or raise Unsolved."""
        active = np.flatnonzero(self._errors > 0)
        while active.size and self.steps < MAX_STEPS:
            d = self._system.correction(self._r[:, active])
            active = active[self._step(active, d)]
            self.steps += 1
        slow = np.flatnonzero(~(self._errors <= 1))
        if slow.size <= _GMRES_COLUMNS:
            for j in slow:
                self._run_gmres(slice(j, j + 1))
        if not (self._errors <= 1).all():
            raise Unsolved(SolveReason.NO_CONVERGENCE)
        x = self._x * self._system.right / self._power
        if not np.isfinite(x).all():
            raise Unsolved(SolveReason.NOT_FINITE)
        return x

    def _run_gmres(self, column: slice) -> None:
        system = self._system
        at = np.arange(column.start, column.stop)
        steps = 0
        goes_on = bool(np.isfinite(self._errors[column]))
        while goes_on and steps < MAX_STEPS and self._errors[column] > 1:
            error = float(self._errors[column][0])
            reduction = max(0.1 / error, 1e-8)
            r = self._r[:, column]
            d, count = gmres(system.product, system.correction, r, reduction, MAX_STEPS - steps)
            steps += count
            goes_on = bool(self._step(at, d)[0])
        self.gmres_steps = max(self.gmres_steps, steps)

    def _step(self, columns: Any, d: Any) -> Any:
        """Add corrections to columns whose error they reduce; return the columns that a further step may improve."""
        x = self._x[:, columns] + d
        b = self._b[:, columns]
        r = self._system.product(x, b)
        before = self._errors[columns]
        after = self._system.errors(r, x, b)
        better = after < before
        at = columns[better]
        self._x[:, at] = x[:, better]
        self._r[:, at] = r[:, better]
        self._errors[at] = after[better]
        return (after > 0) & (after < _PROGRESS * before)


def gmres(
    product: Callable[[Any], Any],
    correction: Callable[[Any], Any],
    r: Any,
    reduction: float,
    limit: int,
) -> tuple[Any, int]:
    """Solve for a vector (n, 1) by flexible GMRES until the residual falls by ``reduction``; return x and the steps."""
    size = norms(r)[0]
    basis = r / size
    corrections = np.empty((len(r), 0), r.dtype)
    hessenberg = np.zeros((limit + 1, limit), r.dtype)
    for j in range(1, limit + 1):
        z = correction(basis[:, -1:])
        corrections = np.hstack([corrections, z])
        w = product(z)
        column = hessenberg[:, j - 1]
        for _ in range(2):  # Gram-Schmidt, twice
            h = matmul(basis.conj().T, w)
            w = w - matmul(basis, h)
            column[:j] += h[:, 0]
        length = norms(w)[0]
        column[j] = length
        small = hessenberg[: j + 1, :j]
        if not np.isfinite(small).all():
            return np.zeros_like(r), j
        target = np.eye(j + 1, 1, dtype=r.dtype) * size
        y, *_ = np.linalg.lstsq(small, target)
        rest = target - small @ y
        left = norms(rest)[0] / size
        is_slow = j == _TRIAL_STEPS and left > 0.1
        if left <= reduction or length == 0 or is_slow:
            break
        basis = np.hstack([basis, w / length])
    return corrections @ y, j
