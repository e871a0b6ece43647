"""``ArrayView``: shape, strides, dtype, device and address of a caller's array."""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lowprec.formats import Blocks, DType
from lowprec.util.strides import Shape, contiguous_strides, reach

Array = NDArray[Any]

#: NumPy dtype of each element type; bfloat16 and float8 are those of ml_dtypes.
NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    d: np.dtype(getattr(ml_dtypes, d.label, d.label)) for d in DType
}

#: Element type of each NumPy dtype in native byte order.
FROM_NUMPY = {numpy_dtype: d for d, numpy_dtype in NUMPY_DTYPES.items()}

# Common names of the values of ``DLDeviceType`` (dlpack.h).
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
    """A device by DLPack's type and index."""

    type: int  # ``DLDeviceType``: 1 is the CPU, 2 is CUDA
    #: Number of the device; 0 for the CPU.
    index: int  # type: ignore[assignment]  # a field, not tuple.index

    @property
    def is_host(self) -> bool:
        return self.type == 1

    def __str__(self) -> str:
        name = _DEVICE_NAMES.get(self.type, f"dlpack_device_{self.type}")
        if self.is_host:
            return name
        return f"{name}:{self.index}"


#: Host memory, pinned memory included.
CPU = Device(1, 0)


#: Strides below this number of elements do not exceed NumPy's limit in bytes.
_MAX_UNUSED = 1 << 48


#: An operand rounded, split or packed for a kernel, and its size in bytes.
PackedOperand: TypeAlias = tuple[Any, int]


@dataclass(slots=True, eq=False, repr=False)
class ArrayView:
    """An immutable view of an array of any library.

    Strides count elements and may be zero or negative. ``owner`` keeps the memory alive; it is None for a description
    (shape and dtype without memory). ``read_only`` is set if the library forbids writing. If the view is of a copy,
    ``copied`` is the reason for the copy as a phrase.
    """

    dtype: DType
    shape: Shape
    strides: Shape
    device: Device
    owner: Any
    read_only: bool
    address: int  # of the element with all indices zero; 0 for a description
    copied: str | None = None

    # Of stored operands: those that are prepared or quantised.
    is_prepared: ClassVar[bool] = False  # whether a product may keep data of it in ``packed``
    is_sparse: ClassVar[bool] = False
    mode: ClassVar[Any] = None  # the mode for which it is prepared
    packed: ClassVar[Any] = None  # by key: operands that were rounded, split or packed for a kernel
    blocks: ClassVar[Blocks | None] = None  # of a quantised array
    quantized: ClassVar[Any] = None  # this array
    scale: ClassVar[float] = 1.0  # of the whole array
    kept: ClassVar[Any] = None  # `KernelCodes` in place of this array
    inner_offsets: ClassVar[Shape | None] = (
        None  # of the last axis, in place of multiples of its stride
    )

    #: The view's part of the key of an executor.
    layout: ClassVar[Any]

    def packed_operand(self, key: Any, make: Callable[[], PackedOperand]) -> Any:
        """Return the packed operand of this key; ``make`` packs it if it is missing."""
        operand = self.packed.get(key)
        if operand is None:
            operand = self.packed.setdefault(key, make())
        value, _ = operand
        return value

    def stored(self) -> tuple[ArrayView, ...]:
        """Return the views of the memory that a product reads."""
        return (self,)

    def source(self, array: Any) -> Any:
        """Return the caller's array, whose stream orders this memory; None for our copy."""
        return array

    def widened(self) -> ArrayView:
        return self

    def strided(self, shape: Shape, strides: Shape, start: int = 0) -> ArrayView:
        """Return a plain, read-only view of the same memory from element ``start`` on."""
        address = self.address + start * self.dtype.itemsize
        return ArrayView(self.dtype, shape, strides, self.device, self.owner, True, address)

    @classmethod
    def description(cls, dtype: DType, shape: Shape) -> ArrayView:
        """Return the view of a contiguous array without memory."""
        return cls(dtype, shape, contiguous_strides(shape), CPU, None, False, 0)

    @property
    def is_description(self) -> bool:
        """Whether the view has neither memory nor device."""
        return self.owner is None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; repeated elements of a broadcast view count each time."""
        return prod(self.shape) * self.dtype.itemsize

    def ndarray(self) -> Array:
        """Return a NumPy array that shares the memory and keeps it alive. Host memory only."""
        assert self.device.is_host, f"{self.device} memory has no NumPy array"
        dtype = NUMPY_DTYPES[self.dtype]
        if 0 in self.shape:  # the address may be null
            return np.empty(self.shape, dtype)
        itemsize = self.dtype.itemsize
        strides = []
        for stride, extent in zip(self.strides, self.shape, strict=True):
            # The stride of an axis of length 1 is not used, and may exceed the limit.
            is_legal = extent > 1 or abs(stride) < _MAX_UNUSED
            strides.append(stride * itemsize if is_legal else 0)
        # A buffer starts at its lowest byte, which precedes the first element if strides are negative.
        below = 0
        if strides and min(strides) < 0:
            below = reach(self.shape, self.strides)[0] * itemsize
        memory = memory_at(self.address + below, self.owner)
        array: Array = np.ndarray(self.shape, dtype, memory, -below, strides)
        if self.read_only:
            array.flags.writeable = False
        return array

    def extent(self) -> tuple[int, int]:
        """Return the address of the first byte of the elements, and the address after the last byte."""
        address = self.address
        if 0 in self.shape:
            return address, address
        first, last = reach(self.shape, self.strides)
        itemsize = self.dtype.itemsize
        return address + first * itemsize, address + (last + 1) * itemsize

    def __repr__(self) -> str:
        marks = ""
        if self.read_only:
            marks = ", read-only"
        if self.copied:
            marks += f", copied: {self.copied}"
        return (
            f"{type(self).__name__}({self.dtype}, shape={self.shape}, strides={self.strides}, "
            f"device={self.device}{marks})"
        )


# Not in the class: a dataclass with slots takes only properties that are Python functions, in Python 3.14.
ArrayView.layout = property(attrgetter("device", "dtype", "shape", "strides"))


class OffsetView(ArrayView):
    """A view of matrices of host memory whose last axis has offsets, as the elements under the kernel of an image."""

    __slots__ = ("inner_offsets",)
    layout = property(attrgetter("device", "dtype", "shape", "strides", "inner_offsets"))
    inner_offsets: Shape  # type: ignore[misc]  # slots

    def __init__(self, memory: ArrayView, shape: Shape, strides: Shape, offsets: Shape) -> None:
        super().__init__(
            memory.dtype, shape, (*strides, 0), CPU, memory.owner, True, memory.address
        )
        self.inner_offsets = offsets

    def ndarray(self) -> Array:
        """Return a copy of the elements."""
        *shape, _ = self.shape
        *strides, _ = self.strides
        columns = [
            self.strided(tuple(shape), tuple(strides), offset).ndarray()
            for offset in self.inner_offsets
        ]
        return np.stack(columns, -1)


@dataclass(slots=True, eq=False)
class Layout:
    """Element type, shape and strides. Equal NumPy arrays share one, by whose identity an executor is found."""

    dtype: DType
    shape: Shape
    strides: Shape
    lost: int  # the bits of an address that are zero if the elements are aligned


class HostView(ArrayView):
    """The view of a NumPy array, which functions of ``numpy_library`` make field by field."""

    __slots__ = ("layout",)
    layout: Layout  # type: ignore[misc]
    device = CPU
    dtype, shape, strides = (
        property(attrgetter(f"layout.{name}")) for name in ("dtype", "shape", "strides")
    )

    @property
    def read_only(self) -> bool:  # type: ignore[override]
        return not self.owner.flags.writeable

    def ndarray(self) -> Array:
        array: Array = self.owner
        return array


def stand_in(extent: Any) -> int:
    """Return an extent as a number for checks: a symbol becomes a number that is equal for equal symbols."""
    if type(extent) is int:
        return extent
    return 1009 + zlib.crc32(str(extent).encode()) % (1 << 20)


class _Buffer(ctypes.Array):  # type: ignore[type-arg]
    """A buffer that starts at an address and refers to the owner of the memory.

    ctypes never frees a class of arrays, so one class serves every size. Its length is a bound: NumPy accesses the
    bytes within shape and strides.
    """

    _type_ = ctypes.c_char
    _length_ = sys.maxsize // 2
    owner: Any


def memory_at(address: int, owner: Any) -> Any:
    """Return a buffer that starts at an address and keeps ``owner`` alive."""
    memory = _Buffer.from_address(address)
    memory.owner = owner
    return memory


# In a PyArrayObject ``char *data`` follows the object header (numpy/ndarraytypes.h, part of NumPy's ABI). Reading it
# takes 0.1 us, ``array.ctypes.data`` 0.8 us.
_base = np.zeros((3, 5), np.float32)
#: The memory of this process in words of 8 bytes.
WORDS: Any = (ctypes.c_uint64 * (sys.maxsize // 8)).from_address(0)
#: Number of words before the address in a NumPy array, 0 if the address cannot be read.
POINTER = 0
if sys.implementation.name == "cpython" and sys.maxsize > 1 << 32:
    POINTER = object.__basicsize__ // 8
for _array in (_base, _base[1:, 2:], _base[::-1]):
    if POINTER and WORDS[(id(_array) >> 3) + POINTER] != _array.ctypes.data:
        POINTER = 0


def data_pointer(array: Array) -> int:
    """Return the address of a NumPy array's first element."""
    if POINTER:
        return WORDS[(id(array) >> 3) + POINTER]  # type: ignore[no-any-return]
    return int(array.ctypes.data)


# Limit of candidate solutions in NumPy's exact overlap search; ordinary views need a few.
_MAX_WORK: Any = 1000


def may_overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether two views may share memory: exact in host memory, unless NumPy's search reaches its limit."""
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
