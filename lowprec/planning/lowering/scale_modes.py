"""The modes by which cuBLASLt multiplies the codes of two quantised operands: its ``cublasLtMatmulMatrixScale_t``.

Source: the cuBLAS documentation, *Narrow Precision Data Types Usage*, with the layouts of the scales.
"""

from __future__ import annotations

from lowprec.planning.layout import GemmLayout
from lowprec.planning.tensor_cores import BLOCK_SCALES_SINCE, Capability, tensor_cores_multiply
from lowprec.recipes import Rule

#: The compute capability with vectors of scales, and with float32 scales of blocks.
_HOPPER = (9, 0)
#: Steps of m with float32 scales of blocks, and with 8-bit scales.
_FLOAT_STEP = 4
_BYTE_STEP = 16


def scale_modes(
    rules: tuple[Rule | None, ...], layout: GemmLayout, capability: Capability | None
) -> tuple[str, str] | None:
    """Return the modes for the scales of ``a`` and ``b``, empty if a kernel applies them to the product.

    None if FP8 units do not multiply these operands.
    """
    a, b = rules
    if (
        a is None
        or b is None
        or capability is None
        or not tensor_cores_multiply("float8_e4m3fn", capability)
    ):
        return None
    elements = {a.elements, b.elements}
    if not elements <= {"e4m3", "e5m2"} or elements == {"e5m2"}:
        return None
    is_single = layout.batch_count == 1
    if not (a.block_scale or b.block_scale):
        if a.scaling == b.scaling == "tensor":
            return "SCALAR_32F", "SCALAR_32F"
        if capability == _HOPPER and is_single:
            return ("OUTER_VEC_32F", "OUTER_VEC_32F")
        return ("", "")
    scales = {a.block_scale, b.block_scale}
    is_weight = b.block[0] > 1
    if (
        scales == {"float32"}
        and is_weight
        and capability == _HOPPER
        and is_single
        and not layout.m % _FLOAT_STEP
    ):
        return "VEC128_32F", "BLK128x128_32F"
    if scales <= {"floor", "rceil", "even"} and capability >= BLOCK_SCALES_SINCE and is_single:
        if layout.m % _BYTE_STEP:
            return None
        return ("VEC32_UE8M0", "VEC32_UE8M0")
    return None


def fp4_units_multiply(
    rules: tuple[Rule | None, ...], layout: GemmLayout, capability: Capability | None
) -> bool:
    """Whether cuBLASLt multiplies these operands as NVFP4, in mode VEC16_UE4M3; n and k are padded."""
    is_nvfp4 = all(rule is not None and rule.block_scale == "e4m3" for rule in rules)
    fits = layout.batch_count == 1 and not layout.m % _BYTE_STEP
    return is_nvfp4 and fits and capability is not None and capability >= BLOCK_SCALES_SINCE
