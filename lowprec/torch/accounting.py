"""The mode of an intercepted product, its row in the report, and its record for a comparison."""

from __future__ import annotations

from contextvars import Context
from typing import Any

import torch
from torch import Tensor

from lowprec import policy
from lowprec.core.interception_report import PassedBy, Statistics
from lowprec.core.ledger import LedgerRow
from lowprec.core.rules import Layer
from lowprec.errors import (
    ArrayError,
    DeviceError,
    DTypeError,
    SettingError,
    ShapeError,
    UnsupportedError,
)
from lowprec.modes import Mode, ResolvedMode, row
from lowprec.torch.aten import ACTED_ON
from lowprec.torch.observing import observe
from lowprec.util.per_thread import PerThread

_grad_enabled = torch.is_grad_enabled
_graph_task = torch._C._current_graph_task_id

#: Errors raised before any computation; PyTorch then computes the product.
REFUSALS = (ArrayError, DTypeError, DeviceError, SettingError, ShapeError, UnsupportedError)

#: A scope, and the context of a backward pass on another thread.
Found = tuple[Any, Context | None]


#: The number of products, and the reason of the operator that multiplies, inside it.
thread = PerThread(counted=0, watched=None)

#: Reasons for routines that keep their precision.
_REASONS = {"dot": PassedBy.VECTORS, "lapack": PassedBy.LINEAR_ALGEBRA}


def reason_against(
    shown: Mode | None, mode: Mode | None, routine: str, dtype: torch.dtype
) -> PassedBy | None:
    """Return the reason why a product is PyTorch's; ``shown`` is the mode of its layer, ``mode`` its own one."""
    if mode is None or shown is None:
        return _REASONS.get(routine, PassedBy.LAYER)
    if dtype in ACTED_ON[row(mode).mode]:
        return None
    if dtype in ACTED_ON[row(shown).mode]:
        return PassedBy.NO_PARAMETER
    return PassedBy.ELEMENT_TYPE


def resolve(mode: Mode, context: Context | None) -> ResolvedMode:
    if context is None:
        return policy.resolve(mode)
    return context.copy().run(policy.resolve, mode)


def is_backward() -> bool:
    return _graph_task() != -1 and not _grad_enabled()


def reference_of(
    scope: Any, resolved: ResolvedMode, context: Context | None
) -> ResolvedMode | None:
    """Return the reference of a comparison, where a product in another mode is computed again in it."""
    if scope.recorder is None or scope.recorder.reference is None:
        return None
    reference = resolve(scope.recorder.reference, context)
    return None if reference.mode == resolved.mode else reference


def count(
    scope: Any, layer: Layer, name: str, tensors: list[Tensor], multiplications: int, mode: str,
    reason: Any = None, detail: str = "", statistics: Statistics | None = None, product: str = "",
    result: Any = None, again: Tensor | None = None, matrices: Any = None,
) -> None:  # fmt: skip
    """Count a product in the report; ``matrices`` returns its operands if these are not the first two tensors."""
    thread.counted += 1
    ledger = scope.ledger
    if not ledger.records_gradients and _grad_enabled() and any(x.requires_grad for x in tensors):
        ledger.records_gradients = True
    dtype = ""
    if tensors:
        dtype = str(tensors[0].dtype).removeprefix("torch.")
    backward = is_backward()
    gradient = product if backward and layer and statistics else ""
    found = LedgerRow(_shown(scope, layer), name, dtype, backward, mode, reason, detail, gradient)
    ledger.add(found, multiplications, lambda: tuple(x.shape for x in tensors[:2]), statistics)
    if reason is not None:
        scope.leave(found)
    if scope.recorder is not None:
        observe(scope.recorder, found, product, multiplications, tensors, result, again, matrices)


def _shown(scope: Any, layer: Layer) -> str:
    """Return the text of a layer; a note if its product may belong to layers with different modes."""
    shown = "|".join(dict.fromkeys(name for name, _ in layer))
    if len(layer) > 1 and len({scope.mode_of((each,)) for each in layer}) > 1:
        note = f"{shown} have different modes, and share an operand; the first pattern's mode was used."
        scope.ledger.notes[note] = None
    return shown
