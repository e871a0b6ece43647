"""``profile``: the open profiles, the recording of a product, and profiles as files (JSON, Trace Event Format).

Source of the time line: *Trace Event Format*, Google (complete events ``X``, metadata events ``M``; microseconds).

Lists and dictionaries change by atomic operations, without a lock: a signal handler or a forked child could find a lock
held.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, get_args

from lowprec._version import __version__
from lowprec.arrays import ArrayView
from lowprec.core.executors import CachedExecutor, observe
from lowprec.errors import UnsupportedError, quoted
from lowprec.modes import ResolvedMode
from lowprec.planning import GemmPlan
from lowprec.profiling.records import Measurement, ProductRecord, RangeRecord
from lowprec.profiling.summary import extents, to_text, totals
from lowprec.util.atomic import write_json

if TYPE_CHECKING:
    from lowprec.backends import Arguments

#: Rows of the time line that are streams: above the numbers of threads, and within the 31 bits that viewers read.
_FIRST_STREAM_ROW = 0x7FFF0000


def trace(label: str, records: Sequence[ProductRecord], ranges: Sequence[RangeRecord]) -> dict[str, Any]:
    """Return a profile in the Trace Event Format."""
    rows = {r.thread_id: r.thread for r in records} | {r.thread_id: r.thread for r in ranges}
    events = [
        _event("M", 0, "process_name", {"name": f"lowprec {label}".rstrip()}),
        *(_row_name(row, name) for row, name in rows.items()),
        *map(_range, ranges),
        *(_product(r.thread_id, r.start_ms, r.host_ms, r) for r in records),
        *_on_streams(records),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(phase: str, row: int, name: str, args: Any, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": os.getpid(), "tid": row, "name": name, **fields, "args": args}


def _row_name(row: int, name: str) -> dict[str, Any]:
    return _event("M", row, "thread_name", {"name": name})


def _range(r: RangeRecord) -> dict[str, Any]:
    *_, name = r.name.rpartition("/")
    ts, dur = 1e3 * r.start_ms, 1e3 * r.elapsed_ms
    return _event("X", r.thread_id, name, {"name": r.name}, cat="range", ts=ts, dur=dur)


def _product(row: int, start_ms: float, elapsed_ms: float, r: ProductRecord) -> dict[str, Any]:
    numbers = r.mode if r.mode_has_effect else r.number_format
    name = f"{numbers} {extents(r.m, r.n, r.k, r.batch_count)}"
    ts, dur = 1e3 * start_ms, 1e3 * elapsed_ms
    return _event("X", row, name, r.to_dict(), cat="product", ts=ts, dur=dur)


def _on_streams(records: Sequence[ProductRecord]) -> Iterator[dict[str, Any]]:
    rows: dict[tuple[str, int], int] = {}
    ends: dict[int, float] = {}
    for r in sorted(records, key=lambda record: record.start_ms):
        if r.stream is None or r.elapsed_ms is None:
            continue
        row = rows.setdefault((r.device, r.stream), _FIRST_STREAM_ROW + len(rows))
        if row not in ends:
            yield _row_name(row, f"{r.device}, stream {r.stream:#x}")
        start_ms = max(r.start_ms, ends.get(row, 0.0))
        ends[row] = start_ms + r.elapsed_ms
        yield _product(row, start_ms, r.elapsed_ms, r)


Threads = Literal["all", "current"]


class profile:
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
    UnsupportedError
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
            raise UnsupportedError(
                f"profile takes a label, which is text, got {quoted(label)}; the products to record run in its block: "
                "with lowprec.profile() as prof"
            )
        if threads not in get_args(Threads):
            choices = ", ".join(map(repr, get_args(Threads)))
            raise UnsupportedError(f"threads={quoted(threads)} is not supported; choose one of: {choices}")
        self.label = label
        self._threads = threads
        self._thread: int | None = None
        self._origin_ns = 0
        self._entered: list[int] = []  # start times of the open entries, in ns
        self._left: list[tuple[int, int]] = []  # start and end of the closed entries, in ns
        self._measured: list[tuple[Measurement, str]] = []
        self._records: dict[int, ProductRecord] = {}
        self._ranges: list[RangeRecord] = []

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

        The name holds for this thread and task. It is an NVTX range too, where the ``nvtx`` package is installed.

        Parameters
        ----------
        name : str
            Shown in ``ProductRecord.label`` after the names of the enclosing ranges, separated by ``/``.
        """
        name = str(name)
        token = _ranges.set((*_ranges.get(), (self, name)))
        start_ns = time.perf_counter_ns()
        try:
            with _annotate(lambda: name):
                yield
        finally:
            end_ns = time.perf_counter_ns()
            whole = self._label_here()
            _ranges.reset(token)
            if self._entered:
                start_ms, elapsed_ms = (start_ns - self._origin_ns) / 1e6, (end_ns - start_ns) / 1e6
                thread = threading.current_thread()
                self._ranges.append(RangeRecord(whole, start_ms, elapsed_ms, thread.name, thread.native_id or 0))

    def _label_here(self) -> str:
        return "/".join(name for owner, name in _ranges.get() if owner is self)

    @property
    def records(self) -> tuple[ProductRecord, ...]:
        """The products so far; waits for those that a GPU still runs."""
        known = self._records
        for index in range(len(known), len(self._measured)):
            measurement, label = self._measured[index]
            known.setdefault(index, measurement.record(index, label, self._origin_ns))
        return tuple(known[index] for index in range(len(known)))

    @property
    def ranges(self) -> tuple[RangeRecord, ...]:
        """The named ranges that have ended."""
        return tuple(self._ranges)

    @property
    def wall_ms(self) -> float:
        """Time during which the profile was open, in ms."""
        now = time.perf_counter_ns()
        total = reached = 0
        for start, end in sorted([*self._left, *((entered, now) for entered in self._entered[:1])]):
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
        UnsupportedError
            ``by`` is neither.
        """
        return to_text(self.label, self.records, self.wall_ms, by, width)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values: totals, products, ranges."""
        records = self.records
        return {
            "lowprec": __version__,
            "label": self.label,
            "totals": totals(records, self.wall_ms),
            "products": [record.to_dict() for record in records],
            "ranges": [record.to_dict() for record in self.ranges],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` to a file, atomically."""
        write_json(path, self.to_dict())

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a timeline in the Trace Event Format (Perfetto, ``chrome://tracing``).

        Products and ranges are on the rows of their threads by the host's clock. Products on a GPU are also on the
        row of their stream, each after the one before it and not before it was submitted; the gaps between them are
        not measured. The file is written atomically.
        """
        write_json(path, trace(self.label, self.records, self.ranges))

    def __len__(self) -> int:
        return len(self._measured)

    def __str__(self) -> str:
        return self.table()

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


def _observer(product: CachedExecutor, resolved: ResolvedMode, *_operands: ArrayView) -> CachedExecutor:
    thread = threading.get_ident()
    listeners = [p for p in dict.fromkeys(_listening) if p._thread in (None, thread)]
    if not listeners:
        return product
    execute = functools.partial(_execute, product, resolved, listeners)
    return product._replace(execute=execute)


def _execute(product: CachedExecutor, resolved: ResolvedMode, listeners: list[profile], arguments: Arguments) -> None:
    backend = product.backend
    measurement = Measurement(product.plan, resolved, arguments.a, arguments.b)
    try:
        with _annotate(lambda: _name(product.plan)):
            measurement.start(backend.stopwatch(arguments))
            product.execute(arguments)
            measurement.stop()
        measurement.ran = backend.execution_info(product.plan, product.execute)
    except BaseException as error:
        measurement.fail(error)
        raise
    finally:
        for listener in listeners:
            listener._measured.append((measurement, listener._label_here()))


@functools.cache
def _nvtx() -> Any | None:
    try:
        return importlib.import_module("nvtx")
    except ImportError:
        return None


def _annotate(name: Callable[[], str]) -> AbstractContextManager[Any]:
    package: Any = _nvtx()
    return contextlib.nullcontext() if package is None else package.annotate(name(), domain="lowprec")


def _name(plan: GemmPlan) -> str:
    numbers = plan.mode if plan.mode_has_effect else plan.compute_dtype
    layout = plan.layout
    return f"lowprec {numbers} {extents(layout.m, layout.n, layout.k, layout.batch_count)}"
