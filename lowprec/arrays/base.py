"""``Library``: the interface that lowprec needs of an array library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from lowprec.arrays.view import ArrayView, Device
from lowprec.errors import ArrayError
from lowprec.formats import DType
from lowprec.util.strides import Shape, contiguous_strides, overlaps_itself


class Delegate(NamedTuple):
    """The product that a library itself must compute, for example to record it for gradients."""

    product: str  # key of ``core.call.PRODUCTS``
    why: str  # the cause and the way out, for functions other than products


class Library(ABC):
    """Adapter of one array library: views of operands, new arrays for results.

    ``allocate`` returns a buffer, the backend fills it, and ``wrap`` returns it as an array. The array is the buffer
    itself, unless arrays are immutable (JAX) or the library is known only by DLPack.
    """

    name: str  # of the library's module
    # memory may be reused on an unknown stream, so arrays live until queued work is done
    keeps_owners: bool = False
    has_weak_types: bool = False  # weakly typed arrays take the element type of the other operand
    delegates: bool = False  # whether :meth:`delegate` may return a product

    def check_type(self, array: Any) -> None:  # noqa: B027 - most libraries accept every type
        """Raise ArrayError, with a remedy, for an array of an unsupported class."""

    def delegate(self, *arrays: Any) -> Delegate | None:
        """Return the library's own product if one of these arrays needs it, such as a tracer."""
        return None

    @abstractmethod
    def describe(self, array: Any) -> ArrayView:
        """Return the view of an array, without memory if it has none and needs the library's own product.

        Raises ArrayError, with a remedy, or DTypeError for arrays that no product supports.
        """

    def view(self, array: Any) -> ArrayView:
        """Return the view of an array to read; raise ArrayError for one that needs the library's own product."""
        delegate = None
        if self.delegates:
            delegate = self.delegate(array)
        if delegate is not None:
            raise ArrayError(delegate.why)
        return self.describe(array)

    def writable_view(self, array: Any) -> ArrayView:
        """Return the view of an ``out``; raise ArrayError if it is read-only, repeats elements, or needs a copy."""
        view = self.describe(array)
        if view.copied is not None:
            raise ArrayError(
                f"the array cannot be written in place: {view.copied}; pass a plain array or omit out="
            )
        if view.read_only:
            raise ArrayError("the array is read-only; pass a writable array or omit out=")
        if view.strides != contiguous_strides(view.shape) and overlaps_itself(
            view.shape, view.strides
        ):
            raise ArrayError(
                f"the array of shape {view.shape} repeats elements, as a broadcast view does (strides {view.strides}, "
                "in elements); pass an array without repeated elements, for example a copy of it"
            )
        return view

    def mark_written(self, array: Any) -> None:  # noqa: B027 - optional
        """Notify the library before an array is written."""

    def allocate(self, shape: Shape, dtype: DType, device: Device, like: Any) -> ArrayView:
        """Return the view of a new row-major buffer for :meth:`wrap`; ``like`` is an array of this library."""
        raise TypeError(f"{self.name} arrays have no memory")

    def wrap(self, buffer: Any, *operands: Any) -> Any:
        """Return a filled buffer as an array without a copy. ``operands`` are ``like``, b, c and bias, or None."""
        return buffer

    def current_stream(self, device: Device) -> int | None:
        """Return the library's current stream, None without streams; CUDA's default stream is 1, as in DLPack."""
        return None

    def __repr__(self) -> str:
        return f"<{self.name} arrays>"
