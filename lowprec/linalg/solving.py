"""``solve`` with options: the choice between a direct solve and refinement, stacks of systems, the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from math import nan, prod, sqrt
from operator import attrgetter
from time import perf_counter
from typing import Any

import numpy as np

from lowprec.arrays import library_of
from lowprec.arrays.namespaces import array_module
from lowprec.core.arguments import check_devices
from lowprec.core.plan_call import plan
from lowprec.errors import ArrayError, SettingError, ShapeError, UnsupportedError, quoted
from lowprec.linalg.factors import Operations
from lowprec.linalg.functions import Operands, find, operands
from lowprec.linalg.refinement import Refinement, System, Unsolved, backward_errors
from lowprec.linalg.results import SolveReason, SolveReport
from lowprec.modes import Mode, parse_mode, row
from lowprec.policy import fp32_guard, is_guarded, math_mode
from lowprec.util.strides import Shape

_CHOICES = {"method": ("direct", "refine", "auto"), "assume": ("gen", "pos")}

_WIDTH = 256  # inner extent of the planned updates
_USUAL_ERROR = 2e-5  # largest probable relative error of updates in the default mode
_WORTH_A_TRIAL = 4.0  # factor by which another mode must be cheaper to be tried before
# smaller systems are solved directly by method="auto", without an estimate of the costs
_SMALLEST = 1024

# Flops per element of the matrix, measured on Zen 5.
_DIRECT = 2500.0  # overhead of a direct solve, in the operands' precision
_REFINE = 3200.0  # refinement of one column, in FP32
_COLUMN = 100.0  # refinement of each further column

_is_on_host = attrgetter("device.is_host")  # of a view


def solve(
    a: Any, b: Any, *, method: str, factor_mode: str | Mode | None, assume: str, full_output: bool
) -> Any:
    """Return the solution, with ``full_output`` a pair of it and the report."""
    for name, value in (("method", method), ("assume", assume)):
        if value not in _CHOICES[name]:
            choices = ", ".join(map(repr, _CHOICES[name]))
            raise SettingError(f"solve has no {name}={quoted(value)}; choose one of: {choices}")
    mode = factor_mode
    if mode is not None:
        mode = parse_mode(mode, "factor_mode")
    if method == "direct" and mode is not None:
        raise SettingError(
            "factor_mode is for method='refine' or 'auto'; a direct solve has no such factor"
        )
    given = operands("solve", a=a, b=b)
    if method == "direct" and not full_output:
        return given.handed_back(_direct(given.library, *given.arrays))
    shape_a, shape_b = (tuple(x.shape) for x in given.arrays)
    batch = _stack(shape_a, shape_b)
    is_positive = assume == "pos"
    x, report = _Solve(given, batch, method, mode, is_positive).run(full_output)
    if full_output:
        return x, report
    return x


def _stack(a: Shape, b: Shape) -> Shape:
    """Return the shape of the stack of systems; raise ShapeError if the operands do not match."""
    if len(a) < 2 or a[-1] != a[-2]:
        raise ShapeError(f"solve takes square matrices, shape (..., n, n), and a has shape {a}")
    if not b or b[max(len(b) - 2, 0)] != a[-1]:
        raise ShapeError(
            f"b must have shape ({a[-1]},) or (..., {a[-1]}, k), as a has shape {a}, and it has shape {b}"
        )
    try:
        return np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ShapeError(
            f"the stacks of a, shape {a}, and b, shape {b}, do not broadcast"
        ) from None


def _direct(library: str, a: Any, b: Any) -> Any:
    if library in ("torch", "cupy") and 1 < b.ndim < a.ndim:  # they treat it as a stack of vectors
        missing = (1,) * (a.ndim - b.ndim)
        b = b.reshape((*missing, *b.shape))
    with fp32_guard():
        return find("solve", library)(a, b)


class _Solve:
    def __init__(
        self, given: Operands, batch: Shape, method: str, mode: Mode | None, is_positive: bool
    ) -> None:
        a, b = given.arrays
        self._given = given
        self._batch = batch
        self._method = method
        self._mode = mode
        self._is_positive = is_positive
        self._is_vector = b.ndim == 1
        self._n = int(a.shape[-1])
        self._columns = 1 if self._is_vector else b.shape[-1]
        #: Conversions from and to the library of the operands.
        self._library = Operations(a)
        self._reason = SolveReason.REQUESTED
        self._factor_mode = mode
        self._seconds: dict[str, float] = {}
        self._refined: list[Refinement] = []
        self._conditions: list[float] = []
        self._fallbacks = 0

    def run(self, full_output: bool) -> tuple[Any, SolveReport]:
        """Return the result and the report; the backward error is computed only for ``full_output``."""
        reason = self._read()
        if reason is not None:
            self._reason = reason
            x = self._direct(*self._given.arrays)
        else:
            # On a GPU the library's own functions are called, so its switches are set; on the host none is called.
            called = [] if self._ops.is_numpy else [self._given.library]
            with math_mode("fp32", frameworks=called):
                x = self._solved()
            if self._is_vector:
                x = x[..., 0]
            x = self._library.from_host(x)
        error = nan
        if full_output and reason is not SolveReason.NOT_READABLE:
            error = self._error(x)
        return self._given.handed_back(x), self._report(error)

    def _read(self) -> SolveReason | None:
        """Inspect the operands; return the reason for a direct solve, or None."""
        views = {}
        for name, x in zip("ab", self._given.arrays, strict=True):
            try:
                views[name] = library_of(x).view(x)
            except ArrayError as error:
                if self._method != "refine":
                    return SolveReason.NOT_READABLE
                error.argument = name
                raise
        check_devices(views)
        a, b = self._given.arrays
        if _is_on_host(views["a"]):
            a = views["a"].ndarray()
            b = views["b"].ndarray()
        if self._is_vector:
            b = b[:, None]
        self._ops = Operations(a)
        #: The matrices on their device, and the right-hand sides as a NumPy array, both broadcast to the stack.
        square = (*self._batch, self._n, self._n)
        right = (*self._batch, self._n, self._columns)
        self._a = array_module(a).broadcast_to(a, square)
        self._b = np.broadcast_to(self._ops.to_host(b), right)
        return self._reason_against_refinement()

    def _reason_against_refinement(self) -> SolveReason | None:
        if self._method == "direct":
            return SolveReason.REQUESTED
        if is_guarded():
            return SolveReason.GUARDED
        if not self._b.size:
            return SolveReason.EMPTY
        if self._ops.is_numpy and not find_spec("scipy"):
            if self._method == "refine":
                raise UnsupportedError(
                    f"refinement {SolveReason.NO_LAPACK}; install it (pip install scipy)"
                )
            return SolveReason.NO_LAPACK
        is_auto = self._method == "auto"
        if is_auto and self._n < _SMALLEST:
            return SolveReason.NOT_FASTER
        self._candidates = self._modes()
        if is_auto:
            self._reason = SolveReason.FASTER
            _, cost, _ = self._candidates[0]
            if not self._is_faster(cost):
                return SolveReason.NOT_FASTER
        return None

    def _costs(self, dtype: str) -> dict[Mode, tuple[float, float]]:
        """Return cost and probable error of an update by mode, the default mode last; cost 1 for a forced mode."""
        width = min(self._n, _WIDTH)
        tall = self._ops.from_host(np.empty((self._n, width), dtype))
        wide = self._ops.from_host(np.empty((width, self._n), dtype))
        planned = plan(tall, wide, rtol=_USUAL_ERROR, bound="probable")
        usable = [x for x in planned.candidates if not row(x.mode).quantizes]
        costs = {x.mode: (x.cost, x.bound) for x in usable}
        usual = costs.pop(planned.mode, (1.0, 0.0))
        return {**costs, planned.mode: usual}

    def _modes(self) -> list[tuple[Mode, float, float]]:
        """Return the modes to try, in order, with costs and errors."""
        costs = self._costs("complex64" if self._given.dtype.is_complex else "float32")
        *others, usual = costs
        if self._mode is not None and others:
            return [(self._mode, *costs.get(self._mode, costs[usual]))]
        first = min(costs, key=lambda mode: costs[mode][0])
        tried = [usual]
        if costs[first][0] * _WORTH_A_TRIAL < costs[usual][0]:
            tried = [first, usual]
        return [(mode, *costs[mode]) for mode in tried]

    def _is_faster(self, cost: float) -> bool:
        n = self._n
        k = self._columns
        working = 1.0
        label = self._given.dtype.label
        if label in ("float64", "complex128"):
            working, _ = max(self._costs(label).values())
        elimination = 2 * n**3 / 3
        substitution = 2 * n**2 * k
        direct = working * (elimination + _DIRECT * n**2 + substitution)
        factor = cost * n**3 / 3
        if not self._is_positive:
            factor *= 2
        refinement = n**2 * (_REFINE + _COLUMN * (k - 1))
        return factor + refinement < direct

    def _solved(self) -> Any:
        matrices = prod(self._given.arrays[0].shape[:-2])
        if matrices == 1:  # one factor for all
            systems = self._b.reshape(-1, self._n, self._columns)
            right = np.moveaxis(systems, 0, 1)
            first = (0,) * len(self._batch)
            x = self._one(first, right.reshape(self._n, -1))
            systems = np.moveaxis(x.reshape(right.shape), 1, 0)
            return systems.reshape(self._b.shape)
        x = np.empty_like(self._b, order="C")
        for at in np.ndindex(*self._batch):
            x[at] = self._one(at, self._b[at])
        return x

    def _one(self, at: tuple[int, ...], b: Any) -> Any:
        """Return the solution of one system, by a direct solve where refinement fails."""
        try:
            with np.errstate(all="ignore"):
                return self._refine(self._a[at], b)
        except Unsolved as error:
            if not self._fallbacks:
                self._reason = error.args[0]
            self._fallbacks += 1
        a = self._a[at]
        if self._ops.is_numpy:
            a = self._library.from_host(a)
        x = self._direct(a, self._library.from_host(b))
        return self._library.to_host(x)

    def _direct(self, a: Any, b: Any) -> Any:
        with self._timed("direct"):
            return _direct(self._given.library, a, b)

    def _refine(self, a: Any, b: Any) -> Any:
        if not np.isfinite(b).all():
            raise Unsolved(SolveReason.NOT_FINITE)
        with self._timed("scaling"):
            system = System(a, b.dtype, self._ops, is_positive=self._is_positive)
        last, _, _ = self._candidates[-1]
        for mode, _, error in self._candidates:
            try:
                with self._timed("factor"):
                    system.factor(mode)
                with self._timed("refinement"):
                    iteration = Refinement(system, b)
                    self._conditions.append(iteration.condition)
                    is_precise = iteration.condition * error <= sqrt(self._n)
                    if mode is not last and not is_precise:
                        continue
                    x = iteration.run()
            except Unsolved as failure:
                reason = failure.args[0]
                continue
            self._refined.append(iteration)
            self._factor_mode = mode
            return x
        raise Unsolved(reason)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = perf_counter()
        try:
            yield
        finally:
            self._seconds.setdefault(phase, 0.0)
            self._seconds[phase] += perf_counter() - begin

    def _error(self, x: Any) -> float:
        """Return the largest backward error."""
        if not self._b.size:
            return 0.0
        x = self._library.to_host(x).reshape(self._b.shape)
        largest = 0.0
        with np.errstate(all="ignore"):
            for at in np.ndindex(*self._batch):
                errors = backward_errors(self._a[at], x[at], self._b[at], self._ops)
                largest = np.maximum(largest, errors.max())  # NaN if one is
        return float(largest)

    def _report(self, error: float) -> SolveReport:
        return SolveReport(
            method="refine" if self._refined else "direct",
            reason=self._reason,
            factor_mode=self._factor_mode if self._conditions else None,
            systems=prod(self._batch),
            fallbacks=self._fallbacks,
            steps=max((r.steps for r in self._refined), default=0),
            gmres_steps=max((r.gmres_steps for r in self._refined), default=0),
            backward_error=error,
            condition=max(self._conditions, default=None),
            seconds=tuple(self._seconds.items()),
        )
