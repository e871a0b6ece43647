"""Decoding of 8-bit codes to bfloat16, which represents every number of these formats, by tables in registers."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from lowprec.backends.cpu.packed.native import I16, vector

_WORDS = ir.VectorType(I16, 32)


@cache
def _table(dtype: str) -> tuple[Any, ...]:
    """Return the bits of the 128 non-negative numbers of an 8-bit format as bfloat16, in four vectors."""
    numbers = np.arange(128, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    with np.errstate(invalid="ignore"):  # signalling NaN
        words = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    return tuple(vector(I16, row) for row in words.reshape(4, 32).tolist())


def _looked_up(builder: Any, low: Any, indices: Any, high: Any) -> Any:
    """Return the words of a table of two vectors at the low six bits of each index (VPERMI2W)."""
    signature = ir.FunctionType(_WORDS, [_WORDS] * 3)
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.vpermi2var.hi.512")
    return builder.call(function, [low, indices, high])


def widened_float8(builder: Any, dtype: str, codes: Any) -> Any:
    """Return 32 numbers of an 8-bit format as the bits of bfloat16."""

    def splat(value: int) -> Any:
        return vector(I16, [value] * 32)

    table, words = _table(dtype), builder.zext(codes, _WORDS)
    small = _looked_up(builder, table[0], words, table[1])
    large = _looked_up(builder, table[2], words, table[3])
    is_large = builder.icmp_signed("!=", builder.and_(words, splat(64)), splat(0))
    magnitude = builder.select(is_large, large, small)
    return builder.or_(magnitude, builder.and_(builder.shl(words, splat(8)), splat(0x8000)))
