"""Products on the ordinary floating-point units: round as the mode says, multiply in FP32 (or FP64), finish.

Every plan can run here. A product of two rounded operands is exact in the FP32 fused multiply-add up to the rounding
of the sum, so these are the numbers of the tile units within the rounding of the accumulation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec.backends.cpu import gemm
from lowprec.backends.cpu.convert import round_float32
from lowprec.backends.cpu.stacks import (
    ACCUMULATOR,
    Stacks,
    finish_stacks,
    has_epilogue,
    scratch,
    stacks_of,
)
from lowprec.backends.execution import Arguments
from lowprec.formats import FLOAT32, DType, NumberFormat
from lowprec.modes import row
from lowprec.planning import GemmPlan, Kernel

__all__ = ["MULTIPLY", "execute", "execute_stacks", "rounding_format"]

MULTIPLY: dict[Kernel, Callable[[Any, Any, Any], None]] = {
    Kernel.MKL: gemm.multiply_mkl,
    Kernel.NUMPY: gemm.multiply_numpy,
}


def rounding_format(plan: GemmPlan) -> NumberFormat | None:
    """Return the format to which the mode rounds the operands, None where they stay as they are."""
    fmt = row(plan.mode).operand_format
    return fmt if plan.mode_has_effect and fmt is not FLOAT32 else None


def execute(plan: GemmPlan, arguments: Arguments) -> None:
    """Run a plan whose kernel is MKL or NumPy."""
    execute_stacks(plan, plan.kernel, arguments, stacks_of(plan, arguments))


def execute_stacks(plan: GemmPlan, kernel: Kernel, arguments: Arguments, stacks: Stacks) -> None:
    """Run a plan, or a slice of its batch, on a kernel of this module.

    Parameters
    ----------
    plan : GemmPlan
    kernel : Kernel
        A key of :data:`MULTIPLY`; the plan's own, or a fallback.
    arguments : Arguments
        For the factors.
    stacks : Stacks
        The arrays in matrix form.
    """
    dtype = ACCUMULATOR[plan.compute_dtype]
    # ``c`` may be ``out`` itself, which the product must not overwrite before it was read.
    if stacks.out.dtype == dtype and stacks.c is None:
        _round_multiply(plan, kernel, stacks.a, stacks.b, stacks.out)
        if has_epilogue(plan):
            finish_stacks(plan, arguments, stacks.out, stacks)
        return
    with scratch(stacks.out.shape, dtype) as product:
        _round_multiply(plan, kernel, stacks.a, stacks.b, product)
        finish_stacks(plan, arguments, product, stacks)


def _round_multiply(plan: GemmPlan, kernel: Kernel, a: Any, b: Any, product: Any) -> None:
    if a.shape[-1] == 0:
        product[...] = 0
        return
    multiply = MULTIPLY[kernel]
    if plan.compute_dtype is DType.INT8:
        gemm.multiply_int8(multiply, a, b, product)
        return
    fmt = rounding_format(plan)
    with contextlib.ExitStack() as stack:
        multiply(
            _rounded(a, product.dtype, fmt, stack), _rounded(b, product.dtype, fmt, stack), product
        )


def _rounded(
    x: Any, dtype: np.dtype[Any], fmt: NumberFormat | None, stack: contextlib.ExitStack
) -> Any:
    """Return ``x`` in ``dtype``, its components rounded to ``fmt``; ``x`` itself where nothing changes."""
    if x.dtype == dtype and fmt is None:
        return x
    out = stack.enter_context(scratch(x.shape, dtype))
    if x.dtype != dtype or not x.flags.c_contiguous:
        out[...] = x
        x = out
    if fmt is not None:
        # Flat, since only a contiguous last dimension can be taken for twice as many real numbers.
        source, target = (y.reshape(-1, copy=False).view(np.float32) for y in (x, out))
        round_float32(source, fmt, target)
    return out
