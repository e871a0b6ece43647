"""Records of the products in a profile, as plain values."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from lowprec.arrays import ArrayView
from lowprec.modes import ResolvedMode
from lowprec.planning import GemmPlan
from lowprec.planning.kernels import format_name
from lowprec.planning.tensor_cores import first_capability, tensor_cores_multiply

_EMPTY = "the product is empty"


def multiplied_format(plan: GemmPlan) -> str:
    """Return the name of the format of the multiplied numbers, which may be parts of the operands."""
    return plan.kernel_row.part_format or format_name(plan.multiplied_format)


def units_of(plan: GemmPlan, used: bool | None) -> tuple[bool, bool | None, str]:
    """Return whether units exist for the format, whether they were used (None: unknown), and the reason."""
    capability = plan.capabilities.compute_capability
    fmt = multiplied_format(plan)
    if capability is None:
        return _tile_units(plan, fmt, used)
    since = first_capability(fmt)
    if not plan.flops:
        return since is not None, False, _EMPTY
    if used:
        reason = "tensor cores"
    elif since is None:
        reason = f"tensor cores do not multiply {fmt} numbers"
    elif not tensor_cores_multiply(fmt, capability):
        major, minor = capability
        reason = f"tensor cores of compute capability {major}.{minor} do not multiply {fmt} numbers"
    elif used is None:
        reason = "the library does not report it"
    else:
        reason = "the library chose an algorithm without tensor cores"
    return since is not None, used, reason


def _tile_units(plan: GemmPlan, fmt: str, used: bool | None) -> tuple[bool, bool | None, str]:
    row = plan.kernel_row
    tiles = [x for x in plan.capabilities.kernels if x.summation == "tiles"]
    eligible = any(x.formats is not None and fmt in x.formats for x in tiles)
    if used:
        reason = row.units
    elif not plan.flops:
        reason = _EMPTY
    elif not eligible:
        reason = f"tile units do not multiply {fmt} numbers"
    else:
        reason = plan.kernel_reason
    return eligible, used, reason


@dataclass(frozen=True, slots=True)
class ProductRecord:
    """A product that ran: times in ms, rates in 1e12 flops per second.

    >>> import numpy as np
    >>> import lowprec
    >>> with lowprec.profile() as prof:
    ...     c = lowprec.matmul(np.eye(4), np.eye(4))
    >>> prof.records[0].flops, prof.records[0].a_dtype
    (128, 'float64')
    """

    label: str  #: The enclosing ranges, ``"step/layer 1"``; empty without any.
    start_ms: float  #: Start of execution on the host, since the profile was first entered.
    host_ms: float  #: Time of the execution call on the host.
    #: Execution time, copies and epilogue included; on a GPU by events on its stream. None if it failed or was captured
    #: into a CUDA graph.
    elapsed_ms: float | None
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    a_dtype: str
    b_dtype: str
    out_dtype: str
    m: int  #: As multiplied; a batch with a single ``b`` may have been folded into m.
    n: int
    k: int
    batch_count: int
    mode: str  #: The resolved mode; see ``mode_has_effect``.
    source: str  #: The source of the mode.
    mode_has_effect: bool  #: False for element types on which no mode acts.
    number_format: str  #: Format of the operands after rounding.
    kernel: str
    algorithm: str | None  #: The library's description of its algorithm, if any.
    device: str
    stream: int | None  #: CUDA stream; None where there are none.
    flops: int  #: 2 m n k per real product, 8 m n k per complex one.
    tflops: float | None  #: Flops over ``elapsed_ms``, in 1e12 per second.
    #: ``tflops`` over the device's highest rate for ``number_format``; None where that is not known.
    peak_share: float | None
    #: Whether the device has tensor units (on a CPU tile units, or vector units for bfloat16 and int8) for the format.
    units_eligible: bool
    #: Whether these units were used; None where the library does not report it.
    units_used: bool | None
    units_reason: str  #: The units, or the reason why none were used.
    #: Operands that were copied or rewritten before the product, with the reason.
    copies: tuple[str, ...]
    thread: str  #: Name of the calling thread.
    error: str | None  #: The error, if the product failed.

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Measurement:
    """The measurement of one execution, shared by the open profiles."""

    def __init__(self, plan: GemmPlan, resolved: ResolvedMode, a: ArrayView, b: ArrayView) -> None:
        self._plan = plan
        self._resolved = resolved
        # The views would keep the caller's arrays alive.
        self._device = a.device
        copies = [f"{c.operand}: {c.reason}" for c in plan.copies]
        for name, view in (("a", a), ("b", b)):
            if view.copied:
                copies.append(f"{name}: {view.copied}")
        self._copies = tuple(copies)
        self._thread = threading.current_thread().name
        self._start_ns = self._end_ns = time.perf_counter_ns()
        self._stopwatch: Any = None
        self._stream: int | None = None
        self._elapsed_ms: float | None = None
        self._error: str | None = None
        #: Units and algorithm of a product that succeeded, as reported by its backend.
        self.ran: tuple[bool | None, str | None] = (None, None)

    def start(self, stopwatch: Any) -> None:
        """Mark the beginning; without a stopwatch, the time is that of the host's clock."""
        self._stopwatch = stopwatch
        if stopwatch is not None:
            self._stream = stopwatch.stream
        self._start_ns = time.perf_counter_ns()

    def stop(self) -> None:
        self._end_ns = time.perf_counter_ns()
        if self._stopwatch is not None:
            self._stopwatch.stop()
        else:
            self._elapsed_ms = (self._end_ns - self._start_ns) / 1e6

    def fail(self, error: BaseException) -> None:
        """Keep the error's text, but not the exception, which holds the caller's frames."""
        self._end_ns = time.perf_counter_ns()
        self._error = f"{type(error).__name__}: {error}"
        self._elapsed_ms = None
        if self._stopwatch is not None:
            self._stopwatch.abandon()
            self._stopwatch = None

    def _read_ms(self) -> float | None:
        stopwatch = self._stopwatch
        if stopwatch is not None:
            try:
                self._elapsed_ms = stopwatch.elapsed_ms()
            except Exception:
                # given up after one failure; after an interrupt the time is read again
                self._stopwatch = None
                raise
            # Cleared after the time is stored: another thread or a signal handler may read it concurrently.
            self._stopwatch = None
        return self._elapsed_ms

    def record(self, label: str, origin_ns: int) -> ProductRecord:
        """Return the record in a profile that began at ``origin_ns``."""
        plan = self._plan
        units, algorithm = self.ran
        number_format = multiplied_format(plan)
        eligible, used, reason = units_of(plan, units)
        elapsed_ms = self._read_ms()
        tflops = peak_share = None
        if elapsed_ms:
            tflops = plan.flops / elapsed_ms * 1e-9
            peak = dict(plan.capabilities.peak_tflops).get(number_format)
            peak_share = tflops / peak if peak else None
        return ProductRecord(
            label=label,
            start_ms=(self._start_ns - origin_ns) / 1e6,
            host_ms=(self._end_ns - self._start_ns) / 1e6,
            elapsed_ms=elapsed_ms,
            **_operands(plan),
            mode=str(plan.mode),
            source=str(self._resolved.source),
            mode_has_effect=plan.mode_has_effect,
            number_format=number_format,
            kernel=plan.kernel,
            algorithm=algorithm,
            device=str(self._device),
            stream=self._stream,
            flops=plan.flops,
            tflops=tflops,
            peak_share=peak_share,
            units_eligible=eligible,
            units_used=used,
            units_reason=reason,
            copies=self._copies,
            thread=self._thread,
            error=self._error,
        )


def _operands(plan: GemmPlan) -> dict[str, Any]:
    a = plan.problem.a
    b = plan.problem.b
    layout = plan.layout
    return {
        "a_shape": a.shape,
        "b_shape": b.shape,
        "out_shape": plan.out_shape,
        "a_dtype": a.dtype.label,
        "b_dtype": b.dtype.label,
        "out_dtype": plan.out_dtype.label,
        "m": layout.m,
        "n": layout.n,
        "k": layout.k,
        "batch_count": layout.batch_count,
    }
