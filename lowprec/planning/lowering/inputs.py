"""The values that all steps of lowering derive from a plan, and the reasons why operands are widened.

Source: the cuBLAS documentation, ``cublasLtMatmul()`` (requirements of the int8, FP8 and FP4 kernels).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from lowprec.formats import BLOCK_FORMATS, BlockFormat, DType
from lowprec.planning.cublaslt.calls import STEP_BYTES
from lowprec.planning.layout import GemmLayout, MatrixStack, addend_layout
from lowprec.planning.lowering.scale_modes import fp4_units_multiply, scale_modes
from lowprec.planning.plan import GemmPlan
from lowprec.planning.problem import GemmProblem
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.planning.tensor_cores import BLOCK_SCALES_SINCE
from lowprec.recipes import Rule

Name = Literal["a", "b"]

#: Formats that cuBLASLt multiplies by their codes.
_READ_AS_CODES = {name: row for name, row in BLOCK_FORMATS.items() if row.scale_mode}

#: Steps of m and n in block-scaled products, and of k by the bits of a code. The documentation of cuBLAS allows more
#: shapes than it computes (vllm issue 4691, nvmath-python issue 52); FP8 of other users is in whole blocks of 128.
_BLOCKED_STEP = 16
BLOCKED_K_STEP = {8: 128, 4: 32}

#: Rows to which int8 operands are padded: cuBLASLt has no algorithm for few rows (PyTorch's ``_int_mm`` needs 17).
_PADDED_ROWS = 32


def reads_k_contiguous(data: DType) -> bool:
    """Whether cuBLASLt's kernels for this type need both operands contiguous along k and aligned to 16 bytes."""
    return data.bits == 8


def reason_to_widen(plan: GemmPlan) -> Reason | None:
    """Return the reason why block-scaled operands are widened; None if there are none, or cuBLASLt multiplies them.

    Each is contiguous along k, whose last block is padded with zeros, and read in place if that suffices.
    """
    operands = (plan.problem.a, plan.problem.b)
    layout = plan.layout
    a, b = (None if x.dtype.is_float8 else x.blocks for x in operands)
    if not (a or b):
        return None
    if not (a and b and a.format == b.format in _READ_AS_CODES):
        of_a = a.format if a else operands[0].dtype
        of_b = b.format if b else operands[1].dtype
        formats = " or ".join(_READ_AS_CODES)
        return Reason.of(ReasonKind.OTHER_BLOCKS, a=of_a, b=of_b, formats=formats)
    if (plan.capabilities.compute_capability or (0, 0)) < BLOCK_SCALES_SINCE:
        return Reason.of(ReasonKind.NO_BLOCK_SCALES)
    k_axis = -min(len(operands[1].shape), 2)
    along_k = a.axis == -1 and b.axis == k_axis
    if not along_k or layout.batch_count > 1 or len(plan.schedule) > 1:
        return Reason.of(ReasonKind.NOT_ONE_PRODUCT_OF_BLOCKS)
    k_step = BLOCKED_K_STEP[4]  # FP8 is padded
    k = multiple(layout.k, a.row.block)
    if layout.m % _BLOCKED_STEP or layout.n % _BLOCKED_STEP or k % k_step:
        return Reason.of(ReasonKind.BLOCK_EXTENTS, data=a.format, step=_BLOCKED_STEP, k_step=k_step)
    return None


def multiple(extent: int, step: int) -> int:
    """Return the least multiple of a step that is not smaller."""
    return -(-extent // step) * step


def padded(extent: int, dtype: DType) -> int:
    return multiple(extent, max(STEP_BYTES // dtype.itemsize, 1))


def _by_column(stack: MatrixStack) -> MatrixStack:
    """Return matrices that are one contiguous column as column-major matrices; others unchanged."""
    if stack.cols == 1 and stack.rows > 1 and stack.leading_dimension == 1:
        return replace(stack, order="col", leading_dimension=stack.rows)
    return stack


class Inputs(NamedTuple):
    """A plan, and the values derived from it that all steps of lowering use."""

    plan: GemmPlan
    problem: GemmProblem
    layout: GemmLayout
    data: DType  # element type of the multiplied matrices
    summed_in: DType  # type of the sums, alpha and beta
    as_real: bool  # complex operands are multiplied as real matrices of twice the extents
    k_contiguous: bool
    rows: int  # of the product
    aligned: bool
    addend: MatrixStack | None
    # of block-scaled operands, or of operands that are quantised to NVFP4
    codes: BlockFormat | None
    scale_modes: tuple[str, str] | None  # of ``a`` and ``b`` that are quantised to FP8

    def rule(self, name: Name) -> Rule | None:
        """Return how an operand is quantised, None if it is not."""
        if self.plan.quantized:
            return self.plan.quantized.rules[name == "b"]
        return None

    def scale_mode(self, name: Name) -> str:
        """Return the mode of the scales of an operand that is quantised to FP8, empty for another one."""
        if self.scale_modes:
            return self.scale_modes[name == "b"]
        return ""

    @property
    def kernels(self) -> str | DType:
        return self.codes.name if self.codes else self.data


def _addend(problem: GemmProblem, layout: GemmLayout) -> MatrixStack | None:
    """Return ``c`` as matrices, None if it is not added or BLAS cannot express it."""
    if not problem.has_beta or problem.c is None:
        return None
    c = addend_layout(problem.c, problem.a, problem.b, layout)
    if c is None or not c.blas_expressible:
        return None
    return c


def _codes(plan: GemmPlan, aligned: bool) -> BlockFormat | None:
    """Return the format whose codes cuBLASLt multiplies, None for numbers."""
    blocks = plan.problem.a.blocks
    if aligned and blocks and reason_to_widen(plan) is None:
        return _READ_AS_CODES.get(blocks.format)
    if plan.quantized is None or plan.multiplied_dtype.is_float8 or len(plan.schedule) > 1:
        return None
    capability = plan.capabilities.compute_capability
    if fp4_units_multiply(plan.quantized.rules, plan.layout, capability):
        return _READ_AS_CODES["nvfp4"]
    return None


def inputs_of(plan: GemmPlan, aligned: bool, pad_rows: bool, widen: bool) -> Inputs:
    problem = plan.problem
    layout = plan.layout
    data = plan.multiplied_dtype
    modes = None
    if plan.quantized and data.is_float8:
        modes = scale_modes(plan.quantized.rules, layout, plan.capabilities.compute_capability)
        if widen:  # to a type of all devices
            in_blocks = modes is not None and "VEC128_32F" in modes
            data = DType.FLOAT32 if in_blocks else DType.BFLOAT16
            modes = None
    codes = None if widen else _codes(plan, aligned)
    as_real = plan.compute_dtype.is_complex and not data.is_complex
    k_contiguous = codes is not None or reads_k_contiguous(data)
    c = _addend(problem, layout)
    c_fits = not problem.has_beta or (c is not None and _by_column(c).order == "col")
    if c_fits and not (k_contiguous or as_real or problem.bias is not None):
        # As row-major matrices, single columns have leading dimension 1, which excludes all 16-byte accesses.
        b = _by_column(layout.b)
        out = _by_column(layout.out)
        layout = replace(layout, b=b, out=out)
    if c is not None and layout.out.order == "col":
        c = _by_column(c)
    if pad_rows and data is DType.INT8:
        rows = max(layout.m, _PADDED_ROWS)
    else:
        rows = layout.m
    if as_real:
        summed_in = DType.FLOAT32
    else:
        summed_in = DType.INT32 if data is DType.INT8 else plan.accumulator
    return Inputs(
        plan, problem, layout, data, summed_in, as_real, k_contiguous, rows, aligned, c, codes, modes
    )  # fmt: skip
