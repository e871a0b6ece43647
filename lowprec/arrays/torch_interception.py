"""PyTorch's mechanisms that intercept operations: modes, tracers, transforms, tangents.

A ``TorchDispatchMode`` may replace the result of an operation (``FakeTensorMode``), record it (``make_fx``) or count it
(``FlopCounterMode``); ``torch.jit.trace`` records; ``torch.func`` wraps. lowprec's product is no operation of torch,
so they would see only the allocation of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec.errors import ArrayError, DelegateError

#: The target where torch must see the product.
DELEGATE = "lowprec.torch:matmul"


def probes_of(torch: Any) -> tuple[Callable[[], Any], ...]:
    """Return functions of torch's that are false where nothing intercepts; 20 to 50 ns each.

    ``make_fx(pre_dispatch=True)`` has a dispatch mode and a function mode separate from the others.
    """
    core = torch._C
    return (
        core._len_torch_dispatch_stack,
        core._len_torch_function_stack,
        core._is_tracing,  # torch.jit.trace
        core._are_functorch_transforms_active,
    )


def refuse_interception(torch: Any) -> None:
    """Raise an ArrayError if an interception that a probe found would miss a product; function modes do not."""
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
    mode = _dispatch_mode(torch)
    if mode is not None:
        raise DelegateError(
            f"the torch mode {type(mode).__name__} is active: it acts on torch's operations and would not see "
            "lowprec's product; call lowprec outside the mode",
            DELEGATE,
        )


def refuse_tangent(torch: Any, array: Any) -> None:
    """Raise an ArrayError if a tensor has a tangent at the current level, unless forward-mode AD is switched off.

    Below autograd, in the handler of a dispatch mode, PyTorch has handled tangents and cannot be asked for them.
    """
    core = torch._C
    if core._dispatch_tls_is_dispatch_key_excluded(core.DispatchKey.AutogradFunctionality):
        return
    if torch.autograd.forward_ad.unpack_dual(array).tangent is not None:
        raise DelegateError(
            "the torch tensor has a tangent of forward-mode AD, which only lowprec.matmul carries on; pass "
            "torch.autograd.forward_ad.unpack_dual(tensor).primal",
            DELEGATE,
        )


def _dispatch_mode(torch: Any) -> Any:
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    if mode is not None:
        return mode
    # The stack of these modes is the process's; a dispatch key shows whether they act on this thread.
    if not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return None
    return torch._ops._get_current_dispatch_mode_pre_dispatch()
