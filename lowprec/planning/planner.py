"""``plan_gemm``: from a problem, the capabilities of a device and a mode to a plan."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

from lowprec.errors import UnsupportedError
from lowprec.formats import BFLOAT16, FLOAT16, FLOAT32, NARROW, Blocks, ComputeType, DType, NumberFormat
from lowprec.modes import TABLE, MathMode, Mode, ModeRow, row, rules_of
from lowprec.planning.bounds import MAX_K_INT8, holds, operand_format
from lowprec.planning.costs import expected_cost
from lowprec.planning.kernels import BLOCKS, Capabilities, KernelRow, Summation, choose_kernel, format_name
from lowprec.planning.layout import GemmLayout, OperandSpec, addend_layout, gemm_layout, stacked_layout
from lowprec.planning.plan import Copy, GemmPlan, Quantized
from lowprec.planning.problem import GemmProblem, check_epilogue, common_dtype, result_dtype
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.planning.schedule import make_schedule
from lowprec.planning.split_bounds import chunk_for
from lowprec.planning.stored import reads_codes_of_b
from lowprec.planning.tensor_cores import Capability, tensor_cores_multiply
from lowprec.recipes import Rule
from lowprec.util.strides import packed_strides

PLAN_CACHE_SIZE = 1024

_Rules: TypeAlias = tuple[Rule | None, Rule | None]


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
    rounded = (False, False)
    if acts:
        rounded = _rounded(problem, fmt)
    products = make_schedule(scheme, rounded, layout.k, problem.k_chunk)
    is_chunked = any(x.k_stop - x.k_start < layout.k for x in products)
    emulation = None
    if acts:
        emulation = scheme.emulation
    operands = format_name(fmt)
    if _multiplies_integers(problem, capabilities):
        operands = BLOCKS
    choice = choose_kernel(operands, capabilities, is_chunked=is_chunked, emulation=emulation)
    kernel = choice.kernel
    if kernel.emulation:
        fmt = compute_dtype.format
        rounded = (False, False)
    has_effect = acts and (compute_dtype.is_single_precision or kernel.emulation is not None)
    k_chunk = problem.k_chunk
    if k_chunk is None and any(rounded) and scheme.parts > 1:
        k_chunk = _chunk_of(scheme, layout.k, capabilities.tensor_cores_of(kernel))
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
        schedule=make_schedule(scheme, rounded, layout.k, k_chunk, concatenates=kernel.concatenates),
        kernel_row=kernel,
        passed_over=choice.passed_over,
        copies=(),
    )
    if not plan.flops:
        return plan
    if kernel.is_cublaslt:
        return _lowered(plan)
    return replace(plan, copies=_widened(plan) or _copies(plan))


def _chunk_of(scheme: ModeRow, k: int, capability: Capability | None) -> int | None:
    """Return the length of the chunks of k that tensor cores sum, None for one chunk."""
    if capability is None:
        return None
    return chunk_for(k, scheme.operand_format.name, capability)


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
    if not problem.in_integers or problem.k_chunk is not None or rows[0].emulates:
        return False
    if problem.ignores_product or not problem.a.shape[-1] or not any(row.summation is Summation.BLOCKS for row in rows):
        return False
    in_tiles = choose_kernel(BFLOAT16.name, capabilities).kernel.summation is Summation.TILES
    return not in_tiles or DType.FLOAT32 in (problem.a.dtype, problem.b.dtype)


def _coded(spec: OperandSpec, axis: int, rule: Rule) -> OperandSpec:
    """Return the description of the codes to which an operand is rounded, contiguous along k."""
    row = next(row for row in NARROW if row.name == rule.codes)
    shape = [*spec.shape]
    shape[axis] += -shape[axis] % row.block
    order = (0, 1)
    if axis == -2:
        order = (1, 0)
    strides = packed_strides(tuple(shape), (*spec.strides[:-2], *order[-len(shape) :]))
    dtype = DType.BFLOAT16
    if row.has_float_scales:
        dtype = DType.FLOAT32
    return OperandSpec(dtype, spec.shape, strides, Blocks(row.name, axis, row))


def _in_codes(problem: GemmProblem, rules: _Rules) -> GemmProblem | None:
    """Return the product of the codes to which operands are rounded; None unless all are integers in blocks."""
    a_rule, b_rule = rules
    for rule in rules:
        if rule is not None and not rule.codes:
            return None
    a = problem.a
    b = problem.b
    if a_rule is not None:
        a = _coded(a, -1, a_rule)
    if b_rule is not None:
        b = _coded(b, -min(2, len(b.shape)), b_rule)
    return replace(problem, a=a, b=b)


def _following_c(problem: GemmProblem, layout: GemmLayout) -> GemmLayout:
    """Return a layout that is not collapsed if the rows of ``c`` have no single stride."""
    c = problem.c if layout.collapsed and problem.has_beta else None
    if c and addend_layout(c, problem.a, problem.b, layout) is None:
        return stacked_layout(problem.a, problem.b, problem.out, layout.out.dtype)
    return layout


#: Length of the pieces of k in which int8 codes are summed if one sum could overflow int32.
_INT8_PIECE = 1 << 16


def _quantized(checked: _Checked, mode: Mode) -> GemmPlan:
    """Return the plan of a mode that quantises: that of the rounded numbers, with the rounding in front of it."""
    problem, capabilities, compute_dtype, out_dtype, layout = checked
    a_rule, b_rule = rules = _rules(problem, mode)
    if a_rule is None and b_rule is None:
        return replace(_plan(checked, mode), mode_has_effect=False)
    piece = _piece_length(checked, rules, mode)
    on_gpu = capabilities.compute_capability is not None
    if on_gpu:
        if any(rule is not None and rule.codes == "int8_blocks" for rule in rules):
            raise UnsupportedError(f"the mode {mode} is for CPUs: on a GPU choose int8, which has a scale per vector")
        layout = _following_c(problem, layout)
        a_dtype, b_dtype = _on_gpu(rules, layout, capabilities, not piece, problem.k_chunk)
        piece = 0
    else:
        a_dtype, b_dtype = _on_cpu(rules, capabilities)
    a = _rounded_spec(problem.a, a_rule, a_dtype)
    b = _rounded_spec(problem.b, b_rule, b_dtype)
    rounded = replace(problem, a=a, b=b, out_dtype=out_dtype, has_alpha=True, is_scaled=True)
    in_codes = _in_codes(replace(rounded, a=problem.a, b=problem.b), rules)
    if in_codes is not None and _multiplies_integers(in_codes, capabilities):
        rounded = in_codes
        piece = 0
    inner = _piece_plan(rounded, capabilities, piece, layout.k)
    last = inner
    if piece:
        last = _piece_plan(rounded, capabilities, layout.k % piece or piece, layout.k)
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


def _rules(problem: GemmProblem, mode: Mode) -> _Rules:
    """Return how ``a`` and ``b`` are quantised; None for a stored operand, and one that the mode does not act on."""
    a_rule, b_rule = rules_of(mode)

    def kept(spec: OperandSpec) -> bool:
        return spec.blocks is not None or not row(mode).acts(spec.dtype)

    return None if kept(problem.a) else a_rule, None if kept(problem.b) else b_rule


def _in_integers(rules: _Rules) -> bool:
    return all(rule is not None and rule.number_format is None for rule in rules)


def _have_float_blocks(rules: _Rules) -> bool:
    """Whether a float32 scale belongs to each block."""
    return any(rule is not None and rule.block_scale == "float32" for rule in rules)


def _piece_length(checked: _Checked, rules: _Rules, mode: Mode) -> int:
    """Return the length of the pieces of k that are summed one by one, 0 for all of k."""
    piece = 0
    if _have_float_blocks(rules):
        piece = max(rule.block[1] for rule in rules if rule is not None)
    elif _in_integers(rules) and checked.layout.k > MAX_K_INT8:
        piece = _INT8_PIECE
    k_chunk = checked.problem.k_chunk
    if k_chunk is not None and piece:
        raise UnsupportedError(f"k_chunk is {k_chunk}, but the mode {mode} sums k in pieces of {piece}; omit k_chunk=")
    return piece


def _rounded_spec(spec: OperandSpec, rule: Rule | None, dtype: DType) -> OperandSpec:
    if rule is None:
        return spec
    return OperandSpec(dtype, spec.shape, packed_strides(spec.shape, spec.strides))


def _float8(rule: Rule | None) -> DType:
    return DType.FLOAT8_E5M2 if rule and rule.elements == "e5m2" else DType.FLOAT8_E4M3FN


def _is_float8(rule: Rule | None) -> bool:
    if rule is None or rule.elements not in ("e4m3", "e5m2"):
        return False
    return rule.block_scale in ("", "float32")


def _on_gpu(
    rules: _Rules, layout: GemmLayout, capabilities: Capabilities, in_one_sum: bool, k_chunk: int | None
) -> tuple[DType, DType]:
    """Return the types in which tensor cores multiply rounded numbers; products of scaled blocks are float32."""
    from lowprec.planning.lowering.scale_modes import scale_modes

    if k_chunk is None and scale_modes(rules, layout, capabilities.compute_capability) is not None:
        return _float8(rules[0]), _float8(rules[1])
    if in_one_sum and _in_integers(rules):
        return DType.INT8, DType.INT8
    if _have_float_blocks(rules):
        return DType.FLOAT32, DType.FLOAT32
    return DType.BFLOAT16, DType.BFLOAT16


def _on_cpu(rules: _Rules, capabilities: Capabilities) -> tuple[DType, DType]:
    """Return the types in which a CPU multiplies rounded numbers; FP8 if it emulates tensor cores that have it."""
    emulated = capabilities.kernels[0].emulates
    if all(map(_is_float8, rules)) and emulated and tensor_cores_multiply("float8_e4m3fn", emulated.capability):
        return _float8(rules[0]), _float8(rules[1])
    if _in_integers(rules):
        return DType.INT8, DType.INT8
    return DType.BFLOAT16, DType.BFLOAT16


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


def _lowered(plan: GemmPlan) -> GemmPlan:
    """Return the plan with the call of cuBLASLt, and copies for operands whose codes it does not read."""
    # With the first plan for cuBLASLt.
    from lowprec.planning.lowering.call import lower
    from lowprec.planning.lowering.inputs import reason_to_widen

    call = lower(plan)
    reason = reason_to_widen(plan)
    packs = (("a", call.pack_a), ("b", call.pack_b))
    copies = tuple(Copy(name, pack.reasons, pack.nbytes) for name, pack in packs if pack)
    if call.staged:
        copies = (*copies, Copy("out", call.staged, call.product_bytes))
    if not call.first.codes:
        copies = _widened(plan) + copies
    passed_over = plan.passed_over
    if reason and reason not in passed_over:
        passed_over = (*passed_over, reason)
    return replace(plan, call=call, copies=copies, passed_over=passed_over)


def _types(scheme: ModeRow, kernel: KernelRow, dtype: DType, has_effect: bool) -> tuple[DType, ComputeType]:
    """Return the element type and the compute type of cuBLASLt's products."""
    if kernel.emulation or not has_effect:
        return dtype, kernel.emulation or dtype.compute_type
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
    emulates_float8 = compute_dtype.is_float8 and checked.capabilities.kernels[0].emulates
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
    for name, spec in (("a", plan.problem.a), ("b", plan.problem.b)):
        is_read = plan.kernel_row.summation is Summation.BLOCKS or (name == "b" and reads_codes_of_b(plan))
        if spec.blocks and spec.blocks.row.scales and not is_read:
            reason = Reason.of(ReasonKind.WIDENED, format=spec.blocks.format, dtype=spec.dtype)
            copies.append(Copy(name, (reason,), spec.dtype.itemsize * prod(spec.shape)))
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
            copies.append(Copy(name, (Reason.of(ReasonKind.STRIDES),), spec.stored_bytes))
    out = problem.out
    if out and not layout.out.blas_expressible and out.dtype is epilogue:
        copies.append(Copy("out", (Reason.of(ReasonKind.RESULT_STRIDES),), out.stored_bytes))
    return tuple(copies)
