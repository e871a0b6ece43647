"""Statistics of intercepted products: how the mode's rounding changes the operands, and the error of the product."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from lowprec.core import dispatch
from lowprec.core import operand_statistics as core
from lowprec.core.interception_report import OperandStatistics, Statistics
from lowprec.modes import Mode, row


def measure(a: Tensor, b: Tensor, mode: Mode) -> Statistics:
    """Return the statistics of both operands, and the product's error relative to float64's, by Frobenius norms."""
    a = a.detach()
    b = b.detach()
    return Statistics(*operand_statistics(a, b, mode), _error(a, b, mode))


def operand_statistics(
    a: Tensor, b: Tensor, mode: Mode, most: int = sys.maxsize
) -> tuple[OperandStatistics, OperandStatistics]:
    """Return the statistics of both operands, from about ``most`` numbers of each."""
    if not row(mode).quantizes:
        least = row(mode).operand_format.smallest_normal
        first, second = (x.abs().double().cpu().numpy() for x in (a, b))
        return core.of_numbers(first, least), core.of_numbers(second, least)
    return core.operand_statistics(a.float().cpu().numpy(), b.float().cpu().numpy(), mode, most)


def _error(a: Tensor, b: Tensor, mode: Mode) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    exact = dispatch.matmul(a.to(wide), b.to(wide))
    if not exact.any():
        return 0.0
    difference = dispatch.matmul(a, b, math_mode=mode) - exact
    return float(difference.norm() / exact.norm())
