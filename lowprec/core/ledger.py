"""Sums of the products of an interception.

A :class:`Ledger` sums products by layer and operator, so its size does not depend on the number of products or shapes.
Forked processes write their sums to files, which the report of the first process adds.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import NamedTuple

from lowprec.core.interception_report import (
    InterceptedProduct,
    InterceptionReport,
    PassedBy,
    Statistics,
)
from lowprec.util.strides import Shapes

#: Rows of a ledger; products of further layers are summed in one row per operator.
_MOST_ROWS = 4096


#: Rows of one operator in one layer for products of different shapes; those of more shapes are one row.
_MOST_SHAPES = 4


_FURTHER = "(further layers)"


class LedgerRow(NamedTuple):
    """The properties by which a ledger sums products."""

    layer: str
    operator: str
    dtype: str
    backward: bool = False
    mode: str = ""
    passed_by: PassedBy | None = None
    detail: str = ""
    gradient: str = ""


_NO_STATISTICS = Statistics()


@dataclass(slots=True)
class _Sum:
    """The sums of products of one row and shape, or of several shapes, in one thread."""

    shapes: Shapes = ()
    count: int = 0
    multiplications: int = 0
    largest: int = -1
    statistics: Statistics = _NO_STATISTICS

    def add(self, other: _Sum) -> None:
        self.count += other.count
        self.multiplications += other.multiplications
        self.statistics = self.statistics.largest(other.statistics)
        if other.largest > self.largest:
            self.largest = other.largest
            self.shapes = other.shapes


#: The sums of one row by shape; of many shapes, one sum with the shape of the largest product.
_Sums = dict[Shapes, _Sum]


def _sum_of(sums: _Sums, shapes: Shapes) -> _Sum:
    found = sums.get(shapes)
    if found is not None:
        return found
    if len(sums) < _MOST_SHAPES and () not in sums:
        return sums.setdefault(shapes, _Sum(shapes))
    parts = list(sums.values())
    sums.clear()
    total = sums.setdefault((), _Sum())
    for each in parts:
        total.add(each)
    return total


def _add_rows(rows: dict[LedgerRow, _Sums], others: Iterable[tuple[LedgerRow, _Sums]]) -> None:
    for row, sums in others:
        of_row = rows.setdefault(row, {})
        for shapes, each in sums.items():
            _sum_of(of_row, shapes).add(each)


class Ledger:
    """Sums of products by :class:`LedgerRow`, of all threads and forked processes."""

    def __init__(self) -> None:
        # By thread, so that no lock is needed.
        self._sums: dict[tuple[int, LedgerRow], _Sums] = {}
        self.folder: Path | None = None  # of the sums of other processes
        self.notes: dict[str, None] = {}
        self.collect: Callable[[], None] = lambda: None  # adds sums that C counted
        self.records_gradients = False

    def add(
        self,
        row: LedgerRow,
        multiplications: int,
        shapes: Callable[[], Shapes],
        statistics: Statistics | None = None,
    ) -> None:
        key = get_ident(), row
        row_sums = self._sums.get(key)
        if row_sums is None:
            if len(self._sums) >= _MOST_ROWS:
                key = get_ident(), row._replace(layer=_FURTHER if row.layer else "", detail="")
            row_sums = self._sums.setdefault(key, {})
        of_operands = shapes()
        found = _sum_of(row_sums, of_operands)
        found.count += 1
        found.multiplications += multiplications
        if multiplications > found.largest:
            found.largest = multiplications
            found.shapes = of_operands
        if statistics is not None:
            found.statistics = found.statistics.largest(statistics)

    def add_sum(
        self, row: LedgerRow, count: int, multiplications: int, largest: int, shapes: Shapes
    ) -> None:
        """Add several products of which ``largest`` is the number of multiplications of the largest one."""
        added = _Sum(shapes, count, multiplications, largest)
        _sum_of(self._sums.setdefault((get_ident(), row), {}), shapes).add(added)

    def mention(self, row: LedgerRow) -> None:
        """Add a row without counts."""
        _sum_of(self._sums.setdefault((0, row), {}), ())

    def share(self, folder: Path) -> None:
        """Write the sums of this process and those that it forks to a folder."""
        folder.mkdir(exist_ok=True)
        self.folder = folder
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_child)

    def _start_child(self) -> None:
        """Drop the sums of the parent process in a forked one."""
        self.collect()
        self._sums = {}
        if "multiprocessing.util" in sys.modules:  # whose children end without atexit
            from multiprocessing import util

            util.register_after_fork(
                self, lambda ledger: util.Finalize(None, ledger.write, exitpriority=0)
            )

    def write(self) -> None:
        """Write the sums of this process for the report of the first one."""
        self.collect()
        if self.folder is None or not self._sums:
            return
        with suppress(OSError):  # the folder is gone, and with it the report
            path = self.folder / str(os.getpid())
            path.with_suffix(".new").write_bytes(pickle.dumps(self._summed()))
            path.with_suffix(".new").rename(path.with_suffix(".sums"))

    def _summed(self) -> dict[LedgerRow, _Sums]:
        found: dict[LedgerRow, _Sums] = {}
        _add_rows(found, ((row, sums) for (_, row), sums in self._sums.copy().items()))
        return found

    def report(self, title: str, remarks: Iterable[str], statistics: bool) -> InterceptionReport:
        """Return the sums of all threads and of the processes that have ended."""
        sums = self._summed()
        paths: list[Path] = []
        if self.folder is not None:
            paths = sorted(self.folder.glob("*.sums"))
        for path in paths:
            _add_rows(sums, pickle.loads(path.read_bytes()).items())
        products = [
            InterceptedProduct(
                row.layer, row.operator, tuple(map(tuple, s.shapes)), row.dtype, row.backward, row.mode, s.count,
                s.multiplications, row.passed_by, row.detail, row.gradient, *s.statistics,
            )
            for row, by_shape in sums.items()
            for s in by_shape.values()
        ]  # fmt: skip
        products.sort(key=lambda p: -p.multiplications)
        found = list(self.notes)
        if self.records_gradients and not any(p.backward for p in products):
            found.append(
                "No backward pass ran inside the block; one that runs after it is PyTorch's own, in full precision."
            )
        return InterceptionReport(
            title, tuple(products), (*found, *remarks), 1 + len(paths), statistics
        )
