"""``profile``: who listens, and what happens around a product while somebody does."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, get_args

from lowprec.arrays import ArrayView
from lowprec.backends import Arguments, backend_of
from lowprec.errors import UnsupportedError, quoted
from lowprec.modes import ResolvedMode
from lowprec.planning import GemmPlan
from lowprec.prepared import Prepared, observe
from lowprec.profiling import nvtx, summary
from lowprec.profiling.records import Measurement, ProductRecord, RangeRecord, make_record
from lowprec.profiling.summary import extents

__all__ = ["profile"]

Threads = Literal["all", "current"]


class profile:
    """Record each product that lowprec runs inside a ``with`` block: what it was, how fast, on which units.

    ``print`` shows a table with a row for each kind of product, and totals. Profiles may be nested and may overlap;
    each records for itself. One that is entered again goes on recording.

    A product counts when it runs: a call that is refused (shapes that do not fit) is none, one that fails while it
    runs is recorded with its error, which goes on to the caller. On a GPU recording waits for nothing; what reads
    times (``records``, ``table``, ``totals``, the files) waits for the products. Products that are captured into a
    CUDA graph are recorded without a time.

    Parameters
    ----------
    label : str
        Title of the table and of the files.
    threads : {"all", "current"}
        Whose products: those of all threads of the process, or of the thread that entered the block.

    Raises
    ------
    UnsupportedError
        If ``threads`` is neither.

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
        if threads not in get_args(Threads):
            choices = ", ".join(map(repr, get_args(Threads)))
            raise UnsupportedError(
                f"threads={quoted(threads)} is not supported; choose one of: {choices}"
            )
        self.label = label
        self._threads = threads
        # Without a lock, which a fork or a signal handler could find taken: each step is atomic, and may come twice.
        self._open: list[None] = []
        self._thread: int | None = None
        self._origin_ns = 0
        self._entered_ns = 0
        self._wall_ns = 0
        self._measured: list[tuple[Measurement, str]] = []
        self._records: dict[int, ProductRecord] = {}
        self._ranges: list[RangeRecord] = []

    # -- recording --------------------------------------------------------------------------------

    def __enter__(self) -> profile:
        if not self._open:
            self._thread = threading.get_ident()
            self._entered_ns = time.perf_counter_ns()
            self._origin_ns = self._origin_ns or self._entered_ns
        self._open.append(None)
        _listen(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.pop()
        if not self._open:
            _stop_listening(id(self))
            self._wall_ns += time.perf_counter_ns() - self._entered_ns
            if self._open:  # another thread has just entered
                _listen(self)

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name a part of the program; products inside it carry the name, ranges inside it add theirs.

        The name holds for this thread and task. It is an NVTX range too, where the ``nvtx`` package is installed.

        Parameters
        ----------
        name : str
        """
        name = str(name)
        token = _ranges.set((*_ranges.get(), (self, name)))
        whole = self._label_here()
        start_ns = time.perf_counter_ns()
        nvtx.push(name)
        try:
            yield
        finally:
            nvtx.pop()
            end_ns = time.perf_counter_ns()
            _ranges.reset(token)
            if self._open:
                thread = threading.current_thread()
                self._ranges.append(
                    RangeRecord(
                        whole,
                        (start_ns - self._origin_ns) / 1e6,
                        (end_ns - start_ns) / 1e6,
                        thread.name,
                        thread.native_id or 0,
                    )
                )

    def _label_here(self) -> str:
        return "/".join(name for owner, name in _ranges.get() if owner is self)

    def _listens(self, thread: int) -> bool:
        return self._threads == "all" or self._thread == thread

    def _add(self, measurement: Measurement) -> None:
        self._measured.append((measurement, self._label_here()))

    # -- reading ----------------------------------------------------------------------------------

    @property
    def records(self) -> tuple[ProductRecord, ...]:
        """The products so far; waits for those that a GPU still runs."""
        for index in range(len(self._records), len(self._measured)):
            measurement, label = self._measured[index]
            record = make_record(measurement, index, label, self._origin_ns)
            self._records.setdefault(index, record)
        return tuple(self._records.values())

    @property
    def ranges(self) -> tuple[RangeRecord, ...]:
        """The named ranges that have ended."""
        return tuple(self._ranges)

    @property
    def wall_ms(self) -> float:
        """How long the profile has been open."""
        running = time.perf_counter_ns() - self._entered_ns if self._open else 0
        return (self._wall_ns + running) / 1e6

    def totals(self) -> dict[str, Any]:
        """Return sums over all products, ready for JSON.

        Returns
        -------
        dict
            ``products``, ``failed`` and ``untimed`` count; ``elapsed_ms`` and ``flops`` are sums over the products
            with a time, ``tflops`` their quotient; ``wall_ms`` is how long the profile was open. ``units``: how many
            products were ``eligible`` for tensor (tile) units, ``used`` them, or are ``unknown``, and the
            ``share_of_flops`` that ran on them. ``by_mode`` and ``by_kernel``: products, time and flops of each.
        """
        return summary.totals(self.records, self.wall_ms)

    def table(self, by: Literal["product", "range"] = "product") -> str:
        """Return a text table, the longest total time first.

        Parameters
        ----------
        by : {"product", "range"}
            A row for each kind of product, or for each range.

        Raises
        ------
        UnsupportedError
            If ``by`` is neither.
        """
        from lowprec.profiling import table

        return table.to_text(self.label, self.records, self.wall_ms, by)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values: totals, products, ranges."""
        from lowprec.profiling import export

        return export.document(self.label, self.records, self.ranges, self.totals())

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` to a file, which is replaced as a whole or not at all.

        Parameters
        ----------
        path : path
        """
        from lowprec.profiling import export

        export.write_json(path, self.to_dict())

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a time line in the Trace Event Format, for Perfetto and ``chrome://tracing``.

        Products and ranges lie on the rows of their threads by the host's clock. Products on a GPU also lie on the
        row of their stream, each after the one before it and not before it was submitted; the gaps between them are
        not measured.

        Parameters
        ----------
        path : path
        """
        from lowprec.profiling import export

        export.write_json(path, export.trace(self.label, self.records, self.ranges))

    def __len__(self) -> int:
        return len(self._measured)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"<lowprec.profile {self.label!r}: {len(self)} products, {state}>"


# -- who listens ----------------------------------------------------------------------------------

#: Open ranges of this thread and task, with the profile that each belongs to.
_ranges: ContextVar[tuple[tuple[profile, str], ...]] = ContextVar("lowprec_ranges", default=())

#: Profiles that listen, by their id. Weakly: one that an interrupt kept from being left ends with its last user.
_listening: dict[int, weakref.ref[profile]] = {}


def _listen(listener: profile) -> None:
    key = id(listener)
    _listening[key] = weakref.ref(listener, lambda _: _stop_listening(key))
    observe(_observer)


def _stop_listening(key: int) -> None:
    _listening.pop(key, None)
    if not _listening:
        observe(None)
        if _listening:  # another thread has just begun to listen
            observe(_observer)


# -- around a product -----------------------------------------------------------------------------


def _observer(prepared: Prepared, resolved: ResolvedMode, x: ArrayView, y: ArrayView) -> Prepared:
    """Return what runs in the place of a product: the product, observed."""
    thread = threading.get_ident()
    found = [reference() for reference in tuple(_listening.values())]
    listeners = tuple(p for p in found if p is not None and p._listens(thread))
    if not listeners:
        return prepared
    measurement = Measurement(prepared.plan, resolved, x, y)
    return prepared._replace(execute=functools.partial(_execute, prepared, measurement, listeners))


def _execute(
    prepared: Prepared,
    measurement: Measurement,
    listeners: tuple[profile, ...],
    arguments: Arguments,
) -> None:
    """Run a product, take its time, and tell the listeners, whether or not it fails."""
    backend = backend_of(arguments.a.device)
    named = nvtx.is_installed()
    if named:
        nvtx.push(_name(prepared.plan))
    try:
        measurement.started(backend.stopwatch(arguments))
        measurement.start_ns = time.perf_counter_ns()
        try:
            prepared.execute(arguments)
        finally:
            measurement.end_ns = time.perf_counter_ns()
        measurement.succeeded(backend.ran(prepared.plan, prepared.execute))
    except BaseException as error:
        measurement.failed(error)
        raise
    finally:
        if named:
            nvtx.pop()
        for listener in listeners:
            listener._add(measurement)


def _name(plan: GemmPlan) -> str:
    """Return the name of a product on a time line.

    Examples
    --------
    >>> from lowprec import explain
    >>> _name(explain.plan(((5, 8, 4), "float32"), ((4, 2), "float32"), math_mode="bf16"))
    'lowprec bf16 40x2x4'
    """
    numbers = plan.mode if plan.mode_has_effect else plan.compute_dtype
    layout = plan.layout
    return f"lowprec {numbers} {extents(layout.m, layout.n, layout.k, layout.batch_count)}"
