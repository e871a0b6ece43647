"""JAX arrays: read in place, and created from memory that JAX imports without a copy.

JAX does not report its stream. On a GPU lowprec runs on its own stream: JAX makes it wait for the operands, and makes
its own streams wait for the result. The host waits if the JAX client does not implement this ("UNIMPLEMENTED").
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from lowprec.arrays.base import Delegate, Library
from lowprec.arrays.device_memory import DeviceArray, is_served, provider
from lowprec.arrays.dlpack import DLPackArray, device_of, import_array
from lowprec.arrays.numpy_library import aligned_empty, host_view
from lowprec.arrays.view import (
    CPU,
    FROM_NUMPY,
    NUMPY_DTYPES,
    ArrayView,
    Device,
    data_pointer,
    stand_in,
)
from lowprec.errors import ArrayError, DTypeError
from lowprec.formats import DType, dtype_from_name
from lowprec.util.strides import Shape

_64_BIT = frozenset({DType.FLOAT64, DType.COMPLEX128})


class JaxLibrary(Library):
    """JAX arrays, which are immutable and so cannot be ``out``. JAX multiplies tracers and sharded arrays itself."""

    name = "jax"
    keeps_owners = True
    has_weak_types = True
    delegates = True

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        self._platform = functools.cache(lambda device: getattr(device, "platform", "several"))
        self._first_cpu = functools.cache(lambda: jax.devices("cpu")[0])

    def delegate(self, *arrays: Any) -> Delegate | None:
        """Return JAX's product for tracers, and for arrays that are sharded over several devices."""
        for array in arrays:
            device = None
            if isinstance(array, self._jax.core.Tracer):
                return Delegate(
                    "jax",
                    f"a JAX tracer ({type(array).__name__}) has no data: inside jit, grad, vmap and other transforms "
                    "lowprec provides matmul; call other functions outside, or through jax.pure_callback",
                )
            with suppress(RuntimeError):  # it is deleted, which `describe` reports
                device = array.device
            if device is not None and self._platform(device) == "several":
                return Delegate(
                    "jax",
                    f"the JAX array is sharded over several devices ({device}), for which lowprec provides "
                    "matmul; otherwise gather it with jax.device_put(array, jax.devices()[0])",
                )
        return None

    def describe(self, array: Any) -> ArrayView:
        """Return the view of an array; in host memory, after waiting for its elements."""
        dtype = FROM_NUMPY.get(array.dtype) or dtype_from_name(str(array.dtype))
        is_traced = isinstance(array, self._jax.core.Tracer)
        try:
            platform = "several"
            if not is_traced:
                platform = self._platform(array.device)
            # Waits for the elements and shares their memory.
            host = None
            if platform == "cpu":
                host = np.asarray(array)
        except RuntimeError as error:
            raise ArrayError(f"the JAX array cannot be read: {error}") from error
        if platform == "several":
            return ArrayView.description(dtype, tuple(map(stand_in, array.shape)))
        if host is None:
            # By __dlpack_device__: array.device is the GPU also for an array in pinned host memory.
            return _import(array, self.current_stream(device_of(array)))
        if not host.flags.c_contiguous and data_pointer(host) != array.unsafe_buffer_pointer():
            return host_view(host, "its layout on the device is not row-major")
        return host_view(host)

    def writable_view(self, array: Any) -> NoReturn:
        """Raise ArrayError: JAX arrays are immutable."""
        raise ArrayError("JAX arrays are immutable; omit out=")

    def current_stream(self, device: Device) -> int | None:
        if is_served(device):
            stream: int = provider(device).own_stream(device)
            return stream
        return None

    def allocate(self, shape: Shape, dtype: DType, device: Device, like: Any) -> ArrayView:
        """Return the view of new memory that JAX can import: a NumPy array, or a DeviceArray on a GPU."""
        self.check_result(dtype)
        if device != CPU:
            stream = provider(device).own_stream(device)
            return DeviceArray(shape, dtype, device, stream).view()
        # XLA's CPU client copies arrays that are not aligned to a cache line.
        return host_view(aligned_empty(shape, NUMPY_DTYPES[dtype]))

    def check_result(self, dtype: DType) -> None:
        """Raise DTypeError for a type of 64 bits that JAX's configuration disables."""
        if dtype in _64_BIT and not self._jax.config.jax_enable_x64:
            raise DTypeError(
                f"the result would be {dtype}, but 64-bit types are disabled in JAX; enable them with "
                'jax.config.update("jax_enable_x64", True), or pass out_dtype='
            )

    def wrap(self, buffer: Any, *operands: Any) -> Any:
        """Return a filled buffer as a JAX array, committed to a device if an operand is, as by ``jax.numpy.matmul``."""
        committed = [x for x in operands if type(x) is type(operands[0]) and x.committed]
        like = next(iter(committed or operands), None)
        adopt = self._jax.dlpack.from_dlpack
        if type(buffer) is DeviceArray:  # its capsule has the device, and makes JAX's stream wait
            result = adopt(buffer)
        elif like is None or like.device == self._first_cpu():
            result = adopt(DLPackArray(buffer))  # 6 us faster than with device=
        else:
            result = adopt(DLPackArray(buffer), device=like.device)
        if committed or like is None:
            return result
        return _uncommitted(result)


def _import(array: Any, stream: int | None) -> ArrayView:
    """Return the view of an array after making a stream wait for it, or the host if JAX's client cannot."""
    try:
        return import_array(array, stream)
    except ArrayError as error:
        if "UNIMPLEMENTED" not in str(error):
            raise
    array.block_until_ready()
    return import_array(array)


def _uncommitted(array: Any) -> Any:
    """Return an imported array as an uncommitted one on the same memory; JAX has no public function for this."""
    try:
        return type(array)(array.aval, array.sharding, [array], committed=False, _skip_checks=True)
    except (TypeError, AttributeError):
        return array
