"""Report of an interception: products computed by lowprec, and those left to the library, with the reason.

A :class:`Ledger` sums products by layer and operator, so its size does not depend on the number of products or shapes.
Forked processes write their sums to files, which the report of the first process adds.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import unique
from math import prod
from operator import attrgetter
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

from lowprec import plotting
from lowprec.util.plain import StrEnum
from lowprec.util.tables import Table, fill, plain_text

Shapes = tuple[tuple[int, ...], ...]

#: Rows of a ledger; products of further layers are summed in one row per operator.
_MOST_ROWS = 4096
_FURTHER = "(further layers)"


@unique
class PassedBy(StrEnum):
    """The reason why a product was left to its library.

    >>> str(PassedBy.CONVOLUTION)
    'a convolution is no matrix product'
    """

    ELEMENT_TYPE = "the mode does not act on this element type"
    LAYER = "no mode for this layer"
    ATTENTION = "attention in one kernel, which hides its products"
    CONVOLUTION = "a convolution is no matrix product"
    RECURRENT = "recurrent layers in one kernel, which hides their products"
    FUSED = "a fused kernel, which hides its products"
    STORAGE = "sparse, quantised or nested storage"
    LINEAR_ALGEBRA = "a solver or a factorisation, not a product"
    PRECISION = "the program chooses its precision"
    UNREACHED = "a function that cannot be replaced"
    REFUSED = "refused by lowprec"


class OperandStatistics(NamedTuple):
    """Statistics of one operand; of several products the largest numbers."""

    magnitude: float = 0.0  #: Largest magnitude of an element.
    underflow: float = (
        0.0  #: Share of the elements that a mode rounds to zero or, one without scales, below its normal numbers.
    )
    clipped: float = 0.0  #: Share of the elements that exceed the largest number of their block by half of its spacing.
    block_range: float = 0.0  #: Binary logarithm of the ratio of the largest and the smallest maximum of a block.


_NONE = OperandStatistics()


class Statistics(NamedTuple):
    """Statistics of a product."""

    a: OperandStatistics = _NONE
    b: OperandStatistics = _NONE
    error: float = 0.0

    def largest(self, other: Statistics) -> Statistics:
        a, b = (OperandStatistics(*map(max, x, y)) for x, y in ((self.a, other.a), (self.b, other.b)))
        return Statistics(a, b, max(self.error, other.error))


class Row(NamedTuple):
    """The properties by which a ledger sums products."""

    layer: str
    operator: str
    dtype: str
    backward: bool = False
    mode: str = ""
    passed_by: PassedBy | None = None
    detail: str = ""
    gradient: str = ""


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

    layer: str  #: Name of the layer whose parameter is an operand, or was in the forward pass; empty if there is none.
    operator: str  #: The library's name, such as ``"addmm"``.
    shapes: Shapes  #: Of the operands of the largest product; of the first two arrays where the library computed it.
    dtype: str  #: Element type of the first operand.
    backward: bool  #: Whether they were part of a backward pass.
    mode: str  #: The resolved mode; empty where the library computed it.
    count: int  #: Number of such products.
    multiplications: int  #: Number of multiplications of elements; 0 where it is unknown.
    passed_by: PassedBy | None = None  #: The reason why the library computed it; None where lowprec did.
    detail: str = ""  #: The error message, where lowprec raised one.
    gradient: str = ""  #: ``"grad_input"`` or ``"grad_weight"`` in backward passes, with ``statistics=True``.
    a: OperandStatistics = _NONE  #: Of the first operand, with ``statistics=True``, where lowprec computed it.
    b: OperandStatistics = _NONE  #: Of the second operand.
    error: float = 0.0  #: Largest error of a product relative to that of float64, by Frobenius norms.

    @property
    def reason(self) -> str:
        """Why the library computed it, as text; empty where lowprec did."""
        return ": ".join(filter(None, (str(self.passed_by or ""), self.detail)))


@dataclass(frozen=True, slots=True)
class InterceptionReport(plotting.Drawable):
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

    def __str__(self) -> str:
        return self.table()

    def table(self, width: int = 120) -> str:
        """Return the report as text tables with lines of this many characters."""
        taken, passed = self.taken, self.passed
        summary = (
            f"{self.title}: {_count(taken)} taken ({_count(p for p in taken if p.backward)} in backward passes), "
            f"{_count(passed)} passed by{f', in {self.processes} processes' if self.processes > 1 else ''}"
        )
        tables = [self._rows("taken", "mode", taken)] if taken else []
        tables += [self._rows("passed by", "why", passed)] if passed else []
        remarks = (fill(text, width) for text in self.remarks)
        return "\n".join([fill(summary, width), *(plain_text(each, width) for each in tables), *remarks])

    def _figure(self) -> Any:
        knows = any(p.multiplications for p in self.products)
        weight = attrgetter("multiplications" if knows else "count")
        layers: dict[str, list[InterceptedProduct]] = {}
        for p in self.products:
            layers.setdefault(p.layer or f"({p.operator})", []).append(p)
        total = sum(map(weight, self.products)) or 1
        names, note = plotting.first(sorted(layers, key=lambda name: -sum(map(weight, layers[name]))))
        shares = {
            label: [100 * sum(weight(p) for p in layers[name] if p in products) / total for name in names]
            for label, products in {"by lowprec": self.taken, "by the library": self.passed}.items()
        }
        figure, ((panel, *others),) = plotting.figure(1.6 + 0.22 * len(names), 1, 1 + self.statistics, sharex=False)
        plotting.bars(panel, names, shares)
        panel.set_xlabel(f"% of the {'multiplications' if knows else 'products'}")
        for other in others:
            plotting.dots(other, names, {"error": [max(p.error for p in layers[name]) for name in names]})
            other.set_xlabel("largest relative error of a product")
        figure.suptitle(self.title + note)
        plotting.legend(figure, panel)
        return figure

    def _rows(self, title: str, last: str, products: tuple[InterceptedProduct, ...]) -> Table:
        total, shows = sum(p.multiplications for p in self.products), self.statistics and title == "taken"
        rows = []
        for p in products:
            shapes = " @ ".join("x".join(map(str, shape)) or "scalar" for shape in p.shapes)
            direction = p.gradient or ("backward" if p.backward else "forward")
            share = f"{p.multiplications / total:.1%}" if p.multiplications else ""
            measured = [_shown(p.a, p.b, i) for i in range(4)] + [f"{p.error:.1e}"] if shows else []
            rows.append(
                [p.layer, p.operator, shapes, p.dtype, direction, str(p.count), share, *measured, p.mode or p.reason]
            )
        measured = [">largest", ">underflow", ">clipped", ">blocks", ">error"] if shows else []
        columns = ["layer", "operator", "operands", "dtype", "pass", ">calls", ">share", *measured, last]
        return Table(title, columns, rows, ("pass", "dtype", "operands"))


def _shown(a: OperandStatistics, b: OperandStatistics, i: int) -> str:
    """Return a statistic of both operands as text."""
    texts = [f"2^{x[i]:.0f}" if i == 3 else f"{x[i]:.1%}" if i else f"{x[i]:.2g}" for x in (a, b)]
    return ", ".join(texts) if any((a[i], b[i])) else ""


def _count(products: Iterable[InterceptedProduct]) -> int:
    return sum(p.count for p in products)


class _Sum:
    """The sums of one row in one thread."""

    __slots__ = ("count", "largest", "multiplications", "shapes", "statistics")

    def __init__(self) -> None:
        self.count = self.multiplications = 0
        self.largest = -1
        self.shapes: Shapes = ()
        self.statistics = Statistics()

    def add(self, other: _Sum) -> None:
        self.count += other.count
        self.multiplications += other.multiplications
        self.statistics = self.statistics.largest(other.statistics)
        if other.largest > self.largest:
            self.largest, self.shapes = other.largest, other.shapes


class Ledger:
    """Sums of products by :class:`Row`, of all threads and forked processes."""

    def __init__(self) -> None:
        # By thread, so that no lock is needed.
        self._sums: dict[tuple[int, Row], _Sum] = {}
        self.name = str(next(_numbers))  # the same in forked processes
        self.folder: Path | None = None  # of the sums of other processes
        self._is_prepared = False
        self.notes: dict[str, None] = {}
        self.records_gradients = False

    def add(
        self, row: Row, multiplications: int, shapes: Callable[[], Shapes], statistics: Statistics | None = None
    ) -> None:
        key = get_ident(), row
        found = self._sums.get(key)
        if found is None:
            if len(self._sums) >= _MOST_ROWS:
                key = get_ident(), row._replace(layer=_FURTHER if row.layer else "", detail="")
            found = self._sums.setdefault(key, _Sum())
        found.count += 1
        found.multiplications += multiplications
        if multiplications > found.largest:
            found.largest, found.shapes = multiplications, shapes()
        if statistics is not None:
            found.statistics = found.statistics.largest(statistics)

    def prepare_fork(self) -> None:
        """Choose the folder for the sums of forked processes."""
        self.folder = self.folder or _shared_folder()
        if "multiprocessing.util" in sys.modules and not self._is_prepared:
            from multiprocessing import util

            # The children of multiprocessing end without atexit.
            util.register_after_fork(self, lambda ledger: util.Finalize(None, ledger.write, exitpriority=0))
            self._is_prepared = True

    def start_child(self) -> None:
        """Drop the sums of the parent process in a forked one."""
        self._sums = {}
        atexit.register(self.write)

    def write(self) -> None:
        """Write the sums of this process for the report of the first one."""
        if self.folder is None or not self._sums:
            return
        with suppress(OSError):  # the folder is gone, and with it the report
            path = self.folder / f"{self.name}-{os.getpid()}"
            path.with_suffix(".new").write_bytes(pickle.dumps(self._summed()))
            path.with_suffix(".new").rename(path.with_suffix(".sums"))

    def _summed(self) -> dict[Row, _Sum]:
        found: dict[Row, _Sum] = {}
        for (_, row), each in self._sums.copy().items():
            found.setdefault(row, _Sum()).add(each)
        return found

    def report(self, title: str, remarks: Iterable[str], statistics: bool) -> InterceptionReport:
        """Return the sums of all threads and of the processes that have ended."""
        sums, processes = self._summed(), 1
        for path in sorted(self.folder.glob(f"{self.name}-*.sums")) if self.folder else ():
            processes += 1
            for row, each in pickle.loads(path.read_bytes()).items():
                sums.setdefault(row, _Sum()).add(each)
        products = [
            InterceptedProduct(
                row.layer, row.operator, s.shapes, row.dtype, row.backward, row.mode, s.count, s.multiplications,
                row.passed_by, row.detail, row.gradient, *s.statistics,
            )
            for row, s in sums.items()
        ]  # fmt: skip
        products.sort(key=lambda p: -p.multiplications)
        found = list(self.notes)
        if self.records_gradients and not any(p.backward for p in products):
            found.append(
                "No backward pass ran inside the block; one that runs after it is PyTorch's own, in full precision."
            )
        return InterceptionReport(title, tuple(products), (*found, *remarks), processes, statistics)


_numbers = itertools.count()


@functools.cache
def _shared_folder() -> Path:
    """Return a folder that this process removes at its end, and its forked children use."""
    folder, process = Path(tempfile.mkdtemp(prefix="lowprec-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == process else None)
    return folder


def multiplications_of(shapes: Shapes) -> int:
    """Return the number of multiplications of a product of two matrices or stacks of them."""
    (a, b) = shapes
    return prod(a) * (b[-1] if len(b) > 1 else 1)
