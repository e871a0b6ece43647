"""What a profile keeps of each product and each range, as plain values."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from lowprec.arrays import ArrayView
from lowprec.backends import Ran, Stopwatch
from lowprec.modes import ResolvedMode
from lowprec.planning import GemmPlan
from lowprec.profiling.units import number_format, units_of

__all__ = ["Measurement", "ProductRecord", "RangeRecord", "make_record"]


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
        Whether there are tensor units (tile units on a CPU) for such numbers.
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


#: A stopwatch is read once, whichever of the profiles that share it comes first. In one thread a signal handler may be.
_reading = threading.RLock()


def _after_fork_in_child() -> None:
    global _reading
    _reading = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Measurement:
    """An execution as it was observed, shared by the profiles that were open.

    Parameters
    ----------
    plan : GemmPlan
    resolved : ResolvedMode
    x, y : ArrayView
        The operands; they are not kept.
    """

    __slots__ = (
        "_elapsed_ms", "_stopwatch", "copied", "device", "end_ns", "error", "plan", "ran", "resolved",
        "start_ns", "stream", "thread", "thread_id",
    )  # fmt: skip

    def __init__(self, plan: GemmPlan, resolved: ResolvedMode, x: ArrayView, y: ArrayView) -> None:
        thread = threading.current_thread()
        self.plan = plan
        self.resolved = resolved
        self.device = x.device
        self.copied: tuple[str, ...] = ()
        if x.copied or y.copied:
            self.copied = tuple(
                f"{name}: {v.copied}" for name, v in (("a", x), ("b", y)) if v.copied
            )
        self.thread = thread.name
        self.thread_id = thread.native_id or 0
        self.start_ns = self.end_ns = time.perf_counter_ns()
        self.stream: int | None = None
        self.ran = Ran(None)
        self.error: str | None = None
        self._elapsed_ms: float | None = None
        self._stopwatch: Stopwatch | None = None

    def started(self, stopwatch: Stopwatch | None) -> None:
        """Take over the stopwatch that runs."""
        self._stopwatch = stopwatch
        self.stream = None if stopwatch is None else stopwatch.stream

    def succeeded(self, ran: Ran) -> None:
        """Mark the end and keep what the product ran on; without a stopwatch, the host's clock has told the time."""
        self.ran = ran
        if self._stopwatch is not None:
            self._stopwatch.stop()
        else:
            self._elapsed_ms = (self.end_ns - self.start_ns) / 1e6

    def failed(self, error: BaseException) -> None:
        """Keep what went wrong, but not the exception, which holds the caller's frames."""
        self.error = f"{type(error).__name__}: {error}"
        if self._stopwatch is not None:
            self._stopwatch.abandon()
            self._stopwatch = None

    def elapsed_ms(self) -> float | None:
        """Return the time of the product; on a GPU, the first call waits for it."""
        with _reading:
            stopwatch = self._stopwatch
            if stopwatch is not None:
                elapsed_ms = stopwatch.elapsed_ms()
                if self._stopwatch is stopwatch:
                    self._elapsed_ms, self._stopwatch = elapsed_ms, None
            return self._elapsed_ms


def make_record(measurement: Measurement, index: int, label: str, origin_ns: int) -> ProductRecord:
    """Return the record of a measurement in a profile that began at ``origin_ns``."""
    m = measurement
    plan, problem, layout = m.plan, m.plan.problem, m.plan.layout
    elapsed_ms = m.elapsed_ms()
    tflops = plan.flops / elapsed_ms * 1e-9 if elapsed_ms else None
    peak = dict(plan.capabilities.peak_tflops).get(number_format(plan))
    units = units_of(plan, m.ran.units)
    return ProductRecord(
        index=index,
        label=label,
        start_ms=(m.start_ns - origin_ns) / 1e6,
        host_ms=(m.end_ns - m.start_ns) / 1e6,
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
        source=str(m.resolved.source),
        mode_has_effect=plan.mode_has_effect,
        number_format=number_format(plan),
        kernel=str(plan.kernel),
        algorithm=m.ran.algorithm,
        device=str(m.device),
        stream=m.stream,
        flops=plan.flops,
        tflops=tflops,
        peak_share=None if tflops is None or not peak else tflops / peak,
        units_eligible=units.eligible,
        units_used=units.used,
        units_reason=units.reason,
        copies=(*(f"{c.operand}: {c.reason}" for c in plan.copies), *m.copied),
        thread=m.thread,
        thread_id=m.thread_id,
        error=m.error,
    )
