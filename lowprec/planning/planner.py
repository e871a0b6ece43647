"""``plan_gemm``: from a problem, the capabilities of a device and a mode to a plan."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from lowprec.errors import UnsupportedError
from lowprec.formats import BFLOAT16, FLOAT16, FLOAT32, ComputeType, DType, NumberFormat
from lowprec.modes import TABLE, MathMode, Mode, ModeRow, row
from lowprec.planning.bounds import MAX_K_INT8, holds, operand_format
from lowprec.planning.costs import expected_cost
from lowprec.planning.kernels import BLOCKS, Capabilities, KernelRow, choose_kernel, format_name
from lowprec.planning.layout import (
    GemmLayout,
    OperandSpec,
    addend_layout,
    gemm_layout,
    stacked_layout,
)
from lowprec.planning.plan import Copy, GemmPlan, Quantized
from lowprec.planning.problem import (
    GemmProblem,
    block_kind,
    check_epilogue,
    common_dtype,
    result_dtype,
)
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.planning.rounded_operands import (
    in_codes,
    operand_rules,
    piece_length,
    rounded_spec,
    types_on_cpu,
    types_on_gpu,
)
from lowprec.planning.schedule import PartProduct, make_schedule
from lowprec.planning.split_bounds import chunk_for
from lowprec.planning.stored import reads_codes_of_b
from lowprec.planning.tensor_cores import BLOCK_KINDS, accumulation
from lowprec.recipes import Recipe, Rule

PLAN_CACHE_SIZE = 1024


class _Checked(NamedTuple):
    """A problem whose element types, shapes and epilogue are supported on a device."""

    problem: GemmProblem
    capabilities: Capabilities
    compute_dtype: DType  # in which the operands are multiplied
    out_dtype: DType
    layout: GemmLayout


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def plan_gemm(problem: GemmProblem, capabilities: Capabilities, mode: Mode) -> GemmPlan:
    """Return the plan of a product on a device in a mode; raises if the product cannot run."""
    if mode is MathMode.FP32_EMULATED:
        return replace(_emulated(problem, capabilities), mode=mode)
    compute_dtype = common_dtype(problem, capabilities)
    out_dtype = result_dtype(problem, compute_dtype)
    layout = gemm_layout(problem.a, problem.b, problem.out, out_dtype)
    check_epilogue(problem, compute_dtype, layout)
    checked = _Checked(problem, capabilities, compute_dtype, out_dtype, layout)
    if row(mode).quantizes and row(mode).acts(compute_dtype):
        return _quantized(checked, mode)
    return _plan(checked, mode)


def _plan(checked: _Checked, mode: Mode) -> GemmPlan:
    problem, capabilities, compute_dtype, out_dtype, layout = checked
    _check_sums(checked)
    if problem.ignores_product:
        layout = replace(layout, k=0)
    scheme = row(mode)
    acts = scheme.acts(compute_dtype)
    fmt = operand_format(mode, compute_dtype)
    rounded = _rounded(problem, fmt if acts else None)
    operands = _kind_of_blocks(problem, capabilities) or format_name(fmt)
    is_chunked = (problem.k_chunk or layout.k) < layout.k
    emulation = scheme.emulation if acts else None
    kernel, passed_over = choose_kernel(
        operands, capabilities, is_chunked=is_chunked, emulation=emulation
    )
    if kernel.cublas_emulation:
        fmt = compute_dtype.format
        rounded = (False, False)
    has_effect = acts and (compute_dtype.is_single_precision or kernel.cublas_emulation is not None)
    if kernel.is_cublaslt:
        layout = _following_c(problem, layout)
    multiplied, compute_type = _types(scheme, kernel, compute_dtype, has_effect)
    plan = GemmPlan(
        problem=problem,
        capabilities=capabilities,
        mode=mode,
        runs_as=mode,
        mode_has_effect=has_effect,
        layout=layout,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype,
        operand_format=fmt,
        rounded=rounded,
        multiplied_dtype=multiplied,
        cublas_compute_type=compute_type,
        schedule=_schedule(checked, scheme, rounded, kernel, layout.k),
        kernel_row=kernel,
        passed_over=passed_over,
        copies=(),
    )
    return _with_copies(plan)


def _kind_of_blocks(problem: GemmProblem, capabilities: Capabilities) -> str:
    """Return the operands of the kernel that reads codes of blocks; empty if the numbers are multiplied."""
    if _multiplies_integers(problem, capabilities):
        return BLOCKS
    kind = block_kind(problem, capabilities)
    group = BLOCK_KINDS[kind].group if kind else 1
    if (problem.k_chunk or 0) % group:
        raise UnsupportedError(
            f"k_chunk is {problem.k_chunk}, but {kind} adds groups of {group} products; pass a multiple"
        )
    return kind


def _schedule(
    checked: _Checked, scheme: ModeRow, rounded: tuple[bool, bool], kernel: KernelRow, k: int
) -> tuple[PartProduct, ...]:
    """Return the products of parts; tensor cores sum those of split operands, and of FP8, in chunks of k."""
    k_chunk = checked.problem.k_chunk
    if k_chunk is None and kernel.imitates and checked.compute_dtype.is_float8:
        (fmt,) = kernel.formats or ("",)
        model = accumulation(fmt, kernel.imitates.cores)
        k_chunk = (model and model.library_chunk) or None
    capability = checked.capabilities.tensor_cores_of(kernel)
    if k_chunk is None and any(rounded) and scheme.parts > 1 and capability is not None:
        k_chunk = chunk_for(k, scheme.operand_format.name, capability)
    return make_schedule(scheme, rounded, k, k_chunk, concatenates=kernel.concatenates)


def _rounded(problem: GemmProblem, fmt: NumberFormat | None) -> tuple[bool, bool]:
    """Return whether ``a`` and ``b`` are rounded to a format; integers are not."""
    a_format = problem.a.dtype.format
    b_format = problem.b.dtype.format
    if fmt is None or a_format is None or b_format is None:
        return False, False
    return not holds(fmt, a_format), not holds(fmt, b_format)


def _multiplies_integers(problem: GemmProblem, capabilities: Capabilities) -> bool:
    """Whether both operands are multiplied as integers in blocks; tile units multiply FP4 faster as bfloat16."""
    rows = capabilities.kernels
    if not problem.in_integers or problem.k_chunk is not None or rows[0].imitates:
        return False
    if problem.ignores_product or not problem.a.shape[-1]:
        return False
    if not any(row.summation == "blocks" for row in rows):
        return False
    for_bfloat16, _ = choose_kernel(BFLOAT16.name, capabilities)
    if for_bfloat16.summation == "tiles":
        return DType.FLOAT32 in (problem.a.dtype, problem.b.dtype)
    return True


def _following_c(problem: GemmProblem, layout: GemmLayout) -> GemmLayout:
    """Return a layout that is not collapsed if the rows of ``c`` have no single stride."""
    c = problem.c if layout.collapsed and problem.has_beta else None
    if c and addend_layout(c, problem.a, problem.b, layout) is None:
        return stacked_layout(problem.a, problem.b, problem.out, layout.out.dtype)
    return layout


def _quantized(checked: _Checked, mode: Mode) -> GemmPlan:
    """Return the plan of a mode that quantises: that of the rounded numbers, with the rounding in front of it."""
    problem, capabilities, compute_dtype, out_dtype, layout = checked
    a_rule, b_rule = rules = operand_rules(problem, mode)
    if a_rule is None and b_rule is None:
        return replace(_plan(checked, mode), mode_has_effect=False)
    scaled = _of_scaled_numbers(checked, mode)
    codes = in_codes(scaled, rules, capabilities)
    has_kind = codes is not None and block_kind(codes, capabilities) != ""
    if not has_kind and not all(rule is None or rule.has_kernels or rule.across for rule in rules):
        capabilities = _without_kernels(capabilities, mode)
    piece = piece_length(rules, layout.k, problem.k_chunk, mode)
    on_gpu = capabilities.compute_capability is not None
    if on_gpu:
        layout = _layout_on_gpu(problem, layout, b_rule)
        dtypes = types_on_gpu(rules, mode, layout, capabilities, not piece, problem.k_chunk)
        piece = 0
    else:
        dtypes = types_on_cpu(rules, capabilities)
    a, b = map(rounded_spec, (problem.a, problem.b), rules, dtypes)
    rounded = replace(scaled, a=a, b=b)
    if codes is not None and (has_kind or _multiplies_integers(codes, capabilities)):
        rounded = codes
        piece = 0
    inner = _piece_plan(rounded, capabilities, piece, layout.k)
    last = _piece_plan(rounded, capabilities, piece and (layout.k % piece or piece), layout.k)
    plan = replace(
        inner,
        problem=problem,
        mode=mode,
        runs_as=mode,
        mode_has_effect=True,
        layout=layout,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype,
        operand_format=row(mode).operand_format,
        rounded=(a_rule is not None, b_rule is not None),
        quantized=Quantized(rules, inner, piece, last),
    )
    if on_gpu and plan.flops:
        return _lowered(plan)
    return plan


def _of_scaled_numbers(checked: _Checked, mode: Mode) -> GemmProblem:
    """Return the product of numbers with scales; imitated tensor cores with ``fast_accum`` sum all of k at once."""
    problem = replace(checked.problem, out_dtype=checked.out_dtype, has_alpha=True, is_scaled=True)
    is_fast = isinstance(mode, Recipe) and mode.product in mode.fast_accum
    if is_fast and checked.capabilities.kernels[0].imitates:
        return replace(problem, k_chunk=problem.k_chunk or max(checked.layout.k, 1))
    return problem


def _layout_on_gpu(problem: GemmProblem, layout: GemmLayout, b_rule: Rule | None) -> GemmLayout:
    """Return a layout in which each matrix of a stochastically rounded ``b`` has own random bits."""
    layout = _following_c(problem, layout)
    draws = b_rule is not None and b_rule.is_stochastic
    if layout.collapsed and draws and len(problem.b.shape) > 2:
        return stacked_layout(problem.a, problem.b, problem.out, layout.out.dtype)
    return layout


def _without_kernels(capabilities: Capabilities, mode: Mode) -> Capabilities:
    """Return capabilities without compiled kernels, which round to few formats; those of GPUs round to all."""
    if capabilities.compute_capability is not None:
        return capabilities
    if capabilities.kernels[0].imitates is not None:
        raise UnsupportedError(
            f"no tensor cores have the format {mode}; leave the scope of lowprec.emulate"
        )
    return replace(
        capabilities,
        kernels=tuple(kernel for kernel in capabilities.kernels if not kernel.requires),
    )


def _piece_plan(problem: GemmProblem, capabilities: Capabilities, length: int, k: int) -> GemmPlan:
    """Return the plan of the product over a piece of k, into a new float32 array to which it is added.

    A length of 0 is all of k, into the result itself.
    """
    if not length:
        return plan_gemm(problem, capabilities, MathMode.FP32)
    length = min(length, k)
    a = problem.a
    b = problem.b
    out = OperandSpec.contiguous(DType.FLOAT32, stacked_layout(a, b).out_shape)
    shape_b = [*b.shape]
    shape_b[max(len(shape_b) - 2, 0)] = length
    piece = GemmProblem(
        replace(a, shape=(*a.shape[:-1], length), blocks=None),
        replace(b, shape=tuple(shape_b), blocks=None),
        c=out,
        out=out,
        has_alpha=True,
        has_beta=True,
        is_scaled=True,
        ignores_product=problem.ignores_product,
    )
    return plan_gemm(piece, capabilities, MathMode.FP32)


def _with_copies(plan: GemmPlan) -> GemmPlan:
    """Return the plan with the copies that its kernel needs, and the call of cuBLASLt if that is the kernel."""
    if not plan.flops:
        return plan
    if plan.kernel_row.is_cublaslt:
        return _lowered(plan)
    return replace(plan, copies=_widened(plan) or _copies(plan))


def _lowered(plan: GemmPlan) -> GemmPlan:
    """Return the plan with the call of cuBLASLt, and copies for operands whose codes it does not read."""
    # With the first plan for cuBLASLt.
    from lowprec.planning.lowering.call import lower
    from lowprec.planning.lowering.inputs import reason_to_widen

    call = lower(plan)
    reason = reason_to_widen(plan)
    copies: list[Copy] = []
    if not call.first.codes:
        copies += _widened(plan)
    for name, pack in (("a", call.pack_a), ("b", call.pack_b)):
        if pack:
            copies.append(Copy(name, pack.reasons, pack.nbytes))
    if call.staged:
        copies.append(Copy("out", call.staged, call.product_bytes))
    passed_over = plan.passed_over
    if reason and reason not in passed_over:
        passed_over = (*passed_over, reason)
    return replace(plan, call=call, copies=tuple(copies), passed_over=passed_over)


def _types(
    scheme: ModeRow, kernel: KernelRow, dtype: DType, has_effect: bool
) -> tuple[DType, ComputeType]:
    """Return the element type and the compute type of cuBLASLt's products."""
    if kernel.cublas_emulation or not has_effect:
        return dtype, kernel.cublas_emulation or dtype.compute_type
    if scheme.widens:
        return scheme.accumulator(dtype), scheme.compute_type
    return scheme.data or dtype, scheme.compute_type


def _check_sums(checked: _Checked) -> None:
    """Raise if a sum may overflow int32, or ``k_chunk`` is not supported."""
    compute_dtype = checked.compute_dtype
    k = checked.layout.k
    k_chunk = checked.problem.k_chunk
    if compute_dtype is DType.INT8 and k > MAX_K_INT8:
        raise UnsupportedError(
            f"int8 operands with k = {k}: sums of more than {MAX_K_INT8} products may overflow int32; "
            "split the inner dimension"
        )
    emulates_float8 = compute_dtype.is_float8 and checked.capabilities.kernels[0].imitates
    if k_chunk is not None and compute_dtype.bits == 8 and not emulates_float8:
        raise UnsupportedError(
            f"k_chunk is {k_chunk}, but {compute_dtype} products are not summed in chunks; omit k_chunk="
        )


def _emulated(problem: GemmProblem, capabilities: Capabilities) -> GemmPlan:
    """Return the plan of the fastest scheme, ``fp32`` included, whose bound is no worse than that of ``fp32``.

    Only schemes whose parts represent a float32 exactly are considered: the omitted rest of other splits may have the
    same sign in all terms, and then does not average out as rounding errors do. Float16 schemes are excluded because
    their bounds hold for norms only, TF32 schemes because they depend on ``NVIDIA_TF32_OVERRIDE``.
    """
    best = fp32 = plan_gemm(problem, capabilities, MathMode.FP32)
    if not fp32.mode_has_effect:
        return fp32
    for scheme in TABLE:
        fmt = scheme.operand_format
        holds_all = scheme.parts > 1 and scheme.parts * fmt.precision >= FLOAT32.precision
        if not holds_all or scheme.uses_tf32 or fmt is FLOAT16:
            continue
        with suppress(UnsupportedError):
            plan = plan_gemm(problem, capabilities, scheme.mode)
            as_exact = plan.bound.relative <= fp32.bound.relative
            if as_exact and expected_cost(plan) < expected_cost(best):
                best = plan
    return best


def _widened(plan: GemmPlan) -> tuple[Copy, ...]:
    """Return the copies of quantised operands, unless the kernel reads the codes."""
    copies = []
    if plan.kernel_row.summation == "blocks":
        return ()
    operands = {"a": plan.problem.a}
    if not reads_codes_of_b(plan):
        operands["b"] = plan.problem.b
    for name, spec in operands.items():
        if spec.blocks and spec.blocks.row.block:
            reason = Reason.of(ReasonKind.WIDENED, format=spec.blocks.format, dtype=spec.dtype)
            nbytes = spec.dtype.itemsize * prod(spec.shape)
            copies.append(Copy(name, (reason,), nbytes))
    return tuple(copies)


def _copies(plan: GemmPlan) -> tuple[Copy, ...]:
    """Return the copies made because of strides; an operand that is rounded is written to a new buffer anyway."""
    if plan.kernel_row.packs:
        return ()
    problem = plan.problem
    layout = plan.layout
    epilogue = plan.accumulator
    copies = []
    operands = (("a", problem.a, layout.a), ("b", problem.b, layout.b))
    for (name, spec, operand), rounded in zip(operands, plan.rounded, strict=True):
        if not operand.blas_expressible and not rounded and spec.dtype is epilogue:
            reason = Reason.of(ReasonKind.STRIDES)
            copies.append(Copy(name, (reason,), spec.stored_bytes))
    out = problem.out
    if out and not layout.out.blas_expressible and out.dtype is epilogue:
        reason = Reason.of(ReasonKind.RESULT_STRIDES)
        copies.append(Copy("out", (reason,), out.stored_bytes))
    return tuple(copies)
