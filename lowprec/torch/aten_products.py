"""Products of PyTorch's own operators by lowprec, below autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec.arrays import ArrayView, Library, library_of
from lowprec.core import dispatch
from lowprec.core.arguments import PLAIN, Options
from lowprec.core.executors import look_up
from lowprec.errors import ArrayError
from lowprec.modes import ResolvedMode
from lowprec.torch.aten import Terms

_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))


def computed(terms: Terms, resolved: ResolvedMode, out: Tensor | None, swaps: bool) -> Tensor:
    """Return a product; the caller is below autograd, whose recording the tensors do not show."""
    records = _grad_enabled()
    try:
        _set_grad_enabled(False)
        return _multiplied(terms, resolved, out, swaps)
    finally:
        _set_grad_enabled(records)


def _multiplied(terms: Terms, resolved: ResolvedMode, out: Tensor | None, swaps: bool) -> Tensor:
    if out is not None and torch._debug_has_internal_overlap(out) == 1:
        raise ArrayError("elements of the result share memory")
    a = terms.a
    b = terms.b
    given = _epilogue(terms, swaps)
    if swaps:
        result = a.new_empty((*a.shape[:-1], b.shape[-1]))
        dispatch.matmul(
            b.detach().mT, a.detach().mT, out=result.mT, math_mode=resolved.mode, **given
        )
    elif a.is_cpu:
        result = _on_cpu(terms, given, resolved, out)
    else:
        result = dispatch.matmul(a.detach(), b.detach(), math_mode=resolved.mode, **given)
    if terms.activation is not None:
        terms.activation(result)
    if out is None or result is out:
        return result
    if out.shape != result.shape:
        return torch.ops.aten.clone.out(result, out=out)  # warns as its own operators
    return out.copy_(result)


def _epilogue(terms: Terms, swaps: bool) -> dict[str, Any]:
    """Return the other terms as arguments of lowprec's product: a result is rounded once, whatever its size."""
    given = {}
    if terms.alpha != 1:
        given["alpha"] = terms.alpha * 1.0
    if terms.beta == 0:
        return given
    c = terms.c.detach()
    columns = terms.b.shape[1:]
    if terms.beta == 1 and c.ndim == 1 and c.shape == columns and not swaps:
        return {**given, "bias": c}
    if swaps:
        c = c.expand(*terms.a.shape[:-1], columns[-1]).mT
    return {**given, "c": c, "beta": terms.beta * 1.0}


def _on_cpu(
    terms: Terms, given: dict[str, Any], resolved: ResolvedMode, out: Tensor | None
) -> Tensor:
    library = library_of(terms.a)
    x = view_of(library, terms.a)
    y = view_of(library, terms.b)
    options = PLAIN
    if given:
        views: Any = {
            name: view_of(library, t) if isinstance(t, Tensor) else t for name, t in given.items()
        }
        options = Options(**views)
    found = look_up(resolved, x, y, options)
    if out is not None and _is_written_directly(out, found.out_shape, terms):
        result = out
        target = view_of(library, out)
    else:
        target = library.allocate(found.out_shape, found.out_dtype, x.device, terms.a)
        result = target.owner
    found.execute(options.arguments(x, y, target))
    return result


def _is_written_directly(out: Tensor, shape: tuple[int, ...], terms: Terms) -> bool:
    """Whether a product may be computed in this tensor: it is contiguous, and no operand shares its memory."""
    if tuple(out.shape) != shape or not out.is_contiguous() or out.is_conj():
        return False
    operands = (terms.a, terms.b, terms.c)
    return not any(x is not None and torch._C._is_alias_of(out, x) for x in operands)


def view_of(library: Library, x: Tensor) -> ArrayView:
    view = library.describe(x if type(x) in PLAIN_TENSORS else x.detach())
    if not view.address and view.size:
        raise ArrayError("the torch tensor has no memory")
    return view


def multiply_into(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    resolved: ResolvedMode,
    adds: bool = False,
    alpha: float = 1.0,
) -> None:
    """Compute ``out = alpha * a @ b`` on the CPU, or add the product to ``out``."""
    library = library_of(a)
    to = library.describe(out)
    options: dict[str, Any] = {"out_dtype": to.dtype, "alpha": alpha}
    if adds:
        options["c"] = to
        options["beta"] = 1.0
    execute_into(to, library.describe(a), library.describe(b), resolved, options)


def execute_into(
    out: ArrayView, a: ArrayView, b: ArrayView, resolved: ResolvedMode, options: dict[str, Any]
) -> None:
    given = Options(out=out, **options)
    found = look_up(resolved, a, b, given)
    found.execute(given.arguments(a, b, out))
