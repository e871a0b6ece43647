"""cuBLAS handles for users' own calls; the module is the controller of their math modes, in all threads.

The math mode of a cuBLAS handle applies to functions without a compute type, such as ``cublasSgemm`` and the solvers
built on it; cuBLASLt has no math mode. Source: the cuBLAS documentation, ``cublasMath_t``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from lowprec.backends.cuda import bindings, runtime
from lowprec.backends.cuda.handles import HandlePool
from lowprec.errors import DeviceError
from lowprec.modes import MathMode
from lowprec.policy import register_controller
from lowprec.util.lock import lock

#: ``cublasMath_t`` by math mode.
_MATH = {MathMode.FP32: 0, MathMode.FP32_PEDANTIC: 2, MathMode.TF32: 3}

#: Flag that may be set in addition: sums of split products stay in FP32.
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16

#: The ``cublasMath_t`` of new and of reused handles.
_at_start = 0
#: Threads that have had each handle.
_uses: Counter[int] = Counter()


def _reset(handle: int) -> None:
    """Set the state of a new handle; the mode that a scope saved for an earlier thread is not restored."""
    _uses[handle] += 1
    with lock:  # no scope begins or ends meanwhile
        bindings.reset_handle(handle, _at_start)


_pool = HandlePool(partial(bindings.create_handle, "cublas"), _reset)


def cublas_handle(device: int | None = None) -> int:
    """Return lowprec's cuBLAS handle of this thread, for direct calls of cuBLAS.

    ``fp32_guard`` and ``math_mode(..., frameworks=True)`` save, set and restore its math mode. The caller may set its
    stream, workspace, and math, pointer and atomics modes, but must not destroy it. When the thread has ended, another
    one may get the handle, in the state of a new one.

    Parameters
    ----------
    device : int, optional
        Index of the GPU, which must be the thread's current device (the default).

    Returns
    -------
    int
        A ``cublasHandle_t``, for ctypes, Cython and ``nvmath.bindings.cublas``.

    Raises
    ------
    DeviceError
        There is no driver or no such device, or the device is not the current one.
    BackendError
        cuBLAS or its Python bindings are missing.

    Examples
    --------
    >>> import lowprec
    >>> try:
    ...     handle = lowprec.cublas_handle()
    ... except (lowprec.DeviceError, lowprec.BackendError):
    ...     handle = None  # no GPU, or no library for it
    """
    current = max(runtime.current_device(), 0)  # device 0 if the thread has not set one
    if device is not None and device != current:
        runtime.properties(device)
        raise DeviceError(
            f"the current device of this thread is cuda:{current}, not cuda:{device}; make cuda:{device} current first"
        )
    return _pool.handle(current)


_AT_START = "math_mode of new handles"


# -- the controller, which is this module ----------------------------------------------------------

name = "cublas"
module = __name__
tier = "process"
switches = {
    "math_mode": "calls of cuBLAS without a compute type, on handles of lowprec.cublas_handle()"
}
modes = tuple(_MATH)


def save() -> dict[str, Any]:
    """Return each handle's ``cublasMath_t``, and that of new handles."""
    return {_AT_START: _at_start, **describe()}


def set_mode(mode: MathMode) -> dict[str, Any]:
    """Set each handle's math mode, keeping the flag for reductions."""
    global _at_start
    _at_start = _MATH[mode]
    for handle in tuple(_pool.devices):
        flags = bindings.math_mode(handle) & _DISALLOW_REDUCED_PRECISION_REDUCTION
        bindings.set_math_mode(handle, _MATH[mode] | flags)
    return save()


def restore(saved: Mapping[str, Any]) -> None:
    """Restore each handle's ``cublasMath_t``; handles created in the block get the value for new handles."""
    global _at_start
    _at_start = saved[_AT_START]
    for handle in tuple(_pool.devices):
        bindings.set_math_mode(handle, saved.get(_name(handle), _at_start))


def describe() -> dict[str, Any]:
    return {_name(handle): bindings.math_mode(handle) for handle in tuple(_pool.devices)}


def _name(handle: int) -> str:
    return f"math_mode of handle {handle:#x}, thread {_uses[handle]}"


register_controller(sys.modules[__name__])
