"""``matmul`` and ``linear`` for PyTorch.

Plain tensors are multiplied directly, under ``torch.func`` by an ``autograd.Function``, in graphs by the operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowprec import policy
from lowprec.arrays import CPU, ArrayView, library_of
from lowprec.arrays.dlpack import type_name
from lowprec.contractions import multiply_transposed
from lowprec.core import dispatch
from lowprec.core.arguments import PLAIN, parse_dtype
from lowprec.core.call import Call, bind, run
from lowprec.core.executors import CachedExecutor, look_up
from lowprec.core.tolerance import mode_of
from lowprec.errors import ArrayError, DeviceError, LowprecError, UnsupportedError
from lowprec.modes import (
    ActivationName,
    BoundName,
    MathMode,
    Mode,
    ModeName,
    ModeSource,
    Recipe,
    ResolvedMode,
    parse_mode,
)
from lowprec.planning import Activation, GemmPlan
from lowprec.torch.current_mode import current_mode
from lowprec.torch.operator import (
    ACCUMULATOR,
    COMPILED_KEY,
    CURRENT,
    OPERATOR,
    ensure_sharded,
    multiply_plain,
    operand_gradients,
    save_operands,
    with_batch_first,
)
from lowprec.util.tracing import is_traced
from lowprec.util.untraced import call_untraced

_PLAIN = (Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling
#: For a tensor of a transform that has ended.
_unwrapped = torch._C._functorch.unwrap_if_dead
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_innermost = torch._C._functorch.peek_interpreter_stack
_JVP = torch._C._functorch.TransformType.Jvp
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize

_ACTIVATIONS = {
    **{name.value: getattr(torch.nn.functional, name.value) for name in Activation},
    Activation.GELU.value: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def matmul(
    a: Tensor,
    b: Tensor,
    /,
    *,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Tensor | None = None,
    activation: ActivationName | None = None,
    out_dtype: Any = None,
    math_mode: ModeName | MathMode | Recipe | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    backward_mode: ModeName | MathMode | Recipe | None = None,
) -> Tensor:
    """Return ``activation(alpha * a @ b + beta * c + bias)`` inside PyTorch.

    Autograd records the product (also for second derivatives), ``torch.func`` transforms it, ``torch.compile`` and
    ``torch.export`` have it in their graphs. PyTorch computes the epilogue (``c``, ``bias``, ``activation``), for
    results of 16 bits in float32 with one rounding.

    Parameters
    ----------
    a : Tensor, shape (..., m, k) or (k,)
    b : Tensor, shape (..., k, n) or (k,)
    c, alpha, beta, bias, activation, out_dtype, math_mode, rtol, bound
        As for :func:`lowprec.matmul`. A graph in which ``rtol`` selects a mode has static shapes.
    backward_mode : str, MathMode or Recipe, optional
        Mode of the two products of the backward pass; by default the forward product's. A guard that is open during
        the backward pass overrides it.

    Raises
    ------
    UnsupportedError
        Also for derivatives that PyTorch would compute wrongly.

    Examples
    --------
    >>> import torch
    >>> w = torch.ones(2, 2, requires_grad=True)
    >>> matmul(torch.eye(2), w, math_mode="bf16").sum().backward()
    >>> w.grad
    tensor([[1., 1.],
            [1., 1.]])
    """
    if is_traced():  # after a graph break in the caller
        return traced_matmul(
            a, b, c=c, alpha=alpha, beta=beta, bias=bias, activation=activation, out_dtype=out_dtype,
            math_mode=math_mode, rtol=rtol, bound=bound, backward_mode=backward_mode,
        )  # fmt: skip
    call = bind(a, b, c=c, alpha=alpha, beta=beta, bias=bias, activation=activation, out_dtype=out_dtype)
    backward = None if backward_mode is None else parse_mode(backward_mode, "backward_mode")
    product: Tensor = run(call, mode_of(call, math_mode, rtol, bound), backward)
    return product


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    math_mode: ModeName | MathMode | Recipe | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    backward_mode: ModeName | MathMode | Recipe | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear``.

    Parameters
    ----------
    x : Tensor, shape (..., k)
    weight : Tensor, shape (n, k)
    bias : Tensor, shape (n,), optional
    math_mode, rtol, bound, backward_mode
        As for :func:`matmul`.

    Examples
    --------
    >>> import torch
    >>> linear(torch.ones(3), torch.ones(2, 3), torch.zeros(2))
    tensor([3., 3.])
    """
    modes = {"math_mode": math_mode, "rtol": rtol, "bound": bound, "backward_mode": backward_mode}
    product: Tensor = multiply_transposed(matmul, x, weight, bias, modes)
    return product


#: The arguments of products in graphs, and the types of factors; the compiler represents NumPy scalars as tensors.
_IN_GRAPHS = frozenset({"c", "alpha", "beta", "bias", "activation", "out_dtype", "math_mode", "rtol", "bound"})
_NUMBERS = (int, float, complex)
#: The mode of checks; no check depends on it.
_FP32 = ResolvedMode(MathMode.FP32, ModeSource.DEFAULT)
_LARGEST = torch.finfo(torch.float32).max


def traced_matmul(a: Any, b: Any, /, *, backward_mode: Any = None, **keywords: Any) -> Any:
    """Multiply in a function that PyTorch's compiler traces, with the arguments of :func:`lowprec.matmul`.

    Whatever is not in a graph, such as a call that raises, runs outside of it.
    """
    # After a graph break the compiler would otherwise trace lowprec.matmul, and replace its NumPy calls by operators.
    given = {name: x for name, x in keywords.items() if not _is_default(name, x)}
    c, bias, alpha, beta = given.get("c"), given.get("bias"), given.get("alpha", 1.0), given.get("beta", 0.0)
    arrays = [x for x in (a, b, c, bias) if x is not None]
    if (
        len(arrays) >= 2
        and all(isinstance(x, Tensor) and not x.is_nested for x in arrays)
        and all(isinstance(x, _NUMBERS) and abs(x) <= _LARGEST for x in (alpha, beta))
        and _IN_GRAPHS.issuperset(given)
    ):  # fmt: skip
        rtol = given.get("rtol")
        extents = _numbers if rtol is not None or "bound" in given else _ones
        operands = [None if x is None else (x.dtype, extents(x.shape)) for x in (a, b, c, bias)]
        # Factors may be symbols, too: any other number of the same kind is checked.
        factors = [
            (2j if isinstance(x, complex) else 2.0) if name in given else default
            for name, x, default in (("alpha", alpha, 1.0), ("beta", beta, 0.0))
        ]
        others = given.get("activation"), given.get("out_dtype")
        modes = _name_of(given.get("math_mode")), rtol.hex() if isinstance(rtol, float) else (rtol,), given.get("bound")
        # A graph is guarded by the current mode where that is read.
        current = current_mode() if modes[0] is None or extents is _numbers else ""
        settings = _settings(operands, factors, others, modes, current, _name_of(backward_mode), a.device)
        if settings is not None and _fit(a, b, c, bias):
            mode, backward, source, product_dtype, result_dtype = settings

            def multiply(x: Tensor, y: Tensor, alpha: Any, dtype: str) -> Tensor:
                return OPERATOR(x, y, mode, backward, alpha, dtype, source)

            return _computed(a, b, c, bias, alpha, beta, others[0], product_dtype, result_dtype, multiply)
    if backward_mode is not None:
        return call_untraced(matmul, a, b, backward_mode=backward_mode, **given)
    return call_untraced(dispatch.matmul, a, b, **given)


def _name_of(mode: Any) -> Any:
    """Return the text of a recipe, which the compiler cannot store in a graph."""
    return mode.value if isinstance(mode, Recipe) else mode


def _is_default(name: str, x: Any) -> bool:
    if name in ("alpha", "beta"):
        return isinstance(x, float) and x == (1.0 if name == "alpha" else 0.0)
    return x is None


matmul._torchdynamo_inline = traced_matmul  # type: ignore[attr-defined]


def _numbers(extents: Any) -> tuple[int, ...]:
    return tuple([len(range(n)) for n in extents])  # of symbols too, which int() would not convert


def _ones(extents: Any) -> tuple[int, ...]:
    return (1,) * len(extents)


def _settings(
    arrays: Any, factors: Any, others: Any, modes: Any, current: str, backward_mode: Any, device: Any
) -> tuple[str, str, str, str, str] | None:
    """Return modes, their source and element types of a product in a graph; None for a call that raises.

    The compiler guards on the current mode: each has its own graph. Where ``rtol`` selects the mode, it guards on the
    extents, on which nothing else depends: symbols are replaced by 1.
    """
    math_mode, (rtol, bound) = modes[0], modes[1:]
    rtol = float.fromhex(rtol) if isinstance(rtol, str) else rtol[0]
    library: Any = library_of(torch.empty(0, device="cpu"))
    place = library.device_of(device) or CPU
    try:
        views = [None if x is None else ArrayView.description(parse_dtype(x[0]), x[1]) for x in arrays]
        a, b, c, bias = (x and replace(x, device=place) for x in views)
        given = dict(zip(("alpha", "beta", "activation", "out_dtype"), (*factors, *others), strict=True))
        call = bind(a, b, c=c, bias=bias, **given)
        plan = look_up(_FP32, call.x, call.y, call.options, observed=False).plan
        backward = None if backward_mode is None else parse_mode(backward_mode).value
        mode, source = current, CURRENT
        if rtol is not None or bound is not None:
            mode, source = mode_of(call, math_mode, rtol, bound).mode.value, ModeSource.RTOL.value
        elif math_mode is not None:
            mode, source = parse_mode(math_mode).value, ModeSource.ARGUMENT.value
    except LowprecError:
        return None
    return mode, backward or mode, source, *_dtypes(plan, call)


_settings._dynamo_marked_constant = True  # type: ignore[attr-defined]  # its decorator would import the compiler


def _dtypes(plan: GemmPlan, call: Call) -> tuple[str, str]:
    """Return the element type of the operator's product, as its argument, and of the result."""
    options = call.options
    has_addend = options.c is not None or options.bias is not None
    if not has_addend and options.activation is None and type(options.alpha) is float:
        return (options.out_dtype.label if options.out_dtype else ""), plan.out_dtype.label
    return (ACCUMULATOR if plan.compute_dtype.bits <= 16 and plan.compute_dtype.format else ""), plan.out_dtype.label


def _fit(a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the extents match; in a graph, it is guarded by them."""
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        return False
    batch = []
    for i in range(max(a.ndim, b.ndim) - 2, 0, -1):
        m = a.shape[-2 - i] if a.ndim >= 2 + i else 1
        n = b.shape[-2 - i] if b.ndim >= 2 + i else 1
        if m != n and m != 1 and n != 1:
            return False
        batch.append(n if m == 1 else m)
    out = [*batch, *a.shape[-2:-1], *b.shape[-1:][: b.ndim - 1]]
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != (b.shape[-1] if b.ndim > 1 else 1)):
        return False
    return c is None or (c.ndim <= len(out) and all(c.shape[-i] in (1, out[-i]) for i in range(1, c.ndim + 1)))


def product(call: Call, resolved: ResolvedMode, entry: CachedExecutor, backward_mode: Mode | None = None) -> Tensor:
    """Return the product of tensors that PyTorch records, transforms or traces, or that have no memory."""
    a, b, options = call.a, call.b, call.options
    _, c, bias, *_ = call.others
    _check_tensors(a, b, c, bias)
    backward, source = backward_mode or resolved.mode, resolved.source
    if options is PLAIN and call.x.ndim > 1 and call.y.ndim > 1:
        return _product(
            a, b, resolved.mode, backward, 1.0, "", source, functools.partial(run, Call(*call[:-1], None), resolved)
        )

    def multiply(x: Tensor, y: Tensor, alpha: float, dtype: str) -> Tensor:
        return _product(x, y, resolved.mode, backward, alpha, dtype, source)

    return _computed(
        a, b, c, bias, options.alpha, options.beta, options.activation, *_dtypes(entry.plan, call), multiply
    )


def _check_tensors(a: Any, b: Any, c: Any, bias: Any) -> None:
    for name, x in (("a", a), ("b", b), ("c", c), ("bias", bias)):
        if not isinstance(x, Tensor) and x is not None:
            raise ArrayError(
                f"{name} is a {type_name(x)} together with tensors that PyTorch records, transforms or traces; "
                f"pass torch.as_tensor({name})"
            )
    if a.is_meta != b.is_meta:
        raise DeviceError(f"a is on {a.device} and b on {b.device}; move one of them to the other's device")


def _computed(
    a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None, alpha: Any, beta: Any, activation: str | None,
    product_dtype: str, result_dtype: str, multiply: Callable[[Tensor, Tensor, Any, str], Tensor],
) -> Tensor:  # fmt: skip
    """Return the product of stacks of matrices by ``multiply``, with the epilogue by PyTorch, which records it."""
    x = a.unsqueeze(0) if a.ndim == 1 else a
    y = b.unsqueeze(-1) if b.ndim == 1 else b
    factor: complex = 1.0
    if isinstance(alpha, complex):
        # The operator's alpha is real; autograd records this multiplication and conjugates a complex alpha.
        factor, alpha = (alpha, 1.0) if alpha else (1.0, 0.0)
    out = multiply(x, y, alpha, product_dtype)
    if b.ndim == 1:
        out = out.squeeze(-1)
    if a.ndim == 1:
        out = out.squeeze(-1 if b.ndim == 1 else -2)
    if factor != 1.0:
        out = out * factor
    if c is not None and beta:
        out = out + beta * c.to(out.dtype)
    if bias is not None:
        bias = (bias.squeeze(-1) if b.ndim == 1 else bias).to(out.dtype)
        if out.dtype == torch.int32:  # saturate
            limits = torch.iinfo(out.dtype)
            out = out.clamp(limits.min - bias.clamp(max=0), limits.max - bias.clamp(min=0))
        out = out + bias
    if activation is not None:
        out = _ACTIVATIONS[activation](out)
    return out.to(getattr(torch, result_dtype))


def _product(
    a: Tensor, b: Tensor, mode: Any, backward_mode: Any, alpha: float, out_dtype: str, source: Any,
    directly: Callable[[], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return a product that PyTorch records or transforms; ``directly`` computes it for plain tensors."""
    is_plain = type(a) in _PLAIN and type(b) in _PLAIN and not a.is_meta
    if is_plain and not _dispatch_modes() and not _transforms():
        if forward_ad._current_level < 0:
            if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
                rest = (mode, backward_mode, alpha, out_dtype, source, directly)
                return _Plain.apply(_unwrapped(a), _unwrapped(b), *rest)
            return multiply_plain(a, b, policy.restrict(mode, source), alpha, out_dtype)
    elif not _transforms() or _innermost().key() == _FUNCTIONALIZE:
        ensure_sharded()
        return OPERATOR(a, b, str(mode), str(backward_mode), alpha, out_dtype, str(source))
    return _Transformed.apply(a, b, str(mode), str(backward_mode), alpha, out_dtype, str(source))


def _recorded(a: Tensor, b: Tensor, mode: str, alpha: float, source: str) -> Tensor:
    """Return a product of a backward pass; a guard that is open now raises its mode."""
    if _is_compiling() or _is_batched(a) or _is_batched(b):
        # In torch.autograd.grad(is_grads_batched=True) PyTorch calls the operator once per gradient.
        return OPERATOR(a, b, str(mode), str(mode), alpha, "", str(source))
    return _product(a, b, parse_mode(mode), mode, alpha, "", ModeSource(source))


class _Plain(torch.autograd.function._SingleLevelFunction):
    _compiled_autograd_key = COMPILED_KEY

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        mode, ctx.mode, ctx.alpha, ctx.out_dtype, ctx.source, directly = rest
        save_operands(ctx, a, b, ctx.needs_input_grad[:2])
        return directly() if directly else multiply_plain(a, b, policy.restrict(mode, ctx.source), *rest[2:4])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_operands = operand_gradients(ctx, gradients[0], ctx.needs_input_grad[:2], _recorded)
        return *of_operands, *(None,) * (len(ctx.needs_input_grad) - 2)


class _Transformed(torch.autograd.Function):
    backward = _Plain.backward

    @staticmethod
    def forward(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        return OPERATOR(a, b, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        a, b, _, ctx.mode, ctx.alpha, ctx.out_dtype, ctx.source = inputs
        save_operands(ctx, a, b, ctx.needs_input_grad[:2])
        ctx.save_for_forward(a, b)
        # With several levels PyTorch passes the inner one's tangents to the outer one as constants.
        stack = torch._C._functorch.get_interpreter_stack() or ()
        ctx.levels = max(sum(x.key() == _JVP for x in stack), forward_ad._current_level + 1)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        if ctx.levels > 1:
            raise UnsupportedError(
                "nested forward-mode derivatives (jvp of jvp, jacfwd of jacfwd) of lowprec's product: PyTorch computes "
                "them wrongly through any autograd.Function; use torch.func.jacfwd(torch.func.jacrev(f)), as hessian"
            )
        a, b = ctx.saved_tensors
        terms = []
        for x, y in ((tangents[0], b), (a, tangents[1])):
            if x is not None and y is not None:
                mode, source = parse_mode(ctx.mode), ModeSource(ctx.source)
                terms.append(_product(x, y, mode, mode, ctx.alpha, ctx.out_dtype, source))
        return sum(terms[1:], terms[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, int]:
        a, b = with_batch_first(in_dims[:2], a, b)
        mode, backward_mode, alpha, out_dtype, source = rest
        return _product(a, b, parse_mode(mode), backward_mode, alpha, out_dtype, ModeSource(source)), 0
