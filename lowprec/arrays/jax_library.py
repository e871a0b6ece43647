"""JAX arrays, read in place and made from memory that JAX adopts without a copy.

JAX does not report its stream. On a GPU lowprec uses a stream of its own: JAX makes arrays ready for it, and JAX's
streams wait for it when a result is exported. Clients without that ability ("UNIMPLEMENTED") are served by waiting on
the host.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import numpy as np

from lowprec.arrays.base import Library
from lowprec.arrays.device_memory import DeviceArray, is_served, provider
from lowprec.arrays.dlpack import DLPackArray, device_of, import_array
from lowprec.arrays.numpy_library import aligned_empty, host_view
from lowprec.arrays.view import CPU, FROM_NUMPY, NUMPY_DTYPES, ArrayView, Device, data_pointer
from lowprec.errors import ArrayError, DelegateError, DTypeError
from lowprec.formats import DType, dtype_from_name

#: The target for arrays that JAX traces or that are sharded over several devices.
DELEGATE = "lowprec.jax:matmul"

_64_BIT = frozenset({DType.FLOAT64, DType.COMPLEX128})


class JaxLibrary(Library):
    """JAX: arrays on one device. They are immutable, so they are never an ``out``."""

    name = "jax"
    keeps_owners = True
    has_weak_types = True

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        self._is_cpu = functools.cache(_is_cpu)
        self._first_cpu = functools.cache(lambda: jax.devices("cpu")[0])

    def check_type(self, array: Any) -> None:
        """Raise for tracers, whose products JAX computes."""
        if isinstance(array, self._jax.core.Tracer):
            raise DelegateError(
                f"a JAX tracer ({type(array).__name__}) has no data: inside jit, grad, vmap and other transforms "
                "lowprec has matmul; call the rest outside, or through jax.pure_callback",
                DELEGATE,
            )

    def view(self, array: Any) -> ArrayView:
        """Return the view of an array, after waiting for it to be computed."""
        if array.dtype not in FROM_NUMPY:
            dtype_from_name(str(array.dtype))
        try:
            # Shares the memory, and waits for it.
            host = np.asarray(array) if self._is_cpu(array.device) else None
        except RuntimeError as error:
            raise ArrayError(f"the JAX array cannot be read: {error}") from error
        if host is None:
            # Each array is asked: one in pinned memory of the host also names the GPU as its device.
            return _import(array, self.current_stream(device_of(array)))
        if not host.flags.c_contiguous and data_pointer(host) != array.unsafe_buffer_pointer():
            return host_view(host, "its layout on the device is not row-major")
        return host_view(host)

    def writable_view(self, array: Any) -> NoReturn:
        """Refuse JAX arrays."""
        raise ArrayError("JAX arrays are immutable and cannot be out; omit out=")

    def current_stream(self, device: Device) -> int | None:
        """Return lowprec's own stream of a GPU."""
        return provider(device).own_stream(device) if is_served(device) else None

    def allocate(self, shape: tuple[int, ...], dtype: DType, device: Device, like: Any) -> ArrayView:
        """Return the view of memory that JAX can adopt: a NumPy array, on a GPU one for :meth:`current_stream`.

        Raises DeviceError if lowprec has no memory on the device, DTypeError for 64-bit types that JAX has disabled.
        """
        if dtype in _64_BIT and not self._jax.config.jax_enable_x64:
            raise DTypeError(
                f"the result would be {dtype}, but JAX has 64-bit types switched off; enable them with "
                'jax.config.update("jax_enable_x64", True), or pass out_dtype='
            )
        if device != CPU:
            stream = provider(device).own_stream(device)
            return DeviceArray(shape, dtype, device, stream).view()
        # XLA's CPU client copies what does not begin with a cache line.
        return host_view(aligned_empty(shape, NUMPY_DTYPES[dtype]))

    def wrap(self, buffer: Any, *operands: Any) -> Any:
        """Return the JAX array that adopts a filled buffer.

        As from ``jax.numpy.matmul``, it is committed to the device of the committed operands; without any it is
        uncommitted, on the device of the first. On a CPU device other than JAX's first, JAX copies it.
        """
        committed = [x for x in operands if type(x) is type(operands[0]) and x.committed]
        like = next(iter(committed or operands), None)
        adopt = self._jax.dlpack.from_dlpack
        if type(buffer) is DeviceArray:  # it names its device itself, and has JAX's stream wait
            result = adopt(buffer)
        elif like is None or like.device == self._first_cpu():
            result = adopt(DLPackArray(buffer))  # 6 us less than with a device
        else:
            result = adopt(DLPackArray(buffer), device=like.device)
        return result if committed or like is None else _uncommitted(result)


def _import(array: Any, stream: int | None) -> ArrayView:
    """Return the view of an array, for which a stream waits; where JAX's client makes none wait, the host does."""
    try:
        return import_array(array, stream)
    except ArrayError as error:
        if "UNIMPLEMENTED" not in str(error):
            raise
    array.block_until_ready()
    return import_array(array)


def _is_cpu(device: Any) -> bool:
    platform: str | None = getattr(device, "platform", None)
    if platform is None:
        raise DelegateError(
            f"the JAX array is spread over several devices ({device}), where lowprec has matmul; else gather it with "
            "jax.device_put(array, jax.devices()[0])",
            DELEGATE,
        )
    return platform == "cpu"


def _uncommitted(array: Any) -> Any:
    """Return the array, which DLPack has committed to its device, uncommitted on the same memory.

    No public function of JAX does this without a copy. If JAX's class changes, the array stays committed.
    """
    try:
        return type(array)(array.aval, array.sharding, [array], committed=False, _skip_checks=True)
    except (TypeError, AttributeError):
        return array
