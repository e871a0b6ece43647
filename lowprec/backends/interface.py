"""The interface of backends: ``Arguments``, ``Executor`` and ``Backend``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from lowprec.arrays import ArrayView, Device
from lowprec.arrays.prepared_view import KernelCodes, QuantizedView
from lowprec.formats import DType
from lowprec.planning import Capabilities, GemmPlan


class Arguments(NamedTuple):
    """Arguments of an executor; ``stream`` is a CUDA stream (1 is the legacy default stream), 0 in host memory."""

    a: ArrayView
    b: ArrayView
    out: ArrayView
    c: ArrayView | None = None
    bias: ArrayView | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    scale_a: ArrayView | float | None = None
    scale_b: ArrayView | float | None = None
    stream: int = 0
    #: Float32 factors of the sums, which broadcast to (..., m) and (..., n).
    row_scales: NDArray[Any] | None = None
    col_scales: NDArray[Any] | None = None
    draw: int = 0  # step, layer and product of a recipe, for its random numbers

    def widened(self, *, b: bool = True) -> Arguments:
        """Return the arguments with quantised operands, ``b`` only if it is set, replaced by their numbers."""
        return self._replace(a=self.a.widened(), b=self.b.widened() if b else self.b)


#: Reads the operands and writes ``out``; safe to call from several threads at once.
Executor: TypeAlias = Callable[[Arguments], None]


class AlgorithmTiming(NamedTuple):
    """A measured algorithm of a library."""

    rank: int  # rank in the library's own order, from 0
    median_ms: float  # of one product
    algorithm: str  # the library's description


class Backend(Protocol):
    """Functions of a backend for one type of device; a module with these functions is a backend."""

    def capabilities(self, device: Device) -> Capabilities:
        """Return the capabilities of the device."""

    def prepare(self, plan: GemmPlan) -> Executor:
        """Return the function that executes a plan."""

    def temporary(
        self, shape: tuple[int, ...], dtype: DType, device: Device, stream: int = 0
    ) -> AbstractContextManager[ArrayView]:
        """Return a temporary row-major array for a ``with`` block that queues work on a stream."""

    def reordered(self, view: QuantizedView) -> KernelCodes | None:
        """Return a copy of codes in the order of the kernels; None if there is no such order."""

    def release_memory(self) -> None:
        """Free memory that is cached for later products."""

    def info(self) -> dict[str, Any]:
        """Return the ``devices`` and the ``versions`` of libraries for ``lowprec.info``."""

    def staging_dtype(self, dtype: DType) -> DType:
        """Return the element type in which a result of this type is staged before :meth:`copy`."""

    def copy(self, source: ArrayView, out: ArrayView, stream: int = 0) -> None:
        """Copy a row-major ``source`` of :meth:`staging_dtype` to ``out``."""

    def describe(self, plan: GemmPlan, arguments: Arguments) -> tuple[tuple[str, str], ...]:
        """Return the device library's description of its algorithm for a plan, as (name, value) pairs."""

    def tune(
        self,
        execute: Executor,
        arguments: Arguments,
        *,
        candidates: int,
        progress: Callable[[int, int], None] | None,
    ) -> tuple[AlgorithmTiming, ...]:
        """Measure the library's algorithms for a product, and use the fastest, which is returned first."""

    def stopwatch(self, arguments: Arguments) -> Any:
        """Start the measurement of a product; None if products are finished when executors return.

        The result has the ``stream`` of the product, ``stop()``, ``abandon()`` for a failed product, and
        ``elapsed_ms()``, which waits for the product and returns its time, None if there is none.
        """

    def execution_info(self, plan: GemmPlan, execute: Executor) -> tuple[bool | None, str | None]:
        """Return units and algorithm of this thread's last product, executed by ``execute`` of ``plan``.

        The first is whether tensor units multiplied (on a CPU tile units, or vector units for bfloat16 and int8), None
        if unknown; the second is the library's description of its algorithm, if any.
        """
