"""Observations of intercepted products, for the comparison of two runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec.core.interception_report import NO_STATISTICS
from lowprec.core.ledger import LedgerRow
from lowprec.core.operand_statistics import SAMPLE
from lowprec.core.recording import Observed, Recorder, fault_text
from lowprec.modes import parse_mode
from lowprec.torch.statistics import operand_statistics

#: Passes by the product of a layer.
_PASSES = {"": "backward", "forward": "backward"}


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
    with torch.no_grad():
        x = result.detach()
        error = None
        reference_norm = 0.0
        if again is not None:
            error = _norm(x - again)
            reference_norm = _norm(again)
        elif row.mode:  # the mode is the reference
            error = 0.0
        of_a = of_b = NO_STATISTICS
        if again is not None and recorder.measures_next(row.layer, phase, row.operator):
            a, b = matrices() if matrices else tensors
            of_a, of_b = operand_statistics(a.detach(), b.detach(), parse_mode(row.mode), SAMPLE)
        fault = ""
        if kind := _fault(x):
            of_operands = [_fault(each) for each in tensors[:2]]
            of_again = "" if again is None else _fault(again)
            reference = None if again is None else recorder.reference
            fault = fault_text(kind, of_operands, row.mode, reference, of_again)
        sketch = recorder.sketch(_numbers(x))
        seen = Observed(
            row.layer, phase, row.operator, row.mode, multiplications, tuple(x.shape), _norm(x), sketch, error,
            reference_norm, fault, of_a, of_b,
        )  # fmt: skip
        recorder.products.append(seen)


def _norm(x: Tensor) -> float:
    wide = torch.complex128 if x.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(x, dtype=wide))


def _numbers(x: Tensor) -> Any:
    x = x.resolve_conj().resolve_neg().cpu()
    if x.dtype is torch.bfloat16:
        x = x.float()
    return x.numpy()


def _fault(x: Tensor) -> str:
    """Return the kind of a number that is not finite."""
    if torch.isfinite(x.sum()) or torch.isfinite(x).all():
        return ""
    return "NaN" if torch.isnan(x).any() else "Inf"
