"""Products by NumPy: every plan without the compiled library; float64, complex128 and mode ``fp64`` in any case.

Operands are scaled, split and rounded as the plan requires, and multiplied by ``numpy.matmul`` in the accumulator's
type. For Inf, NaN and values that overflow in the format the second part of a split operand is NaN, and so are the
sums, which are recomputed from the unsplit operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec.arrays.view import ArrayView, PackedOperand, data_pointer
from lowprec.backends.cpu.emulation import arithmetic, products
from lowprec.backends.cpu.library import untaken
from lowprec.backends.cpu.numpy_blocks import execute_blocks, execute_scaled
from lowprec.backends.cpu.numpy_execution import execute
from lowprec.backends.cpu.numpy_rounding import Split, components, is_expressible, split
from lowprec.backends.interface import Arguments, Executor
from lowprec.formats import FLOAT8_E4M3FN, FLOAT8_E5M2, DType, NumberFormat
from lowprec.modes import row
from lowprec.planning import GemmPlan
from lowprec.planning.stored import kept_modes
from lowprec.planning.tensor_cores import BLOCK_KINDS

#: Length of sums of int8 products that are exact in float32.
_INT8_CHUNK = 1 << 10


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan."""
    if _is_plain(plan):
        return _matmul
    if plan.compute_dtype is DType.INT8:
        return functools.partial(execute, plan, _multiply_int8)
    kernel = plan.kernel_row
    if kernel.summation == "blocks":
        return functools.partial(execute_blocks, plan)
    if kernel.formats and kernel.formats <= BLOCK_KINDS.keys():
        return functools.partial(execute_scaled, plan)
    times: Callable[[Any, Any, Any], None] = multiply
    if kernel.imitates:
        times = _emulated(plan, *(kernel.formats or ()))
    return functools.partial(execute, plan, functools.partial(_sum_products, times))


def _is_plain(plan: GemmPlan) -> bool:
    problem = plan.problem
    layout = plan.layout
    return (
        problem.a.dtype is problem.b.dtype is plan.out_dtype is plan.accumulator
        and _rounding(plan) is None
        and len(plan.schedule) == 1  # no chunks of k
        and not (problem.has_epilogue or layout.collapsed or plan.kernel_row.imitates)
        and all(x.blas_expressible for x in (layout.a, layout.b, layout.out))
    )


def _matmul(arguments: Arguments) -> None:
    with np.errstate(all="ignore"):
        untaken(
            np.matmul, arguments.a.ndarray(), arguments.b.ndarray(), out=arguments.out.ndarray()
        )


def multiply(a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` by ``numpy.matmul``, whose loop runs over batches; arrays of one dtype, at least 2-D."""
    if not is_expressible(a):
        a = np.ascontiguousarray(a)
    if not is_expressible(b):
        b = np.ascontiguousarray(b)
    if is_expressible(out):
        untaken(np.matmul, a, b, out=out)
    else:
        out[...] = untaken(np.matmul, a, b)


def _multiply_int8(plan: GemmPlan, arguments: Arguments, a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` in int32, exactly, by float32 products over chunks of k."""
    product = np.empty(out.shape, np.float32)
    total = np.zeros(out.shape, np.int32)
    for first in range(0, a.shape[-1], _INT8_CHUNK):
        k = slice(first, first + _INT8_CHUNK)
        multiply(a[..., k].astype(np.float32), b[..., k, :].astype(np.float32), product)
        total += product.astype(np.int32)
    out[...] = total


def _sum_products(
    times: Callable[[Any, Any, Any], None],
    plan: GemmPlan,
    arguments: Arguments,
    a: Any,
    b: Any,
    out: Any,
) -> None:
    dtype = out.dtype
    a_parts, a_exponents = _operand(plan, 0, arguments.a, a, dtype)
    b_parts, b_exponents = _operand(plan, 1, arguments.b, b, dtype)
    term = None
    if len(plan.schedule) > 1:
        term = np.empty(out.shape, dtype)
    for product in plan.schedule:
        k = slice(product.k_start, product.k_stop)
        to = term if product.accumulates else out
        times(a_parts[product.a_part][..., k], b_parts[product.b_part][..., k, :], to)
        if product.factor != 1:
            to *= dtype.type(product.factor)
        if product.accumulates:
            out += to
    lost = None
    if max(plan.split) > 1:
        lost = ~np.isfinite(out)
    exponents = [x for x in (a_exponents, b_exponents) if x is not None]
    if exponents:
        for component in components(out):
            np.ldexp(component, -sum(exponents), out=component)
    if lost is not None and lost.any():
        whole = np.empty(out.shape, dtype)
        multiply(a.astype(dtype, copy=False), b.astype(dtype, copy=False), whole)
        np.copyto(out, whole, where=lost)


def _emulated(plan: GemmPlan, fmt: str) -> Callable[[Any, Any, Any], None]:
    """Return the multiplication by an architecture's tensor cores, in place of :func:`multiply`."""
    architecture = plan.kernel_row.imitates
    assert architecture is not None
    types = plan.problem.a.dtype, plan.problem.b.dtype
    if DType.FLOAT8_E5M2 in types and types[0] is not types[1]:
        model = arithmetic.arithmetic(architecture, FLOAT8_E5M2.name)
        return functools.partial(_multiply_float8, model, *types)
    times = functools.partial(products.multiply, model=arithmetic.arithmetic(architecture, fmt))

    def multiply(a: Any, b: Any, out: Any) -> None:
        if out.dtype.kind != "c":
            out[...] = times(a, b, None)
        else:  # one chain of 2k products per component
            out.real = times(-a.imag, b.imag, times(a.real, b.real, None))
            out.imag = times(a.imag, b.real, times(a.real, b.imag, None))

    return multiply


def _multiply_float8(model: Any, of_a: DType, of_b: DType, a: Any, b: Any, out: Any) -> None:
    """Multiply E4M3 by E5M2 numbers, whose arithmetic is one.

    Numbers of E4M3 are multiplied by a power of two, by which their least exponent becomes that of E5M2, and the sums
    by its inverse.
    """
    least = FLOAT8_E5M2.emin - FLOAT8_E4M3FN.emin
    if of_a is DType.FLOAT8_E4M3FN:
        a = np.ldexp(a, least)
    if of_b is DType.FLOAT8_E4M3FN:
        b = np.ldexp(b, least)
    np.ldexp(products.multiply(a, b, None, model=model), -least, out=out)


def _rounding(plan: GemmPlan) -> NumberFormat | None:
    fmt = plan.operand_format
    if plan.mode_has_effect and fmt is not plan.accumulator.format:
        return fmt
    return None


def _operand(plan: GemmPlan, operand: int, view: ArrayView, x: Any, dtype: np.dtype[Any]) -> Split:
    """Return ``a`` (0) or ``b`` (1) as the plan multiplies it; a prepared ``b`` keeps it from the first product on."""
    axis = None
    if plan.scaled[operand]:
        axis = -1 - operand
    how = dtype, row(plan.runs_as), _rounding(plan), plan.split[operand], axis
    if not view.is_prepared or view.mode not in kept_modes(plan):
        return split(x, *how)

    def make() -> PackedOperand:
        parts, exponents = split(x, *how)
        return (parts, exponents), sum(part.nbytes for part in parts)

    return view.packed_operand((*how, data_pointer(x), x.shape, x.strides), make)  # type: ignore[no-any-return]
