"""Report on the solution of a linear system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowprec import plotting
from lowprec.modes import Mode
from lowprec.report import Report
from lowprec.util.plain import StrEnum
from lowprec.util.tables import Table


class SolveReason(StrEnum):
    """The reason for a direct solve or for refinement."""

    REQUESTED = "as requested"
    FASTER = "expected to be faster than a direct solve"
    NOT_FASTER = "refinement is not expected to be faster here"
    GUARDED = "fp32_guard is active"
    EMPTY = "there is nothing to solve"
    NOT_READABLE = "an array has no elements that can be read now"
    NO_LAPACK = "in host memory uses SciPy's LAPACK, and SciPy is not installed"
    NOT_FINITE = "the operands hold Inf or NaN, or numbers close to the largest"
    BREAKDOWN = "there is no factor in lower precision: singular in it, or not positive definite"
    NO_CONVERGENCE = "refinement did not converge"


@dataclass(frozen=True, slots=True)
class SolveReport(Report):
    """Report of :func:`solve`; ``print`` shows a table.

    For a stack, steps, backward error and condition are the largest ones.

    >>> import numpy as np
    >>> import lowprec
    >>> _, report = lowprec.linalg.solve(np.eye(2), np.ones(2), full_output=True)
    >>> report.method, report.backward_error
    ('direct', 0.0)
    """

    method: str  # "refine" if any system was solved by it, else "direct"
    reason: SolveReason  # for the method, or for the first fallback to a direct solve
    factor_mode: Mode | None  # mode of the updates of the factor in lower precision
    systems: int  # number of systems in the broadcast stack
    fallbacks: int  # number of systems for refinement that were solved directly
    steps: int  # applications of the factor in classical refinement, the first solution's included
    gmres_steps: int  # applications of the factor in GMRES
    # |b - a x| / (|a| |x| + |b|), with the Frobenius norm of a; NaN where it is unknown
    backward_error: float
    condition: float | None  # estimate of |a| |a^-1| in the Frobenius norm, of the scaled matrix
    seconds: tuple[tuple[str, float], ...]  # by phase

    def tables(self) -> list[Table]:
        factor = "-"
        if self.factor_mode:
            factor = f"updates in {self.factor_mode}"
        condition = "-"
        if self.condition is not None:
            condition = f"about {self.condition:.1g}"
        phases = [f"{phase} {1e3 * seconds:.3g}" for phase, seconds in self.seconds]
        rows = (
            ("method", f"{self.method} ({self.reason})"),
            ("factor", factor),
            ("systems", f"{self.systems}, of which {self.fallbacks} solved directly after all"),
            ("steps", f"{self.steps} classical, {self.gmres_steps} of GMRES"),
            ("backward error", f"{self.backward_error:.2g}"),
            ("condition", condition),
            ("ms", ", ".join(phases)),
        )
        return [Table("solve", ("", ""), rows)]

    def figure(self) -> Any:
        phases = [phase for phase, _ in self.seconds]
        milliseconds = [1e3 * seconds for _, seconds in self.seconds]
        return plotting.bar_figure("solve", phases, {self.method: milliseconds}, "ms")
