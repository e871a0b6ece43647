"""Dask arrays, which are lazy: Dask multiplies them chunk by chunk."""

from __future__ import annotations

from typing import Any

from lowprec.arrays.base import Delegate, Library
from lowprec.arrays.view import ArrayView
from lowprec.errors import ArrayError, ShapeError
from lowprec.formats import dtype_from_name


class DaskLibrary(Library):
    """Dask arrays; none has memory."""

    name = "dask"
    delegates = True

    def delegate(self, *arrays: Any) -> Delegate | None:
        return Delegate(
            "dask",
            "a Dask array is lazy and has no elements to read: lowprec provides matmul and contractions for it; "
            "otherwise pass array.compute()",
        )

    def describe(self, array: Any) -> ArrayView:
        check_known_shape(array)
        return ArrayView.description(dtype_from_name(array.dtype.name), array.shape)


def check_known_shape(array: Any) -> None:
    """Raise for a Dask array of unknown extents (NaN), or with PyTorch tensors as chunks."""
    if hasattr(array, "numblocks") and type(array._meta).__module__.partition(".")[0] == "torch":
        raise ArrayError(
            "the chunks of the Dask array are PyTorch tensors, which Dask cannot concatenate; convert them with "
            "array.map_blocks(numpy.asarray)"
        )
    if any(type(n) is float for n in array.shape):
        raise ShapeError(f"the shape is not known, {array.shape}; call compute_chunk_sizes() first")


#: The one instance.
DASK = DaskLibrary()
