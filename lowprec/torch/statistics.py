"""Statistics of intercepted products: how the mode's rounding changes the operands, and the error of the product."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowprec.arrays import block_codes
from lowprec.core import dispatch
from lowprec.core.interception_report import OperandStatistics, Statistics
from lowprec.modes import Mode, row, rules_of
from lowprec.recipes import Rule


def measure(a: Tensor, b: Tensor, mode: Mode) -> Statistics:
    """Return the statistics of both operands, and the product's error relative to float64's, by Frobenius norms."""
    a, b = a.detach(), b.detach()
    exact = dispatch.matmul(*(x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b)))
    error = float((dispatch.matmul(a, b, math_mode=mode) - exact).norm() / exact.norm()) if exact.any() else 0.0
    if not row(mode).quantizes:
        least = row(mode).operand_format.smallest_normal
        return Statistics(_of_numbers(a, least), _of_numbers(b, least), error)
    first, second = rules_of(mode)
    return Statistics(_of_codes(a, -1, first), _of_codes(b, -2 if b.ndim > 1 else -1, second), error)


def _of_numbers(x: Tensor, least: float) -> OperandStatistics:
    size = x.abs()
    if not size.numel():
        return OperandStatistics()
    return OperandStatistics(float(size.max()), float(((size > 0) & (size < least)).float().mean()))


def _of_codes(x: Tensor, axis: int, rule: Rule) -> OperandStatistics:
    """Return the statistics of an operand that is rounded to nearest along an axis, without a transform."""
    if not x.numel():
        return OperandStatistics()
    numbers = np.moveaxis(np.atleast_2d(x.float().cpu().numpy()), axis, -1)
    with np.errstate(all="ignore"):
        rule = rule._replace(rounding="nearest", hadamard=0)
        values = block_codes.rounded(numbers, -1, rule, np)[0]
        size = np.abs(numbers)
        rows, k = numbers.shape[-2:]
        high, wide = {"tensor": (rows, k), "vector": (1, k)}.get(rule.scaling, rule.block)
        peaks = np.maximum.reduceat(size, np.arange(0, k, wide), -1)
        peaks = np.maximum.reduceat(peaks, np.arange(0, rows, high), -2)
        clipped = np.zeros(())
        elements = rule.number_format
        if rule.block_scale == "floor" and elements is not None:  # others scale the largest number into the range
            unit = np.ldexp(1.0, np.frexp(peaks)[1] - 1 - elements.emax)
            end = unit * (elements.largest + 2.0 ** (elements.emax - elements.precision))
            clipped = size > np.repeat(end, wide, -1)[..., :k]
        some = peaks[(peaks > 0) & np.isfinite(peaks)]
        span = float(np.log2(some.max() / some.min())) if some.size else 0.0
        underflow = float(((size > 0) & (values == 0)).mean())
    return OperandStatistics(float(size.max()), underflow, float(clipped.mean()), span)
