"""DLPack: views of other libraries' capsules, and an array that exports its own.

Source: ``dlpack.h`` of DLPack 1.0 and the Python specification in the Array API standard.

Two decisions keep this file free of C callbacks, which would have to survive the end of the interpreter:

- An imported capsule is kept alive and never renamed. While its name is ``dltensor``, its own destructor calls the
  producer's deleter exactly once, when the last reference is dropped.
- NumPy creates the exported capsule. It does not export bfloat16 and float8, so their bits are exported as unsigned
  integers and the type code in the new capsule is corrected; so is the device of memory on a GPU.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowprec.arrays.numpy_library import view_of_copy
from lowprec.arrays.view import CPU, FROM_NUMPY, ArrayView, Device
from lowprec.errors import ArrayError, LowprecError
from lowprec.formats import DType, dtype_from_dlpack, dtype_from_name
from lowprec.util.strides import Shape, contiguous_strides, reach

_LEGACY = b"dltensor"
_VERSIONED = b"dltensor_versioned"
_MAJOR = 1
_READ_ONLY = 1 << 0
_IS_COPIED = 1 << 1

# Pinned host memory counts as host memory, managed memory as memory of the GPU in the capsule.
_HOST_TYPES = frozenset({1, 3, 11})
_DEVICE_TYPES = {13: 2}


class _Tensor(ctypes.Structure):
    """``DLTensor``, with the fields of device and type inlined."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``; the older ``DLManagedTensor`` begins with its tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# By subscripts: attributes of ``ctypes.pythonapi``, and so their prototypes, are shared by all packages of the process.
_get_name, _get_pointer = (ctypes.pythonapi[f"PyCapsule_Get{name}"] for name in ("Name", "Pointer"))
_get_name.restype = ctypes.c_char_p
_get_name.argtypes = (ctypes.py_object,)
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

_CAPSULE = type(np.empty(0).__dlpack__())
_TENSOR_OFFSET: int = _Versioned.tensor.offset
_INTEGERS = tuple(ctypes.c_int64 * ndim for ndim in range(65))


def _open(capsule: object) -> tuple[_Tensor, int]:
    """Return the tensor of an unconsumed capsule and its flags (0 before DLPack 1.0)."""
    if type(capsule) is not _CAPSULE:
        raise ArrayError(f"__dlpack__ returned a {type(capsule).__name__}, not a capsule")
    name = _get_name(capsule)
    if name == _LEGACY:
        return _Tensor.from_address(_get_pointer(capsule, _LEGACY)), 0
    if name != _VERSIONED:
        raise ArrayError(
            f"__dlpack__ returned a capsule named {name!r}, which is not an unconsumed DLPack tensor"
        )
    address = _get_pointer(capsule, _VERSIONED)
    managed = _Versioned.from_address(address)
    if managed.major != _MAJOR:
        raise ArrayError(
            f"the array was exported as DLPack {managed.major}.{managed.minor}; lowprec reads DLPack {_MAJOR}"
        )
    return _Tensor.from_address(address + _TENSOR_OFFSET), managed.flags


def view_of_capsule(capsule: object) -> ArrayView:
    """Return the view of a DLPack capsule, which it keeps alive.

    Raises ArrayError for a consumed capsule, another version or an impossible array; DTypeError for its element type.
    """
    tensor, flags = _open(capsule)
    dtype = dtype_from_dlpack(tensor.code, tensor.bits, tensor.lanes)
    ndim = tensor.ndim
    if not 0 <= ndim < len(_INTEGERS) or (ndim and not tensor.shape):
        raise ArrayError(f"the DLPack capsule describes no array: ndim is {ndim}")
    integers = _INTEGERS[ndim]
    shape = ()
    if ndim:
        shape = tuple(integers.from_address(tensor.shape))
    # Before DLPack 1.2 strides may be null, which means row-major.
    if tensor.strides and ndim:
        strides = tuple(integers.from_address(tensor.strides))
    else:
        strides = contiguous_strides(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    if not tensor.data and 0 not in shape:
        raise ArrayError(f"the DLPack capsule of shape {shape} has no data: its pointer is null")
    _check_extent(shape, strides, address, dtype.itemsize)
    device = _device(tensor.device_type, tensor.device_id)
    copied = "the array's library exported a copy" if flags & _IS_COPIED else None
    view = ArrayView(
        dtype, shape, strides, device, capsule, bool(flags & _READ_ONLY), address, copied
    )
    if not address % min(dtype.itemsize, 8):
        return view
    if not device.is_host:
        raise ArrayError(f"the {dtype} array on {device} is not aligned to its element size")
    return view_of_copy(view.ndarray())


def _check_extent(shape: Shape, strides: Shape, address: int, itemsize: int) -> None:
    """Raise unless an array fits the address space; axes of length 0 count as length 1, as in NumPy."""
    if shape and min(shape) < 0:
        raise ArrayError(f"the DLPack capsule describes no array: its shape is {shape}")
    nbytes = itemsize * (prod(shape) or prod(length or 1 for length in shape))
    if 0 in shape:
        first = 0
        last = 0
    else:
        first, last = reach(shape, strides)
    if address + first * itemsize < 0 or max(address + last * itemsize, nbytes) > sys.maxsize:
        raise ArrayError(
            f"the DLPack capsule reaches outside of the address space: shape {shape}, strides {strides} (in elements) "
            f"from address {address:#x}"
        )


def _device(kind: int, index: int) -> Device:
    if kind in _HOST_TYPES:
        return CPU
    return Device(_DEVICE_TYPES.get(kind, kind), index)


def device_of(array: Any) -> Device:
    """Return the DLPack device of an array, the CPU for all host-readable memory; raise ArrayError if it has none."""
    try:
        reported = array.__dlpack_device__()
    except Exception as error:
        raise _refusal(array, error) from error
    try:
        # an Enum of the array's library counts as its number
        kind, index = map(operator.index, reported)
    except (TypeError, ValueError):
        raise ArrayError(
            f"{type_name(array)} has no DLPack device: __dlpack_device__ returned {reported!r}, not two integers"
        ) from None
    return _device(kind, index)


def import_array(array: Any, stream: int | None = None) -> ArrayView:
    """Return the view of any array with ``__dlpack__``; raise ArrayError, with the library's message, if it fails.

    ``stream`` is the consumer's, as in the standard; None for host memory or CUDA's legacy default stream.
    """
    if stream is None:
        keywords = {}
    else:
        keywords = {"stream": stream}
    try:
        try:
            capsule = array.__dlpack__(max_version=(_MAJOR, 0), **keywords)
        except TypeError as error:
            # DLPack before 1.0 lacks the keyword: either this call fails, before any frame of the producer, or the call
            # to which the object forwards it. Not cached, because an object may forward to another one later.
            is_old = getattr(error.__traceback__, "tb_next", None) is None or "max_version" in str(
                error
            )
            if isinstance(error, LowprecError) or not is_old:
                raise
            capsule = array.__dlpack__(**keywords)
    except Exception as error:
        raise _refusal(array, error) from error
    return view_of_capsule(capsule)


def _refusal(array: Any, error: Exception) -> ArrayError:
    return ArrayError(f"{type_name(array)} cannot be exported by DLPack: {error}")


def type_name(x: Any) -> str:
    """Return the qualified name of an object's type, without the module of built-in types."""
    kind = type(x)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


# Types that NumPy does not export, and the unsigned integers as which their bits are exported.
_CARRIERS: dict[DType, np.dtype[Any]] = {
    DType.BFLOAT16: np.dtype(np.uint16),
    DType.FLOAT8_E4M3FN: np.dtype(np.uint8),
    DType.FLOAT8_E5M2: np.dtype(np.uint8),
}


class DLPackArray:
    """A result for a library that is known only by DLPack.

    Import it with that library's ``from_dlpack``, or with ``numpy.asarray`` if it is in host memory; neither copies.
    bfloat16 and float8 are exported under their own types. On a GPU the product may still be running: the consumer's
    stream waits for it, or the host if the consumer passes no stream.

    Parameters
    ----------
    memory : numpy.ndarray
        The elements, shared without a copy; bfloat16 and float8 are dtypes of ml_dtypes.

    Examples
    --------
    >>> import numpy
    >>> array = DLPackArray(numpy.ones((2, 3), numpy.float32))
    >>> array
    DLPackArray(shape=(2, 3), dtype='float32')
    >>> float(numpy.from_dlpack(array).sum())
    6.0
    """

    __slots__ = ("__weakref__", "_dtype", "_memory")

    def __init__(self, memory: NDArray[Any]) -> None:
        self._dtype = FROM_NUMPY.get(memory.dtype) or dtype_from_name(memory.dtype.name)
        self._memory = memory

    @property
    def memory(self) -> NDArray[Any]:
        """The elements as a NumPy array, without a copy."""
        return self._memory

    @property
    def shape(self) -> Shape:
        """Length of each axis."""
        return self._memory.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._memory.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._memory.size

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return self._dtype.label

    @property
    def device(self) -> Device:
        """Device of the elements."""
        return CPU

    def __repr__(self) -> str:
        return f"DLPackArray(shape={self.shape}, dtype={self.dtype!r})"

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        memory = self.memory  # raises for memory on a device
        if copy:
            return np.array(memory, dtype=dtype, copy=True)
        if dtype is None:
            wanted = memory.dtype
        else:
            wanted = np.dtype(dtype)
        if wanted == memory.dtype:
            return memory
        if copy is False:
            raise ValueError(f"conversion from {self.dtype} to {wanted.name} needs a copy")
        return memory.astype(wanted)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device.type, self.device.index)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        device = self.device
        consumer = self._consumer(stream)
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array is on {device} and is not exported to device {dl_device}")
        exported = self
        if copy:
            exported = self._copy()
        exported._hand_over(consumer)
        return export(exported._memory, self._dtype, max_version, device=device, copied=bool(copy))

    def _consumer(self, stream: Any) -> int:
        """Return the consumer's stream; -1 for none."""
        if stream not in (None, -1):
            raise BufferError(f"host memory has no stream; stream must be None, not {stream!r}")
        return -1

    def _hand_over(self, consumer: int) -> None:
        """Make the consumer's stream wait for the elements; nothing to do in host memory."""

    def _copy(self) -> DLPackArray:
        return DLPackArray(self._memory.copy())


def export(
    memory: NDArray[Any],
    dtype: DType,
    max_version: tuple[int, int] | None,
    *,
    device: Device = CPU,
    copied: bool = False,
) -> object:
    """Return a capsule of the newest DLPack version that the consumer supports.

    ``memory`` is not read; ``dtype`` is the actual type of its elements. ``copied``: it is a copy for this export.
    """
    carrier = _CARRIERS.get(dtype)
    exported = memory
    if carrier is not None:
        exported = memory.view(carrier)
    is_versioned = max_version is not None and max_version[0] >= _MAJOR
    capsule: object = exported.__dlpack__(max_version=max_version if is_versioned else None)
    if carrier is None and device is CPU and not copied:
        return capsule
    tensor, _ = _open(capsule)
    tensor.code = dtype.dlpack_code
    tensor.device_type, tensor.device_id = device
    if copied and _get_name(capsule) == _VERSIONED:
        _Versioned.from_address(_get_pointer(capsule, _VERSIONED)).flags |= _IS_COPIED
    return capsule
