"""The one list of array libraries that are tested, and what a test needs of each."""

import importlib
import importlib.util
from enum import Enum, unique

import ml_dtypes
import numpy as np

from lowprec.arrays import DLPackArray

# Types that NumPy and DLPack, or NumPy and torch, do not exchange: their bits travel as integers.
_BITS = {
    np.dtype(ml_dtypes.bfloat16): np.dtype(np.int16),
    np.dtype(ml_dtypes.float8_e4m3fn): np.dtype(np.uint8),
    np.dtype(ml_dtypes.float8_e5m2): np.dtype(np.uint8),
}


@unique
class Backend(Enum):
    """Array libraries under test; each value is the name in a test's id."""

    NUMPY = "numpy"
    TORCH = "torch"
    JAX = "jax"
    DLPACK_ONLY = "dlpack_only"

    def load(self):
        return _NAMESPACES[self]()


class DLPackOnly:
    """An array of which nothing is known but DLPack. NumPy's memory, or torch's where NumPy does not export it."""

    __slots__ = ("_producer",)

    def __init__(self, producer):
        self._producer = producer

    def __dlpack__(self, **keywords):
        return self._producer.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._producer.__dlpack_device__()


class ArrayNamespace:
    """What a test needs of a library: arrays in, arrays out, and how a result of it is recognised.

    ``asarray`` returns an array of the library with the elements of a NumPy array, on the same memory where it can.
    """

    name: str
    result_type: type
    #: Whether its arrays may be written, so that they can be ``out``.
    mutable = True

    def to_numpy(self, array):
        """The elements of an array of this library, or of a result, as NumPy and ml_dtypes have them."""
        return np.asarray(array)

    def __repr__(self):
        return self.name


class _Numpy(ArrayNamespace):
    name = "numpy"
    result_type = np.ndarray

    def asarray(self, array):
        return array


class _Torch(ArrayNamespace):
    name = "torch"

    def __init__(self):
        self.torch = importlib.import_module("torch")
        self.result_type = self.torch.Tensor

    def asarray(self, array):
        # torch has no negative strides, and warns of memory that it may not write.
        if not array.flags.writeable or any(s < 0 for s in array.strides):
            array = array.copy()
        bits = _BITS.get(array.dtype)
        if bits is None:
            return self.torch.from_numpy(array)
        return self.torch.from_numpy(array.view(bits)).view(getattr(self.torch, array.dtype.name))

    def to_numpy(self, array):
        array = array.detach()
        for dtype, bits in _BITS.items():
            if array.dtype is getattr(self.torch, dtype.name):
                return array.view(getattr(self.torch, bits.name)).numpy().view(dtype)
        return array.numpy()


class _Jax(ArrayNamespace):
    name = "jax"
    mutable = False

    def __init__(self):
        self.jax = importlib.import_module("jax")
        # float64 is one of lowprec's types; without this JAX rounds it to float32.
        self.jax.config.update("jax_enable_x64", True)
        self.result_type = self.jax.Array

    def asarray(self, array):
        return self.jax.numpy.array(array)


class _DLPackOnly(ArrayNamespace):
    name = "dlpack_only"
    result_type = DLPackArray

    def asarray(self, array):
        if array.dtype not in _BITS:
            return DLPackOnly(array)
        # torch's export is a second opinion; without torch, lowprec's own has to do.
        if importlib.util.find_spec("torch"):
            return DLPackOnly(_Torch().asarray(array))
        return DLPackOnly(DLPackArray(array))

    def to_numpy(self, array):
        return np.asarray(array._producer if isinstance(array, DLPackOnly) else array)


_NAMESPACES = {
    Backend.NUMPY: _Numpy,
    Backend.TORCH: _Torch,
    Backend.JAX: _Jax,
    Backend.DLPACK_ONLY: _DLPackOnly,
}
