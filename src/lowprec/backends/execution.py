"""What every backend takes and offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from lowprec.arrays import ArrayView, Device
from lowprec.formats import DType
from lowprec.planning import Capabilities, GemmPlan

__all__ = ["Arguments", "Backend", "Executor"]


class Arguments(NamedTuple):
    """What a product is made of: the arrays as views, the factors as numbers."""

    a: ArrayView
    b: ArrayView
    out: ArrayView
    c: ArrayView | None = None
    bias: ArrayView | None = None
    alpha: complex = 1.0
    beta: complex = 0.0


#: Reads the operands and writes ``out``; safe to call from several threads at once.
Executor: TypeAlias = Callable[[Arguments], None]


class Backend(Protocol):
    """One kind of device. A module with these functions is a backend."""

    def capabilities(self, device: Device) -> Capabilities:
        """Return what the device can do."""

    def prepare(self, plan: GemmPlan) -> Executor:
        """Return the function that executes a plan."""

    def allocate(self, shape: tuple[int, ...], dtype: DType, device: Device) -> ArrayView:
        """Return a new row-major array of the backend's own."""

    def copy(self, source: ArrayView, out: ArrayView) -> None:
        """Write the elements of ``source`` to ``out``, an array of the same shape and dtype on the same device."""
