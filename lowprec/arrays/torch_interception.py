"""Detection of PyTorch mechanisms that intercept operations: dispatch modes, tracers, transforms, tangents.

A ``TorchDispatchMode`` may replace the result of an operation (``FakeTensorMode``), record it (``make_fx``) or count it
(``FlopCounterMode``); ``torch.jit.trace`` records; ``torch.func`` wraps. A product by address is not an operation of
torch, so they would see only the allocation of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec.errors import ArrayError, DelegateError

#: matmul as an operation of torch.
DELEGATE = "lowprec.torch:matmul"


def probes_of(torch: Any) -> tuple[Callable[[], Any], ...]:
    """Return functions of torch that are true if an interception may be active; 20 to 50 ns each."""
    core = torch._C
    return (
        core._len_torch_dispatch_stack,
        core._len_torch_function_stack,
        core._is_tracing,  # torch.jit.trace
        core._are_functorch_transforms_active,
    )


def refuse_interception(torch: Any) -> None:
    """Raise ArrayError if an active interception would miss the product; function modes would not."""
    if torch._C._is_tracing():
        raise ArrayError(
            "torch.jit.trace is recording, and would record an empty result for lowprec's product; call lowprec "
            "outside the traced function"
        )
    if torch._C._are_functorch_transforms_active():
        raise DelegateError(
            "the call is inside a torch.func transform (vmap, grad, jvp, functionalize), which acts on torch's "
            "operations; call lowprec outside the transform",
            DELEGATE,
        )
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    # The stack of pre-dispatch modes is global; the dispatch key shows whether they are active in this thread.
    if mode is None and torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        mode = torch._ops._get_current_dispatch_mode_pre_dispatch()
    if mode is not None:
        raise DelegateError(
            f"the torch mode {type(mode).__name__} is active: it acts on torch's operations and would not see "
            "lowprec's product; call lowprec outside the mode",
            DELEGATE,
        )


def refuse_tangent(torch: Any, array: Any) -> None:
    """Raise DelegateError if a tensor has a tangent at the current level of forward-mode AD."""
    core = torch._C
    if core._dispatch_tls_is_dispatch_key_excluded(core.DispatchKey.AutogradFunctionality):
        return
    if torch.autograd.forward_ad.unpack_dual(array).tangent is not None:
        raise DelegateError(
            "the torch tensor has a tangent of forward-mode AD, which only lowprec.matmul propagates; pass "
            "torch.autograd.forward_ad.unpack_dual(tensor).primal",
            DELEGATE,
        )
