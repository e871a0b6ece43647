"""What every backend takes and offers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from lowprec.arrays import ArrayView, Device
from lowprec.formats import DType

if TYPE_CHECKING:  # planning is imported with the first product
    from lowprec.planning import Capabilities, GemmPlan


@functools.cache
def imported(name: str) -> Any:
    """Return an attribute named as ``"module:name"``; the module is imported with the first product."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Arguments(NamedTuple):
    """The operands of a product as views, its factors as numbers, and its stream.

    The stream is CUDA's handle on a GPU (1 is the legacy default stream), and 0 in host memory.
    """

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


#: Reads the operands and writes ``out``; safe to call from several threads at once.
Executor: TypeAlias = Callable[[Arguments], None]


class ExecutionInfo(NamedTuple):
    """The units and algorithm of a product, as its backend reports them."""

    #: Whether tensor units (tile units of a CPU, or its vector units for bfloat16 and int8) multiplied; None where the
    #: library does not report it.
    units: bool | None
    algorithm: str | None = None  # the library's description of its choice


class AlgorithmTiming(NamedTuple):
    """One algorithm of a library, measured."""

    rank: int  # where the library itself ranked it, from 0
    median_ms: float  # of one product
    algorithm: str  # in the library's own words


class Stopwatch(Protocol):
    """Takes the time of one product that is still running when its executor returns."""

    @property
    def stream(self) -> int:
        """On which the product runs."""

    def stop(self) -> None:
        """Mark the end of the product, without waiting for it."""

    def abandon(self) -> None:
        """Give up: the product failed."""

    def elapsed_ms(self) -> float | None:
        """Return the time, waiting for the product; None where there is none to take. Several may ask at once."""


class Backend(Protocol):
    """One kind of device. A module with these functions is a backend."""

    def capabilities(self, device: Device) -> Capabilities:
        """Return the capabilities of the device."""

    def prepare(self, plan: GemmPlan) -> Executor:
        """Return the function that executes a plan."""

    def temporary(
        self, shape: tuple[int, ...], dtype: DType, device: Device, stream: int = 0
    ) -> AbstractContextManager[ArrayView]:
        """Return a new row-major array of the backend's own, for a ``with`` block that queues work on a stream."""

    def release_memory(self) -> None:
        """Give back the memory that is kept for later products."""

    def info(self) -> dict[str, Any]:
        """Return the ``devices`` that can compute and the ``versions`` of libraries for ``lowprec.info``."""

    def staging_dtype(self, dtype: DType) -> DType:
        """Return the element type in which a result of this type is staged, for :meth:`copy` to write."""

    def copy(self, source: ArrayView, out: ArrayView, stream: int = 0) -> None:
        """Write row-major ``source``, of :meth:`staging_dtype`, to ``out``, of the same shape and device."""

    def describe(self, plan: GemmPlan, arguments: Arguments) -> tuple[tuple[str, str], ...]:
        """Return the device library's description of how it would run a plan, as rows of names and values."""

    def tune(
        self, execute: Executor, arguments: Arguments, *, candidates: int, progress: Callable[[int, int], None] | None
    ) -> tuple[AlgorithmTiming, ...]:
        """Measure the library's algorithms for a product and keep the fastest; it comes first. Empty for no choice."""

    def stopwatch(self, arguments: Arguments) -> Stopwatch | None:
        """Start to take the time of a product; None where it is done when its executor returns."""

    def execution_info(self, plan: GemmPlan, execute: Executor) -> ExecutionInfo:
        """Return the units of this thread's last product, an execution of ``execute``, made from ``plan``."""
