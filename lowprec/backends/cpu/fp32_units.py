"""Products on FP32 or FP64 units with operands rounded as the mode requires; every plan can run here.

If operands are split, non-finite elements of the result are recomputed in FP32 from the unsplit operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec.arrays.prepared_view import PackedOperand, PreparedView
from lowprec.arrays.view import NUMPY_DTYPES, data_pointer
from lowprec.backends.cpu import epilogue, gemm, single_products, splitting, team
from lowprec.backends.cpu.buffers import Workspace
from lowprec.backends.cpu.kernel_rows import NUMPY
from lowprec.backends.cpu.scaling import FLOAT16_DIGITS
from lowprec.backends.cpu.splitting import Split
from lowprec.backends.cpu.stacks import Stacks, stacks_of
from lowprec.backends.execution import Arguments, Executor, imported
from lowprec.formats import DType, NumberFormat
from lowprec.modes import row
from lowprec.planning import GemmPlan, KernelRow
from lowprec.planning.prepared import kept_modes

#: Element types of BLAS.
_BLAS_DTYPES = (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan whose kernel has a BLAS."""
    blas = _blas(plan.kernel_row)
    if _is_plain(plan) and blas.takes_whole(plan.layout):
        return blas.call(plan)
    general = functools.partial(execute, plan)
    if blas is not gemm.OPENBLAS or plan.kernel_row.emulates or plan.split != (1, 1):
        return general
    to = FLOAT16_DIGITS if any(plan.scaled) else rounding_format(plan)
    return single_products.prepare(plan, to, general) or general


def _blas(kernel: KernelRow) -> gemm.Blas:
    found: gemm.Blas = imported(kernel.blas)
    return found


def rounding_format(plan: GemmPlan) -> NumberFormat | None:
    """Return the format to which the mode rounds the operands, None for no rounding."""
    fmt = plan.operand_format
    return fmt if plan.mode_has_effect and fmt is not plan.accumulator.format else None


def _is_plain(plan: GemmPlan) -> bool:
    problem, layout = plan.problem, plan.layout
    return (
        plan.compute_dtype in _BLAS_DTYPES
        and problem.a.dtype is problem.b.dtype is plan.out_dtype
        and plan.accumulator is plan.compute_dtype
        and rounding_format(plan) is None
        and len(plan.schedule) == 1
        and not problem.has_epilogue
        and all(x.blas_expressible for x in (layout.a, layout.b, layout.out))
    )


def execute(plan: GemmPlan, arguments: Arguments) -> None:
    """Execute a plan with the BLAS of its kernel; also for an inner dimension of 0."""
    kept = arguments.b if type(arguments.b) is PreparedView else None
    if kept is not None and kept.mode not in kept_modes(plan):
        kept = None
    stacks = stacks_of(plan, arguments)
    if kept or stacks.out.ndim == 2:
        execute_stacks(plan, plan.kernel_row, arguments, stacks, kept)
    else:
        team.share(lambda x: execute_stacks(plan, plan.kernel_row, arguments, x, kept), _slices(stacks))


def _slices(stacks: Stacks) -> list[Stacks]:
    a, b, out, c, bias = stacks
    each = max([x.shape[-2] * x.shape[-1] for x in (a, b, out)])
    if out.ndim < 3 or each > splitting.SMALL_PRODUCT or not a.ndim == b.ndim == out.ndim or 1 in (len(a), len(b)):
        return [stacks]
    step = max(1, splitting.SLICE * len(out) // max(1, a.size, b.size, out.size))
    found = []
    for i in range(0, len(out), step):
        part = slice(i, i + step)
        found.append(Stacks(a[part], b[part], out[part], None if c is None else c[part], bias))
    return found


def execute_stacks(
    plan: GemmPlan, kernel: KernelRow, arguments: Arguments, stacks: Stacks, kept: PreparedView | None = None
) -> None:
    """Execute a plan, or a slice of its batch, with the BLAS of ``kernel``, the plan's own or its fallback.

    ``kept`` is the view of a prepared ``b``, which caches its rounded or split copy.
    """
    with_epilogue(plan, arguments, stacks, lambda out: _sum_products(plan, kernel, stacks.a, stacks.b, out, kept))


def apply_epilogue(plan: GemmPlan, arguments: Arguments, product: Any, stacks: Stacks) -> None:
    """Apply the plan's epilogue to ``product`` (overwritten) and write ``stacks.out``."""
    epilogue.apply(
        product,
        stacks.out,
        alpha=arguments.alpha,
        beta=arguments.beta,
        c=stacks.c,
        bias=stacks.bias,
        activation=plan.problem.activation,
    )


def with_epilogue(plan: GemmPlan, arguments: Arguments, stacks: Stacks, multiply: Callable[[Any], None]) -> None:
    """Call ``multiply`` with an array for the product, in the accumulator's dtype, and apply the epilogue."""
    dtype = NUMPY_DTYPES[plan.accumulator]
    # ``c`` may be ``out`` itself, so the product must not overwrite it before it is read.
    if stacks.out.dtype == dtype and stacks.c is None:
        multiply(stacks.out)
        if plan.problem.has_epilogue:
            apply_epilogue(plan, arguments, stacks.out, stacks)
        return
    with Workspace() as workspace:
        product = workspace.array(stacks.out.shape, dtype)
        multiply(product)
        apply_epilogue(plan, arguments, product, stacks)


def _sum_products(plan: GemmPlan, kernel: KernelRow, a: Any, b: Any, out: Any, kept: PreparedView | None) -> None:
    if a.shape[-1] == 0:
        out[...] = 0
        return
    multiply = _blas(kernel).multiply
    if plan.compute_dtype is DType.INT8:
        gemm.multiply_int8(multiply, a, b, out)
        return
    is_whole = len(plan.schedule) == 1 and plan.split == (1, 1)
    if is_whole and not kernel.emulates:
        with Workspace() as workspace:
            if kept is None:
                x, y = whole_operands(plan, (a, b), out.dtype, workspace)
            else:
                (x,) = whole_operands(plan, (a,), out.dtype, workspace)
                y = _kept_split(plan, b, out.dtype, kept)
            multiply(x.parts[0], y.parts[0], out)
            splitting.unscale(out, x, y)
        return
    with Workspace() as workspace:
        split_a = split_operand(plan, a, 0, out.dtype, workspace)
        split_b = (
            split_operand(plan, b, 1, out.dtype, workspace) if kept is None else _kept_split(plan, b, out.dtype, kept)
        )
        term = workspace.array(out.shape, out.dtype)
        for product in plan.schedule:
            x = split_a.parts[product.a_part][..., product.k_start : product.k_stop]
            y = split_b.parts[product.b_part][..., product.k_start : product.k_stop, :]
            to = term if product.accumulates else out
            multiply(x, y, to)
            with np.errstate(all="ignore"):
                if product.factor != 1:
                    to *= to.dtype.type(product.factor)
                if product.accumulates:
                    out += term
        splitting.unscale(out, split_a, split_b)
    if not is_whole and max(plan.split) > 1:
        recompute_non_finite(kernel, a, b, out)


def whole_operands(
    plan: GemmPlan, arrays: tuple[Any, ...], dtype: np.dtype[Any], workspace: Workspace, first: int = 0
) -> list[Split]:
    """Return operands in one part: ``a`` and ``b``, or ``b`` alone if ``first`` is 1."""
    if any(plan.scaled):
        return splitting.scaled_where_needed(arrays, dtype, row(plan.scheme), workspace, first)
    return [Split([x]) for x in splitting.rounded(arrays, dtype, rounding_format(plan), workspace)]


def split_operand(plan: GemmPlan, x: Any, operand: int, dtype: np.dtype[Any], workspace: Workspace) -> Split:
    """Return an operand (0 for ``a``, 1 for ``b``) as the plan splits it."""
    fmt = rounding_format(plan)
    axis = (-1, -2)[operand] if plan.scaled[operand] else None
    return splitting.split(x, dtype, row(plan.scheme), fmt, plan.split[operand], axis, workspace)


def _kept_split(plan: GemmPlan, b: Any, dtype: np.dtype[Any], kept: PreparedView) -> Split:
    """Return the cached split of a prepared operand, made in the first product."""
    emulates = plan.kernel_row.emulates
    how = (plan.scheme, rounding_format(plan), plan.split[1], plan.scaled[1], emulates, dtype)
    key = (*how, data_pointer(b), b.shape, b.strides)

    def make() -> PackedOperand:
        with Workspace() as workspace:
            if plan.split[1] > 1 or emulates:
                parts, exponents = split_operand(plan, b, 1, dtype, workspace)
            else:
                ((parts, exponents),) = whole_operands(plan, (b,), dtype, workspace, first=1)
            made = Split([part.copy(order="K") for part in parts], exponents)
        return PackedOperand(made, sum(part.nbytes for part in made.parts))

    found: Split = kept.packed_operand(key, make)
    return found


def recompute_non_finite(kernel: KernelRow, a: Any, b: Any, out: Any) -> None:
    """Recompute the non-finite elements of ``out`` in FP32, with the BLAS of a kernel."""
    lost = ~np.isfinite(out)
    if not lost.any():
        return
    with Workspace() as workspace:
        x, y = splitting.rounded((a, b), out.dtype, None, workspace)
        product = workspace.array(out.shape, out.dtype)
        _blas(NUMPY if kernel.emulates else kernel).multiply(x, y, product)
        np.copyto(out, product, where=lost)
