"""Handles of cuBLAS for users who call it themselves, and the controller of their math mode.

cuBLASLt has no math mode: the compute type of each product decides. A cuBLAS handle has one, and it governs the
functions that name no compute type (``cublasSgemm`` and what is built on them: solvers, for example). Source: the
cuBLAS documentation, ``cublasMath_t``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lowprec.backends.cuda import bindings, runtime
from lowprec.backends.cuda.handles import HandlePool
from lowprec.errors import DeviceError
from lowprec.modes import MathMode
from lowprec.policy import register_controller
from lowprec.policy.protocol import Tier

#: ``cublasMath_t`` by math mode.
_MATH = {MathMode.FP32: 0, MathMode.FP32_PEDANTIC: 2, MathMode.TF32: 3}

#: Flag that may be or-ed to each: sums of split products stay in FP32.
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16

#: The ``cublasMath_t`` with which a handle starts: that of the open block, so that one made inside has it too.
_at_start = 0


def _create() -> int:
    handle = bindings.create_handle("cublas")
    try:
        if _at_start:
            bindings.set_math_mode(handle, _at_start)
    except BaseException:
        bindings.destroy_handle(handle, "cublas")
        raise
    return handle


_pool = HandlePool(_create)


def cublas_handle(device: int | None = None) -> int:
    """Return lowprec's cuBLAS handle of this thread, for calling cuBLAS yourself.

    ``fp32_guard`` and ``math_mode(..., frameworks=True)`` act on it: they save its math mode, set it, and put it back.
    The handle stays lowprec's: set its stream, its workspace and its math mode as you like, and do not destroy it.

    Parameters
    ----------
    device : int, optional
        Index of the GPU, which must be the current one of the thread; by default the current one.

    Returns
    -------
    int
        A ``cublasHandle_t``: what ctypes, Cython and ``nvmath.bindings.cublas`` take.

    Raises
    ------
    DeviceError
        If there is no driver or no such device, or it is not the current one.
    BackendError
        If cuBLAS or its Python bindings are missing.

    Examples
    --------
    >>> import lowprec
    >>> try:
    ...     handle = lowprec.cublas_handle()
    ... except (lowprec.DeviceError, lowprec.BackendError):
    ...     handle = None  # there is no GPU here, or nothing to reach it by
    """
    current = max(runtime.current_device(), 0)  # the first one until the thread has chosen
    if device is not None and device != current:
        runtime.properties(device)
        raise DeviceError(
            f"cuda:{device} is not the current device of this thread, cuda:{current} is; make it the current one first"
        )
    return _pool.handle(current)


_AT_START = "math_mode of new handles"


class CublasController:
    """The math modes of the handles that :func:`cublas_handle` handed out, of all threads."""

    name = "cublas"
    module = "lowprec.backends.cuda.cublas"
    tier = Tier.PROCESS
    switches: Mapping[str, str] = MappingProxyType({
        "math_mode": "calls of cuBLAS without a compute type, on handles of lowprec.cublas_handle()"
    })  # fmt: skip
    modes = tuple(_MATH)

    def save(self) -> dict[str, Any]:
        """Return each handle's ``cublasMath_t`` as it is, and that of handles to come."""
        return {_AT_START: _at_start, **self.describe()}

    def set_mode(self, mode: MathMode) -> dict[str, Any]:
        """Set each handle's math mode; the flag about reductions stays as it is."""
        global _at_start
        _at_start = _MATH[mode]
        for handle in tuple(_pool.devices):
            flags = bindings.math_mode(handle) & _DISALLOW_REDUCED_PRECISION_REDUCTION
            bindings.set_math_mode(handle, _MATH[mode] | flags)
        return self.save()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put each handle's ``cublasMath_t`` back; one that was made inside the block gets that of new handles."""
        global _at_start
        _at_start = saved[_AT_START]
        for handle in tuple(_pool.devices):
            bindings.set_math_mode(handle, saved.get(_name(handle), _at_start))

    def describe(self) -> dict[str, Any]:
        """Return each handle's ``cublasMath_t`` as it is."""
        return {_name(handle): bindings.math_mode(handle) for handle in tuple(_pool.devices)}


def _name(handle: int) -> str:
    return f"math_mode of handle {handle:#x}"


register_controller(CublasController())
