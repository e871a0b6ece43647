"""Views of prepared operands: lowprec's copy of an array, with a cache of its packed operands.

A backend caches here the packed ``b`` of a product, under a key of everything that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowprec.arrays.device_memory import LEGACY_STREAM, provider
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.view import ArrayView
from lowprec.errors import ArrayError
from lowprec.formats import Blocks


class PreparedView(ArrayView):
    """A view of immutable memory with its packed operands.

    Products in ``mode`` use ``packed``, the cache of packed operands. It has no lock, which could be held during a
    fork; if several threads pack at once, the first result is used. ``sparse_axis`` is the axis along which the
    elements are 2:4 sparse, -2 or -1, or None.
    """

    __slots__ = ("_transposed", "mode", "packed", "sparse_axis")
    is_prepared = True
    mode: Any  # type: ignore[misc]  # slots
    packed: dict[Any, Any]  # type: ignore[misc]

    def __init__(self, view: ArrayView, mode: Any, packed: dict[Any, Any]) -> None:
        super().__init__(
            view.dtype, view.shape, view.strides, view.device, view.owner, True, view.address
        )
        self.mode = mode
        self.packed = packed
        self.sparse_axis: int | None = None
        self._transposed: PreparedView | None = None

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """Whether the elements are 2:4 sparse along the inner dimension of a product."""
        return self.sparse_axis == -2

    def ndarray(self) -> NDArray[Any]:
        """Return the copy as a NumPy array. Host memory only."""
        array: NDArray[Any] = self.owner if self.device.is_host else super().ndarray()
        return array

    def source(self, array: Any) -> Any:
        return None

    @property
    def transposed(self) -> PreparedView:
        """The view with the last two axes exchanged, sharing memory and packed operands."""
        if self._transposed is None:
            if self.device.is_host:
                view = host_view(self.owner.swapaxes(-1, -2))
            else:
                *batch, rows, columns = self.shape
                *outer, row_stride, column_stride = self.strides
                view = self.strided((*batch, columns, rows), (*outer, column_stride, row_stride))
            self._transposed = PreparedView(view, self.mode, self.packed)
            if self.sparse_axis is not None:
                self._transposed.sparse_axis = -3 - self.sparse_axis
        return self._transposed


class KernelCodes(NamedTuple):
    """The codes of a quantised array in the order of a backend's kernels."""

    address: int
    memory: NDArray[Any]
    scale: float  # of the array
    lanes: int  # numbers of 32 bits in a vector of the kernels, on which the order depends
    restored: Callable[[], Any]  # returns the quantised array with new codes


class QuantizedView(PreparedView):
    """The view of a quantised array, without its scale.

    Codes with scales of blocks are described by their values in bfloat16: element type and strides are those of the
    widened numbers, which exist only while a product reads them. ``address`` is that of the codes. A view of ``kept``
    codes has no others: ``quantized`` is restored from them each time.
    """

    __slots__ = ("_quantized", "blocks", "is_prepared", "kept")
    is_prepared: bool  # type: ignore[misc]  # slots
    blocks: Blocks  # type: ignore[misc]
    kept: KernelCodes | None  # type: ignore[misc]

    def __init__(
        self,
        view: ArrayView,
        blocks: Blocks,
        quantized: Any,
        is_prepared: bool = False,
        kept: KernelCodes | None = None,
    ) -> None:
        super().__init__(view, "fp32", {})
        self.blocks = blocks
        self._quantized = quantized
        self.is_prepared = is_prepared
        self.kept = kept

    @property
    def quantized(self) -> Any:
        """The quantised array."""
        if self.kept is None:
            return self._quantized
        return self.kept.restored()

    @property
    def scale(self) -> float:  # type: ignore[override]
        """The scale of the quantised array; 1 for an array of scales, which are those of the widened numbers."""
        scale = (self.kept or self._quantized).scale
        return scale if isinstance(scale, float) else 1.0

    def stored(self) -> tuple[ArrayView, ...]:
        if self.kept is not None:
            return ()
        return self._quantized._stored()  # type: ignore[no-any-return]

    def source(self, array: Any) -> Any:
        if self.kept is not None:
            return None
        return self._quantized.codes

    def widened(self) -> ArrayView:
        """Return the view of the widened numbers; this view if they have no scales of blocks."""
        if not self.blocks.row.block:
            return self
        wide: ArrayView = self.quantized._widened()
        return ArrayView(
            self.dtype, self.shape, self.strides, self.device, wide.owner, True, wide.address
        )

    def prepared(self, kept: KernelCodes | None) -> QuantizedView:
        """Return the view of which products keep the codes in the order of their kernel; of ``kept`` codes alone."""
        if kept is None:
            return QuantizedView(self, self.blocks, self.quantized, is_prepared=True)
        memory = ArrayView(
            self.dtype, self.shape, self.strides, self.device, kept.memory, True, kept.address
        )
        return QuantizedView(memory, self.blocks, None, is_prepared=True, kept=kept)

    @property
    def transposed(self) -> PreparedView:
        kept = self.kept
        if kept is None:
            view: QuantizedView = self.quantized.T._view
            if self.is_prepared:
                view = view.prepared(None)
        else:
            shape, strides = ((*x[:-2], x[-1], x[-2]) for x in (self.shape, self.strides))
            blocks = self.blocks._replace(axis=-3 - self.blocks.axis)
            of_transposed = kept._replace(restored=lambda: kept.restored().T)
            view = QuantizedView(
                self.strided(shape, strides), blocks, None, is_prepared=True, kept=of_transposed
            )
        if self.is_prepared:
            view.packed = self.packed
        return view

    def ndarray(self) -> NDArray[Any]:
        """Return the widened numbers. Host memory only."""
        if not self.blocks.row.block:
            return super().ndarray()
        return self.widened().ndarray()


class Prepared:
    """Base of :class:`lowprec.PreparedOperand` and :class:`lowprec.QuantizedArray`, which hold a prepared view."""

    _view: PreparedView
    _description = "a prepared operand, which is accepted only as b of matmul"
    _remedy = "the array itself"
    _like: Any = None  # an array of the library of results, if it is accepted as a, too

    #: Otherwise ``@`` with a NumPy array would treat this object as a scalar.
    __array_ufunc__ = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        # NumPy would make an array of this one object, which it also stores in files.
        raise ArrayError(
            f"{type(self).__name__}: {self._description} and as the weight of linear; pass {self._remedy}"
        )


def refuse_prepared(cause: str, **arguments: Any) -> None:
    """Raise ArrayError if one of these arguments is a prepared operand; ``cause`` is that of the refusal."""
    for name, value in arguments.items():
        if isinstance(value, Prepared):
            raise ArrayError(
                f"{name} is {value._description} and as the weight of linear, with arrays that are read in place, but "
                f"{cause}; or pass {value._remedy}"
            )


def copy_of(view: ArrayView, stream: int | None) -> ArrayView:
    """Return the view of a copy with the same strides and alignment, made on a stream if there is one."""
    if view.device.is_host:
        return host_view(_host_copy(view))
    device = view.device
    first, last = view.extent()
    memory = provider(device)
    stream = stream or LEGACY_STREAM
    before = first % _ALIGNMENT_BYTES
    block = memory.allocate(last - first + before, device, stream)
    if last > first:
        memory.copy(first, block.address + before, last - first, device, stream)
        memory.synchronize(stream, device)
    address = block.address + before + view.address - first
    return ArrayView(view.dtype, view.shape, view.strides, device, block, True, address)


_ALIGNMENT_BYTES = 256


def _host_copy(view: ArrayView) -> NDArray[Any]:
    """Return a copy with the same strides; large gaps between elements are not written, so they use no memory."""
    if not view.size:
        return np.empty(view.shape, view.ndarray().dtype)
    first, last = view.extent()
    memory = np.empty(last - first + 2 * _ALIGNMENT_BYTES, np.uint8)
    start = (first - memory.ctypes.data) % _ALIGNMENT_BYTES + view.address - first
    x = view.ndarray()
    copy: NDArray[Any] = np.ndarray(x.shape, x.dtype, memory, start, x.strides)
    once = tuple(slice(1 if step == 0 else None) for step in x.strides)
    copy[once] = x[once]
    copy.flags.writeable = False
    return copy
