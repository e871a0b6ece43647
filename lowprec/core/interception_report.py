"""Report of an interception: products computed by lowprec, and those left to the library, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import unique
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from lowprec import plotting
from lowprec.report import Report
from lowprec.util.plain import StrEnum
from lowprec.util.strides import Shapes
from lowprec.util.tables import Table


@unique
class PassedBy(StrEnum):
    """The reason why a product was left to its library.

    >>> str(PassedBy.CONVOLUTION)
    'a convolution in one kernel, which hides its products'
    """

    ELEMENT_TYPE = "the mode does not act on this element type"
    LAYER = "no mode for this layer"
    NO_PARAMETER = (
        "no product with a known parameter; the mode of others does not act on this element type"
    )
    ATTENTION = "attention in one kernel, which hides its products"
    CONVOLUTION = "a convolution in one kernel, which hides its products"
    RECURRENT = "recurrent layers in one kernel, which hides their products"
    FUSED = "a fused kernel, which hides its products"
    STORAGE = "sparse, quantised or nested storage"
    LINEAR_ALGEBRA = "a solver or a factorisation, not a product"
    VECTORS = "vectors are not rounded"
    OWN_LOOP = "a loop of NumPy, which calls no BLAS"
    LONG = "the inner dimension is too long for one sum of the mode"
    NO_MEMORY = "no memory for the operands of the product"
    PRECISION = "the program chooses its precision"
    REFUSED = "refused by lowprec"
    OTHER_THREAD = "another thread or task, outside the block"
    NOT_VISIBLE = "not visible: a package that calls no operators was loaded"


class OperandStatistics(NamedTuple):
    """Statistics of one operand; of several products the largest numbers."""

    magnitude: float = 0.0  #: Largest magnitude of an element.
    underflow: float = (
        #: Share of the elements that a mode rounds to zero or, one without scales, below its normal numbers.
        0.0
    )
    #: Share of the elements that exceed the largest number of their block by half of its spacing.
    clipped: float = 0.0
    #: Binary logarithm of the ratio of the largest and the smallest maximum of a block.
    block_range: float = 0.0


NO_STATISTICS = OperandStatistics()


class Statistics(NamedTuple):
    """Statistics of a product."""

    a: OperandStatistics = NO_STATISTICS
    b: OperandStatistics = NO_STATISTICS
    error: float = 0.0

    def largest(self, other: Statistics) -> Statistics:
        a = OperandStatistics(*map(max, self.a, other.a))
        b = OperandStatistics(*map(max, self.b, other.b))
        return Statistics(a, b, max(self.error, other.error))


@dataclass(frozen=True, slots=True)
class InterceptedProduct:
    """Products of one operator in one layer.

    >>> import torch
    >>> from lowprec.torch import intercept
    >>> with intercept("bf16") as seen:
    ...     c = torch.ones(4, 8) @ torch.ones(8, 2)
    >>> seen.report().products[0].shapes
    ((4, 8), (8, 2))
    """

    #: Name of the layer whose parameter is an operand, or was in the forward pass; empty if there is none.
    layer: str
    operator: str  #: The library's name, such as ``"addmm"``.
    #: Of the operands; of the largest product where they are many. Of a library, the first two arrays.
    shapes: Shapes
    dtype: str  #: Element type of the first operand.
    backward: bool  #: Whether they were part of a backward pass.
    mode: str  #: The resolved mode; empty where the library computed it.
    count: int  #: Number of such products.
    multiplications: int  #: Number of multiplications of elements; 0 where it is unknown.
    #: The reason why the library computed it; None where lowprec did.
    passed_by: PassedBy | None = None
    detail: str = ""  #: The error message, where lowprec raised one, or why it used another mode.
    #: ``"grad_input"`` or ``"grad_weight"`` in backward passes, with ``statistics=True``.
    gradient: str = ""
    #: Of the first operand, with ``statistics=True``, where lowprec computed it.
    a: OperandStatistics = NO_STATISTICS
    b: OperandStatistics = NO_STATISTICS  #: Of the second operand.
    #: Largest error of a product relative to that of float64, by Frobenius norms.
    error: float = 0.0

    @property
    def reason(self) -> str:
        """Why the library computed it, or lowprec in another mode, as text; empty where neither."""
        return ": ".join(filter(None, (str(self.passed_by or ""), self.detail)))


@dataclass(frozen=True, slots=True)
class InterceptionReport(Report):
    """The products of an interception; ``print`` shows them as tables.

    The figure shows each layer's share of the multiplications (of JAX's products, whose executions are not counted, of
    the products) and, with ``statistics=True``, its largest error.

    >>> import torch
    >>> from lowprec.torch import intercept
    >>> with intercept("bf16") as seen:
    ...     c = torch.ones(4, 8) @ torch.ones(8, 2)
    >>> seen.report().title
    "lowprec.torch.intercept('bf16')"
    """

    title: str  #: The interception.
    products: tuple[InterceptedProduct, ...]  #: The most multiplications first.
    remarks: tuple[str, ...] = ()  #: Notes on the counts.
    processes: int = 1  #: Number of processes that multiplied.
    statistics: bool = False  #: Whether magnitudes and underflow were measured.

    @property
    def taken(self) -> tuple[InterceptedProduct, ...]:
        """The products that lowprec computed."""
        return tuple(p for p in self.products if p.passed_by is None)

    @property
    def passed(self) -> tuple[InterceptedProduct, ...]:
        """The products that the library computed."""
        return tuple(p for p in self.products if p.passed_by is not None)

    _width = 120

    def tables(self) -> list[Table]:
        taken, passed = self.taken, self.passed
        summary = (
            f"{self.title}: {_count(taken)} taken ({_count(p for p in taken if p.backward)} in backward passes), "
            f"{_count(passed)} passed by{f', in {self.processes} processes' if self.processes > 1 else ''}"
        )
        tables = [Table(summary, ())]
        forward, backward = (
            {name for p in taken if p.backward is direction for name in p.layer.split("|")}
            for direction in (False, True)
        )
        halves = backward - forward
        is_passed = any(
            not p.backward and (p.layer in halves or p.passed_by is PassedBy.NO_PARAMETER)
            for p in passed
        )
        if halves and is_passed:
            halved = f"Of {len(halves)} layers only backward products were taken; forward products were passed by."
            tables.append(Table(halved, ()))
        if taken:
            tables.append(self._rows("taken", "mode", taken))
        if passed:
            tables.append(self._rows("passed by", "why", passed))
        return tables

    def figure(self) -> Any:
        knows = any(p.multiplications for p in self.products)
        weight = attrgetter("multiplications" if knows else "count")
        layers: dict[str, list[InterceptedProduct]] = {}
        for p in self.products:
            layers.setdefault(p.layer or f"({p.operator})", []).append(p)
        total = sum(map(weight, self.products)) or 1
        names, note = plotting.first(
            sorted(layers, key=lambda name: -sum(map(weight, layers[name])))
        )
        shares = {
            label: [
                100 * sum(weight(p) for p in layers[name] if p in products) / total
                for name in names
            ]
            for label, products in {"by lowprec": self.taken, "by the library": self.passed}.items()
        }
        figure, ((panel, *others),) = plotting.figure(
            1.6 + 0.22 * len(names), 1, 1 + self.statistics, sharex=False
        )
        plotting.bars(panel, names, shares)
        panel.set_xlabel(f"% of the {'multiplications' if knows else 'products'}")
        for other in others:
            plotting.dots(
                other, names, {"error": [max(p.error for p in layers[name]) for name in names]}
            )
            other.set_xlabel("largest relative error of a product")
        figure.suptitle(self.title + note)
        plotting.legend(figure, panel)
        return figure

    def _rows(self, title: str, last: str, products: tuple[InterceptedProduct, ...]) -> Table:
        total = sum(p.multiplications for p in self.products)
        columns = ["layer", "operator", "operands", "dtype", "pass", ">calls", ">share"]
        measured = {}
        if self.statistics and title == "taken":
            measured = _STATISTICS
            columns += [*measured, ">error"]
        rows = []
        for p in products:
            shapes = " @ ".join("x".join(map(str, shape)) or "scalar" for shape in p.shapes)
            direction = p.gradient or ("backward" if p.backward else "forward")
            share = f"{p.multiplications / total:.1%}" if p.multiplications else ""
            row = [p.layer, p.operator, shapes, p.dtype, direction, str(p.count), share]
            for i, text in enumerate(measured.values()):
                both = (p.a[i], p.b[i])
                row.append(", ".join(map(text.format, both)) if any(both) else "")
            if measured:
                row.append(f"{p.error:.1e}")
            rows.append([*row, p.reason or p.mode])
        return Table(title, [*columns, last], rows, ("pass", "dtype", "operands"))


#: Columns of a table for the fields of :class:`OperandStatistics`, with their formats.
_STATISTICS = {
    ">largest": "{:.2g}",
    ">underflow": "{:.1%}",
    ">clipped": "{:.1%}",
    ">blocks": "2^{:.0f}",
}


def _count(products: Iterable[InterceptedProduct]) -> int:
    return sum(p.count for p in products)


def multiplications_of(shapes: Shapes) -> int:
    """Return the number of multiplications of a product of two matrices or stacks of them."""
    a, b = shapes
    return prod((*a, *b[1:][-1:]))
