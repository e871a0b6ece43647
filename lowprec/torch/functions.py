"""The product of tensors that PyTorch records, transforms or traces.

A call that the compiler traces becomes the operator in a graph; PyTorch computes the epilogue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowprec.arrays import CPU, ArrayView, library_of
from lowprec.arrays.dlpack import type_name
from lowprec.core import dispatch
from lowprec.core.arguments import PLAIN, parse_dtype
from lowprec.core.call import Call, bind, run
from lowprec.core.executors import CachedExecutor, look_up
from lowprec.core.tolerance import mode_of
from lowprec.errors import ArrayError, DeviceError, LowprecError
from lowprec.modes import MathMode, Mode, ModeSource, Recipe, ResolvedMode, parse_mode
from lowprec.planning import ACTIVATIONS, GemmPlan
from lowprec.rounding_rules import Format
from lowprec.torch.current_mode import current_mode
from lowprec.torch.operator import ACCUMULATOR, CURRENT, OPERATOR, OperatorOptions
from lowprec.torch.recording import recorded_product
from lowprec.util.untraced import call_untraced

TENSOR_ACTIVATIONS = {
    **{name: getattr(torch.nn.functional, name) for name in ACTIVATIONS},
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


#: The arguments of products in graphs, and the types of factors; the compiler represents NumPy scalars as tensors.
_IN_GRAPHS = frozenset(
    {"c", "alpha", "beta", "bias", "activation", "out_dtype", "math_mode", "rtol", "bound"}
)
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
    c = given.get("c")
    bias = given.get("bias")
    alpha = given.get("alpha", 1.0)
    beta = given.get("beta", 0.0)
    settings = None
    if _is_for_graphs((a, b, c, bias), (alpha, beta), given):
        settings = _settings_of((a, b, c, bias), given, backward_mode)
    if settings is not None and _fit(a, b, c, bias):
        mode, backward, source, product_dtype, result_dtype = settings

        def multiply(x: Tensor, y: Tensor, alpha: Any) -> Tensor:
            return OPERATOR(x, y, mode, backward, alpha, product_dtype, source)

        epilogue = (c, bias, alpha, beta, given.get("activation"))
        return _with_epilogue(a, b, multiply, epilogue, result_dtype)
    if backward_mode is not None:
        given["backward_mode"] = backward_mode
    return call_untraced(dispatch.matmul, a, b, **given)


def _is_for_graphs(tensors: Any, factors: Any, given: Any) -> bool:
    arrays = [x for x in tensors if x is not None]
    return (
        len(arrays) >= 2
        and all(isinstance(x, Tensor) and not x.is_nested for x in arrays)
        and all(isinstance(x, _NUMBERS) and abs(x) <= _LARGEST for x in factors)
        and _IN_GRAPHS.issuperset(given)
    )


def _settings_of(
    tensors: Any, given: Any, backward_mode: Any
) -> tuple[str, str, str, str, str] | None:
    rtol = given.get("rtol")
    bound = given.get("bound")
    math_mode = _name_of(given.get("math_mode"))
    needs_extents = rtol is not None or bound is not None
    operands = [_described(x, needs_extents) for x in tensors]
    factors = (_factor("alpha", 1.0, given), _factor("beta", 0.0, given))
    # A graph is guarded by the current mode where that is read.
    current = ""
    if math_mode is None or needs_extents:
        current = current_mode()
    if isinstance(rtol, float):
        rtol = (rtol.hex(),)
    modes = (math_mode, rtol, bound, _name_of(backward_mode))
    others = (given.get("activation"), given.get("out_dtype"))
    return _settings(operands, factors, others, modes, current, tensors[0].device)


def _described(x: Any, needs_extents: bool) -> Any:
    """Return the element type and the extents of an operand in a graph, 1 where nothing depends on them."""
    if x is None:
        return None
    if not needs_extents:
        return x.dtype, (1,) * x.ndim
    # of symbols too, which int() would not convert
    return x.dtype, tuple([len(range(n)) for n in x.shape])


def _factor(name: str, default: float, given: Any) -> complex:
    """Return a factor of the same kind as that of a call, which may be a symbol."""
    if name not in given:
        return default
    return 2j if isinstance(given[name], complex) else 2.0


def _name_of(mode: Any) -> Any:
    """Return the text of a recipe or a format, which the compiler cannot store in a graph."""
    if isinstance(mode, Recipe):
        return mode.value
    return str(mode) if isinstance(mode, Format) else mode


def _is_default(name: str, x: Any) -> bool:
    if name in ("alpha", "beta"):
        return isinstance(x, float) and x == (1.0 if name == "alpha" else 0.0)
    return x is None


def _settings(
    arrays: Any, factors: Any, others: Any, modes: Any, current: str, device: Any
) -> tuple[str, str, str, str, str] | None:
    """Return modes, their source and element types of a product in a graph; None for a call that raises.

    The compiler guards on the current mode: each has its own graph. Where ``rtol`` selects the mode, it guards on the
    extents, on which nothing else depends: symbols are replaced by 1.
    """
    math_mode, rtol, bound, backward_mode = modes
    try:
        call = _call(arrays, factors, others, device)
        plan = look_up(_FP32, call.x, call.y, call.options, observed=False).plan
        mode = current
        source: str = CURRENT
        if rtol is not None or bound is not None:
            if isinstance(rtol, tuple):
                rtol = float.fromhex(*rtol)
            resolved, _ = mode_of(call, math_mode, rtol, bound)
            mode = resolved.mode.value
            source = ModeSource.RTOL.value
        elif math_mode is not None:
            mode = parse_mode(math_mode).value
            source = ModeSource.ARGUMENT.value
        backward = mode
        if backward_mode is not None:
            backward = parse_mode(backward_mode).value
    except LowprecError:
        return None
    return mode, backward, source, *_dtypes(plan, call)


def _call(arrays: Any, factors: Any, others: Any, device: Any) -> Call:
    """Return the call of a product in a graph, whose tensors are only described."""
    library: Any = library_of(torch.empty(0, device="cpu"))
    place = library.device_of(device) or CPU
    views: list[Any] = []
    for x in arrays:
        view = x and replace(ArrayView.description(parse_dtype(x[0]), x[1]), device=place)
        views.append(view)
    a, b, c, bias = views
    alpha, beta = factors
    activation, out_dtype = others
    return bind(
        a, b, c=c, bias=bias, alpha=alpha, beta=beta, activation=activation, out_dtype=out_dtype
    )


_settings._dynamo_marked_constant = True  # type: ignore[attr-defined]  # its decorator would import the compiler


def _dtypes(plan: GemmPlan, call: Call) -> tuple[str, str]:
    """Return the element type of the operator's product, as its argument, and of the result."""
    options = call.options
    result = plan.out_dtype.label
    has_epilogue = (
        options.c is not None or options.bias is not None or options.activation is not None
    )
    if not has_epilogue and type(options.alpha) is float:
        return "" if options.out_dtype is None else options.out_dtype.label, result
    is_narrow = plan.compute_dtype.bits <= 16 and plan.compute_dtype.format
    return ACCUMULATOR if is_narrow else "", result


def _fit(a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the extents match; in a graph, it is guarded by them."""
    if a.shape[-1] != b.shape[max(b.ndim - 2, 0)]:
        return False
    columns = b.shape[1:][-1:]
    out = [*a.shape[-2:-1], *columns]
    for axis in range(-3, -1 - max(a.ndim, b.ndim), -1):
        m = _extent(a, axis)
        n = _extent(b, axis)
        if m != n and m != 1 and n != 1:
            return False
        out.insert(0, n if m == 1 else m)
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != (*columns, 1)[0]):
        return False
    if c is None:
        return True
    if c.ndim > len(out):
        return False
    return all(
        n in (1, extent) for n, extent in zip(reversed(c.shape), reversed(out), strict=False)
    )


def _extent(x: Tensor, axis: int) -> Any:
    return x.shape[axis] if x.ndim >= -axis else 1


def product(
    call: Call, resolved: ResolvedMode, entry: CachedExecutor, backward_mode: Mode | None = None
) -> Tensor:
    """Return the product of tensors that PyTorch records, transforms or traces, or that have no memory."""
    a = call.a
    b = call.b
    options = call.options
    _, c, bias, *_ = call.others
    _check_tensors(a, b, c, bias)
    mode = resolved.mode
    source = resolved.source
    backward = backward_mode or mode
    if options is PLAIN and call.x.ndim > 1 and call.y.ndim > 1:
        directly = functools.partial(run, Call(*call[:-1], None), resolved)
        return recorded_product(a, b, OperatorOptions(mode, backward, source=source), directly)
    product_dtype, result_dtype = _dtypes(entry.plan, call)

    def multiply(x: Tensor, y: Tensor, alpha: float) -> Tensor:
        return recorded_product(x, y, OperatorOptions(mode, backward, alpha, product_dtype, source))

    epilogue = (c, bias, options.alpha, options.beta, options.activation)
    return _with_epilogue(a, b, multiply, epilogue, result_dtype)


def _check_tensors(a: Any, b: Any, c: Any, bias: Any) -> None:
    for name, x in (("a", a), ("b", b), ("c", c), ("bias", bias)):
        if not isinstance(x, Tensor) and x is not None:
            raise ArrayError(
                f"{name} is a {type_name(x)} together with tensors that PyTorch records, transforms or traces; "
                f"pass torch.as_tensor({name})"
            )
    if a.is_meta != b.is_meta:
        raise DeviceError(
            f"a is on {a.device} and b on {b.device}; move one of them to the other's device"
        )


def _with_epilogue(
    a: Tensor,
    b: Tensor,
    multiply: Callable[[Tensor, Tensor, Any], Tensor],
    epilogue: Any,
    result_dtype: str,
) -> Tensor:
    """Return the product of stacks of matrices by ``multiply``, with the epilogue by PyTorch, which records it."""
    c, bias, alpha, beta, activation = epilogue
    factor: complex = 1.0
    if isinstance(alpha, complex):
        # The operator's alpha is real; autograd records the multiplication by a factor and conjugates a complex one.
        factor = alpha or 1.0
        alpha = 1.0 if alpha else 0.0
    out = _stacks(a, b, alpha, multiply)
    if factor != 1.0:
        out = out * factor
    if c is not None and beta:
        out = out + beta * c.to(out.dtype)
    if bias is not None:
        if b.ndim == 1:
            bias = bias.squeeze(-1)
        out = _with_bias(out, bias.to(out.dtype))
    if activation is not None:
        out = TENSOR_ACTIVATIONS[activation](out)
    return out.to(getattr(torch, result_dtype))


def _stacks(
    a: Tensor, b: Tensor, alpha: Any, multiply: Callable[[Tensor, Tensor, Any], Tensor]
) -> Tensor:
    """Multiply vectors as matrices of one row or column."""
    is_row = a.ndim == 1
    is_column = b.ndim == 1
    if is_row:
        a = a.unsqueeze(0)
    if is_column:
        b = b.unsqueeze(-1)
    out = multiply(a, b, alpha)
    if is_row:
        out = out.squeeze(-2)
    if is_column:
        out = out.squeeze(-1)
    return out


def _with_bias(out: Tensor, bias: Tensor) -> Tensor:
    if out.dtype == torch.int32:  # saturate
        limits = torch.iinfo(out.dtype)
        out = out.clamp(limits.min - bias.clamp(max=0), limits.max - bias.clamp(min=0))
    return out + bias
