"""The backend of the CPU; :func:`prepare` returns the executor of a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from lowprec.arrays import ArrayView, Device
from lowprec.arrays.numpy_library import NUMPY
from lowprec.backends.cpu import (
    library,
    numpy_execution,
    numpy_products,
    products,
    quantized_products,
)
from lowprec.backends.cpu.device import capabilities as capabilities
from lowprec.backends.cpu.device import info as info
from lowprec.backends.cpu.kernel_codes import reordered as reordered
from lowprec.backends.interface import AlgorithmTiming, Arguments, Executor
from lowprec.formats import DType
from lowprec.planning import GemmPlan


def prepare(plan: GemmPlan) -> Executor:
    if 0 in plan.out_shape:
        return lambda _: None
    if not plan.layout.k or plan.problem.ignores_product:  # k or alpha is zero
        return functools.partial(numpy_execution.execute, plan, numpy_execution.set_to_zero)
    if plan.quantized and any(rule and rule.across for rule in plan.quantized.rules):
        return quantized_products.with_numbers_of_forward(plan, prepare(plan.quantized.inner))
    if plan.kernel_row.packs:
        return products.prepare(plan)
    if plan.quantized is not None:
        return quantized_products.prepare(plan)
    return numpy_products.prepare(plan)


def temporary(
    shape: tuple[int, ...], dtype: DType, device: Device, stream: int = 0
) -> AbstractContextManager[ArrayView]:
    return nullcontext(NUMPY.allocate(shape, dtype, device, None))


def release_memory() -> None:
    kernels = library.library()
    if kernels is not None:
        kernels.release_memory()


def staging_dtype(dtype: DType) -> DType:
    return dtype


def copy(source: ArrayView, out: ArrayView, stream: int = 0) -> None:
    out.ndarray()[...] = source.ndarray()


def stopwatch(arguments: Arguments) -> None:
    """Return None: products are finished when executors return."""


def execution_info(plan: GemmPlan, execute: Executor) -> tuple[bool, None]:
    # Kernels that store rounded operands as float32 use FP32 units.
    return plan.flops > 0 and plan.kernel_row.holds_in is None, None


def describe(plan: GemmPlan, arguments: Arguments) -> tuple[tuple[str, str], ...]:
    return ()


def tune(
    execute: Executor,
    arguments: Arguments,
    *,
    candidates: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[AlgorithmTiming, ...]:
    return ()
