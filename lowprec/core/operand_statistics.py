"""Statistics of the operands of observed products: how the mode's rounding changes them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from lowprec.arrays import block_codes
from lowprec.core.interception_report import OperandStatistics
from lowprec.modes import Mode, row, rules_of
from lowprec.recipes import Rule

#: Numbers of an operand from which comparisons of two runs estimate underflow and clipping.
SAMPLE = 1 << 12


def operand_statistics(
    a: Any, b: Any, mode: Mode, most: int = sys.maxsize
) -> tuple[OperandStatistics, OperandStatistics]:
    """Return the statistics of both operands, arrays of NumPy, from about ``most`` numbers of each."""
    if not row(mode).quantizes:
        least = row(mode).operand_format.smallest_normal
        return of_numbers(a, least), of_numbers(b, least)
    first, second = rules_of(mode)
    return of_codes(a, -1, first, most), of_codes(b, -min(b.ndim, 2), second, most)


def of_numbers(x: Any, least: float) -> OperandStatistics:
    """Return the statistics of numbers of which those below ``least`` are subnormal or zero in the mode."""
    size = np.abs(x)
    if not size.size:
        return OperandStatistics()
    underflow = (size > 0) & (size < least)
    return OperandStatistics(float(size.max()), float(underflow.mean()))


def of_codes(x: Any, axis: int, rule: Rule | None, most: int) -> OperandStatistics:
    """Return the statistics of an operand that is rounded to nearest along an axis, without a transform."""
    if rule is None or not x.size:
        return of_numbers(x, 0.0)
    if rule.across:
        axis = -3 - axis
    numbers = np.moveaxis(np.atleast_2d(x), axis, -1)
    with np.errstate(all="ignore"):
        if numbers.size > most and rule.block[0] == 1:
            numbers = _chosen(numbers.reshape(-1, numbers.shape[-1]), most)
        rule = rule._replace(rounding="nearest", hadamard=0)
        values, *_ = block_codes.rounded(numbers, -1, rule, np)
        size = np.abs(numbers)
        peaks, wide = _peaks(size, rule)
        underflow = (size > 0) & (values == 0)
        clipped = _clipped(size, peaks, wide, rule)
        positive = peaks[(peaks > 0) & np.isfinite(peaks)]
        span = 0.0
        if positive.size:
            span = float(np.log2(positive.max() / positive.min()))
    return OperandStatistics(float(size.max()), float(underflow.mean()), clipped, span)


def _chosen(numbers: Any, most: int) -> Any:
    """Return some rows, those with the largest and the smallest number among them."""
    step = numbers.size // most + 1
    largest = [int(at) // numbers.shape[-1] for at in (numbers.argmax(), numbers.argmin())]
    return numbers[np.union1d(np.arange(0, len(numbers), step), largest)]


def _peaks(size: Any, rule: Rule) -> tuple[Any, int]:
    """Return the largest number of each block, and the width of the blocks."""
    rows, k = size.shape[-2:]
    high, wide = rule.block
    if rule.scaling == "tensor":
        high = rows
    elif rule.scaling == "vector":
        high = 1
    if rule.scaling in ("tensor", "vector"):
        wide = k
    peaks = np.maximum.reduceat(size, np.arange(0, k, wide), -1)
    return np.maximum.reduceat(peaks, np.arange(0, rows, high), -2), wide


def _clipped(size: Any, peaks: Any, wide: int, rule: Rule) -> float:
    elements = rule.number_format
    # others scale the largest number into the range
    if rule.block_scale not in ("floor", "even") or elements is None:
        return 0.0
    fraction, exponent = np.frexp(peaks)
    if rule.block_scale == "even":
        exponent = exponent + (fraction >= 1 - elements.unit_roundoff / 2)
    unit = np.ldexp(1.0, exponent - 1 - elements.emax)
    end = unit * (elements.largest + 2.0 ** (elements.emax - elements.precision))
    beyond = size > np.repeat(end, wide, -1)[..., : size.shape[-1]]
    return float(beyond.mean())
