"""Operands whose product has one correct bit pattern in each mode, and that pattern, computed without lowprec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


def exact_operands(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Any, Any]:
    """Return float32 operands whose product has one right bit pattern in each mode.

    ``a`` has 13 significant bits, an odd multiple of 2^-12 times a power of two per row; ``b`` is 1 or 2 with a sign.
    A sum of k products spans 14 + log2(k) bits, and so do the sums of the rounded numbers: within FP32's 24 for k up to
    1024. TF32 keeps 11 of the 13 bits, bfloat16 8; float16 keeps 11 in the even rows and 5 in the odd ones: these begin
    with a number, which meets a zero, that is so large that the others become subnormal when the row is scaled.
    """
    if k > 1024:
        raise ValueError(f"k is {k}, but sums of more than 1024 products are not exact in FP32")
    mantissas = 1 + (2 * rng.integers(0, 2048, (m, k)) + 1) / 4096
    scales = np.where(np.arange(m) % 2, 2.0**-20, 1.0)[:, np.newaxis]
    a = (mantissas * rng.choice([-1, 1], (m, k)) * scales).astype(np.float32)
    b = rng.choice(np.array([-2, -1, 1, 2], np.float32), (k, n))
    if k > 1:
        a[1::2, 0], b[0] = 2.0**13, 0
    return a, b


def _tf32(x: Any) -> Any:
    # No ties here: two bits are dropped, and the last of them is 1.
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _fp16(x: Any) -> Any:
    _, exponents = np.frexp(np.abs(x).max(-1, keepdims=True))  # the largest number of a row becomes 2^14 or more
    return np.ldexp(np.ldexp(x, 15 - exponents).astype(np.float16).astype(np.float64), exponents - 15)


ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "fp32": lambda x: x,
    "fp32_pedantic": lambda x: x,
    "tf32": _tf32,
    "bf16": lambda x: x.astype(ml_dtypes.bfloat16),
    "fp16": _fp16,
}


def reference(a: Any, b: Any, mode: str) -> Any:
    """Return a mode's result for exact operands, computed without lowprec."""
    return (ROUNDINGS[mode](a).astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


def same_bits(x: Any, y: Any) -> bool:
    """Whether two arrays are equal, including NaN and the sign of zero."""
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


@dataclass(frozen=True)
class Job:
    """A product and its only correct result."""

    a: Any
    b: Any
    expected: Any
