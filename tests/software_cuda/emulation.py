"""cuBLASLt's own emulation of FP32 by bfloat16 parts and of FP64 by integers.

Source: the cuBLAS documentation, *Floating Point Emulation*. Where it is silent: the nine products of parts are rounded
to float32 and added from the smallest on; products of integers and their sums are exact and rounded once; the dynamic
control keeps every bit of the operands, or takes native FP64 if these are too many, or there are Inf or NaN.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

DYNAMIC, FIXED = 0, 1
_DEFAULT_BITS = {DYNAMIC: 79, FIXED: 55}


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
        return -(-((self.max_bits or _DEFAULT_BITS[self.control]) + 1) // 8)

    def workspace_bytes(self, m, n, k, batch_count, *, is_complex):
        """Return the documented upper bound of the workspace of fixed-point emulation."""

        def padded(extent, step):
            return (extent + step - 1) // step * step

        mult = 2 if is_complex else 1
        rows, cols, inner = padded(m, 1024), padded(n, 1024), padded(k, 128)
        gemm = (rows * inner + cols * inner) * mult * self.slices + 4 * (rows + cols) * mult
        sums = 8 * m * n * mult * mult if is_complex else 0
        partial = min(4 * rows * cols * mult * mult * self.slices, 2**32) * (padded(k, 8192) // 8192)
        gemm += max(sums, partial)
        blocks = padded(k, 64) // 64
        dynamic = 4 * (m * blocks + n * blocks + m * n) * mult if self.control == DYNAMIC else 0
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
    """Return the product of float64 or complex128 matrices (batch, rows, cols) with integers as operands."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return np.matmul(a, b)
    bits = 8 * how.slices - 1
    if how.control == DYNAMIC:
        needed = 53 + max(_spread(a, 2), _spread(b, 1)) + how.offset
        if needed > bits:
            return np.matmul(a, b)
    (x, x_exponents), (y, y_exponents) = _integers(a, 2, bits), _integers(b, 1, bits)
    sums = np.stack([
        np.matmul(x[0], y[0]) - np.matmul(x[1], y[1]),
        np.matmul(x[0], y[1]) + np.matmul(x[1], y[0]),
    ])  # fmt: skip
    exponents = x_exponents + y_exponents - 2 * bits
    real, imaginary = (_rounded(s, exponents) for s in sums)
    return real + 1j * imaginary if a.dtype.kind == "c" else real


def _exponents(x, axis):
    """Return the exponents of the components of all elements, and the largest along an axis; -10^6 for zeros."""
    components = np.stack([x.real, x.imag])
    found = np.where(components == 0, -(10**6), np.frexp(components)[1])
    return found, found.max(axis=(0, axis + 1), keepdims=True)[0]


def _spread(x, axis):
    """Return the largest difference between exponents along an axis."""
    found, largest = _exponents(x, axis)
    return int(np.where(found == -(10**6), 0, largest - found).max(initial=0))


def _integers(x, axis, bits):
    """Return real and imaginary parts as integers of ``bits`` bits, truncated, and the exponents of rows or columns."""
    _, largest = _exponents(x, axis)
    largest = np.where(largest == -(10**6), 0, largest)
    made = np.frompyfunc(lambda v, e: _scaled(v, bits - int(e)), 2, 1)
    return made(np.stack([x.real, x.imag]), largest), largest


def _scaled(value, exponent):
    """Return ``value * 2^exponent``, truncated."""
    numerator, denominator = float(value).as_integer_ratio()
    shifted = abs(numerator) << max(exponent, 0)
    found = shifted // (denominator << max(-exponent, 0))
    return found if value >= 0 else -found


def _rounded(sums, exponents):
    """Return ``sums * 2^exponents`` rounded to float64."""

    def one(value, exponent):
        # The quotient of two integers is rounded correctly.
        return value << exponent if exponent >= 0 else value / (1 << -exponent)

    return np.frompyfunc(lambda v, e: float(one(int(v), int(e))), 2, 1)(sums, exponents).astype(np.float64)
