"""Report on the solution of a linear system."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from lowprec.modes import MathMode
from lowprec.util.plain import StrEnum, finite
from lowprec.util.tables import Table, html, plain_text


class Reason(StrEnum):
    """The reason for a direct solve or for refinement."""

    REQUESTED = "as requested"
    FASTER = "expected to be faster than a direct solve"
    NOT_FASTER = "refinement is not expected to be faster here"
    GUARDED = "fp32_guard is active"
    EMPTY = "there is nothing to solve"
    NOT_READABLE = "an array has no elements that can be read now"
    NO_LAPACK = "in host memory uses SciPy's LAPACK, and SciPy is not installed"
    NOT_FINITE = "the operands hold Inf or NaN, or numbers close to the largest"
    BREAKDOWN = "there is no factor in lower precision: singular, or not positive definite"
    NO_CONVERGENCE = "refinement did not converge"


@dataclass(frozen=True, slots=True)
class SolveReport:
    """Report of :func:`solve`; ``print`` shows a table.

    For a stack, steps, backward error and condition are the largest ones.
    """

    requested: str  # the argument ``method``
    method: str  # "refine" if any system was solved by it, else "direct"
    reason: Reason  # for the method, or for the first fallback to a direct solve
    factorization: str | None  # "LU" or "Cholesky", in lower precision
    factor_mode: MathMode | None  # mode of its updates
    systems: int  # number of systems in the broadcast stack
    fallbacks: int  # number of systems for refinement that were solved directly
    steps: int  # applications of the factor in classical refinement, the first solution's included
    gmres_steps: int  # applications of the factor in GMRES
    backward_error: float  # |b - a x| / (|a| |x| + |b|), with the Frobenius norm of a; NaN where it is unknown
    condition: float | None  # estimate of |a| |a^-1| in the Frobenius norm, of the scaled matrix
    seconds: tuple[tuple[str, float], ...]  # by phase

    @property
    def _table(self) -> Table:
        factor = f"{self.factorization}, updates in {self.factor_mode}" if self.factorization else "-"
        rows = {
            "method": f"{self.method} ({self.reason})",
            "factor": factor,
            "systems": f"{self.systems}, of which {self.fallbacks} solved directly after all",
            "steps": f"{self.steps} classical, {self.gmres_steps} of GMRES",
            "backward error": f"{self.backward_error:.2g}",
            "condition": "-" if self.condition is None else f"about {self.condition:.1g}",
            "ms": ", ".join(f"{phase} {1e3 * seconds:.3g}" for phase, seconds in self.seconds),
        }
        return Table(f"solve, method={self.requested!r}", ("", ""), list(rows.items()))

    def __str__(self) -> str:
        return plain_text(self._table)

    def _repr_html_(self) -> str:
        return html(self._table)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, ready for JSON."""
        named = {f.name: getattr(self, f.name) for f in fields(self)} | {"seconds": dict(self.seconds)}
        return dict(finite({name: str(x) if isinstance(x, StrEnum) else x for name, x in named.items()}))
