"""Formats of NVIDIA's tensor cores, and a model of their sums: the largest number of roundings of a term.

A tensor core adds the exact products of a group of g to the accumulator: all terms are aligned to the largest exponent
and truncated to F fraction bits, and the sum is rounded toward zero to FP32. If the magnitudes of the terms add up to
S, each of the g + 1 truncated terms loses less than 2^-F S, and the result, with r fraction bits, less than 2^-r S:
together (g + 1) 2^(24 - F) + 2^(24 - r) units of 2^-24. Splitting the sum removes more roundings than it adds, as long
as no part is shorter than a group.

Source of the model, measured on V100, A100, H100, H200 and B200: F. A. Khattak and M. Mikaitis, "Accurate models of
NVIDIA tensor cores", arXiv 2512.07004, section 4 and table 3. FP8, and an independent confirmation of groups and order:
P. Xie and others, "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores", arXiv 2511.10909, which is
also the source of the sums with scales of blocks. First
capabilities and instructions: CUDA C++ Programming Guide, *Warp Matrix Functions*; PTX ISA, *mma*, *wgmma* and
*tcgen05.mma*.
"""

from __future__ import annotations

from dataclasses import asdict
from math import ceil
from typing import NamedTuple

from lowprec.architectures import Cores, TensorCore

Capability = tuple[int, int]


#: The first compute capability that multiplies block-scaled formats (cuBLAS documentation, *Scaling Mode Support
#: Overview*).
BLOCK_SCALES_SINCE = (10, 0)


class Accumulation(NamedTuple):
    """How a tensor core adds a group of products of one format to an FP32 accumulator: ``c + a_1 b_1 + ... + a_g b_g``.

    1. The products are exact. The exponent of a product is the sum of its factors' exponents; a subnormal factor is not
       normalised and has the exponent of the smallest normal number.
    2. The nonzero terms, including c, are aligned to their largest exponent, at least ``least_exponent``, and truncated
       to ``fraction_bits`` below it.
    3. The sum of these is exact, and rounded toward zero to float32, subnormal numbers included, of which
       ``result_bits`` fraction bits remain; it is infinite beyond the largest float32. An exact zero is +0.
    4. With ``adds_after`` c is not among the terms: it is added to the rounded sum, to nearest.

    A NaN in a product or in c, infinities of both signs, and an infinity times zero give the NaN 0x7fffffff.
    """

    instruction_k: int  # products of one instruction: one group, or two in order
    group: int  # products that are added to the accumulator at once
    fraction_bits: int
    #: It has no effect on Volta, where no nonzero product of float16 numbers and no FP32 accumulator has an exponent
    #: below -126.
    least_exponent: int
    # exponent of the smallest normal number of the factors' format; set for the emulation
    emin: int = 0
    result_bits: int = 23
    adds_after: bool = False
    # products after which libraries add the sum to the result in FP32, unless accumulation is fast; 0: all of k
    library_chunk: int = 0
    # products whose exact sum is a term, with the exponent of the scales alone
    dot: int = 1


#: The first compute capability of a model, and the model; None if sums are not in FP32.
_Model = tuple[Capability, Accumulation | None]

_SIXTEEN_BITS: tuple[_Model, ...] = (
    ((9, 0), Accumulation(16, 16, 25, -133)),
    ((8, 0), Accumulation(16, 8, 24, -132)),
    ((7, 0), Accumulation(4, 4, 23, -126)),
)
#: Blackwell: of ``tcgen05.mma``, which cuBLASLt uses; a published model without recorded results of a library.
_EIGHT_BITS: tuple[_Model, ...] = (
    ((10, 0), Accumulation(32, 32, 25, -133)),
    ((9, 0), Accumulation(32, 32, 13, -133, result_bits=13, library_chunk=128)),
    ((8, 9), Accumulation(32, 16, 13, -132, result_bits=13, library_chunk=128)),
)

_TF32: tuple[_Model, ...] = (
    ((9, 0), Accumulation(8, 8, 25, -133)),
    ((8, 0), Accumulation(8, 4, 24, -132)),
)

#: Kinds of instructions that multiply scales of blocks in, by their names in PTX: for MXFP8 and MXFP6; for MXFP4 and
#: NVFP4. Published models without recorded results of a library.
BLOCK_KINDS = {
    "mxf8f6f4": Accumulation(32, 32, 25, -126),
    "mxf4nvf4": Accumulation(64, 64, 35, -126, dot=16),
}

#: Models by operand format, the newest compute capability first; the last is the first that supports the format.
_MODELS: dict[str, tuple[_Model, ...]] = {
    "float16": _SIXTEEN_BITS,
    "bfloat16": _SIXTEEN_BITS[:2],
    "tf32": _TF32,
    "float8_e4m3fn": _EIGHT_BITS,
    "float8_e5m2": _EIGHT_BITS,
    "float64": (((8, 0), None),),
    "int8": (((7, 2), None),),
    **{kind: ((BLOCK_SCALES_SINCE, model),) for kind, model in BLOCK_KINDS.items()},
}

#: Compute capabilities with FP64 tensor cores, which only data-centre GPUs have.
_FLOAT64_TENSOR_CORES = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})

#: Cost of FP64 relative to FP32 by compute capability: data sheets of V100, A100, H100 and B200.
_FLOAT64_COSTS = {(6, 0): 2.0, (7, 0): 2.0, (8, 0): 1.0, (9, 0): 1.0, (10, 0): 2.0}
_FLOAT64_COST_DEFAULT = 64.0
_FLOAT64_COST_CPU = 2.0


def float64_cost(capability: Capability | None) -> float:
    """Return the cost of a flop in FP64 relative to FP32 on a GPU, or on a CPU (None)."""
    if capability is None:
        return _FLOAT64_COST_CPU
    return _FLOAT64_COSTS.get(capability, _FLOAT64_COST_DEFAULT)


def first_capability(fmt: str) -> Capability | None:
    """Return the first compute capability whose tensor cores support a format, None if there is none."""
    models = _MODELS.get(fmt)
    if models:
        return models[-1][0]
    return None


def tensor_cores_multiply(fmt: str, capability: Cores | None) -> bool:
    """Whether tensor cores of a compute capability (None: no tensor cores) or a model support a format."""
    if isinstance(capability, TensorCore):
        models = _MODELS.get(fmt, (((0, 0), None),))
        return fmt not in BLOCK_KINDS and all(model is not None for _, model in models)
    if fmt == "float64":
        return capability in _FLOAT64_TENSOR_CORES
    first = first_capability(fmt)
    return capability is not None and first is not None and capability >= first


def accumulation(fmt: str, capability: Cores) -> Accumulation | None:
    """Return how tensor cores of a compute capability or a model sum products of a format in FP32; None if not."""
    if isinstance(capability, TensorCore):
        if not tensor_cores_multiply(fmt, capability):
            return None
        return Accumulation(instruction_k=capability.group, **asdict(capability))
    models = (model for since, model in _MODELS.get(fmt, ()) if capability >= since)
    return next(models, None)


def roundings(k: int, fmt: str, capability: Cores) -> int:
    """Return the largest number of roundings to FP32 of a term in a sum of ``k`` products."""
    model = accumulation(fmt, capability)
    if model is None:
        return k
    of_terms = (model.group + 1) * 2.0 ** (24 - model.fraction_bits)
    each = of_terms + 2.0 ** (24 - model.result_bits) + model.adds_after
    # Rounded up, because each addition of the parts of a split sum needs at least one rounding.
    return ceil(-(-k // model.group) * each)
