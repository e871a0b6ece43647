"""How a quantising mode rounds the operands of a product: the rules, the element types, and the pieces of k."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from lowprec.errors import UnsupportedError
from lowprec.formats import NARROW, BlockFormat, Blocks, DType
from lowprec.modes import Mode, row, rules_of
from lowprec.planning.bounds import MAX_K_INT8
from lowprec.planning.kernels import Capabilities
from lowprec.planning.layout import GemmLayout, OperandSpec
from lowprec.planning.lowering.scale_modes import scale_modes
from lowprec.planning.problem import GemmProblem
from lowprec.planning.tensor_cores import tensor_cores_multiply
from lowprec.recipes import Rule
from lowprec.util.strides import packed_strides

#: How ``a`` and ``b`` are quantised, None for one that is not.
Rules: TypeAlias = tuple[Rule | None, Rule | None]

#: Length of the pieces of k in which int8 codes are summed if one sum could overflow int32.
_INT8_PIECE = 1 << 16


def operand_rules(problem: GemmProblem, mode: Mode) -> Rules:
    """Return how ``a`` and ``b`` are quantised; None for a stored operand, and one that the mode does not act on."""
    a_rule, b_rule = rules_of(mode)
    of_a = None if _is_kept(problem.a, mode) else a_rule
    of_b = None if _is_kept(problem.b, mode) else b_rule
    return of_a, of_b


def _is_kept(spec: OperandSpec, mode: Mode) -> bool:
    return spec.blocks is not None or not row(mode).acts(spec.dtype)


def piece_length(rules: Rules, k: int, k_chunk: int | None, mode: Mode) -> int:
    """Return the length of the pieces of k that are summed one by one, 0 for all of k."""
    piece = 0
    if _have_float_blocks(rules):
        piece = max(rule.block[1] for rule in rules if rule is not None)
    elif _in_integers(rules) and k > MAX_K_INT8:
        piece = _INT8_PIECE
    if k_chunk is not None and piece:
        raise UnsupportedError(
            f"k_chunk is {k_chunk}, but the mode {mode} sums k in pieces of {piece}; omit k_chunk="
        )
    return piece


def _have_float_blocks(rules: Rules) -> bool:
    """Whether a float32 scale belongs to each block along k."""
    return any(rule and rule.block_scale == "float32" and not rule.across for rule in rules)


def _in_integers(rules: Rules) -> bool:
    return all(rule and rule.number_format is None for rule in rules)


def types_on_gpu(
    rules: Rules,
    mode: Mode,
    layout: GemmLayout,
    capabilities: Capabilities,
    in_one_sum: bool,
    k_chunk: int | None,
) -> tuple[DType, DType]:
    """Return the types in which tensor cores multiply rounded numbers; products of scaled blocks are float32."""
    if any(rule is not None and rule.codes == "int8_blocks" for rule in rules):
        raise UnsupportedError(
            f"the mode {mode} is for CPUs: on a GPU choose int8, which has a scale per vector"
        )
    for rule in rules:
        if rule is not None and (rule.is_wide or not rule.is_plain):
            raise UnsupportedError(
                f"the mode {mode} is for CPUs and JAX: no kernel of a GPU rounds to {rule}"
            )
    if k_chunk is None and scale_modes(rules, layout, capabilities.compute_capability) is not None:
        return _float8(rules[0]), _float8(rules[1])
    if in_one_sum and _in_integers(rules):
        return DType.INT8, DType.INT8
    if _have_float_blocks(rules):
        return DType.FLOAT32, DType.FLOAT32
    return DType.BFLOAT16, DType.BFLOAT16


def types_on_cpu(rules: Rules, capabilities: Capabilities) -> tuple[DType, DType]:
    """Return the types in which a CPU multiplies rounded numbers; FP8 if it emulates tensor cores that have it."""
    emulated = capabilities.kernels[0].imitates
    has_float8 = emulated is not None and tensor_cores_multiply("float8_e4m3fn", emulated.cores)
    if has_float8 and all(map(_is_float8, rules)):
        return _float8(rules[0]), _float8(rules[1])
    if _in_integers(rules):
        return DType.INT8, DType.INT8
    if any(rule and (rule.is_wide or rule.across) for rule in rules):
        return DType.FLOAT32, DType.FLOAT32
    return DType.BFLOAT16, DType.BFLOAT16


def _float8(rule: Rule | None) -> DType:
    return DType.FLOAT8_E5M2 if rule and rule.elements == "e5m2" else DType.FLOAT8_E4M3FN


def _is_float8(rule: Rule | None) -> bool:
    if rule is None or rule.elements not in ("e4m3", "e5m2"):
        return False
    return rule.block_scale in ("", "float32")


def rounded_spec(spec: OperandSpec, rule: Rule | None, dtype: DType) -> OperandSpec:
    """Return the description of rounded numbers, without gaps, if there is a rule."""
    if rule is None:
        return spec
    if rule.across:
        return OperandSpec.contiguous(dtype, spec.shape)
    return OperandSpec(dtype, spec.shape, packed_strides(spec.shape, _distinct(spec, rule)))


def _distinct(spec: OperandSpec, rule: Rule) -> tuple[int, ...]:
    """Return the strides of an operand, without 0 along its batch if each of its numbers has own random bits."""
    if not rule.is_stochastic:
        return spec.strides
    return (*(stride or 1 for stride in spec.strides[:-2]), *spec.strides[-2:])


def in_codes(problem: GemmProblem, rules: Rules, capabilities: Capabilities) -> GemmProblem | None:
    """Return the product of the codes to which operands are rounded; None unless all have 8-bit scales of blocks.

    For a CPU's kernels both operands are integers in blocks; for emulated tensor cores codes are in bytes.
    """
    coded = []
    axes = (-1, -min(2, len(problem.b.shape)))
    for spec, axis, rule in zip((problem.a, problem.b), axes, rules, strict=True):
        if rule is None:
            coded.append(spec)
            continue
        row = next((row for row in NARROW if row.name == rule.codes), None)
        if capabilities.kernels[0].imitates:
            row = rule.in_bytes
        if row is None or rule.across:
            return None
        coded.append(_coded(spec, axis, rule, row))
    a, b = coded
    return replace(problem, a=a, b=b)


def _coded(spec: OperandSpec, axis: int, rule: Rule, row: BlockFormat) -> OperandSpec:
    """Return the description of the codes to which an operand is rounded, contiguous along k."""
    shape = [*spec.shape]
    shape[axis] += -shape[axis] % row.block
    order = (0, 1)
    if axis == -2:
        order = (1, 0)
    wanted = (*_distinct(spec, rule)[:-2], *order[-len(shape) :])
    strides = packed_strides(tuple(shape), wanted)
    dtype = DType.BFLOAT16
    if row.has_float_scales:
        dtype = DType.FLOAT32
    blocks = Blocks(row.name, axis, row)
    return OperandSpec(dtype, spec.shape, strides, blocks)
