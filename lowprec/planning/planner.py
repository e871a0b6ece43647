"""``plan_gemm``: from a problem, the capabilities of a device and a mode to a plan."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import prod

from lowprec.errors import UnsupportedError
from lowprec.formats import FLOAT16, FLOAT32, ComputeType, DType
from lowprec.modes import TABLE, MathMode, Mode, ModeRow, row, rules_of
from lowprec.planning.bounds import MAX_K_INT8, holds, operand_format
from lowprec.planning.costs import expected_cost
from lowprec.planning.kernels import Capabilities, KernelRow, choose_kernel, format_name
from lowprec.planning.layout import GemmLayout, OperandSpec, addend_layout, gemm_layout, stacked_layout
from lowprec.planning.plan import Copy, GemmPlan, Quantized
from lowprec.planning.problem import GemmProblem, check_epilogue, common_dtype, result_dtype
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.planning.schedule import make_schedule
from lowprec.planning.split_bounds import chunk_for
from lowprec.planning.stored import reads_codes_of_b
from lowprec.planning.tensor_cores import tensor_cores_multiply
from lowprec.recipes import Rule
from lowprec.util.strides import packed_strides

PLAN_CACHE_SIZE = 1024


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def plan_gemm(problem: GemmProblem, capabilities: Capabilities, mode: Mode) -> GemmPlan:
    """Return the plan of a product on a device in a mode; raises if the product cannot run."""
    if row(mode).quantizes and row(mode).acts(common_dtype(problem, capabilities)):
        return _quantized(problem, capabilities, mode)
    if mode is MathMode.FP32_EMULATED:
        return replace(_emulated(problem, capabilities), mode=mode)
    return _plan(problem, capabilities, mode)


def _plan(problem: GemmProblem, capabilities: Capabilities, mode: Mode) -> GemmPlan:
    compute_dtype = common_dtype(problem, capabilities)
    out_dtype = result_dtype(problem, compute_dtype)
    layout = gemm_layout(problem.a, problem.b, problem.out, out_dtype)
    check_epilogue(problem, compute_dtype, layout)
    emulates_float8 = compute_dtype.is_float8 and capabilities.kernels[0].emulates
    _check_sums(compute_dtype, layout.k, None if emulates_float8 else problem.k_chunk)
    if problem.ignores_product:
        layout = replace(layout, k=0)
    scheme, fmt = row(mode), operand_format(mode, compute_dtype)
    acts = scheme.acts(compute_dtype)
    a_format, b_format = problem.a.dtype.format, problem.b.dtype.format
    rounded = (False, False)
    if acts and fmt and a_format and b_format:
        rounded = (not holds(fmt, a_format), not holds(fmt, b_format))
    products = make_schedule(scheme, rounded, layout.k, problem.k_chunk)
    choice = choose_kernel(
        format_name(fmt), capabilities,
        is_chunked=any(x.k_stop - x.k_start < layout.k for x in products),
        emulation=scheme.emulation if acts else None,
    )  # fmt: skip
    kernel = choice.kernel
    fmt, rounded = (compute_dtype.format, (False, False)) if kernel.emulation else (fmt, rounded)
    has_effect = acts and (compute_dtype.is_single_precision or kernel.emulation is not None)
    k_chunk, capability = problem.k_chunk, capabilities.tensor_cores_of(kernel)
    if k_chunk is None and capability and any(rounded) and scheme.parts > 1:
        k_chunk = chunk_for(layout.k, scheme.operand_format.name, capability)
    schedule = make_schedule(scheme, rounded, layout.k, k_chunk, concatenates=kernel.concatenates)
    layout = _following_c(problem, layout) if kernel.is_cublaslt else layout
    multiplied, compute_type = _types(scheme, kernel, compute_dtype, has_effect)
    plan = GemmPlan(
        problem=problem, capabilities=capabilities, mode=mode, scheme=mode, mode_has_effect=has_effect,
        layout=layout, compute_dtype=compute_dtype, out_dtype=out_dtype, out_shape=layout.out_shape,
        operand_format=fmt, rounded=rounded, multiplied_dtype=multiplied,
        cublas_compute_type=compute_type,
        schedule=schedule, kernel_row=kernel, passed_over=choice.passed_over,
        copies=(),
        flops=(8 if compute_dtype.is_complex else 2) * layout.batch_count * layout.m * layout.n * layout.k,
    )  # fmt: skip
    if not plan.flops:
        return plan
    widened = _widened(plan)
    if not kernel.is_cublaslt:
        copies = widened or _copies(plan)
        return replace(plan, copies=copies) if copies else plan
    return _lowered(plan, widened)


def _following_c(problem: GemmProblem, layout: GemmLayout) -> GemmLayout:
    """Return a layout that is not collapsed if the rows of ``c`` have no single stride."""
    c = problem.c if layout.collapsed and problem.has_beta else None
    if c and addend_layout(c, problem.a, problem.b, layout) is None:
        return stacked_layout(problem.a, problem.b, problem.out, layout.out.dtype)
    return layout


#: Length of the pieces of k in which int8 codes are summed if one sum could overflow int32.
_INT8_PIECE = 1 << 16


def _quantized(problem: GemmProblem, capabilities: Capabilities, mode: Mode) -> GemmPlan:
    """Return the plan of a mode that quantises: that of the rounded numbers, with the rounding in front of it."""
    compute_dtype = common_dtype(problem, capabilities)
    out_dtype = result_dtype(problem, compute_dtype)
    layout = gemm_layout(problem.a, problem.b, problem.out, out_dtype)
    check_epilogue(problem, compute_dtype, layout)
    specs = (problem.a, problem.b)
    stored = [spec.blocks is not None or not row(mode).acts(spec.dtype) for spec in specs]
    rules = tuple(None if is_stored else rule for is_stored, rule in zip(stored, rules_of(mode), strict=True))
    a_rule, b_rule = rules
    if a_rule is None and b_rule is None:
        return replace(_plan(problem, capabilities, mode), mode_has_effect=False)
    in_integers = all(rule is not None and rule.number_format is None for rule in rules)
    dtype, piece = DType.INT8 if in_integers else DType.BFLOAT16, 0
    if any(rule is not None and rule.block_scale == "float32" for rule in rules):
        piece = max(rule.block[1] for rule in rules if rule is not None)
    elif in_integers and layout.k > MAX_K_INT8:
        piece = _INT8_PIECE
    if problem.k_chunk is not None and piece:
        raise UnsupportedError(
            f"k_chunk is {problem.k_chunk}, but the mode {mode} sums k in pieces of {piece}; omit k_chunk="
        )
    on_gpu = capabilities.compute_capability is not None
    if on_gpu:
        layout = _following_c(problem, layout)
        dtypes, piece = _on_gpu(rules, layout, capabilities, in_integers and not piece, problem.k_chunk), 0
    else:
        dtypes = _emulated_float8(rules, capabilities) or (dtype, dtype)
    rounded = [
        spec if rule is None else OperandSpec(dtype, spec.shape, packed_strides(spec.shape, spec.strides))
        for spec, rule, dtype in zip(specs, rules, dtypes, strict=True)
    ]
    whole = replace(problem, a=rounded[0], b=rounded[1], out_dtype=out_dtype, has_alpha=True, is_scaled=True)
    lengths = (min(n, layout.k) for n in ((piece, layout.k % piece or piece) if piece else (0, 0)))
    inner, last = (plan_gemm(_piece_of(whole, n) if piece else whole, capabilities, MathMode.FP32) for n in lengths)
    plan = replace(
        inner, problem=problem, mode=mode, scheme=mode, mode_has_effect=True, layout=layout,
        compute_dtype=compute_dtype, out_dtype=out_dtype, out_shape=layout.out_shape,
        operand_format=row(mode).operand_format, rounded=(a_rule is not None, b_rule is not None),
        quantized=Quantized((a_rule, b_rule), inner, piece, last),
        flops=2 * layout.batch_count * layout.m * layout.n * layout.k * (not problem.ignores_product),
    )  # fmt: skip
    return _lowered(plan, _widened(plan)) if on_gpu and plan.flops else plan


def _on_gpu(
    rules: tuple[Rule | None, ...], layout: GemmLayout, capabilities: Capabilities, in_int32: bool, k_chunk: int | None
) -> tuple[DType, DType]:
    """Return the types in which tensor cores multiply rounded numbers; products of scaled blocks are float32."""
    from lowprec.planning.cublaslt.scale_modes import scale_modes

    if k_chunk is None and scale_modes(rules, layout, capabilities.compute_capability) is not None:
        a, b = (DType.FLOAT8_E5M2 if rule and rule.elements == "e5m2" else DType.FLOAT8_E4M3FN for rule in rules)
        return a, b
    in_float32 = any(rule is not None and rule.block_scale == "float32" for rule in rules)
    dtype = DType.INT8 if in_int32 else DType.FLOAT32 if in_float32 else DType.BFLOAT16
    return dtype, dtype


def _emulated_float8(rules: tuple[Rule | None, ...], capabilities: Capabilities) -> tuple[DType, DType] | None:
    """Return the types of FP8 operands, if the products of FP8 tensor cores are emulated and multiply these."""
    emulated, found = capabilities.kernels[0].emulates, []
    for rule in rules:
        if rule is None or rule.elements not in ("e4m3", "e5m2") or rule.block_scale not in ("", "float32"):
            return None
        found.append(DType.FLOAT8_E4M3FN if rule.elements == "e4m3" else DType.FLOAT8_E5M2)
    if emulated is None or not tensor_cores_multiply("float8_e4m3fn", emulated.capability):
        return None
    return found[0], found[1]


def _piece_of(problem: GemmProblem, length: int) -> GemmProblem:
    """Return the product over a piece of k, into a new float32 array to which it is added."""
    a, b = problem.a, problem.b
    out = stacked_layout(a, b).out_shape
    inner = max(len(b.shape) - 2, 0)
    return GemmProblem(
        replace(a, shape=(*a.shape[:-1], length), blocks=None),
        replace(b, shape=(*b.shape[:inner], length, *b.shape[inner + 1 :]), blocks=None),
        c=OperandSpec.contiguous(DType.FLOAT32, out), out=OperandSpec.contiguous(DType.FLOAT32, out),
        has_alpha=True, has_beta=True, is_scaled=True, ignores_product=problem.ignores_product,
    )  # fmt: skip


def _lowered(plan: GemmPlan, widened: tuple[Copy, ...]) -> GemmPlan:
    """Return the plan with the call of cuBLASLt; ``widened`` are copies for operands whose codes it does not read."""
    from lowprec.planning.cublaslt.lowering import lower, reason_to_widen  # with the first plan for cuBLASLt

    call, reason = lower(plan), reason_to_widen(plan)
    packs = (("a", call.pack_a), ("b", call.pack_b))
    copies = tuple(Copy(name, pack.reasons, pack.nbytes) for name, pack in packs if pack)
    staged = (Copy("out", call.staged, call.product_bytes),) if call.staged else ()
    copies = (() if call.first.codes else widened) + copies + staged
    passed_over = (*plan.passed_over, reason) if reason and reason not in plan.passed_over else plan.passed_over
    return replace(plan, call=call, copies=copies, passed_over=passed_over)


def _types(scheme: ModeRow, kernel: KernelRow, dtype: DType, has_effect: bool) -> tuple[DType, ComputeType]:
    """Return the element type and the compute type of cuBLASLt's products."""
    if kernel.emulation or not has_effect:
        return dtype, kernel.emulation or dtype.compute_type
    return scheme.accumulator(dtype) if scheme.widens else scheme.data or dtype, scheme.compute_type


def _check_sums(compute_dtype: DType, k: int, k_chunk: int | None) -> None:
    """Raise if a sum may overflow int32, or ``k_chunk`` is not supported."""
    if compute_dtype is DType.INT8 and k > MAX_K_INT8:
        raise UnsupportedError(
            f"int8 operands with k = {k}: sums of more than {MAX_K_INT8} products may overflow int32; "
            "split the inner dimension"
        )
    if k_chunk is not None and compute_dtype.bits == 8:
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
    problem, reads = plan.problem, reads_codes_of_b(plan)
    operands = (("a", problem.a, False), ("b", problem.b, reads))
    return tuple(
        Copy(name, (Reason.of(ReasonKind.WIDENED, format=spec.blocks.format, dtype=spec.dtype),),
             spec.dtype.itemsize * prod(spec.shape))
        for name, spec, is_read in operands
        if spec.blocks and spec.blocks.row.scales and not is_read
    )  # fmt: skip


def _copies(plan: GemmPlan) -> tuple[Copy, ...]:
    """Return the copies made because of strides; an operand that is rounded is written to a new buffer anyway."""
    if plan.kernel_row.packs:
        return ()
    problem, layout, epilogue = plan.problem, plan.layout, plan.accumulator
    copies = []
    operands = (("a", problem.a, layout.a), ("b", problem.b, layout.b))
    for (name, spec, operand), rounded in zip(operands, plan.rounded, strict=True):
        if not operand.blas_expressible and not rounded and spec.dtype is epilogue:
            copies.append(Copy(name, (Reason.of(ReasonKind.STRIDES),), spec.stored_bytes))
    out = problem.out
    if out and not layout.out.blas_expressible and out.dtype is epilogue:
        copies.append(Copy("out", (Reason.of(ReasonKind.RESULT_STRIDES),), out.stored_bytes))
    return tuple(copies)
