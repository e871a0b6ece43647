"""The backend of the CPU; :func:`prepare` returns the executor of a plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from lowprec.arrays import ArrayView, Device
from lowprec.arrays.numpy_library import NUMPY
from lowprec.backends.cpu import library, numpy_products, products  # noqa: F401 - the executors of kernel rows
from lowprec.backends.cpu.device import capabilities as capabilities
from lowprec.backends.cpu.device import info as info
from lowprec.backends.execution import AlgorithmTiming, Arguments, ExecutionInfo, Executor, imported
from lowprec.formats import DType
from lowprec.planning import GemmPlan


def prepare(plan: GemmPlan) -> Executor:
    """Return the function that executes a plan for this CPU; safe to call from several threads at once."""
    make: Callable[[GemmPlan], Executor] = imported(plan.kernel_row.executor)
    return _nothing if 0 in plan.out_shape else make(plan)


def _nothing(_: Arguments) -> None:
    """Execute a product with an empty result."""


def temporary(
    shape: tuple[int, ...], dtype: DType, device: Device, stream: int = 0
) -> AbstractContextManager[ArrayView]:
    """Return a new row-major array in host memory."""
    return nullcontext(NUMPY.allocate(shape, dtype, device, None))


def release_memory() -> None:
    """Return unused temporary memory to the system."""
    kernels = library.library()
    if kernels is not None:
        kernels.release_memory()


def staging_dtype(dtype: DType) -> DType:
    """Return the same type: NumPy copies every type."""
    return dtype


def copy(source: ArrayView, out: ArrayView, stream: int = 0) -> None:
    """Write the elements of ``source`` to ``out``, an array of the same shape and dtype."""
    out.ndarray()[...] = source.ndarray()


def stopwatch(arguments: Arguments) -> None:
    """Return None: products are finished when executors return."""


def execution_info(plan: GemmPlan, execute: Executor) -> ExecutionInfo:
    """Return whether units for 16 or 8 bits computed this thread's last product."""
    # Kernels that store rounded operands as float32 use FP32 units.
    return ExecutionInfo(plan.flops > 0 and plan.kernel_row.holds_in is None)


def describe(plan: GemmPlan, arguments: Arguments) -> tuple[tuple[str, str], ...]:
    """Return nothing: the plan describes the kernel completely."""
    return ()


def tune(
    execute: Executor, arguments: Arguments, *, candidates: int, progress: Callable[[int, int], None] | None
) -> tuple[AlgorithmTiming, ...]:
    """Return nothing: the CPU's kernels have no algorithms to choose from."""
    return ()
