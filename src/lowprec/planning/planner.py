"""From a problem, a device and a mode to a plan. Cached."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from lowprec.errors import ModeError, UnsupportedError
from lowprec.formats import ComputeType, DType, NumberFormat
from lowprec.modes import MathMode, mode_names, row
from lowprec.planning.advice import advise
from lowprec.planning.bounds import MAX_K_INT8, error_bound, holds, operand_format
from lowprec.planning.kernels import Capabilities, choose_kernel, format_name
from lowprec.planning.layout import (
    GemmLayout,
    OperandSpec,
    addend_layout,
    gemm_layout,
    stacked_layout,
)
from lowprec.planning.plan import Copy, GemmPlan, Product
from lowprec.planning.problem import GemmProblem, check_epilogue, common_dtype, result_dtype
from lowprec.planning.reasons import Reason, Why

if TYPE_CHECKING:  # what only cuBLASLt needs is imported with the first product for it
    from lowprec.planning.calls import CublasLtCall

PLAN_CACHE_SIZE = 1024


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def plan_gemm(problem: GemmProblem, capabilities: Capabilities, mode: MathMode) -> GemmPlan:
    """Return how a product runs on a device in a mode. Cached: the same arguments give the same object.

    Raises DTypeError, ShapeError, ModeError or UnsupportedError, before any work, if the product cannot run.

    Examples
    --------
    >>> from lowprec.planning.kernels import KernelRow
    >>> square = OperandSpec.contiguous(DType.FLOAT32, (256, 256))
    >>> numpy = KernelRow("numpy", "NumPy's BLAS", "module:function", holds_in=DType.FLOAT32)
    >>> plan = plan_gemm(GemmProblem(square, square), Capabilities("cpu", "any", (numpy,)), MathMode.BF16)
    >>> plan.kernel, plan.a_becomes
    ('numpy', 'bfloat16, held in float32')
    """
    if not row(mode).available:
        raise ModeError(
            f"the mode {mode} is not available in this version; choose one of: {mode_names()}"
        )
    compute_dtype = common_dtype(problem, capabilities)
    out_dtype = result_dtype(problem, compute_dtype)
    layout = gemm_layout(problem.a, problem.b, problem.out, out_dtype)
    check_epilogue(problem, compute_dtype, layout)
    if compute_dtype is DType.INT8 and layout.k > MAX_K_INT8:
        raise UnsupportedError(
            f"int8 operands with k = {layout.k}: sums of more than {MAX_K_INT8} products may leave int32; "
            "split the inner dimension"
        )
    fmt = operand_format(mode, compute_dtype)
    a_exact, b_exact = _is_exact(problem.a, fmt), _is_exact(problem.b, fmt)
    has_effect = compute_dtype.is_single_precision
    rounded = (has_effect and not a_exact, has_effect and not b_exact)
    schedule = _schedule(mode, rounded, layout)
    choice = choose_kernel(
        format_name(fmt), capabilities, layout,
        is_complex=compute_dtype.is_complex, products=len(schedule),
    )  # fmt: skip
    kernel = choice.kernel
    if kernel.is_cublaslt:
        layout = _with_addend_in_reach(problem, layout)
    compute_type, multiplied = _compute(mode, compute_dtype)
    plan = GemmPlan(
        problem=problem,
        capabilities=capabilities,
        mode=mode,
        mode_has_effect=has_effect,
        layout=layout,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype,
        out_shape=layout.out_shape,
        operand_format=fmt,
        rounded=rounded,
        multiplied_dtype=multiplied,
        cublas_compute_type=compute_type,
        schedule=schedule,
        kernel_row=kernel,
        passed_over=choice.passed_over,
        fallback=choice.fallback,
        copies=(),
        flops=(8 if compute_dtype.is_complex else 2) * layout.batch_count * layout.m * layout.n * layout.k,
        bytes_moved=_bytes_moved(problem, out_dtype, layout),
        advice=(),
        bound=error_bound(
            mode, compute_dtype, out_dtype, layout.k, kernel, a_exact=a_exact, b_exact=b_exact,
            capability=kernel.emulates.capability if kernel.emulates else capabilities.compute_capability,
        ),
    )  # fmt: skip
    call = _call(plan)
    copies = _copies_of_call(call) if kernel.is_cublaslt else _copies(plan)
    return replace(plan, call=call, copies=copies, advice=_advice(plan, call))


def _call(plan: GemmPlan) -> CublasLtCall | None:
    if not (plan.kernel_row.is_cublaslt and plan.flops):
        return None
    from lowprec.planning.lowering import lower

    return lower(plan)


def _with_addend_in_reach(problem: GemmProblem, layout: GemmLayout) -> GemmLayout:
    """Return a layout in which cuBLASLt's one step from row to row suits the addend, too."""
    if not (problem.has_beta and problem.c and layout.collapsed):
        return layout
    if addend_layout(problem.c, problem.a, problem.b, layout) is None:
        return stacked_layout(problem.a, problem.b, problem.out, layout.out.dtype)
    return layout


def _advice(plan: GemmPlan, call: CublasLtCall | None) -> tuple[Reason, ...]:
    layout = plan.layout
    converts = any(plan.rounded) and (call is None or bool(call.pack_a or call.pack_b))
    return advise(
        layout.m,
        layout.n,
        layout.k,
        plan.operand_format,
        plan.arithmetic_intensity,
        plan.capabilities.flops_per_byte,
        plan.kernel_row.cost_per_element if converts else None,
        tensor_cores=plan.capabilities.compute_capability is not None,
    )


def _compute(mode: MathMode, compute_dtype: DType) -> tuple[ComputeType, DType]:
    """Return what cuBLASLt is allowed, and the element type of what it multiplies."""
    if not compute_dtype.is_single_precision:
        return compute_dtype.compute_type, compute_dtype
    return row(mode).compute_type, row(mode).data or compute_dtype


def _schedule(
    mode: MathMode, rounded: tuple[bool, bool], layout: GemmLayout
) -> tuple[Product, ...]:
    """Return the products of the mode's pairs of parts; what is not rounded has one part."""
    products: list[Product] = []
    for i, j in row(mode).pairs:
        if (rounded[0] or i == 0) and (rounded[1] or j == 0):
            exponent = -row(mode).part_exponent * (i + j)
            products.append(Product(i, j, 0, layout.k, exponent, accumulates=bool(products)))
    return tuple(products)


def _is_exact(spec: OperandSpec, fmt: NumberFormat | None) -> bool:
    """Whether an operand holds only numbers of the format that is multiplied."""
    return fmt is None or (spec.dtype.format is not None and holds(fmt, spec.dtype.format))


def _copies(plan: GemmPlan) -> tuple[Copy, ...]:
    """Return the copies that strides alone force upon a kernel; a conversion fills a new buffer anyway."""
    if plan.kernel_row.reads_any_strides:
        return ()
    problem, layout, epilogue = plan.problem, plan.layout, plan.compute_dtype.accumulator
    copies = []
    operands = (("a", problem.a, layout.a), ("b", problem.b, layout.b))
    for (name, spec, operand), rounded in zip(operands, plan.rounded, strict=True):
        if not operand.blas_expressible and not rounded and spec.dtype is epilogue:
            copies.append(Copy(name, (Reason.of(Why.STRIDES),), spec.stored_bytes))
    out = problem.out
    if out and not layout.out.blas_expressible and out.dtype is epilogue:
        copies.append(Copy("out", (Reason.of(Why.RESULT_STRIDES),), out.stored_bytes))
    return tuple(copies)


def _copies_of_call(call: CublasLtCall | None) -> tuple[Copy, ...]:
    """Return the temporary arrays of a product by cuBLASLt: operands rewritten, a staged result."""
    if call is None:
        return ()
    packs = (("a", call.pack_a), ("b", call.pack_b))
    copies = [Copy(name, (pack.reason,), pack.nbytes) for name, pack in packs if pack]
    if call.staged:
        copies.append(Copy("out", call.staged, call.product_bytes))
    return tuple(copies)


def _bytes_moved(problem: GemmProblem, out_dtype: DType, layout: GemmLayout) -> int:
    addends = (problem.c if problem.has_beta else None, problem.bias)
    read = [problem.a, problem.b, *filter(None, addends)]
    return sum(spec.stored_bytes for spec in read) + out_dtype.itemsize * prod(layout.out_shape)
