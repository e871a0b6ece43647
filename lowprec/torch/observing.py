"""Observations of intercepted products, for the comparison of two runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec.core.ledger import LedgerRow
from lowprec.core.operand_statistics import SAMPLE
from lowprec.core.recording import Kind, Recorder, fault_text
from lowprec.modes import parse_mode
from lowprec.torch.statistics import operand_statistics

#: Passes by the product of a layer.
_PASSES = {"": "backward", "forward": "backward"}
_WIDE = (torch.float64, torch.complex128)
_SINGLE = (torch.float32, torch.complex64)


def observe(
    recorder: Recorder, row: LedgerRow, product: str, multiplications: int, tensors: list[Tensor], result: Any,
    again: Tensor | None, matrices: Any = None,
) -> None:  # fmt: skip
    """Record a product; ``again`` is that of the same operands in the reference.

    ``matrices`` returns the operands for the statistics, of an operator whose tensors are no matrices.
    """
    if isinstance(result, (tuple, list)):
        result = result[0]
    if (
        type(result) is not Tensor
        or result.layout is not torch.strided
        or result.is_quantized
        or result.is_meta
    ):
        return
    phase = _PASSES.get(product, product) if row.backward else "forward"
    kind = Kind(row.layer, phase, row.operator, row.mode)
    with torch.no_grad():
        x = _numbers(result)
        y = None if again is None else _numbers(again).to(x.dtype)
        count = x.numel() * (2 if x.is_complex() else 1)
        other = None if y is None else y.data_ptr()
        index, begins, is_faulty = recorder.add(
            kind, tuple(x.shape), x.data_ptr(), other, count, x.dtype in _WIDE, multiplications
        )
        if begins and y is not None:
            a, b = matrices() if matrices else tensors
            statistics = operand_statistics(a.detach(), b.detach(), parse_mode(row.mode), SAMPLE)
            recorder.add_statistics(kind, index, statistics)
        if is_faulty and (fault := _fault(x)):
            of_operands = [_fault(each) for each in tensors[:2]]
            of_again = "" if y is None else _fault(y)
            reference = None if y is None else recorder.reference
            recorder.add_fault(index, fault_text(fault, of_operands, row.mode, reference, of_again))


def _numbers(x: Tensor) -> Tensor:
    """Return the numbers of a result as contiguous ones, in this machine's memory, that the library reads."""
    x = x.detach().resolve_conj().resolve_neg().cpu()
    if x.dtype not in _SINGLE and x.dtype not in _WIDE:
        x = x.float()
    return x.contiguous()


def _fault(x: Tensor) -> str:
    """Return the kind of a number that is not finite."""
    if torch.isfinite(x).all():
        return ""
    return "NaN" if torch.isnan(x).any() else "Inf"
