"""Detection of PyTorch mechanisms that intercept operations: dispatch modes, tracers, transforms, tangents.

A ``TorchDispatchMode`` may replace the result of an operation (``FakeTensorMode``), record it (``make_fx``) or count it
(``FlopCounterMode``); ``torch.jit.trace`` records; ``torch.func`` wraps. A product by address is not an operation of
torch, so they would see only the allocation of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec.errors import ArrayError


def probes_of(torch: Any) -> tuple[Callable[[], Any], ...]:
    """Return functions of torch that are true if an interception may be active; 20 to 50 ns each."""
    core = torch._C
    return (
        core._len_torch_dispatch_stack,
        core._len_torch_function_stack,
        core._is_tracing,  # torch.jit.trace
        core._are_functorch_transforms_active,
    )


def interception(torch: Any) -> str:
    """Return the interception that would miss the product; "" if there is none, or only function modes."""
    if torch._C._is_tracing():
        raise ArrayError(
            "torch.jit.trace is recording, and would record an empty result for lowprec's product; call lowprec "
            "outside the traced function"
        )
    if torch._C._are_functorch_transforms_active():
        return (
            "the call is inside a torch.func transform (vmap, grad, jvp, functionalize), which acts on torch's "
            "operations; call lowprec outside the transform"
        )
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    # The stack of pre-dispatch modes is global; the dispatch key shows whether they are active in this thread.
    if mode is None and torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        mode = torch._ops._get_current_dispatch_mode_pre_dispatch()
    if mode is None:
        return ""
    return (
        f"the torch mode {type(mode).__name__} is active: it acts on torch's operations and would not see lowprec's "
        "product; call lowprec outside the mode"
    )


def has_tangent(torch: Any, array: Any) -> bool:
    """Whether a tensor has a tangent at the current level of forward-mode AD."""
    core = torch._C
    if core._dispatch_tls_is_dispatch_key_excluded(core.DispatchKey.AutogradFunctionality):
        return False
    return torch.autograd.forward_ad.unpack_dual(array).tangent is not None
