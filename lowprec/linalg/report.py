"""How a linear system was solved, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowprec.modes import MathMode
from lowprec.util.plain import StrEnum, finite
from lowprec.util.tables import Table, html, plain_text


class Reason(StrEnum):
    """Why a direct solve gave the answer, or refinement did."""

    REQUESTED = "as requested"
    FASTER = "expected to be faster than a direct solve"
    NOT_FASTER = "refinement is not expected to be faster here"
    GUARDED = "fp32_guard is active, so nothing is computed in lower precision"
    EMPTY = "there is nothing to solve"
    NOT_READABLE = "the array has no elements that can be read now"
    NOT_FINITE = "the operands hold Inf or NaN, or numbers too large for refinement"
    BREAKDOWN = "the matrix has no factors in lower precision: singular, or not positive definite"
    NO_CONVERGENCE = "refinement did not converge"


class Method(StrEnum):
    """The values of ``method=``."""

    DIRECT = "direct"
    REFINE = "refine"
    AUTO = "auto"


class Assume(StrEnum):
    """The values of ``assume=``."""

    GENERAL = "gen"
    POSITIVE = "pos"


@dataclass(frozen=True, slots=True)
class SolveReport:
    """How :func:`solve` came to its result; ``print`` shows a table.

    Of a stack, ``steps``, ``gmres_steps``, ``backward_error`` and ``condition`` are the largest of its systems.
    """

    requested: Method  # the argument
    method: Method  # ``direct`` or ``refine``: what gave the result, of at least one system
    reason: Reason  # for the method, or for the first direct solve after all
    factorization: str | None  # "LU" or "Cholesky", None where there was none in lower precision
    factor_mode: MathMode | None  # of the factor's updates
    systems: int  # matrices
    fallbacks: int  # systems that were to be refined and were solved directly
    steps: int  # applications of the factor in classical refinement, the first solution included
    gmres_steps: int  # applications of the factor in GMRES
    backward_error: float  # |b - a x| / (|a| |x| + |b|), with the Frobenius norm of a: the largest of all columns
    condition: float | None  # estimate of |a| |a^-1| in the Frobenius norm, after scaling
    seconds: tuple[tuple[str, float], ...]  # by phase

    def _rows(self) -> list[tuple[str, str]]:
        mode = "-" if self.factor_mode is None else f"{self.factorization}, updates in {self.factor_mode}"
        systems = f"{self.systems}, of which {self.fallbacks} solved directly after all" if self.fallbacks else ""
        return [
            ("method", f"{self.method} ({self.reason})"),
            ("factor", mode),
            ("systems", systems or str(self.systems)),
            ("steps", f"{self.steps} classical, {self.gmres_steps} of GMRES"),
            ("backward error", f"{self.backward_error:.2g}"),
            ("condition", "-" if self.condition is None else f"about {self.condition:.1g}"),
            ("ms", ", ".join(f"{phase} {1e3 * seconds:.3g}" for phase, seconds in self.seconds)),
        ]

    def _table(self) -> Table:
        return Table(f"solve, method={str(self.requested)!r}", ("", ""), self._rows())

    def __str__(self) -> str:
        return plain_text(self._table())

    def _repr_html_(self) -> str:
        return html(self._table())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {name: str(x) if isinstance(x, StrEnum) else x for name, x in named.items()}
        return dict(finite(plain | {"seconds": dict(self.seconds)}))
