"""The products that cuBLASLt computes, as data.

Source: the cuBLAS documentation, ``cublasLtMatmul()``: the tables of compute, scale, A, B, C, D and bias types, and the
requirements of the int8, FP8 and FP4 kernels below them; *Tensor Core Usage* for their dimensions; *Scaling Mode
Support Overview*. Uncertain, and decided for refusal: bias and activations on float64 (the table names a bias type),
alpha and beta other than 0 and 1 for an int32 scale type. FP8 and FP4 results are not modelled.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

# ``cudaDataType``.
R_32F, R_64F, R_16F, R_8I, C_32F, C_64F = range(6)
R_32I, R_16BF, R_8F_E4M3, R_8F_E5M2, R_4F_E2M1 = 10, 14, 28, 29, 33

DTYPES = {
    R_32F: np.dtype(np.float32),
    R_64F: np.dtype(np.float64),
    R_16F: np.dtype(np.float16),
    R_16BF: np.dtype(ml_dtypes.bfloat16),
    R_8I: np.dtype(np.int8),
    R_32I: np.dtype(np.int32),
    C_32F: np.dtype(np.complex64),
    C_64F: np.dtype(np.complex128),
    R_8F_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    R_8F_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    # in memory two in a byte, the first in the low half
    R_4F_E2M1: np.dtype(ml_dtypes.float4_e2m1fn),
}
FLOAT8 = frozenset({R_8F_E4M3, R_8F_E5M2})

# ``cublasComputeType_t``.
COMPUTE_16F = frozenset({64, 65})
COMPUTE_32F = frozenset({68, 69})
COMPUTE_64F = frozenset({70, 71})
COMPUTE_32I = frozenset({72, 73})
FAST_16F, FAST_16BF, FAST_TF32, EMULATED_16BFX9, EMULATED_FIXEDPOINT = 74, 75, 77, 78, 79
FAST = frozenset({FAST_16F, FAST_16BF, FAST_TF32, EMULATED_16BFX9})

# ``cublasLtMatmulMatrixScale_t``: the modes that are modelled, and the elements and scales of their blocks.
SCALAR_32F, VEC16_UE4M3, VEC32_UE8M0, OUTER_VEC_32F, VEC128_32F, BLK128x128_32F = range(6)
#: Modes with float32 scales of vectors and blocks, as pairs of those of A and B.
FLOAT_SCALES = frozenset({
    (OUTER_VEC_32F, OUTER_VEC_32F), (VEC128_32F, VEC128_32F),
    (VEC128_32F, BLK128x128_32F), (BLK128x128_32F, VEC128_32F),
})  # fmt: skip
BLOCKS = {
    VEC16_UE4M3: (16, np.dtype(ml_dtypes.float8_e4m3fn)),
    VEC32_UE8M0: (32, np.dtype(ml_dtypes.float8_e8m0fnu)),
}

#: No epilogue but the default one.
NO_EPILOGUE = -1


class Row(NamedTuple):
    """One line of the tables; ``bias`` is a type, or NO_EPILOGUE."""

    compute: frozenset[int]
    scale: int
    a: int
    b: int
    c: int
    d: int
    bias: int


def _same(compute, scale, ab, cd, bias):
    return Row(compute, scale, ab, ab, cd, cd, bias)


ROWS = (
    _same(COMPUTE_16F, R_16F, R_16F, R_16F, R_16F),
    _same(COMPUTE_32I, R_32I, R_8I, R_32I, NO_EPILOGUE),
    _same(COMPUTE_32I, R_32F, R_8I, R_8I, NO_EPILOGUE),
    _same(COMPUTE_32F, R_32F, R_16BF, R_16BF, R_16BF),
    _same(COMPUTE_32F, R_32F, R_16F, R_16F, R_16F),
    _same(COMPUTE_32F, R_32F, R_8I, R_32F, NO_EPILOGUE),
    _same(COMPUTE_32F, R_32F, R_16BF, R_32F, R_32F),
    _same(COMPUTE_32F, R_32F, R_16F, R_32F, R_32F),
    _same(COMPUTE_32F | FAST, R_32F, R_32F, R_32F, R_32F),
    _same(COMPUTE_32F | FAST, C_32F, C_32F, C_32F, NO_EPILOGUE),
    _same(COMPUTE_64F | {EMULATED_FIXEDPOINT}, R_64F, R_64F, R_64F, NO_EPILOGUE),
    _same(COMPUTE_64F | {EMULATED_FIXEDPOINT}, C_64F, C_64F, C_64F, NO_EPILOGUE),
    *(
        Row(frozenset({68}), R_32F, a, b, cd, cd, bias)
        for a, b in ((R_8F_E4M3, R_8F_E4M3), (R_8F_E4M3, R_8F_E5M2), (R_8F_E5M2, R_8F_E4M3))
        for cd, bias in ((R_16BF, R_16BF), (R_16F, R_16F), (R_32F, R_16BF))
    ),
)

#: With scales of blocks alone.
FP4_ROWS = tuple(
    _same(frozenset({68}), R_32F, R_4F_E2M1, cd, bias)
    for cd, bias in ((R_16BF, R_16BF), (R_16F, R_16F), (R_32F, R_16BF))
)

#: By everything but the compute type.
_BY_TYPES = {(x.scale, x.a, x.b, x.c, x.d): x for x in (*ROWS, *FP4_ROWS)}


def row(compute, scale, a, b, c, d):
    """Return the line for a combination of types, None if there is none."""
    found = _BY_TYPES.get((scale, a, b, c, d))
    return found if found is not None and compute in found.compute else None


def has_float8(capability):
    """Whether a device multiplies FP8."""
    return capability == (8, 9) or capability >= (9, 0)


def float8_wants_tn(capability):
    """Whether its FP8 kernels read A transposed and B not, in column-major terms."""
    return capability in ((8, 9), (9, 0)) or capability[0] == 12


def has_block_scales(capability):
    """Whether a device multiplies FP8 and FP4 with scales of blocks."""
    return capability >= (10, 0)


def has_float_scales(capability):
    """Whether a device multiplies FP8 with float32 scales of vectors and blocks."""
    return capability == (9, 0)


def emulates(compute, capability, version):
    """Whether a device emulates by a compute type, which other devices ignore (*Floating Point Emulation*)."""
    if compute == EMULATED_16BFX9:
        return capability in ((10, 0), (10, 3)) and version >= 120900
    able = capability[0] in (8, 10, 12) or capability in ((9, 0), (11, 0))
    return compute == EMULATED_FIXEDPOINT and able and version >= 130100


# ``cublasLtNumericalImplFlags_t``.
FMA, HMMA, IMMA, DMMA = 1, 2, 4, 8
ACCUMULATOR_16F, ACCUMULATOR_32F, ACCUMULATOR_64F, ACCUMULATOR_32I = (1 << b for b in range(8, 12))
INPUT_16F, INPUT_16BF, INPUT_TF32, INPUT_32F, INPUT_64F, INPUT_8I, INPUT_E4M3, INPUT_E5M2 = (
    1 << b for b in range(16, 24)
)

_TENSOR_INPUT = {
    R_16F: HMMA | ACCUMULATOR_32F | INPUT_16F,
    R_16BF: HMMA | ACCUMULATOR_32F | INPUT_16BF,
    R_8I: IMMA | ACCUMULATOR_32I | INPUT_8I,
    R_8F_E4M3: HMMA | ACCUMULATOR_32F | INPUT_E4M3,
    R_8F_E5M2: HMMA | ACCUMULATOR_32F | INPUT_E5M2,
    R_4F_E2M1: HMMA | ACCUMULATOR_32F,
    R_64F: DMMA | ACCUMULATOR_64F | INPUT_64F,
    C_64F: DMMA | ACCUMULATOR_64F | INPUT_64F,
}
_FAST_INPUT = {
    FAST_TF32: HMMA | ACCUMULATOR_32F | INPUT_TF32,
    FAST_16F: HMMA | ACCUMULATOR_32F | INPUT_16F,
    FAST_16BF: HMMA | ACCUMULATOR_32F | INPUT_16BF,
}


#: Of algorithms that emulate.
EMULATED_FLAGS = {
    EMULATED_16BFX9: HMMA | ACCUMULATOR_32F | INPUT_16BF,
    EMULATED_FIXEDPOINT: IMMA | ACCUMULATOR_32I | INPUT_8I,
}


def flags(compute, a, b, *, tf32_forbidden, emulates=False):
    """Return the numerical implementation flags of what runs on tensor cores where it may."""
    if emulates:
        return EMULATED_FLAGS[compute]
    if a in (R_32F, C_32F):
        if compute in _FAST_INPUT and not (compute == FAST_TF32 and tf32_forbidden):
            return _FAST_INPUT[compute]
        return FMA | ACCUMULATOR_32F | INPUT_32F
    found = _TENSOR_INPUT[a] | _TENSOR_INPUT[b]
    return found & ~ACCUMULATOR_32F | ACCUMULATOR_16F if compute in COMPUTE_16F else found
