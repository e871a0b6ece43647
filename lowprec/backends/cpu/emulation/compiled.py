"""Emulation with numba, the fast implementation. Importing this module imports numba and compiles.

An aligned and truncated term is an integer below 2^27 (products are below 4, with at most 25 fraction bits). So
conversion to int32 truncates it, and the sum of 17 terms in float64 is exact.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from lowprec.backends.cpu.emulation.arithmetic import Arithmetic
from lowprec.backends.cpu.emulation.arrays import NOWHERE, Operand
from lowprec.backends.cpu.packed import native  # noqa: F401 - makes numba's target, safely
from lowprec.backends.cpu.packed.stored_code import sources_digest
from lowprec.policy.protocol import raised_in

# Module constants, which numba compiles into the code.
_LEAST = np.int32(-126)  # least exponent of a float32, normal or subnormal
_NOWHERE = np.int32(NOWHERE)
_BIAS = 1023
_BEYOND_FLOAT32 = np.int64((1 << 29) - 1)
_SIGN = np.int64(-(2**63))
_TOO_LARGE = 2.0**128
_SMALLEST_NORMAL = 2.0**-126


@numba.njit(error_model="numpy")
def _align(total, largest, scale_bits, unscale_bits, fraction_bits, least):
    """Compute the exponents of alignment, as float64 scales, from c and the largest exponents of the products."""
    bits = total.view(np.int64)
    for j in range(total.size):
        exponent = max(np.int32(((bits[j] >> 52) & 0x7FF) - _BIAS), _LEAST)
        exponent = exponent if total[j] != 0 else _NOWHERE
        shift = np.int64(fraction_bits - max(max(exponent, largest[j]), least))
        scale_bits[j] = (_BIAS + shift) << 52
        unscale_bits[j] = (_BIAS - shift) << 52


@numba.njit(error_model="numpy")
def _round(sums, unscale, total, special):
    """Round the sums of a group toward zero to float32; overflows are recorded in ``special``."""
    bits = total.view(np.int64)
    for j in range(total.size):
        total[j] = sums[j] * unscale[j]
    for j in range(total.size):
        value = total[j]
        if abs(value) >= _TOO_LARGE:
            special[j] = special[j] if special[j] != 0 else np.copysign(np.inf, value)
            total[j] = 0.0
    for j in range(total.size):
        value, sign = total[j], bits[j] & _SIGN
        is_small = abs(value) < _SMALLEST_NORMAL
        units = np.float64(np.int32((value if is_small else 0.0) * 2.0**149))
        bits[j] &= ~_BEYOND_FLOAT32
        total[j] = abs(units * 2.0**-149) if is_small else total[j]
        bits[j] |= sign


@numba.njit(error_model="numpy")
def _note_special(a_row, b, first, last, start, special):
    """Add the non-finite products of a group, in order."""
    for i in range(first, last):
        for j in range(special.size):
            product = np.float64(a_row[i]) * np.float64(b[i, start + j])
            if not np.isfinite(product):
                special[j] += product


def _block_function() -> Any:
    """Return the function to compile; its closure contains a digest, which is part of numba's cache key."""
    sources = sources_digest()

    def block(
        a, a_exponents, a_raw, b, b_exponents, b_raw, c,
        top, bottom, left, right, is_finite, group, fraction_bits, least,
    ):  # fmt: skip
        _ = sources
        n = right - left
        largest = np.empty(n, np.int32)
        scale_bits, unscale_bits = np.empty(n, np.int64), np.empty(n, np.int64)
        scale, unscale = scale_bits.view(np.float64), unscale_bits.view(np.float64)
        sums, total, special = np.empty(n), np.empty(n), np.empty(n)
        for row in range(top, bottom):
            for j in range(n):
                value = np.float64(c[row, left + j])
                special[j] = 0.0 if np.isfinite(value) else value
                total[j] = value if np.isfinite(value) else 0.0
            for first in range(0, a.shape[1], group):
                last = min(first + group, a.shape[1])
                largest[:] = _NOWHERE
                for i in range(first, last):
                    exponent, exponents = a_exponents[row, i], b_exponents[i, left:right]
                    for j in range(n):
                        largest[j] = max(largest[j], exponent + exponents[j])
                _align(total, largest, scale_bits, unscale_bits, fraction_bits, least)
                for j in range(n):
                    sums[j] = np.float64(np.int32(total[j] * scale[j]))
                for i in range(first, last):
                    factor, factors = a[row, i], b[i, left:right]
                    for j in range(n):
                        sums[j] += np.float64(np.int32(factor * factors[j] * scale[j]))
                if not is_finite:
                    _note_special(a_raw[row], b_raw, first, last, left, special)
                _round(sums, unscale, total, special)
            for j in range(n):
                c[row, left + j] = total[j] if special[j] == 0 else special[j]

    return block


def _compiled(function: Any) -> Any:
    values, exponents, raw = (x[:, ::1] for x in (types.float64, types.int32, types.float32))
    operand, index = (values, exponents, raw), types.intp
    block = (index,) * 4
    signature = types.void(*operand, *operand, raw, *block, types.boolean, index, *(types.int32,) * 2)
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(signature, cache=True, **options)(function)
    except (OSError, RuntimeError) as error:
        if not raised_in(error, "numba.core.caching", "os", "tempfile"):
            raise
        return numba.njit(signature, **options)(function)


_run = _compiled(_block_function())


def accumulate(a: Operand, b: Operand, c: Any, rows: slice, columns: slice, arithmetic: Arithmetic) -> None:
    """Compute ``c += a @ b`` for a block of c; see :func:`lowprec.backends.cpu.emulation.arrays.accumulate`."""
    _run(
        *a[:3], *b[:3], c,
        rows.start, rows.stop, columns.start, columns.stop,
        a.is_finite and b.is_finite,
        arithmetic.group, arithmetic.fraction_bits, arithmetic.least_exponent,
    )  # fmt: skip
