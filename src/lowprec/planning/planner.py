"""From a problem, a device and a mode to a plan. Cached."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from math import prod
from typing import TYPE_CHECKING

from lowprec.errors import ModeError, UnsupportedError
from lowprec.formats import FLOAT16, FLOAT32, ComputeType, DType, NumberFormat
from lowprec.modes import TABLE, MathMode, mode_names, row
from lowprec.planning.advice import advise
from lowprec.planning.bounds import MAX_K_INT8, error_bound, holds, operand_format
from lowprec.planning.costs import expected_cost
from lowprec.planning.kernels import Capabilities, KernelRow, choose_kernel, format_name
from lowprec.planning.layout import (
    GemmLayout,
    OperandSpec,
    addend_layout,
    gemm_layout,
    stacked_layout,
    with_rows_copied,
)
from lowprec.planning.plan import Copy, GemmPlan
from lowprec.planning.problem import GemmProblem, check_epilogue, common_dtype, result_dtype
from lowprec.planning.reasons import Reason, Why
from lowprec.planning.schedule import Product, make_schedule
from lowprec.planning.split_bounds import chunk_for

if TYPE_CHECKING:  # what only cuBLASLt needs is imported with the first product for it
    from lowprec.planning.calls import CublasLtCall

PLAN_CACHE_SIZE = 1024

#: Columns of the result from which a copy of ``a`` pays, and multiplications up to which a product is small for that.
_COLUMNS_PER_COPY, _SMALL_PRODUCT = 32, 1 << 26


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
    if mode is MathMode.FP32_EMULATED:
        return replace(_emulated(problem, capabilities), mode=mode)
    compute_dtype = common_dtype(problem, capabilities)
    out_dtype = result_dtype(problem, compute_dtype)
    layout = gemm_layout(problem.a, problem.b, problem.out, out_dtype)
    check_epilogue(problem, compute_dtype, layout)
    _check_sums(compute_dtype, layout.k, problem.k_chunk)
    fmt = operand_format(mode, compute_dtype)
    a_exact, b_exact = _is_exact(problem.a, fmt), _is_exact(problem.b, fmt)
    has_effect = compute_dtype.is_single_precision
    rounded = (has_effect and not a_exact, has_effect and not b_exact)
    products = make_schedule(row(mode), rounded, layout.k, problem.k_chunk)
    choose = partial(
        choose_kernel,
        format_name(fmt), capabilities,
        is_complex=compute_dtype.is_complex,
        products=len(products),
        is_chunked=any(x.k_stop - x.k_start < layout.k for x in products),
    )  # fmt: skip
    choice, rows = choose(layout), with_rows_copied(layout)
    if rows is not layout and choice.kernel.blas and _pays_to_copy(layout):
        # What takes no copies would read strides that there are not.
        as_rows, layout = choose(rows), rows
        choice = as_rows if as_rows.kernel.blas else choice
    kernel = choice.kernel
    schedule = _schedule(mode, rounded, layout, problem.k_chunk, capabilities, kernel)
    if kernel.is_cublaslt:
        layout = _with_addend_in_reach(problem, layout)
    compute_type, multiplied = _compute(mode, compute_dtype)
    plan = GemmPlan(
        problem=problem, capabilities=capabilities, mode=mode, scheme=mode, mode_has_effect=has_effect,
        layout=layout, compute_dtype=compute_dtype, out_dtype=out_dtype, out_shape=layout.out_shape,
        operand_format=fmt, rounded=rounded, multiplied_dtype=multiplied, cublas_compute_type=compute_type,
        schedule=schedule, kernel_row=kernel, passed_over=choice.passed_over, fallback=choice.fallback,
        copies=(),
        flops=(8 if compute_dtype.is_complex else 2) * layout.batch_count * layout.m * layout.n * layout.k,
        bytes_moved=_bytes_moved(problem, out_dtype, layout),
        advice=(),
        bound=error_bound(
            mode, compute_dtype, out_dtype, layout.k, kernel, a_exact=a_exact, b_exact=b_exact,
            capability=_capability(kernel, capabilities),
            schedule=schedule, elements=layout.batch_count * layout.m * layout.n,
        ),
    )  # fmt: skip
    call = _call(plan)
    copies = _copies_of_call(call) if kernel.is_cublaslt else _copies(plan)
    return replace(plan, call=call, copies=copies, advice=_advice(plan, call))


def _pays_to_copy(layout: GemmLayout) -> bool:
    """Whether one product of a copy of ``a`` is faster than many small ones: there are enough columns to use it."""
    return layout.n >= _COLUMNS_PER_COPY and layout.m * layout.n * layout.k <= _SMALL_PRODUCT


def _call(plan: GemmPlan) -> CublasLtCall | None:
    if not (plan.kernel_row.is_cublaslt and plan.flops):
        return None
    return _lower()(plan)


@cache
def _lower() -> Callable[[GemmPlan], CublasLtCall]:
    from lowprec.planning.lowering import lower

    return lower


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
        layout.m, layout.n, layout.k, plan.operand_format,
        plan.arithmetic_intensity, plan.capabilities.flops_per_byte,
        plan.kernel_row.cost_per_element if converts else None,
        tensor_cores=plan.capabilities.compute_capability is not None,
    )  # fmt: skip


def _compute(mode: MathMode, compute_dtype: DType) -> tuple[ComputeType, DType]:
    """Return what cuBLASLt is allowed, and the element type of what it multiplies."""
    if not compute_dtype.is_single_precision:
        return compute_dtype.compute_type, compute_dtype
    found = row(mode)
    if found.widens:
        return found.compute_type, found.accumulator(compute_dtype)
    return found.compute_type, found.data or compute_dtype


def _capability(kernel: KernelRow, capabilities: Capabilities) -> tuple[int, int] | None:
    """Return the compute capability of the tensor cores that sum, or are imitated; None where there are none."""
    return kernel.emulates.capability if kernel.emulates else capabilities.compute_capability


def _schedule(
    mode: MathMode,
    rounded: tuple[bool, bool],
    layout: GemmLayout,
    k_chunk: int | None,
    capabilities: Capabilities,
    kernel: KernelRow,
) -> tuple[Product, ...]:
    """Return the products of the mode's pairs of parts; what is not rounded has one part."""
    found, capability = row(mode), _capability(kernel, capabilities)
    if k_chunk is None and capability and any(rounded) and found.parts > 1:
        k_chunk = chunk_for(layout.k, found.operand_format.name, capability)
    return make_schedule(found, rounded, layout.k, k_chunk, concatenates=kernel.concatenates)


def _check_sums(compute_dtype: DType, k: int, k_chunk: int | None) -> None:
    """Raise if a sum may leave its type, or is to be taken apart and cannot be."""
    if compute_dtype is DType.INT8 and k > MAX_K_INT8:
        raise UnsupportedError(
            f"int8 operands with k = {k}: sums of more than {MAX_K_INT8} products may leave int32; "
            "split the inner dimension"
        )
    if k_chunk is not None and compute_dtype.bits == 8:
        raise UnsupportedError(
            f"k_chunk is {k_chunk}, but the operands are {compute_dtype}, whose sums are not taken apart; leave it out"
        )


def _emulated(problem: GemmProblem, capabilities: Capabilities) -> GemmPlan:
    """Return the plan of the fastest scheme whose bound is no worse than that of ``fp32``, which is one of them.

    Its parts hold every bit of a float32, too: what a split loses does not average out, as the rounding errors do of
    which ``fp32``'s bound is made. Schemes in float16 are none: their bounds are of norms, since rows are scaled, and
    ``fp32`` bounds every element. What depends on ``NVIDIA_TF32_OVERRIDE`` is none.
    """
    best = fp32 = plan_gemm(problem, capabilities, MathMode.FP32)
    if not fp32.mode_has_effect:
        return fp32
    for found in TABLE:
        fmt = found.operand_format
        holds_all = found.parts > 1 and found.parts * fmt.precision >= FLOAT32.precision
        if not holds_all or found.uses_tf32 or fmt is FLOAT16:
            continue
        with suppress(UnsupportedError):
            plan = plan_gemm(problem, capabilities, found.mode)
            as_exact = plan.bound.relative <= fp32.bound.relative
            if as_exact and expected_cost(plan) < expected_cost(best):
                best = plan
    return best


def _is_exact(spec: OperandSpec, fmt: NumberFormat | None) -> bool:
    """Whether an operand holds only numbers of the format that is multiplied."""
    return fmt is None or (spec.dtype.format is not None and holds(fmt, spec.dtype.format))


def _copies(plan: GemmPlan) -> tuple[Copy, ...]:
    """Return the copies that strides alone force upon a kernel; a conversion fills a new buffer anyway."""
    if plan.kernel_row.reads_any_strides:
        return ()
    problem, layout, epilogue = plan.problem, plan.layout, plan.accumulator
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
