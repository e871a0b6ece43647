"""Records of the products of a run: sums of 1, 2, 4, 8... products of a place, and the order of all products.

A sketch has 1,021 sums of the numbers of all results with random signs. The norm of the difference of two sketches is
that of the difference of the results, with a standard deviation of 2.2 %.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lowprec.backends.cpu.observing import (  # noqa: F401 - some for other packages
    BEGINS,
    IS_FAULTY,
    Site,
    Sums,
    observe,
    require,
    xla_handler,
)
from lowprec.core.interception_report import (
    NO_STATISTICS,
    InterceptedProduct,
    OperandStatistics,
    Statistics,
)
from lowprec.modes import Mode, parse_mode
from lowprec.util.strides import Shape

#: Products of a run whose order is kept.
_MOST_STEPS = 1 << 20

NO_LAYER = "(no layer)"
#: The pass of products of which it is unknown, as JAX's.
ANY_PASS = "any"


class Kind(NamedTuple):
    """A place of a program, and the mode of its products."""

    layer: str
    # "forward", "grad_input", "grad_weight", "backward" for other gradients, or ANY_PASS
    phase: str
    operator: str
    mode: str  # empty where the library computed it

    @property
    def name(self) -> str:
        return self.layer or NO_LAYER


#: Layer, phase and operator of a product, and the shape of its result.
Step = tuple[str, str, str, Shape]


class Observed(NamedTuple):
    """1, 2, 4, 8... following products of a kind."""

    kind: Kind
    sums: Sums
    error: float | None  # norm of the difference to the reference's products of the same operands
    a: OperandStatistics = NO_STATISTICS  # of the first product
    b: OperandStatistics = NO_STATISTICS


class Run(NamedTuple):
    """The products of a run: those that were observed, and sums of the others."""

    observed: Sequence[Observed] = ()
    others: Sequence[InterceptedProduct] = ()
    steps: Sequence[Step] = ()
    order: Any = ()  # an index of `steps` for each product
    fault_at: int = -1  # number of the first product with a fault
    fault: str = ""  # "NaN" or "Inf" in its result, and the origin


class Recorder:
    """The products of a run; ``reference`` is the mode in which each is computed again, None for no other one.

    It raises UnsupportedError where there is no compiled library.
    """

    def __init__(self, reference: Mode | None = None) -> None:
        require()
        self.reference = reference
        self._observed: list[Observed] = []
        self._sites: dict[Kind, Site] = {}
        self._statistics: dict[tuple[Kind, int], Any] = {}
        self._steps: dict[Step, int] = {}
        self._order = array("i")
        self._count = 0
        self._fault = (-1, "")
        self.others: list[InterceptedProduct] = []  # that are not observed

    def add(
        self, kind: Kind, shape: Shape, numbers: int, again: int | None, count: int, is_wide: bool,
        multiplications: int,
    ) -> tuple[int, bool, bool]:  # fmt: skip
        """Add a product, as :meth:`Site.add`; return its number, and whether it begins a record and may be faulty."""
        site = self._sites.get(kind) or self._sites.setdefault(kind, Site())
        index = self._count
        self._count += 1
        if index < _MOST_STEPS:
            step = (*kind[:3], shape)
            self._order.append(self._steps.setdefault(step, len(self._steps)))
        flags = site.add(numbers, again, count, is_wide, multiplications, index)
        return index, bool(flags & BEGINS), bool(flags & IS_FAULTY)

    def add_statistics(self, kind: Kind, index: int, of_operands: Any) -> None:
        """Record the statistics of the operands of the first product of a record."""
        self._statistics[kind, index] = of_operands

    def add_steps(self, steps: Sequence[Step], order: Any) -> int:
        """Record the order of products whose sums are recorded later; return the number of the first one."""
        numbers = [self._steps.setdefault(step, len(self._steps)) for step in steps]
        first = self._count
        self._count += len(order)
        if len(order):
            self._order.extend(np.array(numbers)[order].tolist())
        return first

    def add_sums(
        self, kind: Kind, sums: Sums, offset: int = 0, of_operands: Any = (NO_STATISTICS,) * 2
    ) -> None:
        """Record sums whose products are numbered from ``offset``."""
        sums = sums._replace(begin=sums.begin + offset, end=sums.end + offset)
        error = None
        if sums.is_compared:
            error = math.sqrt(sums.error)
        elif kind.mode and self.reference in (None, parse_mode(kind.mode)):
            error = 0.0
        self._observed.append(Observed(kind, sums, error, *of_operands))
        fault, of_a, of_b, again = sums.faults
        if fault:
            reference = self.reference if sums.is_compared else None
            text = fault_text(fault, (of_a, of_b), kind.mode, reference, again)
            self.add_fault(sums.fault_at + offset, text)

    def add_fault(self, index: int, text: str) -> None:
        """Record a NaN or Inf of a product, if it is the first one."""
        if self._fault[0] < 0 or index < self._fault[0]:
            self._fault = (index, text)

    def statistics(self, place_of: Callable[[Kind], str]) -> dict[tuple[str, str, str], Statistics]:
        """Return the largest statistics by place, operator and mode."""
        found: dict[tuple[str, str, str], Statistics] = {}
        for x in self.run().observed:
            key = (place_of(x.kind), x.kind.operator, x.kind.mode)
            error = math.sqrt(x.sums.error / x.sums.reference) if x.sums.reference else 0.0
            found[key] = found.get(key, Statistics()).largest(Statistics(x.a, x.b, error))
        return found

    def run(self) -> Run:
        """Return the products so far."""
        for kind, site in self._sites.items():
            for sums in site.take():
                found = self._statistics.pop((kind, sums.begin), (NO_STATISTICS,) * 2)
                self.add_sums(kind, sums, 0, found)
        order = np.array(self._order)
        others = tuple(self.others)
        return Run(tuple(self._observed), others, tuple(self._steps), order, *self._fault)


def fault_text(
    fault: str, of_operands: Sequence[str], mode: str, reference: Mode | None, again: str
) -> str:
    """Return the text of a NaN or Inf in a result, and its origin; ``again`` is that of the reference's result."""
    for name, of_operand in zip(("first", "second"), of_operands, strict=False):
        if of_operand:
            return f"{fault}: its {name} operand has {of_operand}"
    if reference is None:
        return f"{fault}: its operands are finite"
    if again:
        return f"{fault}: so is the product in {reference}"
    return f"{fault}: by {mode}; the product is finite in {reference}"


def norm(x: np.ndarray[Any, Any]) -> float:
    """Return the Euclidean norm, without the BLAS."""
    if np.iscomplexobj(x):
        return math.hypot(norm(x.real), norm(x.imag))
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.square(x, dtype=np.float64).sum()))


def distance(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Return the Euclidean norm of a difference."""
    with np.errstate(all="ignore"):
        return norm(x - y)
