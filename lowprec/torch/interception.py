"""``intercept``: lowprec computes the products of an unmodified program, by kernels in PyTorch's dispatcher.

The kernels are in front of PyTorch's own. They are below autograd, functorch's transforms, dispatch modes and tracers,
so these see the operators as usual, and above nothing: products inside C++ composites and compiled graphs are seen.
"""

from __future__ import annotations

import sys
from contextvars import Context
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowprec.core.interception import Interception
from lowprec.core.interception_report import PassedBy
from lowprec.core.ledger import LedgerRow
from lowprec.core.rules import ALL, RulesLike, names, parse_rules
from lowprec.errors import ModeError
from lowprec.modes import Recipe, ResolvedMode, row
from lowprec.policy.decorators import ContextScope
from lowprec.torch.accounting import (
    REFUSALS,
    Found,
    count,
    is_backward,
    reason_against,
    reference_of,
    resolve,
    thread,
)
from lowprec.torch.aten import (
    ATTENTIONS,
    CASTS,
    CONVOLUTIONS,
    LSTM,
    AtenProduct,
    Kernel,
    Terms,
    kernels,
    multiplications_of,
)
from lowprec.torch.aten_products import PLAIN_TENSORS, computed
from lowprec.torch.attention_kernels import CACHE, attention_kernel
from lowprec.torch.convolution_kernels import convolution_kernel
from lowprec.torch.layer_names import NAMES
from lowprec.torch.passes import mode_of_product, routine_of
from lowprec.torch.recurrent_layers import lstm_kernel
from lowprec.torch.registration import Function, count_idle_call, register, share_contexts, untraced
from lowprec.torch.statistics import measure

_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_graph_task = torch._C._current_graph_task_id
_function_modes = torch._C._len_torch_function_stack


class intercept(Interception):
    """Compute the products of PyTorch's own operators by lowprec, in a block.

    The operators are ``mm``, ``bmm``, ``dot``, ``vdot``, ``addmm``, ``baddbmm``, ``addmv``, on the CPU
    ``convolution`` and ``attention`` in one kernel, and all that are made of them: ``matmul``, ``linear``, ``einsum``,
    layers, compiled graphs. PyTorch computes products of element types on which no mode acts, and those inside other
    fused kernels (recurrent layers, attention and convolutions on GPUs); :meth:`report` names them.

    The block applies to this thread and task, and to backward passes that start inside it. A later backward pass is
    PyTorch's own. Products that checkpointing recomputes, and those of ``torch.func.grad`` and ``create_graph=True``,
    are counted as forward products.

    Parameters
    ----------
    math_mode : str, MathMode, Recipe, mapping, list of pairs, or path
        Mode of the products, or rules: ``"lm_head=fp32,*.mlp.*=bf16,*=tf32"``, a mapping, pairs of a pattern and a
        mode, or a TOML file with a table ``[rules]``. A pattern is that of layers' names, a class, or an operator; the
        first one that matches is used, and a product that none matches is PyTorch's. ``*`` does not match ``"dot"``,
        products of two vectors, and ``"lapack"``, those of solvers and their gradients. Modes that quantise act on
        products of a matrix with a parameter; the others, such as attention's, are in ``bf16`` unless a rule names
        their operator, or products without a layer by ``""``. An ``fp32_guard`` overrides the modes.
    statistics : bool
        Whether to measure the operands and the errors of products; see :class:`OperandStatistics`.
    step : int
        Number of the first training step, which the random numbers of a recipe depend on; :meth:`step` adds one.

    Raises
    ------
    ModeError
        A mode or a pattern is illegal.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Linear(4, 2)
    >>> with intercept("bf16") as seen:
    ...     layer(torch.ones(3, 4)).sum().backward()
    >>> [(p.layer, p.operator, p.backward, p.count) for p in seen.report().taken]
    [('Linear', 'addmm', False, 1), ('Linear', 'mm', True, 1)]
    """

    def __init__(self, math_mode: RulesLike, statistics: bool = False, *, step: int = 0) -> None:
        of_cache = dict(parse_rules(math_mode)).get(CACHE)
        if of_cache is not None and not row(of_cache).quantizes:
            raise ModeError(f"{CACHE!r} is a rule for formats of keys and values, got {of_cache}")
        super().__init__(math_mode, statistics)
        self.step_number = step
        self.depends_on_layers = any(
            pattern != ALL or row(mode).quantizes for pattern, mode in self.rules
        )

    def step(self) -> None:
        """Begin the next training step: the random numbers of recipes are those of its number."""
        self.step_number += 1

    def leave(self, product: LedgerRow) -> None:
        """Called with each product that was left to PyTorch."""

    def _install(self) -> None:
        share_contexts()
        register(kernels(), _replacement)
        register(CASTS, _noted)
        torch.clear_autocast_cache()  # of casts that NAMES does not know

    def _remarks(self) -> list[str]:
        if "torch._inductor.package.package" in sys.modules:
            self.ledger.mention(LedgerRow("", "AOTInductor", "", passed_by=PassedBy.NOT_VISIBLE))
        compiler = sys.modules.get("torch._dynamo.utils")
        if compiler is None or not compiler.counters["frames"]["ok"]:
            return []
        text = (
            "Compiled graphs ran in this process. Not seen are products of few elements that Inductor turns into "
            "multiplications and sums, flex_attention and, without lowprec.torch.inductor_options, "
            "products of max_autotune's C++ GEMMs and of cpp_wrapper."
        )
        return [text]


untraced(ContextScope.__enter__)
untraced(ContextScope.__exit__)


def _current() -> Found | None:
    """Return the scope that applies to a product, and the context of a backward pass on another thread."""
    block = intercept._innermost()
    if (
        block is intercept._of_process
        and _graph_task() != -1
        and torch._C._is_key_in_tls("context")
    ):
        context: Context = torch._C._get_obj_in_tls("context")
        found = intercept._innermost(context)
        if found is not None:
            return found.scope, context
    if block is None:
        return None
    return block.scope, None


# -- kernels --------------------------------------------------------------------------------------


def _replacement(kernel: Kernel, own: Function) -> Function:
    """Return a kernel that calls PyTorch's own one outside of all blocks."""
    if kernel.operator in CONVOLUTIONS and kernel.key == "CPU":
        act = convolution_kernel(kernel, own)
    elif kernel.operator in ATTENTIONS and kernel.key == "CPU":
        act = attention_kernel(kernel, own)
    elif kernel.operator == LSTM:
        act = lstm_kernel(kernel, own, _watched)
    elif kernel.product is None:
        act = _watched(kernel, own)
    else:
        act = _replaced(kernel, kernel.product, own)

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        blocks: Any = intercept._holders
        if not blocks:
            count_idle_call()
            return own(keyset, *args, **kwargs)
        found = _current()
        if found is None:
            for block in blocks:
                block.scope.ledger.add(
                    LedgerRow("", kernel.name, "", passed_by=PassedBy.OTHER_THREAD), 0, tuple
                )
            return own(keyset, *args, **kwargs)
        if _function_modes() or not PLAIN_TENSORS.issuperset(map(type, args)):
            # Attributes of tensors would call the functions of modes and subclasses.
            with torch._C.DisableTorchFunction():
                return act(found, keyset, args, kwargs)
        return act(found, keyset, args, kwargs)

    return call


def _replaced(kernel: Kernel, product: AtenProduct, own: Function) -> Function:
    def compute(found: Found, keyset: Any, args: Any, kwargs: Any) -> Any:
        scope, context = found
        given = dict(kwargs)
        out = given.pop("out", None)
        terms = product.terms(*args, **given)
        # PyTorch raises its errors, and reads no factors for an alpha of zero.
        if terms.alpha == 0 or not terms.is_accepted(product.axes, out, kernel.in_place):
            return own(keyset, *args, **kwargs)
        a = terms.a
        b = terms.b
        if kernel.in_place:
            out = args[0]
        is_needed = scope.depends_on_layers or scope.recorder is not None
        part = NAMES.of(a, b, is_backward(), names(scope.rules, kernel.name), is_needed)
        routine = routine_of(kernel.name, part, a, b)
        if thread.watched is PassedBy.LINEAR_ALGEBRA:
            routine = "lapack"
        shown = scope.mode_of(part.layer, routine)
        mode, swaps = mode_of_product(scope, shown, part, routine, a.ndim > 1 < b.ndim)
        reason = reason_against(shown, mode, routine, a.dtype)
        detail = ""
        record = partial(
            count, scope, part.layer, kernel.name, [a, b], a.numel() * b.shape[1:][-1:].numel()
        )
        if reason is None:
            resolved = resolve(mode, context)
            try:
                statistics = measure(a, b, resolved.mode) if scope.statistics else None
                again = _in_reference(scope, terms, resolved, context)
                result = computed(terms, resolved, out, swaps)
            except REFUSALS as error:
                reason = PassedBy.REFUSED
                detail = str(error)
            else:
                if isinstance(mode, Recipe) and resolved.mode == mode:
                    mode = shown  # the products of a layer and all steps have one row
                else:
                    if not part.layer and row(shown).quantizes > row(mode).quantizes:
                        detail = f"no parameter found: computed in {mode}"
                    mode = resolved.mode
                record(mode.value, None, detail, statistics, part.product, result, again)
                return result
        result = own(keyset, *args, **kwargs)
        record("", reason, detail, product=part.product, result=result)
        return result

    return compute


def _in_reference(
    scope: Any, terms: Terms, resolved: ResolvedMode, context: Context | None
) -> Tensor | None:
    """Return the product in the reference of a comparison, before an operator in place overwrites its terms."""
    reference = reference_of(scope, resolved, context)
    if reference is None:
        return None
    return computed(terms, reference, None, swaps=False)


def _noted(_: Kernel, own: Function) -> Function:
    """Return a kernel of casts that records those of parameters."""

    def cast(keyset: Any, x: Any, **kwargs: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            if not isinstance(x, Tensor):  # PyTorch unpacks the numbers of `x + 1`
                x = torch.from_numpy(np.asarray(x))
            result: Tensor = own(keyset, x, **kwargs)
            if intercept._holders:
                NAMES.add_cast(x, result)
            else:
                count_idle_call()
        return result

    return cast


def _watched(kernel: Kernel, own: Function) -> Function:
    def watch(found: Found, keyset: Any, args: Any, kwargs: Any) -> Any:
        if thread.watched:
            return own(keyset, *args, **kwargs)
        before = thread.counted
        thread.watched = kernel.passed_by
        try:
            result = own(keyset, *args, **kwargs)
        finally:
            thread.watched = None
        if thread.counted == before:  # else its own products were counted
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            multiplications = multiplications_of(kernel.operator, args, kwargs, result)
            layer = NAMES.of_any(tensors)
            count(
                found[0],
                layer,
                kernel.name,
                tensors,
                multiplications,
                "",
                kernel.passed_by,
                result=result,
            )
        return result

    return watch
