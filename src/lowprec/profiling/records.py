"""What a profile keeps of each product and each range, as plain values."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from lowprec.arrays import ArrayView
from lowprec.backends import Stopwatch
from lowprec.modes import ResolvedMode
from lowprec.planning import GemmPlan
from lowprec.profiling.units import number_format, units_of


@dataclass(frozen=True, slots=True)
class ProductRecord:
    """A product that ran.

    Parameters
    ----------
    index : int
        Position in the profile, from 0: products by the order in which their calls returned.
    label : str
        The ranges around it, ``"step/layer 1"``; empty outside of any.
    start_ms : float
        When its execution began on the host, since the profile was entered first.
    host_ms : float
        How long the host was busy with its execution.
    elapsed_ms : float or None
        How long it ran, conversions and epilogue included. On a GPU by events on its stream. None where it failed, or
        was captured into a CUDA graph instead of run.
    a_shape, b_shape, out_shape : tuple of int
    a_dtype, b_dtype, out_dtype : str
    m, n, k, batch_count : int
        As multiplied: a batch with one ``b`` may have become the rows of a single product.
    mode : str
        In force; see ``mode_has_effect``.
    source : str
        Who chose the mode.
    mode_has_effect : bool
        False for element types on which no mode acts.
    number_format : str
        Of what was multiplied, once rounded.
    kernel : str
    algorithm : str or None
        What the library chose, in its own words, where it tells.
    device : str
    stream : int or None
        CUDA stream; None where there are none.
    flops : int
        2 m n k per real product, 8 m n k per complex one.
    tflops : float or None
        Flops over ``elapsed_ms``, in 1e12 per second.
    peak_share : float or None
        ``tflops`` over the device's highest rate for ``number_format``; None where that is not known.
    units_eligible : bool
        Whether there are tensor units (on a CPU tile units, or vector units for bfloat16 and int8) for such numbers.
    units_used : bool or None
        Whether they multiplied them; None where the library does not tell.
    units_reason : str
        Which units, or why not.
    copies : tuple of str
        Operands that were copied or rewritten before, and why.
    thread : str
        Name of the calling thread.
    thread_id : int
    error : str or None
        What was raised, where the product failed.
    """

    index: int
    label: str
    start_ms: float
    host_ms: float
    elapsed_ms: float | None
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    a_dtype: str
    b_dtype: str
    out_dtype: str
    m: int
    n: int
    k: int
    batch_count: int
    mode: str
    source: str
    mode_has_effect: bool
    number_format: str
    kernel: str
    algorithm: str | None
    device: str
    stream: int | None
    flops: int
    tflops: float | None
    peak_share: float | None
    units_eligible: bool
    units_used: bool | None
    units_reason: str
    copies: tuple[str, ...]
    thread: str
    thread_id: int
    error: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RangeRecord:
    """A named range of a program, by the host's clock.

    Parameters
    ----------
    name : str
        With the names around it, ``"step/layer 1"``.
    start_ms, elapsed_ms : float
        When it began since the profile was entered first, and how long it took.
    thread : str
    thread_id : int
    """

    name: str
    start_ms: float
    elapsed_ms: float
    thread: str
    thread_id: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


class Measurement:
    """An execution as it was observed, shared by the profiles that were open."""

    def __init__(self, plan: GemmPlan, resolved: ResolvedMode, a: ArrayView, b: ArrayView) -> None:
        thread = threading.current_thread()
        self._plan = plan
        self._resolved = resolved
        self._device = a.device
        self._copied = tuple(
            f"{name}: {view.copied}"
            for name, view in (("a", a), ("b", b))
            if view.copied is not None
        )
        self._thread = thread.name
        self._thread_id = thread.native_id or 0
        self._start_ns = self._end_ns = time.perf_counter_ns()
        self._stopwatch: Stopwatch | None = None
        self._stream: int | None = None
        self._elapsed_ms: float | None = None
        self._units: bool | None = None
        self._algorithm: str | None = None
        self._error: str | None = None

    def start(self, stopwatch: Stopwatch | None) -> None:
        """Mark the beginning; without a stopwatch, the host's clock tells the time."""
        if stopwatch is not None:
            self._stopwatch, self._stream = stopwatch, stopwatch.stream
        self._start_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """Mark the end."""
        self._end_ns = time.perf_counter_ns()
        if self._stopwatch is not None:
            self._stopwatch.stop()
        else:
            self._elapsed_ms = (self._end_ns - self._start_ns) / 1e6

    def ran_on(self, units: bool | None, algorithm: str | None) -> None:
        """Keep what the backend tells of a product that succeeded."""
        self._units, self._algorithm = units, algorithm

    def fail(self, error: BaseException) -> None:
        """Keep what went wrong, but not the exception, which holds the caller's frames."""
        self._end_ns = time.perf_counter_ns()
        self._error = f"{type(error).__name__}: {error}"
        self._elapsed_ms = None
        if self._stopwatch is not None:
            self._stopwatch.abandon()
            self._stopwatch = None

    def _read_ms(self) -> float | None:
        """Return the time of the product; on a GPU, who asks first waits for it."""
        stopwatch = self._stopwatch
        if stopwatch is not None:
            try:
                self._elapsed_ms = stopwatch.elapsed_ms()
            except Exception:
                self._stopwatch = None
                raise
            # After the time, not before: another thread, or a signal handler, may be reading it as well.
            self._stopwatch = None
        return self._elapsed_ms

    def record(self, index: int, label: str, origin_ns: int) -> ProductRecord:
        """Return the record in a profile that began at ``origin_ns``."""
        plan, problem, layout = self._plan, self._plan.problem, self._plan.layout
        elapsed_ms = self._read_ms()
        tflops = plan.flops / elapsed_ms * 1e-9 if elapsed_ms else None
        peak = dict(plan.capabilities.peak_tflops).get(number_format(plan))
        units = units_of(plan, self._units)
        return ProductRecord(
            index=index,
            label=label,
            start_ms=(self._start_ns - origin_ns) / 1e6,
            host_ms=(self._end_ns - self._start_ns) / 1e6,
            elapsed_ms=elapsed_ms,
            a_shape=problem.a.shape,
            b_shape=problem.b.shape,
            out_shape=plan.out_shape,
            a_dtype=problem.a.dtype.label,
            b_dtype=problem.b.dtype.label,
            out_dtype=plan.out_dtype.label,
            m=layout.m,
            n=layout.n,
            k=layout.k,
            batch_count=layout.batch_count,
            mode=str(plan.mode),
            source=str(self._resolved.source),
            mode_has_effect=plan.mode_has_effect,
            number_format=number_format(plan),
            kernel=str(plan.kernel),
            algorithm=self._algorithm,
            device=str(self._device),
            stream=self._stream,
            flops=plan.flops,
            tflops=tflops,
            peak_share=None if tflops is None or not peak else tflops / peak,
            units_eligible=units.eligible,
            units_used=units.used,
            units_reason=units.reason,
            copies=(*(f"{c.operand}: {c.reason}" for c in plan.copies), *self._copied),
            thread=self._thread,
            thread_id=self._thread_id,
            error=self._error,
        )
