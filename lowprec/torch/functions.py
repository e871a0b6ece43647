"""``matmul`` and ``linear`` for PyTorch.

Plain tensors are multiplied directly, under ``torch.func`` by an ``autograd.Function``, in graphs by the operator.
"""

from __future__ import annotations

import inspect
from numbers import Complex, Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowprec import policy
from lowprec.arrays import CPU
from lowprec.arrays.libraries import library_of
from lowprec.arrays.prepared_view import refuse_prepared
from lowprec.core import dispatch
from lowprec.core.arguments import Options, parse_dtype
from lowprec.core.executors import capabilities
from lowprec.core.plan_call import mode_within
from lowprec.errors import ArrayError, DeviceError, DTypeError, ShapeError, UnsupportedError
from lowprec.modes import ActivationName, BoundName, MathMode, ModeName, parse_mode
from lowprec.planning import Activation, OperandSpec
from lowprec.planning.problem import broadcasts
from lowprec.torch.current_mode import current_mode
from lowprec.torch.operator import (
    ACCUMULATOR,
    COMPILED_KEY,
    OPERATOR,
    ensure_sharded,
    multiply_plain,
    operand_gradients,
    result_dtype,
    save_operands,
    with_batch_first,
)
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
    math_mode: ModeName | MathMode | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    backward_mode: ModeName | MathMode | None = None,
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
    backward_mode : str or MathMode, optional
        Mode of the two products of the backward pass; by default the forward product's. A guard that is open during
        the backward pass overrides it.

    Returns
    -------
    Tensor, shape (..., m, n)

    Raises
    ------
    ModeError, ShapeError, DTypeError, UnsupportedError
        As for :func:`lowprec.matmul`; UnsupportedError also for derivatives that PyTorch would compute wrongly.

    Examples
    --------
    >>> import torch
    >>> w = torch.ones(2, 2, requires_grad=True)
    >>> matmul(torch.eye(2), w, math_mode="bf16").sum().backward()
    >>> w.grad
    tensor([[1., 1.],
            [1., 1.]])
    """
    _check_tensors(a=a, b=b, c=c, bias=bias)
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if type(factor) is float or isinstance(factor, Real):
            continue
        if not isinstance(factor, Complex):
            raise DTypeError(f"{name} must be a number, got {type(factor).__name__}")
        if not (a.is_complex() or b.is_complex()):
            raise DTypeError(f"{name} is complex, but the operands are {a.dtype} and {b.dtype}")
    if beta and c is None:
        raise ShapeError(f"beta is {beta}, but c is missing; pass c=")
    if a.is_meta != b.is_meta:
        raise DeviceError(f"a is on {a.device} and b on {b.device}; move one of them to the other's device")
    plain = c is bias is activation is None and type(alpha) is float
    x = a.unsqueeze(0) if a.ndim == 1 else a
    y = b.unsqueeze(-1) if b.ndim == 1 else b
    if x.ndim < 2 or y.ndim < 2:
        raise ShapeError(f"operands have at least one axis, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    dtype, outer = "", 1.0
    if out_dtype is not None:
        is_named = isinstance(out_dtype, str | torch.dtype)
        dtype = str(out_dtype if is_named else parse_dtype(out_dtype).label).removeprefix("torch.")
    if type(alpha) is not float and not isinstance(alpha, Real):
        # The operator's alpha is real; autograd records this multiplication and conjugates a complex alpha.
        outer, alpha = (alpha, 1.0) if alpha else (1.0, 0.0)
    if rtol is not None or bound is not None:
        math_mode = _mode_within(x, y, out_dtype, math_mode, rtol, bound)
    rounded = None if plain else _rounded_last(x, y, dtype)
    if rounded is not None:
        dtype = ACCUMULATOR if x.dtype.itemsize == y.dtype.itemsize == 2 else ""
    out = _product(x, y, math_mode, backward_mode, alpha, dtype)
    if b.ndim == 1:
        out = out.squeeze(-1)
    if a.ndim == 1:
        out = out.squeeze(-1 if b.ndim == 1 else -2)
    if plain:
        return out
    out = _with_epilogue(out, outer, c, beta, bias, activation)
    return out if rounded is None else out.to(rounded)


_LOW = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def _rounded_last(a: Tensor, b: Tensor, out_dtype: str) -> torch.dtype | None:
    """Return the 16-bit type to which a result is rounded after an epilogue in float32; else None."""
    common = result_dtype(a, b, "")
    dtype = _LOW.get(out_dtype) if out_dtype else common
    # The product raises for any other out_dtype.
    return dtype if dtype in _LOW.values() and common in (dtype, torch.float32) else None


def _with_epilogue(
    out: Tensor, factor: Any, c: Tensor | None, beta: Any, bias: Tensor | None, activation: str | None
) -> Tensor:
    if out.dtype == torch.int32 and (c is not None or activation not in (None, "relu")):
        raise UnsupportedError(
            "c and activations other than relu cannot be used with int8 operands, whose product is exact integers; "
            "apply them to the result after converting that"
        )
    if factor != 1.0:
        out = out * factor
    if c is not None and beta:
        _check_addend("c", c, out, tuple(out.shape))
        out = out + beta * c.to(out.dtype)
    if bias is not None:
        _check_addend("bias", bias, out, tuple(out.shape[-1:]))
        bias = bias.to(out.dtype)
        if out.dtype == torch.int32:  # saturate
            limits = torch.iinfo(out.dtype)
            out = out.clamp(limits.min - bias.clamp(max=0), limits.max - bias.clamp(min=0))
        out = out + bias
    if activation is None:
        return out
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"activation {activation!r} is not supported; choose one of: {', '.join(map(repr, _ACTIVATIONS))}"
        )
    if out.is_complex():
        raise UnsupportedError(f"activation {activation} is not defined for {out.dtype} operands")
    return _ACTIVATIONS[activation](out)


def _check_addend(name: str, x: Tensor, out: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse an addend that would change the result's shape or element type, as ``lowprec.matmul`` does."""
    if not (tuple(x.shape) == shape if name == "bias" else broadcasts(x.shape, shape)):
        raise ShapeError(f"{name} has shape {tuple(x.shape)}, which does not broadcast to {shape} of the result")
    if torch.promote_types(x.dtype, out.dtype) != out.dtype:
        raise DTypeError(f"{name} has dtype {x.dtype}, but is added in {out.dtype}")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    math_mode: ModeName | MathMode | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    backward_mode: ModeName | MathMode | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear``.

    Parameters
    ----------
    x : Tensor, shape (..., k)
    weight : Tensor, shape (n, k)
    bias : Tensor, shape (n,), optional
    math_mode, rtol, bound, backward_mode
        As for :func:`matmul`.

    Returns
    -------
    Tensor, shape (..., n)

    Raises
    ------
    ModeError, ShapeError, DTypeError, UnsupportedError
        As for :func:`matmul`; ShapeError also if ``weight`` has fewer than two axes.

    Examples
    --------
    >>> import torch
    >>> linear(torch.ones(3), torch.ones(2, 3), torch.zeros(2))
    tensor([3., 3.])
    """
    _check_tensors(weight=weight)
    if weight.ndim < 2:
        raise ShapeError(f"weight has shape {tuple(weight.shape)}; linear expects (n, k)")
    return matmul(
        x, weight.mT,
        bias=bias, math_mode=math_mode, rtol=rtol, bound=bound, backward_mode=backward_mode,
    )  # fmt: skip


_SUPPORTED = frozenset(inspect.signature(matmul).parameters)


def traced_matmul(a: Any, b: Any, /, **keywords: Any) -> Any:
    """Multiply in a function that PyTorch's compiler traces, with the arguments of :func:`lowprec.matmul`."""
    # After a graph break the compiler would otherwise trace lowprec.matmul, and replace its NumPy calls by operators.
    given = {name: x for name, x in keywords.items() if x is not None}
    # The compiler represents NumPy scalars as tensors.
    numbers = all(isinstance(given.get(name, 1.0), int | float | complex) for name in ("alpha", "beta"))
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if numbers and tensors and _SUPPORTED.issuperset(given):
        return matmul(a, b, **given)
    return call_untraced(dispatch.matmul, a, b, **given)


def _mode_within(a: Tensor, b: Tensor, out_dtype: Any, math_mode: Any, rtol: Any, bound: str | None) -> Any:
    """Return the mode for ``rtol``: in a graph, a constant for these shapes and for the current mode."""
    # In a graph numbers may be symbols, which int() and float() would not convert.
    given = rtol.hex() if isinstance(rtol, float) else (rtol,)
    x, y = [(x.dtype, _numbers(x.shape), _numbers(x.stride())) for x in (a, b)]
    return _chosen(x, y, a.device, out_dtype, current_mode(), math_mode, given, bound)


def _numbers(extents: Any) -> tuple[int, ...]:
    return tuple([len(range(n)) for n in extents])


def _chosen(a: Any, b: Any, device: Any, out_dtype: Any, _: str, math_mode: Any, rtol: Any, bound: Any) -> str:
    rtol = float.fromhex(rtol) if isinstance(rtol, str) else rtol[0]
    operands = [OperandSpec(parse_dtype(dtype), *rest) for dtype, *rest in (a, b)]
    options = Options(out_dtype=None if out_dtype is None else parse_dtype(out_dtype))
    library: Any = library_of(torch.empty(0, device="cpu"))
    able = capabilities(library.device_of(device) or CPU)
    return mode_within(rtol, math_mode, options.problem(*operands), able, bound)[0].mode.value


_chosen._dynamo_marked_constant = True  # type: ignore[attr-defined]  # its decorator would import the compiler


def _check_tensors(**arguments: Any) -> None:
    for name, x in arguments.items():
        if not isinstance(x, Tensor) and (x is not None or name not in ("c", "bias")):
            refuse_prepared(**{name: x})
            raise ArrayError(
                f"{name} is a {type(x).__qualname__} together with tensors that PyTorch records, transforms or traces; "
                f"pass torch.as_tensor({name})"
            )
        if x is not None and x.is_nested:
            raise ArrayError(f"{name} is nested; multiply its parts, from {name}.unbind()")


def _product(a: Tensor, b: Tensor, math_mode: Any, backward_mode: Any, alpha: float, out_dtype: str) -> Tensor:
    if _is_compiling():
        # The compiler guards on the mode: each mode has its own graph.
        is_current = math_mode is None
        mode = current_mode() if is_current else str(math_mode)
        rest = (mode, _backward(backward_mode, mode), alpha, out_dtype)
        return OPERATOR(a, b, *rest, is_current)
    mode = str(policy.resolve(math_mode).mode)
    rest = (mode, _backward(backward_mode, mode), alpha, out_dtype)
    plain = type(a) in _PLAIN and type(b) in _PLAIN and not a.is_meta
    if plain and not _dispatch_modes() and not _transforms():
        if forward_ad._current_level < 0:
            if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
                return _Plain.apply(_unwrapped(a), _unwrapped(b), *rest)
            return multiply_plain(a, b, mode, alpha, out_dtype)
    elif not _transforms() or _innermost().key() == _FUNCTIONALIZE:
        ensure_sharded()
        return OPERATOR(a, b, *rest)
    return _Transformed.apply(a, b, *rest)


def _backward(backward_mode: Any, mode: str) -> str:
    return mode if backward_mode is None else str(parse_mode(backward_mode, "backward_mode"))


def _recorded(a: Tensor, b: Tensor, mode: str, alpha: float) -> Tensor:
    if not _is_compiling() and (_is_batched(a) or _is_batched(b)):
        # In torch.autograd.grad(is_grads_batched=True) PyTorch calls the operator once per gradient.
        return OPERATOR(a, b, mode, mode, alpha)
    return _product(a, b, mode, mode, alpha, "")


class _Plain(torch.autograd.function._SingleLevelFunction):
    _compiled_autograd_key = COMPILED_KEY

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        mode, ctx.mode, ctx.alpha, ctx.out_dtype = rest
        save_operands(ctx, a, b, ctx.needs_input_grad[:2])
        return multiply_plain(a, b, mode, ctx.alpha, ctx.out_dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = operand_gradients(ctx, gradients[0], ctx.needs_input_grad[:2], _recorded)
        return *found, None, None, None, None


class _Transformed(torch.autograd.Function):
    backward = _Plain.backward

    @staticmethod
    def forward(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        mode, backward_mode, alpha, out_dtype = rest
        return OPERATOR(a, b, mode, backward_mode, alpha, out_dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        a, b, _, ctx.mode, ctx.alpha, ctx.out_dtype = inputs
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
                terms.append(_product(x, y, ctx.mode, ctx.mode, ctx.alpha, ctx.out_dtype))
        return sum(terms[1:], terms[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, int]:
        a, b = with_batch_first(in_dims[:2], a, b)
        mode, backward_mode, alpha, out_dtype = rest
        return _product(a, b, mode, backward_mode, alpha, out_dtype), 0
