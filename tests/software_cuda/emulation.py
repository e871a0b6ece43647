"""cuBLASLt's own emulation of FP32 by bfloat16 parts and of FP64 by integers.

Source: the cuBLAS documentation, *Floating Point Emulation*. Where it is silent: the nine products of parts are rounded
to float32 and added from the smallest on; products of integers and their sums are those of extended precision; the
dynamic control keeps every bit of the operands, or takes native FP64.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

DYNAMIC = 0


@dataclass(frozen=True)
class Emulation:
    """The values of ``EmulationDescAttribute``, in order; the strategy is ignored: whatever can be is emulated."""

    strategy: int = 0
    special_values: int = 0xFFFF
    control: int = DYNAMIC
    max_bits: int = 0
    offset: int = 0

    @property
    def slices(self):
        """The most 8-bit integers per number, of which one bit is the sign."""
        assert self.control == DYNAMIC, "the fixed control is not modelled"
        return -(-((self.max_bits or 79) + 1) // 8)

    def workspace_bytes(self, m, n, k, batch_count, *, is_complex):
        """Return the documented upper bound of the workspace of fixed-point emulation."""

        def padded(extent, step):
            return (extent + step - 1) // step * step

        mult = 2 if is_complex else 1
        rows, cols, inner = padded(m, 1024), padded(n, 1024), padded(k, 128)
        gemm = (rows * inner + cols * inner) * mult * self.slices + 4 * (rows + cols) * mult
        sums = 8 * m * n * mult * mult if is_complex else 0
        partial = min(4 * rows * cols * mult * mult * self.slices, 2**32) * (
            padded(k, 8192) // 8192
        )
        gemm += max(sums, partial)
        blocks = padded(k, 64) // 64
        dynamic = 4 * (m * blocks + n * blocks + m * n) * mult
        return int(max(gemm, dynamic) * batch_count * 1.25) + 128 * 1024 * 1024


def bf16x9(a, b):
    """Return the product of float32 or complex64 matrices (batch, rows, cols) as the sum of nine."""
    x, y = list(_parts(a)), list(_parts(b))
    pairs = sorted(((i, j) for i in range(3) for j in range(3)), key=sum, reverse=True)
    total = np.zeros((len(a), a.shape[1], b.shape[2]), a.dtype)
    for i, j in pairs:
        total = total + _native(x[i], y[j])
    return total


def _native(a, b):
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    return np.matmul(a.astype(wide), b.astype(wide)).astype(a.dtype)


def _parts(x):
    rest = np.ascontiguousarray(x).view(np.float32)
    for _ in range(3):
        part = rest.astype(ml_dtypes.bfloat16).astype(np.float32)
        yield part.view(x.dtype)
        rest = rest - part


def fixed_point(a, b, how):
    """Return the product of float64 or complex128 matrices (batch, rows, cols) that keeps every bit of the operands.

    It is native where these are too many, or there are Inf or NaN.
    """
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return np.matmul(a, b)
    needed = 53 + max(_spread(a, 2), _spread(b, 1)) + how.offset
    if needed >= 8 * how.slices:
        return np.matmul(a, b)
    wide = np.clongdouble if a.dtype.kind == "c" else np.longdouble
    return np.matmul(a.astype(wide), b.astype(wide)).astype(a.dtype)


def _spread(x, axis):
    """Return the largest difference between exponents of components along an axis, but for zeros."""
    components = np.stack([x.real, x.imag])
    exponents = np.where(components == 0, -(10**6), np.frexp(components)[1])
    largest = exponents.max(axis=(0, axis + 1), keepdims=True)
    return int(np.where(components == 0, 0, largest - exponents).max(initial=0))
