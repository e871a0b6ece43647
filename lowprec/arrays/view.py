"""Views: shape, strides, type and address of a caller's array.

All stages after the first read only views. The address of a NumPy array is computed when it is read.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lowprec.formats import DType
from lowprec.util.strides import contiguous_strides, reach

#: NumPy's type for each element type; bfloat16 and float8 are those of ml_dtypes.
NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {d: np.dtype(getattr(ml_dtypes, d.label, d.label)) for d in DType}

#: The other way round, in native byte order.
FROM_NUMPY = {numpy_dtype: d for d, numpy_dtype in NUMPY_DTYPES.items()}

# ``DLDeviceType`` of dlpack.h: the words that the libraries use for each.
_DEVICE_NAMES = {
    1: "cpu",
    2: "cuda",
    3: "cuda_host",
    8: "metal",
    10: "rocm",
    11: "rocm_host",
    12: "ext_dev",
    13: "cuda_managed",
    14: "oneapi",
}


class Device(NamedTuple):
    """Where an array's memory is, in DLPack's terms.

    Examples
    --------
    >>> str(Device(2, 1))
    'cuda:1'
    """

    type: int  # ``DLDeviceType``: 1 is the CPU, 2 is CUDA
    #: Which of the devices of that type; 0 for the CPU.
    index: int  # type: ignore[assignment]  # readers expect a field, not tuple.index

    @property
    def is_host(self) -> bool:
        """Whether the CPU can read this memory by its address."""
        return self.type == 1

    def __str__(self) -> str:
        name = _DEVICE_NAMES.get(self.type, f"dlpack_device_{self.type}")
        return name if self.is_host else f"{name}:{self.index}"


#: Memory of the host; pinned memory counts as such.
CPU = Device(1, 0)


_MAX_UNUSED = 1 << 48


@dataclass(slots=True, eq=False, repr=False)
class ArrayView:
    """An array as lowprec sees it; immutable.

    Strides count elements and may be zero or negative. ``owner`` keeps the memory alive, and is None for a description
    without memory. ``read_only``: the library forbids writing, or does not say. ``address`` is that of the element with
    all indices zero. ``copied`` is a phrase for ``plan``: why this is a view of a copy.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: Device
    owner: Any
    read_only: bool
    _address: int | None
    copied: str | None = None

    @property
    def address(self) -> int:
        """Address of the element with all indices zero."""
        assert self._address is not None
        return self._address

    @property
    def is_description(self) -> bool:
        """Whether there is no memory, and no device, behind the view."""
        return self.owner is None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; repeated elements of a broadcast view count each time."""
        return prod(self.shape) * self.dtype.itemsize

    def ndarray(self) -> NDArray[Any]:
        """Return a NumPy array on the same memory, which it keeps alive. Host memory only."""
        assert self.device.is_host, f"{self.device} memory has no NumPy array"
        dtype = NUMPY_DTYPES[self.dtype]
        if 0 in self.shape:  # their address may be null
            return np.empty(self.shape, dtype)
        itemsize = self.dtype.itemsize
        # The stride of an axis of length 1 is not used, and may be more than NumPy takes.
        strides = [
            s * itemsize if n > 1 or abs(s) < _MAX_UNUSED else 0 for s, n in zip(self.strides, self.shape, strict=True)
        ]
        # A buffer is addressed from its lowest byte, which negative strides put before the first element.
        below = 0
        if strides and min(strides) < 0:
            below = reach(self.shape, self.strides)[0] * itemsize
        memory = memory_at(self.address + below, self.owner)
        array: NDArray[Any] = np.ndarray(self.shape, dtype, memory, -below, strides)
        if self.read_only:
            array.flags.writeable = False
        return array

    def extent(self) -> tuple[int, int]:
        """Return the first byte address that the view touches and the one after the last."""
        address = self.address
        if 0 in self.shape:
            return address, address
        first, last = reach(self.shape, self.strides)
        itemsize = self.dtype.itemsize
        return address + first * itemsize, address + (last + 1) * itemsize

    def __repr__(self) -> str:
        marks = [", read-only"] if self.read_only else []
        marks += [f", copied: {self.copied}"] if self.copied else []
        return (
            f"{type(self).__name__}({self.dtype}, shape={self.shape}, strides={self.strides}, "
            f"device={self.device}{''.join(marks)})"
        )


def with_k_zero(a: ArrayView, b: ArrayView) -> tuple[ArrayView, ArrayView]:
    """Return the operands of a product cut to an inner dimension of 0, if their inner dimensions agree."""
    axes = len(a.shape) - 1, max(len(b.shape) - 2, 0)
    if not a.shape or not b.shape or a.shape[axes[0]] != b.shape[axes[1]]:
        return a, b

    def emptied(x: ArrayView, axis: int) -> ArrayView:
        shape = (*x.shape[:axis], 0, *x.shape[axis + 1 :])
        return ArrayView(x.dtype, shape, contiguous_strides(shape), x.device, x.owner, True, x.address)

    return emptied(a, axes[0]), emptied(b, axes[1])


class HostView(ArrayView):
    """A view whose owner is a NumPy array: its address is worked out only when it is asked for."""

    __slots__ = ()

    @property
    def address(self) -> int:
        """Address of the element with all indices zero."""
        if self._address is None:
            self._address = data_pointer(self.owner)
        return self._address

    def ndarray(self) -> NDArray[Any]:
        """Return the NumPy array itself."""
        array: NDArray[Any] = self.owner
        return array


class _Memory(ctypes.Array):  # type: ignore[type-arg]
    """Bytes at an address, as a buffer that can keep their owner alive.

    One class with the largest length serves every size, since ctypes keeps a class for each length. NumPy reads only
    the bytes that shape and strides name.
    """

    _type_ = ctypes.c_char
    _length_ = sys.maxsize // 2
    owner: Any


def memory_at(address: int, owner: Any) -> Any:
    """Return the bytes from an address on as a buffer for NumPy, which keeps their owner alive; nothing is read."""
    memory = _Memory.from_address(address)
    memory.owner = owner
    return memory


# A PyArrayObject is the object header and then ``char *data`` (numpy/ndarraytypes.h), which is part of NumPy's
# binary interface. Reading it costs 0.1 us, ``array.ctypes.data`` 0.8 us, and a product of two needs three.
_HEADER = object.__basicsize__
_word_at = ctypes.c_size_t.from_address


def _pointer_by_layout(array: NDArray[Any]) -> int:
    return _word_at(id(array) + _HEADER).value


def _pointer_by_interface(array: NDArray[Any]) -> int:
    return array.ctypes.data


def _layout_is_as_expected() -> bool:
    if sys.implementation.name != "cpython":
        return False
    base = np.zeros((3, 5), np.float32)
    probes = (base, base[1:, 2:], base[::-1])
    return all(_pointer_by_layout(p) == _pointer_by_interface(p) for p in probes)


#: Address of a NumPy array's first element.
data_pointer = _pointer_by_layout if _layout_is_as_expected() else _pointer_by_interface


# How many candidate solutions NumPy's exact search may try; ordinary views need a handful.
_MAX_WORK: Any = 1000


def may_overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether writing one view may change the other; False is certain.

    In host memory True is exact as well, unless NumPy's search gives up on the strides. In other memory True means that
    the address ranges overlap.
    """
    if a.device != b.device or a.is_description or b.is_description:
        return False
    a_first, a_last = a.extent()
    b_first, b_last = b.extent()
    if a_first == a_last or b_first == b_last or a_last <= b_first or b_last <= a_first:
        return False
    if not a.device.is_host:
        return True
    try:
        return np.shares_memory(a.ndarray(), b.ndarray(), max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True
