"""``intercept``: lowprec computes the products of an unmodified program, by kernels in PyTorch's dispatcher.

The kernels are in front of PyTorch's own. They are below autograd, functorch's transforms, dispatch modes and tracers,
so these see the operators as usual, and above nothing: products inside C++ composites and compiled graphs are seen.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from contextvars import Context
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowprec import policy
from lowprec.arrays import ArrayView, Library, library_of
from lowprec.core import dispatch
from lowprec.core.arguments import PLAIN, Options
from lowprec.core.executors import look_up
from lowprec.core.interception import Interception, Modes
from lowprec.core.interception_report import PassedBy, Row, Statistics
from lowprec.errors import ArrayError, DeviceError, DTypeError, ShapeError, UnsupportedError
from lowprec.modes import Recipe, ResolvedMode, row
from lowprec.torch.aten import ACTED_ON, Kernel, Product, Terms, kernels
from lowprec.torch.layer_names import NAMES, Layer
from lowprec.torch.passes import mode_of_product
from lowprec.torch.statistics import measure

#: Errors raised before any computation; PyTorch then computes the product.
_REFUSALS = (ArrayError, DTypeError, DeviceError, ShapeError, UnsupportedError)
#: Elements of a result from which a bias is added by the product's epilogue; it costs more than a small addition.
_FUSED_BIAS = 1 << 14

_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_graph_task = torch._C._current_graph_task_id
_function_modes = torch._C._len_torch_function_stack
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


class intercept(Interception):
    """Compute the products of PyTorch's own operators by lowprec, in a block.

    The operators are ``mm``, ``bmm``, ``dot``, ``vdot``, ``addmm``, ``baddbmm``, ``addmv``, and all that are made of
    them: ``matmul``, ``linear``, ``einsum``, layers, compiled graphs. PyTorch computes products of element types on
    which no mode acts, and those inside fused kernels (attention, convolutions, recurrent layers); :meth:`report` names
    them.

    The block applies to this thread and task, and to backward passes that start inside it. A later backward pass is
    PyTorch's own. Products that checkpointing recomputes, and those of ``torch.func.grad`` and ``create_graph=True``,
    are counted as forward products.

    Parameters
    ----------
    math_mode : str, MathMode, Recipe, or mapping
        Mode of the products, or modes by layer: ``{"lm_head": "fp32", "*.mlp.*": "bf16", "*": "tf32"}``. The keys are
        patterns of the layers' names, or their classes; the first one that matches is used, and a product that none
        matches is PyTorch's. An ``fp32_guard`` overrides the modes.
    statistics : bool
        Whether to measure the operands and the errors of products; see :class:`OperandStatistics`.
    attention : bool
        Whether modes that quantise act on all products, and not on those with a parameter alone. The others, such as
        attention's, and products with vectors are in ``bf16`` by default.
    step : int
        Number of the first training step, which the random numbers of a recipe depend on; :meth:`step` adds one.

    Raises
    ------
    ModeError
        A mode is unknown.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Linear(4, 2)
    >>> with intercept("bf16") as seen:
    ...     layer(torch.ones(3, 4)).sum().backward()
    >>> [(p.layer, p.operator, p.backward, p.count) for p in seen.report().taken]
    [('Linear', 'addmm', False, 1), ('Linear', 'mm', True, 1)]
    """

    def __init__(self, math_mode: Modes, statistics: bool = False, *, attention: bool = False, step: int = 0) -> None:
        super().__init__(math_mode, statistics)
        self.attention, self.step_number = attention, step

    def step(self) -> None:
        """Begin the next training step: the random numbers of recipes are those of its number."""
        self.step_number += 1

    def _install(self) -> None:
        global _libraries
        _libraries = _libraries or _registered()

    def _uninstall(self) -> None:
        global _libraries
        if threading.active_count() == 1:  # else another thread may multiply meanwhile
            removed, _libraries = _libraries, ()
            for library in removed:
                library._destroy()

    def _remarks(self) -> list[str]:
        compiler = sys.modules.get("torch._dynamo.utils")
        if compiler is None or not compiler.counters["frames"]["ok"]:
            return []
        text = (
            "Compiled graphs ran in this process. Not seen are products of few elements that Inductor turns into "
            "multiplications and sums, flex_attention, AOTInductor and, without lowprec.torch.inductor_options, "
            "products of max_autotune's C++ GEMMs and of cpp_wrapper."
        )
        return [text]


# -- registration ---------------------------------------------------------------------------------

#: A library that is not referenced removes its kernels.
_libraries: tuple[torch.library.Library, ...] = ()


def _registered() -> tuple[torch.library.Library, ...]:
    # PyTorch warns once per process. `catch_warnings` would replace the filters of other threads.
    warnings.filterwarnings("ignore", r"\s*Warning only once for all operators, .*overrid", UserWarning)
    made: dict[str, torch.library.Library] = {}
    for kernel in kernels():
        space, _, name = kernel.operator.partition("::")
        library = made.get(space) or made.setdefault(space, torch.library.Library(space, "IMPL"))
        own = torch.library.get_kernel(kernel.operator, kernel.key).call_boxed
        replacement = _watched(kernel, own) if kernel.product is None else _replaced(kernel, kernel.product, own)
        library.impl(name, replacement, kernel.key, with_keyset=True, allow_override=True)
    return tuple(made.values())


def _current() -> tuple[Any, Context | None] | None:
    """Return the scope that applies to a product, and the context of a backward pass on another thread."""
    stack = intercept._stack.get()
    if stack:
        return stack[-1].scope, None
    if _graph_task() != -1 and torch._C._is_key_in_tls("context"):
        context: Context = torch._C._get_obj_in_tls("context")
        stack = context.get(intercept._stack) or ()
        if stack:
            return stack[-1].scope, context
    scope = intercept._of_process
    return None if scope is None else (scope, None)


# -- kernels --------------------------------------------------------------------------------------


class _Thread(threading.local):
    counted = 0  # products
    is_watching = False  # inside an operator that multiplies


_thread = _Thread()


def _replaced(kernel: Kernel, product: Product, own: Callable[..., Any]) -> Callable[..., Any]:
    name, make, axes, in_place = kernel.name, product.terms, product.axes, kernel.in_place

    def multiply(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not intercept._holders or (found := _current()) is None:
            return own(keyset, *args, **kwargs)
        if _function_modes() or not _PLAIN.issuperset(map(type, args)):
            # Attributes of tensors would call the functions of modes and subclasses.
            with torch._C.DisableTorchFunction():
                return compute(found, keyset, args, kwargs)
        return compute(found, keyset, args, kwargs)

    def compute(found: tuple[Any, Context | None], keyset: Any, args: Any, kwargs: Any) -> Any:
        scope, context = found
        given = dict(kwargs)
        out = given.pop("out", None)
        terms = make(*args, **given)
        a, b = terms.a, terms.b
        # PyTorch raises its errors, and reads no factors for an alpha of zero.
        if terms.alpha == 0 or not terms.is_accepted(axes, out, in_place):
            return own(keyset, *args, **kwargs)
        part = NAMES.of(a, b, _is_backward(), scope.attention)
        layer = part.layer
        mode, multiplications = scope.mode_of(layer), a.numel() * (b.shape[-1] if b.ndim > 1 else 1)
        reason, detail, swaps = PassedBy.ELEMENT_TYPE, "", False
        shown = mode
        if mode is not None and row(mode).quantizes:
            mode, swaps = mode_of_product(scope, mode, part, a.ndim > 1 < b.ndim)
        if mode is None:
            reason = PassedBy.LAYER
        elif a.dtype in ACTED_ON[row(mode).mode]:
            try:
                resolved = policy.resolve(mode) if context is None else context.copy().run(policy.resolve, mode)
                measured = measure(a, b, resolved.mode) if scope.statistics else None
                result = _computed(terms, resolved, args[0] if in_place else out, swaps)
                # The products of a layer and all steps have one row.
                text = (shown if isinstance(mode, Recipe) and resolved.mode == mode else resolved.mode).value
                _count(scope, layer, name, [a, b], multiplications, text, statistics=measured, product=part.product)
                return result
            except _REFUSALS as error:
                reason, detail = PassedBy.REFUSED, str(error)
        result = own(keyset, *args, **kwargs)
        _count(scope, layer, name, [a, b], multiplications, "", reason, detail)
        return result

    return multiply


def _watched(kernel: Kernel, own: Callable[..., Any]) -> Callable[..., Any]:
    def watch(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.is_watching or not intercept._holders or (found := _current()) is None:
            return own(keyset, *args, **kwargs)
        before, _thread.is_watching = _thread.counted, True
        try:
            result = own(keyset, *args, **kwargs)
        finally:
            _thread.is_watching = False
        if _thread.counted == before:  # else its own products were counted
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            multiplications = _multiplications(kernel.operator, args, kwargs, result)
            _count(found[0], NAMES.of_any(tensors), kernel.name, tensors, multiplications, "", kernel.passed_by)
        return result

    return watch


def _computed(terms: Terms, resolved: ResolvedMode, out: Tensor | None, swaps: bool) -> Tensor:
    """Return a product; the caller is below autograd, whose recording the tensors do not show."""
    records = _grad_enabled()
    try:
        _set_grad_enabled(False)
        return _multiplied(terms, resolved, out, swaps)
    finally:
        _set_grad_enabled(records)


def _multiplied(terms: Terms, resolved: ResolvedMode, out: Tensor | None, swaps: bool) -> Tensor:
    a, b, c, alpha, beta, _ = terms
    bias = None
    if swaps:
        product = a.new_empty((*a.shape[:-1], b.shape[-1]))
        dispatch.matmul(b.detach().mT, a.detach().mT, out=product.mT, math_mode=resolved.mode)
        return _finished(product, terms, bias, out)
    if c is not None and c.ndim == 1 and alpha == beta == 1 and a.shape[0] * b.shape[-1] >= _FUSED_BIAS:
        bias = c if c.shape == b.shape[1:] else None
    if a.is_cpu:
        is_separate = out is not None and not any(x is not None and torch._C._is_alias_of(out, x) for x in (a, b, c))
        result = _on_cpu(a, b, bias, resolved, out if is_separate else None)
    else:
        added = None if bias is None else bias.detach()
        result = dispatch.matmul(a.detach(), b.detach(), bias=added, math_mode=resolved.mode)
    return _finished(result, terms, bias, out)


def _finished(result: Tensor, terms: Terms, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Add the terms that a product lacks, in ``out`` if it is given."""
    _, _, c, alpha, beta, activation = terms
    if alpha != 1:
        result.mul_(alpha)
    if c is not None and bias is None and beta != 0:
        result.add_(c, alpha=beta)
    if activation is not None:
        activation(result)
    if out is None or result is out:
        return result
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def _on_cpu(a: Tensor, b: Tensor, bias: Tensor | None, resolved: ResolvedMode, out: Tensor | None) -> Tensor:
    library = library_of(a)
    x, y = _view(library, a), _view(library, b)
    options = PLAIN if bias is None else Options(bias=_view(library, bias))
    found = look_up(resolved, x, y, options)
    if out is not None and tuple(out.shape) == found.out_shape and out.is_contiguous() and not out.is_conj():
        target = _view(library, out)
        result = out
    else:
        target = library.allocate(found.out_shape, found.out_dtype, x.device, a)
        result = target.owner
    found.execute(options.arguments(x, y, target))
    return result


def _view(library: Library, x: Tensor) -> ArrayView:
    view = library.describe(x if type(x) in _PLAIN else x.detach())
    if not view.address and view.size:
        raise ArrayError("the torch tensor has no memory")
    return view


def _is_backward() -> bool:
    return _graph_task() != -1 and not _grad_enabled()


# -- counts ---------------------------------------------------------------------------------------


def _count(
    scope: Any, layer: Layer, name: str, tensors: list[Tensor], multiplications: int, mode: str,
    reason: Any = None, detail: str = "", statistics: Statistics | None = None, product: str = "",
) -> None:  # fmt: skip
    _thread.counted += 1
    ledger = scope.ledger
    if not ledger.records_gradients and _grad_enabled() and any(x.requires_grad for x in tensors):
        ledger.records_gradients = True
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    backward = _is_backward()
    gradient = product if backward and layer and statistics else ""
    found = Row(_shown(scope, layer), name, dtype, backward, mode, reason, detail, gradient)
    ledger.add(found, multiplications, lambda: tuple(tuple(x.shape) for x in tensors[:2]), statistics)


def _multiplications(operator: str, args: Any, kwargs: Any, result: Any) -> int:
    """Return the number of multiplications of an operator of which PyTorch has a formula, else 0."""
    from torch.utils.flop_counter import flop_registry

    space, _, name = operator.partition("::")
    formula = flop_registry.get(getattr(getattr(torch.ops, space), name.partition(".")[0], None))
    try:
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=result)) // 2
    except Exception:  # noqa: BLE001 - a formula for other arguments; the count is information
        return 0


def _shown(scope: Any, layer: Layer) -> str:
    """Return the text of a layer; a note if its product may belong to layers with different modes."""
    if len(layer) < 2:
        return layer[0][0] if layer else ""
    shown = "|".join(dict.fromkeys(name for name, _ in layer))
    if len({scope.mode_of((each,)) for each in layer}) > 1:
        scope.ledger.notes[
            f"{shown} have different modes, and share an operand; the first pattern's mode was used."
        ] = None
    return shown
