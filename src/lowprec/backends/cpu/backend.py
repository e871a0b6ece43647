"""Executes plans on the CPU.

:func:`prepare` turns a plan into a function of the operands. All decisions were made in the plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from lowprec.arrays import ArrayView, Device, library_of
from lowprec.backends.cpu import fp32_units, tiles
from lowprec.backends.cpu.mkl import Matrix, loaded_mkl
from lowprec.backends.cpu.stacks import has_epilogue
from lowprec.backends.execution import Arguments, Executor, Ran, Timed
from lowprec.formats import DType
from lowprec.planning import GemmPlan, Kernel

__all__ = [
    "allocate",
    "aside_dtype",
    "copy",
    "describe",
    "prepare",
    "ran",
    "stopwatch",
    "tune",
]

#: Stands for NumPy, in whose arrays the backend computes.
_ANY = np.empty(0)

#: dtypes that ``numpy.matmul`` multiplies with a BLAS.
_BLAS_DTYPES = (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)


def prepare(plan: GemmPlan) -> Executor:
    """Return the function that executes a plan.

    Parameters
    ----------
    plan : GemmPlan
        A plan for this CPU.

    Returns
    -------
    Executor
        Safe to call from several threads at once.
    """
    if 0 in plan.out_shape:
        return _nothing
    if plan.kernel in fp32_units.MULTIPLY or plan.layout.k == 0:
        if _is_plain(plan):
            return _PLAIN[plan.kernel](plan)
        return functools.partial(fp32_units.execute, plan)
    return functools.partial(tiles.execute, plan)


def _is_plain(plan: GemmPlan) -> bool:
    """Whether one call of a library on the arrays as they are is all that the plan asks for."""
    problem, layout = plan.problem, plan.layout
    return (
        plan.kernel in _PLAIN
        and layout.k > 0
        and (layout.batch_shape == () or plan.kernel is Kernel.NUMPY)
        and (not layout.collapsed or plan.kernel is Kernel.MKL)
        and plan.compute_dtype in _BLAS_DTYPES
        and problem.a.dtype is problem.b.dtype is plan.out_dtype
        and fp32_units.rounding_format(plan) is None
        and not has_epilogue(plan)
        and all(x.blas_expressible for x in (layout.a, layout.b, layout.out))
    )


def _plain_numpy(plan: GemmPlan) -> Executor:
    def execute(arguments: Arguments) -> None:
        a, b, out = arguments[:3]
        with np.errstate(all="ignore"):
            np.matmul(a.ndarray(), b.ndarray(), out=out.ndarray())

    return execute


def _plain_mkl(plan: GemmPlan) -> Executor:
    layout = plan.layout
    matrices = [
        Matrix(x.order == "row", x.leading_dimension or 1) for x in (layout.a, layout.b, layout.out)
    ]
    product = loaded_mkl().product(plan.out_dtype.label, layout.m, layout.n, layout.k, *matrices)

    def execute(arguments: Arguments) -> None:
        a, b, out = arguments[:3]
        product(a.address, b.address, out.address)

    return execute


#: Plans that need no more than one call of the library.
_PLAIN: dict[Kernel, Callable[[GemmPlan], Executor]] = {
    Kernel.NUMPY: _plain_numpy,
    Kernel.MKL: _plain_mkl,
}


def _nothing(_: Arguments) -> None:
    """Compute a result that has no elements."""


def allocate(shape: tuple[int, ...], dtype: DType, device: Device, stream: int = 0) -> ArrayView:
    """Return a new row-major array in host memory."""
    return library_of(_ANY).allocate(shape, dtype, device)


def aside_dtype(dtype: DType) -> DType:
    """Return the same type: NumPy copies all."""
    return dtype


def copy(source: ArrayView, out: ArrayView, stream: int = 0) -> None:
    """Write the elements of ``source`` to ``out``, an array of the same shape and dtype."""
    out.ndarray()[...] = source.ndarray()


def stopwatch(arguments: Arguments) -> None:
    """Return None: the host's clock tells, because a product is done when its executor returns."""


def ran(plan: GemmPlan, execute: Executor) -> Ran:
    """Return whether this thread's last product ran on tile units; where a part of it fell back, it did not."""
    by_tiles = isinstance(execute, functools.partial) and execute.func is tiles.execute
    return Ran(by_tiles and not tiles.fell_back())


def describe(plan: GemmPlan, arguments: Arguments) -> tuple[tuple[str, str], ...]:
    """Return nothing: the plan itself says all that there is to say."""
    return ()


def tune(
    execute: Executor,
    arguments: Arguments,
    *,
    candidates: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[Timed, ...]:
    """Return nothing: the CPU's kernels have no algorithms to choose from."""
    return ()
