"""``lowprec.matmul`` where PyTorch's compiler reads the caller's function: in the graph, or else not read at all.

What the compiler cannot take into a graph it runs as it is, and then reads each function that is called from there. The
kernels below :func:`lowprec.matmul` are NumPy's arithmetic on bits, of which it would make operations of PyTorch's: so
it is kept out of them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from lowprec.core import dispatch
from lowprec.torch.product import matmul as product

_TAKEN = frozenset(inspect.signature(product).parameters)


def matmul(a: Any, b: Any, /, **keywords: Any) -> Any:
    """Multiply, with the arguments of :func:`lowprec.matmul`."""
    given = {name: x for name, x in keywords.items() if x is not None}
    # The compiler takes NumPy's numbers for tensors.
    numbers = all(
        isinstance(given.get(name, 1.0), int | float | complex) for name in ("alpha", "beta")
    )
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if numbers and tensors and _TAKEN.issuperset(given):
        return product(a, b, **given)
    return _uncompiled(a, b, **given)


@torch.compiler.disable(
    reason="lowprec.matmul is in no graph with out=, k_chunk= or scales, operands that are no tensors, or factors that "
    "are no numbers of Python's"
)
def _uncompiled(a: Any, b: Any, /, **given: Any) -> Any:
    return dispatch.matmul(a, b, **given)
