"""Products of DTensors: which placements of the operands give which of the result, without communication."""

from __future__ import annotations

import functools
import sys
from typing import Any

from lowprec.torch.operator import OPERATOR


def ensure_registered() -> None:
    """Tell DTensor how the operator may be sharded, if there are DTensors in this process."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(OPERATOR)(_placements)


def _placements(a: Any, b: Any, *others: Any, **keywords: Any) -> list[Any]:
    """Return pairs of placements: those of the result, and those of the arguments.

    An operand that is a sum over the ranks (``Partial``) is summed before: rounding its parts would lose more than the
    mode's bound allows.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    rows, columns, ndim = a.ndim, b.ndim, max(a.ndim, b.ndim)
    rest = [None] * len(others)

    def batch(x: Any, axis: int) -> Any:
        """Return the placement of an operand whose batch is split along an axis of the result."""
        own = axis - ndim + x.ndim
        return Shard(own) if own >= 0 and x.shape[own] > 1 else Replicate()

    chosen: list[tuple[Any, Any, Any]] = [
        (Replicate(), Replicate(), Replicate()),
        (Shard(ndim - 2), Shard(rows - 2), Replicate()),
        (Shard(ndim - 1), Replicate(), Shard(columns - 1)),
        (Partial(), Shard(rows - 1), Shard(columns - 2)),
        *((Shard(i), batch(a, i), batch(b, i)) for i in range(ndim - 2)),
    ]
    return [([out], [of_a, of_b, *rest]) for out, of_a, of_b in chosen]
