"""What lowprec asks of an array library: the one interface behind which all of them look alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lowprec.arrays.view import ArrayView, Device
from lowprec.errors import ArrayError
from lowprec.formats import DType
from lowprec.util.strides import contiguous_strides, overlaps_itself


class Library(ABC):
    """Access to the arrays of one library: views of operands, new arrays for results.

    ``allocate`` makes a buffer, the backend fills it, and ``wrap`` returns the caller's array: the buffer itself,
    except where arrays are immutable (JAX) or the library is known only by DLPack.
    """

    #: The library's name, as its module is called.
    name: str

    #: Whether work on a stream must hold an array until it is done, because the library would reuse the memory of one
    #: that it thinks dead on streams of its own.
    keeps_owners: bool = False

    def check_type(self, array: Any) -> None:  # noqa: B027 - most libraries have nothing to refuse
        """Raise an ArrayError with a remedy for an array of this library without memory to read."""

    #: Whether an array's element type may yield to that of its partner in a product.
    has_weak_types: bool = False

    @abstractmethod
    def view(self, array: Any) -> ArrayView:
        """Return the view of an array to read.

        Raises ArrayError if it cannot be read in place, with a remedy, DTypeError if its element type is not supported.
        """

    def view_same_type(self, array: Any) -> ArrayView:
        """Return what :meth:`view` does, right after it: the library's state, which it checks, is still the same."""
        return self.view(array)

    def writable_view(self, array: Any) -> ArrayView:
        """Return the view of an ``out``.

        Raises ArrayError if it is read-only, repeats elements, or could be viewed only through a copy.
        """
        view = self.view(array)
        check_writable(view)
        return view

    def mark_written(self, array: Any) -> None:  # noqa: B027 - most libraries need not know
        """Notify the library that an array is about to be written."""

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: DType, device: Device, like: Any) -> ArrayView:
        """Return the view of a new row-major buffer for :meth:`wrap`, placed as ``like``, an array of this library."""

    def wrap(self, buffer: Any, *operands: Any) -> Any:
        """Return a filled buffer as an array of this library, without a copy.

        ``operands``, arrays of any library or None, are those of the product, the ``like`` of :meth:`allocate` first.
        """
        return buffer

    def current_stream(self, device: Device) -> int | None:
        """Return the handle of the library's current stream, None where there are no streams.

        CUDA's default stream is 1 (``cudaStreamLegacy``), as in DLPack, never 0.
        """
        return None

    def __repr__(self) -> str:
        return f"<{self.name} arrays>"


def check_writable(view: ArrayView) -> None:
    """Raise :class:`ArrayError` unless writing through the view is safe and reaches the caller's memory."""
    if view.copied is not None:
        raise ArrayError(f"out cannot be written in place: {view.copied}; pass a plain array or omit out=")
    if view.read_only:
        raise ArrayError("out is read-only; pass a writable array or omit out=")
    if view.strides != contiguous_strides(view.shape) and overlaps_itself(view.shape, view.strides):
        raise ArrayError(
            f"out of shape {view.shape} repeats elements (strides {view.strides}, in elements), as a broadcast view "
            "does; pass an array with an element for each index, for example a copy of it"
        )
