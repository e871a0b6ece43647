"""``solve``: its arguments, the choice between a direct solve and refinement, stacks of systems, the report."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod, sqrt
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from lowprec.arrays import ArrayView, library_of
from lowprec.core.dispatch import matmul
from lowprec.core.plan_call import plan
from lowprec.errors import ArrayError, DeviceError, ShapeError, UnsupportedError, quoted
from lowprec.linalg.factors import Host, OnDevice, Operations
from lowprec.linalg.refinement import Refined, System, Unsolved, norms, refine
from lowprec.linalg.report import Assume, Method, Reason, SolveReport
from lowprec.linalg.routes import Operands, call, find, operands
from lowprec.modes import MathMode, parse_mode
from lowprec.planning import Candidate, GemmPlan
from lowprec.policy import fp32_guard, is_guarded, math_mode
from lowprec.util.plain import StrEnum

#: Columns of a panel, at most.
_WIDTH = 256

#: Probable relative error of the updates, at most, where neither the mode nor the condition is known.
_USUAL_ERROR = 1e-5

#: A mode that is less precise is tried first where the usual one costs so many times as much.
_WORTH_A_TRIAL = 4.0

# Times relative to those of products in FP32, on Zen 5: LAPACK's factorization over products of as many flops, and all
# of refinement that is no update of the factor, in flops for each element of the matrix.
_LAPACK, _OVERHEAD = 1.8, 4000.0

#: Steps of refinement that are expected.
_STEPS = 4

_Choice = TypeVar("_Choice", bound=StrEnum)


def solve(a: Any, b: Any, *, method: str, factor_mode: str | MathMode | None, assume: str, full_output: bool) -> Any:
    """Return the solution, with ``full_output`` a pair of it and the report."""
    requested = _choice(Method, method, "method")
    assumed = _choice(Assume, assume, "value of assume")
    mode = None if factor_mode is None else parse_mode(factor_mode, "factor_mode")
    if requested is Method.DIRECT and mode is not None:
        raise UnsupportedError(
            "factor_mode is for method='refine' and method='auto'; a direct solve has no such factor"
        )
    if requested is Method.DIRECT and not full_output:
        return call("solve", a, b)
    found = operands("solve", (a, b))
    _check_shapes(*found.arrays)
    x, report = _Solve(found, requested, assumed, mode, full_output).run()
    return (x, report) if full_output else x


def _choice(kind: type[_Choice], value: object, what: str) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(str(x)) for x in kind)
        raise UnsupportedError(f"solve has no {what} {quoted(value)}; choose one of: {names}") from None


def _check_shapes(a: Any, b: Any) -> None:
    shape, of_b = tuple(a.shape), tuple(b.shape)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ShapeError(f"solve takes square matrices, shape (..., n, n), and a has shape {shape}")
    if not of_b or of_b[max(len(of_b) - 2, 0)] != shape[-1]:
        raise ShapeError(
            f"b must have shape ({shape[-1]},) or (..., {shape[-1]}, k) for a of shape {shape}, got {of_b}"
        )
    try:
        np.broadcast_shapes(shape[:-2], of_b[:-2])
    except ValueError:
        raise ShapeError(f"the stacks of a, {shape}, and b, {of_b}, do not broadcast") from None


class _Solve:
    """One call."""

    def __init__(self, found: Operands, requested: Method, assumed: Assume, mode: MathMode | None, full: bool) -> None:
        self._operands, self._requested, self._mode, self._full = found, requested, mode, full
        self._is_positive = assumed is Assume.POSITIVE
        self._a, self._b = found.arrays
        self._is_vector = self._b.ndim == 1
        self._n = int(self._a.shape[-1])
        self._columns = 1 if self._is_vector else int(self._b.shape[-1])
        self._batch = np.broadcast_shapes(tuple(self._a.shape[:-2]), tuple(self._b.shape[:-2]))
        self._width = min(_WIDTH, max(32, self._n // 128 * 16))
        self._seconds: dict[str, float] = {}
        self._reason = Reason.REQUESTED
        #: Of the systems that were refined, and of all after the first direct solve.
        self._refined: list[tuple[Refined, MathMode, float]] = []
        self._conditions: list[float] = []
        self._direct_errors: list[float] = []
        self._fallbacks = 0

    def run(self) -> tuple[Any, SolveReport]:
        try:
            views = [library_of(x).view(x) for x in (self._a, self._b)]
        except ArrayError as error:
            if self._requested is Method.REFINE and not is_guarded():
                error.argument = error.argument or _refused((self._a, self._b))
                raise
            return self._direct(self._reason if self._requested is Method.DIRECT else Reason.NOT_READABLE, None)
        if views[0].device != views[1].device:
            raise DeviceError(f"a is on {views[0].device} and b on {views[1].device}; move one of them")
        on_host = views[0].device.is_host
        self._ops: Operations = Host() if on_host else OnDevice(self._a)
        self._arrays = [v.ndarray() for v in views] if on_host else [self._a, self._b]
        if self._requested is Method.DIRECT:
            return self._direct(Reason.REQUESTED, self._ops)
        if is_guarded():
            return self._direct(Reason.GUARDED, self._ops)
        if not prod((*self._batch, self._n, self._columns)):
            return self._direct(Reason.EMPTY, self._ops)
        modes = self._modes()
        if self._requested is Method.AUTO:
            if not self._is_faster(modes[0]):
                return self._direct(Reason.NOT_FASTER, self._ops)
            self._reason = Reason.FASTER
        # The switches of a library on a GPU are set for its own functions; on the host none of these is called.
        libraries = False if on_host else [self._operands.library]
        with math_mode("fp32", frameworks=libraries):
            x = self._all(modes)
        return self._result(x, views[0]), self._report()

    # -- the choice --------------------------------------------------------------------------------

    def _plan(self, dtype: str) -> GemmPlan:
        """Return the plan of an update of a matrix of this size, with the costs of all modes."""
        shapes = (self._n, self._width), (self._width, self._n)
        left, right = (self._ops.from_host(np.empty(shape, dtype)) for shape in shapes)
        return plan(left, right, rtol=_USUAL_ERROR, bound="probable")

    def _modes(self) -> list[Candidate]:
        """Return the modes to try, one after the other."""
        made = self._plan("complex64" if self._operands.dtype.is_complex else "float32")
        known = {x.mode: x for x in made.candidates}
        usual = known.get(made.mode, Candidate(made.mode, 0.0, 1.0, True, None))  # type: ignore[arg-type]
        if not made.candidates:  # the environment decides
            return [usual]
        if self._mode is not None:
            return [known.get(self._mode, usual._replace(mode=self._mode, bound=0.0))]
        first = made.candidates[0]
        return [first, usual] if first.cost * _WORTH_A_TRIAL < usual.cost else [usual]

    def _is_faster(self, mode: Candidate) -> bool:
        """Whether refinement is expected to be faster than a direct solve."""
        n, k = self._n, self._columns
        working = self._plan(self._operands.dtype.label).candidates
        each = working[0].cost if self._operands.dtype.label in ("float64", "complex128") and working else 1.0
        direct = _LAPACK * each * (2 * n**3 / 3 + 2 * n**2 * k)
        factor = mode.cost * n**3 * (1 / 3 if self._is_positive else 2 / 3)
        return factor + n**2 * (_OVERHEAD + 2 * _STEPS * k * (each + 1)) < direct

    # -- refinement --------------------------------------------------------------------------------

    def _all(self, modes: list[Candidate]) -> Any:
        """Return the solutions of all systems, shape (..., n, k), as NumPy's array."""
        a, b = self._arrays
        b = b[:, None] if self._is_vector else b
        n, k, dtype = self._n, self._columns, np.dtype(self._operands.dtype.label)
        x = np.empty((*self._batch, n, k), dtype)
        if prod(a.shape[:-2]) == 1:  # one factor for all
            right = np.broadcast_to(self._ops.to_host(b), x.shape).reshape(-1, n, k)
            beside = np.moveaxis(right, 0, 1).reshape(n, -1)
            found = self._one(a.reshape(n, n), beside, (0,) * (a.ndim - 2), None, modes)
            x[...] = np.moveaxis(found.reshape(n, -1, k), 1, 0).reshape(x.shape)
            return x
        for at, of_a, of_b in _positions(self._batch, a, b):
            x[at] = self._one(a[of_a], np.ascontiguousarray(self._ops.to_host(b[of_b])), of_a, of_b, modes)
        return x

    def _one(self, a: Any, b: Any, of_a: Any, of_b: Any, modes: list[Candidate]) -> Any:
        """Return the solution of one system, by a direct solve where refinement fails."""
        system = None
        try:
            system = System(a, b.dtype, self._ops, is_positive=self._is_positive)
            refined = self._refine(system, b, modes)
            self._refined.append(refined)
            return refined[0].x
        except Unsolved as error:
            self._fallbacks += 1
            if self._fallbacks == 1:
                self._reason = error.reason
        finally:
            for phase, seconds in {} if system is None else system.seconds.items():
                self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        return self._directly(a, b, of_a)

    def _refine(self, system: System, b: Any, modes: list[Candidate]) -> tuple[Refined, MathMode, float]:
        if not np.isfinite(b).all():
            raise Unsolved(Reason.NOT_FINITE)
        for mode in modes:
            try:
                system.factor(mode.mode, self._width)
                x, inverse = np.split(system.correction(np.hstack([b, system.probes()])), [b.shape[1]], axis=1)
                condition = system.condition(inverse)
                if not np.isfinite(condition) or not np.isfinite(x).all():
                    raise Unsolved(Reason.BREAKDOWN)
                self._conditions.append(condition)
                if mode is not modes[-1] and condition * mode.bound > sqrt(system.n):
                    continue  # too ill-conditioned for this mode
                return refine(system, b, np.ascontiguousarray(x)), mode.mode, condition
            except Unsolved:
                if mode is modes[-1]:
                    raise
        raise AssertionError("the last mode returns or raises")

    # -- direct solves -----------------------------------------------------------------------------

    def _solver(self) -> Any:
        return find("solve", self._operands.library)

    def _directly(self, a: Any, b: Any, of_a: Any) -> Any:
        """Return the solution of one system by the library's own solver, as NumPy's array."""
        begin = perf_counter()
        own = self._operands.arrays[0]
        like = own[of_a]
        right = b
        if self._operands.library != "numpy":
            right = OnDevice(like).from_host(b)
        with fp32_guard():
            found = self._solver()(like, right)
        x = library_of(found).view(found).ndarray() if isinstance(self._ops, Host) else self._ops.to_host(found)
        self._seconds["direct"] = self._seconds.get("direct", 0.0) + perf_counter() - begin
        if self._full:
            self._direct_errors.append(_backward_error(a, b, x, self._ops))
        return x

    def _direct(self, reason: Reason, ops: Operations | None) -> tuple[Any, SolveReport]:
        """Solve everything by the library's own solver."""
        begin = perf_counter()
        with fp32_guard():
            x = self._solver()(self._a, self._b)
        self._seconds["direct"] = perf_counter() - begin
        self._reason = reason
        if self._full:
            self._direct_errors.append(float("nan") if ops is None else self._errors_of(x, ops))
        return self._operands.handed_back(x), self._report()

    def _errors_of(self, x: Any, ops: Operations) -> float:
        """Return the largest backward error of all systems."""
        a, b = self._arrays
        x = library_of(x).view(x).ndarray() if isinstance(ops, Host) else x
        b, x = (y[:, None] if self._is_vector and y is b else y for y in (b, x))
        x = x[..., None] if self._is_vector else x
        return max(
            (_backward_error(a[of_a], ops.to_host(b[of_b]), ops.to_host(x[at]), ops)
             for at, of_a, of_b in _positions(self._batch, a, b)),
            default=0.0,
        )  # fmt: skip

    # -- results -----------------------------------------------------------------------------------

    def _result(self, x: Any, view: ArrayView) -> Any:
        """Return solutions as an array of the operands' library."""
        x = x[..., 0] if self._is_vector else x
        if isinstance(self._ops, OnDevice):
            return self._ops.from_host(x)
        library = library_of(self._a)
        target = library.allocate(x.shape, self._operands.dtype, view.device, self._a)
        target.ndarray()[...] = x
        return self._operands.handed_back(library.wrap(target.owner, self._a, self._b))

    def _report(self) -> SolveReport:
        refined = [r for r, _, _ in self._refined]
        errors = [r.backward_error for r in refined] + self._direct_errors
        factored = self._conditions or self._refined
        mode = self._refined[0][1] if self._refined else None
        return SolveReport(
            requested=self._requested,
            method=Method.REFINE if refined else Method.DIRECT,
            reason=self._reason,
            factorization=("Cholesky" if self._is_positive else "LU") if factored else None,
            factor_mode=mode,
            systems=prod(self._batch),
            fallbacks=self._fallbacks,
            steps=max((r.steps for r in refined), default=0),
            gmres_steps=max((r.gmres_steps for r in refined), default=0),
            backward_error=float(np.max(errors, initial=0.0)),
            condition=max(self._conditions, default=None),
            seconds=tuple(self._seconds.items()),
        )


def _refused(arrays: tuple[Any, Any]) -> str | None:
    """Return the name of the first array that cannot be read."""
    for name, x in zip("ab", arrays, strict=True):
        try:
            library_of(x).view(x)
        except ArrayError:
            return name
    return None


def _positions(batch: tuple[int, ...], a: Any, b: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the index of each system, and those of its matrix and its right-hand sides."""
    for at in np.ndindex(*batch):
        yield (
            at,
            *(
                tuple(0 if m == 1 else i for i, m in zip(at[len(at) - x.ndim + 2 :], x.shape, strict=False))
                for x in (a, b)
            ),
        )


def _backward_error(a: Any, b: Any, x: Any, ops: Operations) -> float:
    with np.errstate(all="ignore"):
        r = b - ops.to_host(matmul(a, ops.from_host(np.ascontiguousarray(x)), math_mode="fp32"))
        size = np.sqrt(ops.magnitudes(a)[2].sum()) * norms(x) + norms(b)
        return float(np.max(np.where(r == 0, 0.0, norms(r) / size), initial=0.0))
