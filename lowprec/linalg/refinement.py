"""One linear system by a factor in lower precision and iterative refinement in the working precision.

Sources: E. Carson and N. J. Higham, "A new analysis of iterative refinement and its application to accurate solution of
ill-conditioned sparse linear systems", SIAM J. Sci. Comput. 39(6), 2017, and "Accelerating the solution of linear
systems by iterative refinement in three precisions", SIAM J. Sci. Comput. 40(2), 2018; A. Haidar, S. Tomov, J. Dongarra
and N. J. Higham, "Harnessing GPU tensor cores for fast FP16 arithmetic to speed up mixed-precision iterative refinement
solvers", SC18, 2018; M. Arioli and I. S. Duff, "Using FGMRES to obtain backward stability in mixed precision", ETNA 33,
2009, for the flexible form of GMRES, whose preconditioner need not be the same twice; N. J. Higham, S. Pranesh and
M. Zounon, "Squeezing a matrix into half precision, with an application to solving linear systems", SIAM J. Sci. Comput.
41(4), 2019, for the scaling; C. S. Kenney and A. J. Laub, "Small-sample statistical condition estimates for general
matrix functions", SIAM J. Sci. Comput. 15(1), 1994, for the estimate of the condition.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from lowprec.core.dispatch import matmul
from lowprec.linalg import factors
from lowprec.linalg.report import Reason
from lowprec.modes import MathMode

#: Most applications of the factor to one right-hand side.
MAX_STEPS = 50

#: A step that reduces the error by less than this is the last one of its kind.
_PROGRESS = 0.5

#: Right-hand sides that GMRES solves one after the other, at most.
_GMRES_COLUMNS = 8

#: Random vectors that estimate the norm of the inverse.
_PROBES = 2

#: Rows and columns whose largest magnitudes differ by less stay as they are (LAPACK's gesv with equilibration).
_EVEN = 0.1

_FACTOR_TYPES = {"f": "float32", "c": "complex64"}


class Unsolved(Exception):
    """Refinement does not apply to this system, or does not converge."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class Refined(NamedTuple):
    """The solution of a system, shape (n, k), on the host."""

    x: Any
    steps: int
    gmres_steps: int
    backward_error: float


def norms(x: Any) -> Any:
    """Return the 2-norm of each column, without overflow or underflow in the squares."""
    largest = np.abs(x).max(axis=0, initial=0.0)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return scale * np.sqrt((np.abs(x / scale) ** 2).sum(axis=0))


def _power(x: Any) -> Any:
    """Return a power of two near the reciprocal of each number."""
    return np.ldexp(1.0, -np.clip(np.frexp(x)[1], -1000, 1000))


class System:
    """A matrix, its scaling, and its factor once there is one."""

    def __init__(self, a: Any, dtype: np.dtype[Any], ops: factors.Operations, *, is_positive: bool) -> None:
        self.n = int(a.shape[0])
        self.seconds = {"scaling": 0.0, "factor": 0.0, "refinement": 0.0}
        self._a, self._dtype, self._ops, self._is_positive = a, dtype, ops, is_positive
        self._scales: tuple[Any, Any] | None = None
        self._work: Any = None
        begin = perf_counter()
        with np.errstate(all="ignore"):
            self._scale()
        self.seconds["scaling"] += perf_counter() - begin

    def _scale(self) -> None:
        """Set scales, norms and the working array."""
        ops, kind = self._ops, self._dtype.kind
        self._work = ops.lowered(self._a, _FACTOR_TYPES[kind], None)
        rows, columns, squares = ops.magnitudes(self._work)
        self.norm = self.scaled_norm = float(np.sqrt(squares.sum()))
        if min(rows.min(), columns.min()) > _EVEN * rows.max() and 2.0**-40 < rows.max() < 2.0**40:
            return
        # Beyond float32's range, or uneven: again in the working precision.
        rows, columns, _ = ops.magnitudes(self._a)
        largest = rows.max()
        if not np.isfinite(largest):
            raise Unsolved(Reason.NOT_FINITE)
        if not min(rows.min(), columns.min()) > 0:
            raise Unsolved(Reason.BREAKDOWN)
        ones = np.ones(self.n)
        whole = _power(largest)
        even = ops.lowered(self._a, self._dtype.name, (whole * ones, ones))
        self.norm = float(np.sqrt(ops.magnitudes(even)[2].sum())) / whole
        if self._is_positive:
            # To a diagonal within [1/2, 2).
            diagonal = self._ops.to_host(self._a.diagonal()).real
            if not diagonal.min() > 0:
                raise Unsolved(Reason.BREAKDOWN)
            left = right = np.ldexp(1.0, -(np.frexp(diagonal)[1] >> 1))
        else:
            left = _power(rows)
            right = _power(ops.magnitudes(ops.lowered(self._a, self._dtype.name, (left, ones)))[1])
        self._scales = left.astype(self._real), right.astype(self._real)
        self._work = ops.lowered(self._a, _FACTOR_TYPES[kind], self._scales)
        self.scaled_norm = float(np.sqrt(ops.magnitudes(self._work)[2].sum()))

    @property
    def _real(self) -> str:
        return np.dtype(self._dtype.char.lower()).name

    def factor(self, mode: MathMode, width: int) -> None:
        """Factor the scaled matrix in a mode, again if it was factored before."""
        begin = perf_counter()
        if self._work is None:
            self._work = self._ops.lowered(self._a, _FACTOR_TYPES[self._dtype.kind], self._scales)
        work, self._work = self._work, None
        factorize = factors.cholesky if self._is_positive else factors.lu
        with np.errstate(all="ignore"):
            try:
                self._blocks = factorize(work, self._ops, mode, width)
            except np.linalg.LinAlgError:
                raise Unsolved(Reason.BREAKDOWN) from None
        self.seconds["factor"] += perf_counter() - begin

    def correction(self, r: Any) -> Any:
        """Return the solution for right-hand sides (n, k), in the precision of the factor."""
        left, right = self._scales or (None, None)
        with np.errstate(all="ignore"):
            r = r if left is None else r * left[:, None]
            scale = _power(np.abs(r).max(axis=0)).astype(self._real)
            low = np.ascontiguousarray(r * scale, _FACTOR_TYPES[self._dtype.kind])
            ops = self._ops
            x = ops.to_host(factors.solved(self._blocks, ops.from_host(low), ops)).astype(self._dtype) / scale
            return x if right is None else x * right[:, None]

    def product(self, x: Any) -> Any:
        """Return the product of the matrix and vectors (n, k)."""
        return self._ops.to_host(matmul(self._a, self._ops.from_host(np.ascontiguousarray(x))))

    def residual(self, b: Any, x: Any) -> Any:
        """Return ``b - a @ x``."""
        with np.errstate(all="ignore"):
            return b - self.product(x)

    def backward_errors(self, r: Any, b: Any, x: Any) -> Any:
        """Return the normwise backward error of each column: of the matrix as it is, or as it was scaled."""
        with np.errstate(all="ignore"):
            found = _quotient(norms(r), self.norm * norms(x) + norms(b))
            if self._scales is None:
                return found
            left, right = (s[:, None] for s in self._scales)
            scaled = _quotient(norms(r * left), self.scaled_norm * norms(x / right) + norms(b * left))
            return np.maximum(found, scaled)

    def condition(self, inverse_probes: Any) -> float:
        """Return the condition of the scaled matrix, from its inverse times normal random vectors."""
        if self._scales is not None:
            inverse_probes = inverse_probes / self._scales[1][:, None]
        return self.scaled_norm * float(np.sqrt(np.mean(norms(inverse_probes) ** 2)))

    def probes(self) -> Any:
        """Return normal random vectors (n, k), with the scaling of the rows undone."""
        found = np.random.default_rng(0).standard_normal((self.n, _PROBES)).astype(self._dtype)
        return found if self._scales is None else found / self._scales[0][:, None]


def _quotient(r: Any, size: Any) -> Any:
    return np.where(r == 0, 0.0, r / size)


def refine(system: System, b: Any, x: Any) -> Refined:
    """Improve a first solution until its backward error is that of the working precision, or raise Unsolved."""
    begin = perf_counter()
    unit = float(np.finfo(b.dtype).eps) / 2
    # What LAPACK's dsgesv accepts; each column goes on while steps help.
    limit = 2 * np.sqrt(system.n) * unit
    r = system.residual(b, x)
    errors = system.backward_errors(r, b, x)
    steps, active = 1, np.flatnonzero(errors > 0)
    while active.size and steps < MAX_STEPS:
        better = _step(system, b, x, r, errors, active, system.correction(r[:, active]))
        steps, active = steps + 1, active[better]
    slow = np.flatnonzero(~(errors <= unit))
    gmres_steps = 0
    if slow.size and slow.size <= _GMRES_COLUMNS:
        for j in slow:
            gmres_steps = max(gmres_steps, _refine_by_gmres(system, b, x, r, errors, j, unit))
    system.seconds["refinement"] += perf_counter() - begin
    if not (errors <= limit).all():
        raise Unsolved(Reason.NO_CONVERGENCE)
    return Refined(x, steps, gmres_steps, float(errors.max(initial=0.0)))


def _step(system: System, b: Any, x: Any, r: Any, errors: Any, columns: Any, d: Any) -> Any:
    """Add corrections to columns where that reduces the error; return where the next step may help, too."""
    y = x[:, columns] + d
    residual = system.residual(b[:, columns], y)
    found = system.backward_errors(residual, b[:, columns], y)
    before = errors[columns]
    taken = found < before
    at = columns[taken]
    x[:, at], r[:, at], errors[at] = y[:, taken], residual[:, taken], found[taken]
    return (found > 0) & (found < _PROGRESS * before)


def _refine_by_gmres(system: System, b: Any, x: Any, r: Any, errors: Any, j: int, unit: float) -> int:
    """Refine one column by GMRES; return the steps taken."""
    columns, steps, goes_on = np.array([j]), 0, True
    while goes_on and steps < MAX_STEPS and errors[j] > unit and np.isfinite(errors[j]):
        reduction = max(0.1 * unit / errors[j], 1e-8)
        d, taken = gmres(system.product, system.correction, r[:, columns], reduction, MAX_STEPS - steps)
        steps += taken
        goes_on = bool(_step(system, b, x, r, errors, columns, d)[0])
    return steps


def gmres(
    product: Callable[[Any], Any], correction: Callable[[Any], Any], r: Any, reduction: float, limit: int
) -> tuple[Any, int]:
    """Solve for one vector (n, 1) by flexible GMRES until the residual is reduced; return it and the steps."""
    size = norms(r)[0]
    basis, solutions = r / size, np.empty((len(r), 0), r.dtype)
    hessenberg = np.zeros((limit + 1, limit), r.dtype)
    for j in range(limit):
        z = correction(basis[:, -1:])
        w = product(z)
        for _ in range(2):  # classical Gram-Schmidt, twice
            h = basis.conj().T @ w
            w = w - basis @ h
            hessenberg[: j + 1, j] += h[:, 0]
        solutions = np.hstack([solutions, z])
        hessenberg[j + 1, j] = norms(w)[0]
        target = np.zeros(j + 2, r.dtype)
        target[0] = size
        small = hessenberg[: j + 2, : j + 1]
        if not np.isfinite(small).all():
            return np.zeros_like(r), j + 1
        y = np.linalg.lstsq(small, target)[0]
        left = np.linalg.norm(target - small @ y)
        if left <= reduction * size or j + 1 == limit or hessenberg[j + 1, j] == 0:
            return solutions @ y[:, None], j + 1
        basis = np.hstack([basis, w / hessenberg[j + 1, j]])
    raise AssertionError("the loop returns")
