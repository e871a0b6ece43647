"""The backend of the CPU; :func:`prepare` returns the executor of a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from lowprec.arrays import CPU, ArrayView, Device
from lowprec.arrays.numpy_library import NUMPY
from lowprec.backends.cpu import buffers, casting, device, fp32_units, numba_import, packed_products
from lowprec.backends.cpu.device import capabilities as capabilities
from lowprec.backends.cpu.device import info as info
from lowprec.backends.cpu.packed import micro_kernels, run
from lowprec.backends.execution import AlgorithmTiming, Arguments, ExecutionInfo, Executor, imported
from lowprec.formats import DType
from lowprec.planning import GemmPlan, plan_gemm

_BY_UNITS = (packed_products.execute, packed_products.execute_job, run.execute, run.execute_batch)


def prepare(plan: GemmPlan) -> Executor:
    """Return the function that executes a plan for this CPU; safe to call from several threads at once."""
    if 0 in plan.out_shape:
        return _nothing
    if plan.layout.k == 0:
        return functools.partial(fp32_units.execute, plan)
    row = plan.kernel_row
    if row.micro_kernel or row.requires == "numba":
        if _numba_has_failed():
            return prepare(_without_numba(plan))
    elif _converts(plan) or plan.problem.activation:
        casting.can_compile()
    make: Callable[[GemmPlan], Executor] = imported(plan.kernel_row.executor)
    return make(plan)


def _converts(plan: GemmPlan) -> bool:
    """Whether numba's kernels are used: operands are rounded, or 16- or 8-bit numbers are read or written."""
    dtypes = (plan.problem.a.dtype, plan.problem.b.dtype, plan.out_dtype)
    return any(plan.rounded) or any(x.bits < 32 for x in dtypes)


def _numba_has_failed() -> bool:
    return bool(numba_import.failure()) or (casting.has_kernels() and numba_import.fails())


def _without_numba(plan: GemmPlan) -> GemmPlan:
    casting.has_kernels.cache_clear()
    micro_kernels.unsupported_reason.cache_clear()
    device.forget()
    return plan_gemm(plan.problem, capabilities(CPU), plan.mode)


def _nothing(_: Arguments) -> None:
    """Execute a product with an empty result."""


def temporary(
    shape: tuple[int, ...], dtype: DType, device: Device, stream: int = 0
) -> AbstractContextManager[ArrayView]:
    """Return a new row-major array in host memory."""
    return nullcontext(NUMPY.allocate(shape, dtype, device, None))


def release_memory() -> None:
    """Return the unused buffers of all threads to the system."""
    buffers.release_all()


def staging_dtype(dtype: DType) -> DType:
    """Return the same type: NumPy copies every type."""
    return dtype


def copy(source: ArrayView, out: ArrayView, stream: int = 0) -> None:
    """Write the elements of ``source`` to ``out``, an array of the same shape and dtype."""
    out.ndarray()[...] = source.ndarray()


def stopwatch(arguments: Arguments) -> None:
    """Return None: products are finished when executors return."""


def execution_info(plan: GemmPlan, execute: Executor) -> ExecutionInfo:
    """Return whether tensor units computed all of this thread's last product."""
    by_kernel = isinstance(execute, functools.partial) and execute.func in _BY_UNITS
    # Kernels that store rounded operands as float32 use FP32 units.
    by_units = by_kernel and plan.kernel_row.holds_in is None
    return ExecutionInfo(by_units and not (plan.fallback and packed_products.fell_back()))


def describe(plan: GemmPlan, arguments: Arguments) -> tuple[tuple[str, str], ...]:
    """Return nothing: the plan describes the kernel completely."""
    return ()


def tune(
    execute: Executor, arguments: Arguments, *, candidates: int, progress: Callable[[int, int], None] | None
) -> tuple[AlgorithmTiming, ...]:
    """Return nothing: the CPU's kernels have no algorithms to choose from."""
    return ()
