"""How NVIDIA's tensor cores sum, as roundings that a term of a sum goes through at most.

A tensor core adds the exact products of a group to the accumulator: all terms are aligned to the largest exponent and
cut to F fraction bits, and the sum is rounded toward zero to FP32. Of terms whose magnitudes add up to S, each of the
g + 1 that are cut loses less than 2^-F S, and the result less than 2^-23 S: together (g + 1) 2^(24 - F) + 2 units of
2^-24. Splitting the sum adds fewer roundings than it takes away, as long as no part is shorter than a group.

Source of the model, read off V100, A100, H100, H200 and B200: F. A. Khattak and M. Mikaitis, "Accurate models of
NVIDIA tensor cores", arXiv 2512.07004. FP8 on Hopper: 13 fraction bits in groups of 32 (H. Zhao and others, "Insights
into DeepSeek-V3", arXiv 2505.09343).
"""

from __future__ import annotations

from math import ceil

from lowprec.formats import DType

__all__ = ["roundings"]

#: By the kind of data: group and fraction bits, per compute capability from which they hold, the newest first.
_MODELS: dict[str, tuple[tuple[tuple[int, int], int, int], ...]] = {
    "16-bit": (((9, 0), 16, 25), ((8, 0), 8, 24), ((7, 0), 4, 23)),
    "tf32": (((9, 0), 8, 25), ((8, 0), 4, 24)),
    "8-bit": (((8, 9), 32, 13),),
}

_KIND = {
    DType.FLOAT16: "16-bit",
    DType.BFLOAT16: "16-bit",
    DType.FLOAT8_E4M3FN: "8-bit",
    DType.FLOAT8_E5M2: "8-bit",
}


def roundings(k: int, data: DType, capability: tuple[int, int], *, tf32: bool = False) -> int:
    """Return the roundings to FP32 that a term of a sum of ``k`` products goes through at most.

    Parameters
    ----------
    k : int
        Products per element.
    data : DType
        What is multiplied.
    capability : tuple of int
        Compute capability, (major, minor).
    tf32 : bool
        Whether float32 data may go to the tensor cores.

    Examples
    --------
    >>> roundings(4096, DType.FLOAT32, (9, 0)), roundings(4096, DType.BFLOAT16, (9, 0))
    (4096, 2688)
    >>> roundings(4096, DType.BFLOAT16, (7, 0))
    12288
    """
    kind = "tf32" if tf32 else _KIND.get(data)
    for since, group, fraction_bits in _MODELS.get(kind or "", ()):
        if capability >= since:
            each = (group + 1) * 2.0 ** (24 - fraction_bits) + 2
            # No less than one rounding per addition of the parts of a split sum.
            return ceil(-(-k // group) * each)
    return k
