"""Which numbers NVIDIA's tensor cores multiply, and how they sum: roundings that a term of a sum goes through at most.

A tensor core adds the exact products of a group to the accumulator: all terms are aligned to the largest exponent and
cut to F fraction bits, and the sum is rounded toward zero to FP32. Of terms whose magnitudes add up to S, each of the
g + 1 that are cut loses less than 2^-F S, and the result less than 2^-r S, where r are its fraction bits: together
(g + 1) 2^(24 - F) + 2^(24 - r) units of 2^-24. Splitting the sum adds fewer roundings than it takes away, as long as
no part is shorter than a group.

Source of the model, read off V100, A100, H100, H200 and B200: F. A. Khattak and M. Mikaitis, "Accurate models of
NVIDIA tensor cores", arXiv 2512.07004, section 4 and table 3. FP8, and the same groups in the same order found
independently: P. Xie and others, "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores", arXiv
2511.10909. First capabilities and instructions: CUDA C++ Programming Guide, *Warp Matrix Functions*; PTX ISA, *mma*,
*wgmma* and *tcgen05.mma*.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

Capability = tuple[int, int]


class Accumulation(NamedTuple):
    """How a tensor core sums products of one format in FP32."""

    group: int  # products that are added to the accumulator at once
    fraction_bits: int  # that a term keeps below the largest exponent of its group
    #: Exponent to which terms are aligned at least. None is needed on Volta: with a term that is not zero, float16
    #: products and an FP32 accumulator do not get below -126.
    least_exponent: int
    instruction_k: int  # products of one instruction: a group, or two in order
    result_bits: int = 23  # fraction bits of the accumulator, which is rounded toward zero


#: A capability from which it holds; None for sums in another type.
_Model = tuple[Capability, Accumulation | None]

_SIXTEEN_BITS: tuple[_Model, ...] = (
    ((9, 0), Accumulation(16, 25, -133, 16)),
    ((8, 0), Accumulation(8, 24, -132, 16)),
    ((7, 0), Accumulation(4, 23, -126, 4)),
)
_EIGHT_BITS: tuple[_Model, ...] = (
    ((10, 0), Accumulation(32, 25, -133, 32)),
    ((9, 0), Accumulation(32, 13, -133, 32, result_bits=13)),
    ((8, 9), Accumulation(16, 13, -132, 32, result_bits=13)),
)

#: By format of the operands, the newest capability first; the last is the first that multiplies it.
_MODELS: dict[str, tuple[_Model, ...]] = {
    "float16": _SIXTEEN_BITS,
    "bfloat16": _SIXTEEN_BITS[:2],
    "tf32": (((9, 0), Accumulation(8, 25, -133, 8)), ((8, 0), Accumulation(4, 24, -132, 8))),
    "float8_e4m3fn": _EIGHT_BITS,
    "float8_e5m2": _EIGHT_BITS,
    "float64": (((8, 0), None),),
    "int8": (((7, 2), None),),
}

#: Only data-centre GPUs have FP64 tensor cores; 8.6, 8.9 and 12.x have none.
_FLOAT64_TENSOR_CORES = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})

#: FP64 in units of FP32, by capability: data sheets of V100, A100, H100 and B200. Other GPUs have next to no FP64.
_FLOAT64_COSTS = {(6, 0): 2.0, (7, 0): 2.0, (8, 0): 1.0, (9, 0): 1.0, (10, 0): 2.0}
_FLOAT64_COST_ELSEWHERE = 64.0
_FLOAT64_COST_OF_A_CPU = 2.0


def float64_cost(capability: Capability | None) -> float:
    """Return the cost of a flop in FP64 relative to FP32 on a GPU, or on a CPU (None)."""
    if capability is None:
        return _FLOAT64_COST_OF_A_CPU
    return _FLOAT64_COSTS.get(capability, _FLOAT64_COST_ELSEWHERE)


def first_capability(fmt: str) -> Capability | None:
    """Return the first compute capability whose tensor cores multiply a format, None if none does."""
    models = _MODELS.get(fmt)
    return models[-1][0] if models else None


def tensor_cores_multiply(fmt: str, capability: Capability | None) -> bool:
    """Whether tensor cores of a compute capability multiply a format; not where there are none (None).

    Examples
    --------
    >>> tensor_cores_multiply("bfloat16", (7, 0)), tensor_cores_multiply("bfloat16", (9, 0))
    (False, True)
    >>> tensor_cores_multiply("float64", (8, 0)), tensor_cores_multiply("float64", (8, 9))
    (True, False)
    """
    if fmt == "float64":
        return capability in _FLOAT64_TENSOR_CORES
    first = first_capability(fmt)
    return capability is not None and first is not None and capability >= first


def accumulation(fmt: str, capability: Capability) -> Accumulation | None:
    """Return how tensor cores of a compute capability sum products of a format; None where they do not, in FP32.

    Examples
    --------
    >>> accumulation("tf32", (9, 0)).group, accumulation("tf32", (7, 0))
    (8, None)
    """
    models = (model for since, model in _MODELS.get(fmt, ()) if capability >= since)
    return next(models, None)


def roundings(k: int, fmt: str, capability: Capability) -> int:
    """Return the roundings to FP32 that a term of a sum of ``k`` products goes through at most.

    Examples
    --------
    >>> roundings(4096, "float32", (9, 0)), roundings(4096, "bfloat16", (9, 0))
    (4096, 2688)
    >>> roundings(4096, "float16", (7, 0))
    12288
    """
    model = accumulation(fmt, capability)
    if model is None:
        return k
    each = (model.group + 1) * 2.0 ** (24 - model.fraction_bits) + 2.0 ** (24 - model.result_bits)
    # No less than one rounding per addition of the parts of a split sum.
    return ceil(-(-k // model.group) * each)
