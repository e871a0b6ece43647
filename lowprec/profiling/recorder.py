"""``profile``: the open profiles and the recording of a product.

Lists and dictionaries change by atomic operations, without a lock: a signal handler or a forked child could find a lock
held.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, get_args

from lowprec._version import __version__
from lowprec.arrays import ArrayView
from lowprec.core.executors import CachedExecutor, observe
from lowprec.errors import SettingError, quoted
from lowprec.modes import ResolvedMode
from lowprec.profiling.records import Measurement, ProductRecord
from lowprec.profiling.summary import figure, sentences, tables, totals
from lowprec.report import Report, document
from lowprec.util.tables import Table

if TYPE_CHECKING:
    from lowprec.backends import Arguments

Threads = Literal["all", "current"]


class profile(Report):
    """Record the products in a ``with`` block: their kind, speed and units.

    ``print`` shows a table with a row for each kind of product, and totals. Profiles may be nested and may overlap;
    each has its own records. Entering a profile again continues it.

    Products that run are recorded; calls that raise before (shapes that do not match) are not. A product that fails
    while it runs is recorded with its error, which the caller also gets. Recording never waits for a GPU; reading times
    (``records``, ``table``, ``totals``, the files) waits for the products. Products captured into a CUDA graph are
    recorded without a time.

    Parameters
    ----------
    label : str
        Title of the table and of the files.
    threads : {"all", "current"}
        Record the products of all threads of the process, or of the thread that entered the block.

    Raises
    ------
    SettingError
        ``threads`` is neither, or ``label`` is not a str.

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> a = np.ones((64, 32), np.float32)
    >>> with lowprec.profile() as prof:
    ...     with prof.range("forward"):
    ...         c = lowprec.matmul(a, a.T, math_mode="tf32")
    >>> record = prof.records[0]
    >>> record.label, record.m, record.n, record.k, record.mode, record.source, record.flops
    ('forward', 64, 64, 32, 'tf32', 'math_mode= argument', 262144)
    """

    def __init__(self, label: str = "", *, threads: Threads = "all") -> None:
        if not isinstance(label, str):
            raise SettingError(
                f"profile takes a label, which is text, got {quoted(label)}; the products to record run in its block: "
                "with lowprec.profile() as prof"
            )
        if threads not in get_args(Threads):
            choices = ", ".join(map(repr, get_args(Threads)))
            raise SettingError(
                f"threads={quoted(threads)} is not supported; choose one of: {choices}"
            )
        self.label = label
        self._threads = threads
        self._thread: int | None = None
        self._origin_ns = 0
        self._entered: list[int] = []  # start times of the open entries, in ns
        self._left: list[tuple[int, int]] = []  # start and end of the closed entries, in ns
        self._measured: list[tuple[Measurement, str]] = []
        self._records: dict[int, ProductRecord] = {}

    def __enter__(self) -> profile:
        now = time.perf_counter_ns()
        if not self._entered:
            self._thread = threading.get_ident() if self._threads == "current" else None
            self._origin_ns = self._origin_ns or now
        self._entered.append(now)
        _listening.append(self)
        _attach()
        return self

    def __exit__(self, *exception: object) -> None:
        now = time.perf_counter_ns()
        _listening.remove(self)
        _attach()
        self._left.append((self._entered.pop(), now))

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name a part of the program; its products carry the names of nested ranges.

        The name holds for this thread and task.

        Parameters
        ----------
        name : str
            Shown in ``ProductRecord.label`` after the names of the enclosing ranges, separated by ``/``.
        """
        token = _ranges.set((*_ranges.get(), (self, str(name))))
        try:
            yield
        finally:
            _ranges.reset(token)

    def _label(self) -> str:
        return "/".join(name for owner, name in _ranges.get() if owner is self)

    @property
    def records(self) -> tuple[ProductRecord, ...]:
        """The products so far; waits for those that a GPU still runs."""
        known = self._records
        for index in range(len(known), len(self._measured)):
            measurement, label = self._measured[index]
            known.setdefault(index, measurement.record(label, self._origin_ns))
        return tuple(known[index] for index in range(len(known)))

    @property
    def wall_ms(self) -> float:
        """Time during which the profile was open, in ms."""
        now = time.perf_counter_ns()
        intervals = [*self._left]
        intervals += [(entered, now) for entered in self._entered[:1]]
        total = reached = 0
        for start, end in sorted(intervals):
            total += max(end - max(start, reached), 0)
            reached = max(end, reached)
        return total / 1e6

    def totals(self) -> dict[str, Any]:
        """Return sums over all products, ready for JSON.

        Returns
        -------
        dict
            ``products``, ``failed`` and ``untimed`` are counts; ``elapsed_ms`` and ``flops`` are sums over the products
            with a time, ``tflops`` is their quotient; ``wall_ms`` is the time the profile was open. ``units``: numbers
            of products that were ``eligible`` for tensor units (tile units of a CPU, or its vector units for bfloat16
            and int8), ``used`` them, or are ``unknown``, and the ``share_of_flops`` on them. ``by_mode`` and
            ``by_kernel``: products, time and flops of each.
        """
        return totals(self.records, self.wall_ms)

    def table(self, by: Literal["product", "range"] = "product", width: int = 120) -> str:
        """Return a text table, the longest total time first.

        Parameters
        ----------
        by : {"product", "range"}
            One row per kind of product, or per range.
        width : int
            Characters of a line; a narrow table omits columns.

        Raises
        ------
        SettingError
            ``by`` is neither.
        """
        return document(tables(self.label, self.records, by), self.remarks, width)

    def tables(self) -> list[Table]:
        return tables(self.label, self.records, "product")

    @property
    def remarks(self) -> list[str]:
        """The totals, and the reasons why units were not used."""
        return list(sentences(self.records, self.wall_ms))

    def figure(self) -> Any:
        return figure(self.label, self.records)

    def to_dict(self) -> dict[str, Any]:
        """Return totals and products as plain values."""
        records = self.records
        return {
            "lowprec": __version__,
            "label": self.label,
            "totals": totals(records, self.wall_ms),
            "products": [record.to_dict() for record in records],
        }

    _width = 120

    def __len__(self) -> int:
        return len(self._measured)

    def __repr__(self) -> str:
        state = "open" if self._entered else "closed"
        return f"<lowprec.profile {self.label!r}: {len(self)} products, {state}>"


#: Open ranges of this thread and task, each with its profile.
_ranges: ContextVar[tuple[tuple[profile, str], ...]] = ContextVar("lowprec_ranges", default=())

#: Open profiles, once per entry.
_listening: list[profile] = []


def _attach() -> None:
    attached = None
    # Another thread or a signal handler may enter or exit a profile in between.
    while attached is not bool(_listening):
        attached = bool(_listening)
        observe(_observer if attached else None)


def _observer(
    product: CachedExecutor, resolved: ResolvedMode, *_operands: ArrayView
) -> CachedExecutor:
    thread = threading.get_ident()
    listeners = [p for p in dict.fromkeys(_listening) if p._thread in (None, thread)]
    if not listeners:
        return product
    execute = functools.partial(_execute, product, resolved, listeners)
    return product._replace(execute=execute)


def _execute(
    product: CachedExecutor, resolved: ResolvedMode, listeners: list[profile], arguments: Arguments
) -> None:
    backend = product.backend
    measurement = Measurement(product.plan, resolved, arguments.a, arguments.b)
    try:
        measurement.start(backend.stopwatch(arguments))
        product.execute(arguments)
        measurement.stop()
        measurement.ran = backend.execution_info(product.plan, product.execute)
    except BaseException as error:
        measurement.fail(error)
        raise
    finally:
        for listener in listeners:
            listener._measured.append((measurement, listener._label()))
