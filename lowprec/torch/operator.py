"""``torch.ops.lowprec.matmul``: the product of stacks of matrices as an operator of PyTorch, for graphs and transforms.

It has its own kernel for autograd because of forward-mode derivatives: for an operator made by
``torch.library.custom_op`` PyTorch returns tangents of zero without an error; this one refuses.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from lowprec import policy
from lowprec.core.arguments import parse_dtype
from lowprec.core.call import bind, run
from lowprec.errors import DTypeError, ShapeError, UnsupportedError
from lowprec.formats import OPERAND_DTYPES, promote
from lowprec.modes import ModeSource, of_pass, parse_mode
from lowprec.recipes import Pass, Recipe

_SCHEMA = (
    "matmul(Tensor a, Tensor b, str mode, str backward_mode, float alpha=1.0, str out_dtype='', "
    "str source='') -> Tensor"
)
_library = torch.library.Library("lowprec", "DEF")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))

#: PyTorch's modes, tracers and transforms see its calls.
OPERATOR = torch.ops.lowprec.matmul.default

#: An ``out_dtype`` for 16-bit operands: a float32 result whose gradient has the operands' type.
ACCUMULATOR = "accumulator"

#: The ``source`` of a mode that was the current one during tracing: it is resolved again when the graph runs, maybe in
#: another thread or task.
CURRENT = "current"


class OperatorOptions(NamedTuple):
    """The arguments after the operands; PyTorch omits trailing defaults."""

    mode: Any
    backward_mode: Any  # of the two products of the backward pass
    alpha: float = 1.0
    out_dtype: str = ""
    # of the mode: a value of ``ModeSource``, or ``CURRENT``; by default the argument
    source: str = ""

    def as_text(self) -> OperatorOptions:
        """Return the arguments of the operator."""
        return OperatorOptions(
            str(self.mode), str(self.backward_mode), self.alpha, self.out_dtype, str(self.source)
        )


def _multiply(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    if a.requires_grad:
        a = a.detach()
    if b.requires_grad:
        b = b.detach()
    return multiply_plain(a, b, OperatorOptions(*rest))


def multiply_plain(a: Tensor, b: Tensor, options: OperatorOptions) -> Tensor:
    """Multiply tensors that PyTorch neither records nor traces."""
    if options.source == CURRENT:
        resolved = policy.resolve()
    else:
        source = ModeSource(options.source or ModeSource.ARGUMENT)
        resolved = policy.restrict(parse_mode(options.mode), source)
    dtype = options.out_dtype
    if dtype == ACCUMULATOR:
        dtype = "float32"
    if options.alpha == 1.0 and not dtype:
        call = bind(a, b)
    else:
        call = bind(a, b, alpha=options.alpha, out_dtype=dtype or None)
    product: Tensor = run(call, resolved)
    return product


_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
for _key in _DEVICES:
    _library.impl("matmul", _multiply, _key.name)


def result_dtype(a: Tensor, b: Tensor, out_dtype: str) -> torch.dtype:
    if out_dtype == ACCUMULATOR:
        return torch.float32
    if out_dtype:
        return getattr(torch, out_dtype)
    return getattr(torch, promote(parse_dtype(a.dtype), parse_dtype(b.dtype)).results[0].label)


@torch.library.register_fake("lowprec::matmul", lib=_library)
def _fake(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    dtypes = {"a": parse_dtype(a.dtype), "b": parse_dtype(b.dtype)}
    for name, dtype in dtypes.items():
        if not dtype.results:
            raise DTypeError(
                f"{name} has dtype {dtype}; supported: {', '.join(map(str, OPERAND_DTYPES))}"
            )
    promote(*dtypes.values())
    shapes = f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    k = a.shape[-1]
    k_of_b = b.shape[-2]
    if type(k) is type(k_of_b) is int and k != k_of_b:
        raise ShapeError(f"the inner dimensions differ, {shapes}")
    torch._check(k == k_of_b)
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise ShapeError(f"the batch dimensions do not broadcast, {shapes}") from None
    dtype = result_dtype(a, b, OperatorOptions(*rest).out_dtype)
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=dtype)


@register_flop_formula(torch.ops.lowprec.matmul)
def _flops(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * math.prod(out_shape) * a[-1]


def save_operands(
    ctx: Any, a: Tensor, b: Tensor, options: OperatorOptions, needed: tuple[bool, bool]
) -> None:
    """Save the operands for the needed gradients of ``a`` and ``b``, and the shapes and dtypes of both."""
    ctx.options = options
    ctx.of_a = (a.shape, a.dtype)
    ctx.of_b = (b.shape, b.dtype)
    ctx.save_for_backward(a if needed[1] else None, b if needed[0] else None)


def _operand_gradient(gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the gradient of an operand of this shape and type."""
    if gradient.numel() != shape.numel():
        gradient = gradient.sum_to_size(shape)
    if gradient.shape != shape:
        gradient = gradient.reshape(shape)
    if gradient.is_complex() and not dtype.is_complex:
        gradient = gradient.real
    return gradient.to(dtype)


def operand_gradients(
    ctx: Any, gradient: Tensor, needed: tuple[bool, bool], multiply: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ``a`` and ``b``, two products in the mode of the context."""
    a, b = ctx.saved_tensors
    options = ctx.options
    if options.out_dtype == ACCUMULATOR:
        gradient = gradient.to(ctx.of_a[1])
    backward = parse_mode(options.backward_mode)
    # A batch that becomes part of k would change the blocks and random numbers of the forward product.
    keeps_batch = isinstance(backward, Recipe) and backward.backward_override is not None

    def product(x: Tensor, y: Tensor, name: Pass) -> Any:
        mode = str(of_pass(backward, name))
        return multiply(x, y, OperatorOptions(mode, mode, options.alpha, "", options.source))

    for_a = for_b = None
    if needed[0]:
        x, y = gradient, b
        if not keeps_batch:
            x, y = _over_batch(gradient, b, ctx.of_a[0], -1)
        for_a = _operand_gradient(product(x, y.mH, "grad_input"), *ctx.of_a)
    if needed[1]:
        x, y = gradient, a
        if not keeps_batch or len(ctx.of_b[0]) == 2:
            x, y = _over_batch(gradient, a, ctx.of_b[0], -2)
        for_b = _operand_gradient(product(y.mH, x, "grad_weight"), *ctx.of_b)
    return for_a, for_b


def _over_batch(
    gradient: Tensor, other: Tensor, shape: torch.Size, inner: int
) -> tuple[Tensor, Tensor]:
    """Return both factors of an operand's gradient, ``inner`` with the axes along which the operand was broadcast.

    That is one product instead of a sum of several, as in JAX.
    """
    batch = gradient.shape[:-2]
    if shape[:-2] == batch:
        return gradient, other
    own = (1,) * (len(batch) + 2 - len(shape)) + shape[:-2]
    of_other = (1,) * (len(batch) + 2 - other.ndim) + other.shape[:-2]
    summed = [i for i, n in enumerate(own) if n == 1 != of_other[i]]
    other = other.reshape(*of_other, *other.shape[-2:])
    return _with_inner(gradient, summed, inner), _with_inner(other, summed, inner)


def _with_inner(x: Tensor, axes: list[int], inner: int) -> Tensor:
    """Make axes of the batch, which may have no elements, part of the last axis (-1) or the one before it (-2)."""
    kept = [i for i in range(x.ndim - 2) if i not in axes]
    order = [*kept, *axes, x.ndim - 2, x.ndim - 1]
    if inner == -1:
        order = [*kept, x.ndim - 2, *axes, x.ndim - 1]
    shape = [x.shape[i] for i in (*kept, x.ndim - 2, x.ndim - 1)]
    shape[inner] *= math.prod(x.shape[i] for i in axes)
    # PyTorch's legacy batching has no rule for flatten.
    if order != sorted(order):
        x = x.permute(order)
    return x.reshape(shape)


_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_KERNEL_IS_NEXT = tuple(torch._C.DispatchKeySet(key) for key in _DEVICES)


def _below_autograd(keyset: Any, *arguments: Any) -> Tensor:
    below = keyset & _AFTER_AUTOGRAD
    if below in _KERNEL_IS_NEXT:
        return _multiply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return OPERATOR.redispatch(below, *arguments)


#: Functions of one level lack this attribute, which compiled backward passes need.
COMPILED_KEY = torch.autograd.Function._compiled_autograd_key


class _Recorded(torch.autograd.function._SingleLevelFunction):
    _compiled_autograd_key = COMPILED_KEY

    @staticmethod
    def forward(ctx: Any, keyset: Any, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        save_operands(ctx, a, b, OperatorOptions(*rest), ctx.needs_input_grad[1:3])
        # PyTorch switches gradients off in here; the levels of torch.func below this one need them.
        with torch.enable_grad():
            return _below_autograd(keyset, a, b, *rest)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        def multiply(x: Tensor, y: Tensor, options: OperatorOptions) -> Any:
            if options.source == CURRENT:
                options = options._replace(source="")
            return OPERATOR(x, y, *options)

        of_operands = operand_gradients(ctx, gradients[0], ctx.needs_input_grad[1:3], multiply)
        return None, *of_operands, None, None, None, None, None


def _record(keyset: Any, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in (a, b)
    ):
        raise UnsupportedError(
            "a forward-mode derivative of lowprec's product inside a graph or a mode: PyTorch has no rule for it "
            "there; use torch.func.jvp of the function itself, without torch.compile"
        )
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        # A kernel is called at one level; without this PyTorch expects a Function for all levels.
        with enable_single_level_autograd_function():
            return _Recorded.apply(keyset, a, b, *OperatorOptions(*rest))
    return _below_autograd(keyset, a, b, *rest)


_library.impl("matmul", _record, "Autograd", with_keyset=True)


@torch.library.register_vmap("lowprec::matmul", lib=_library)
def _batched(info: Any, in_dims: Any, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, int]:
    a, b = with_batch_first(in_dims[:2], a, b)
    return OPERATOR(a, b, *rest), 0


def with_batch_first(
    in_dims: tuple[int | None, ...], a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the operands with the mapped axis first, and with equal numbers of batch axes after it."""
    of_a, of_b = in_dims
    ndim = max(a.ndim - (of_a is not None), b.ndim - (of_b is not None))
    return _with_first(of_a, a, ndim), _with_first(of_b, b, ndim)


def _with_first(dim: int | None, x: Tensor, ndim: int) -> Tensor:
    if dim is None:
        return x
    x = x.movedim(dim, 0)
    added = [1] * (ndim + 1 - x.ndim)
    return x.reshape(x.shape[0], *added, *x.shape[1:])


def ensure_sharded() -> None:
    """Register the operator's shardings, if DTensor is loaded in this process."""
    if "torch.distributed.tensor" in sys.modules:
        _register_sharding()


@functools.cache
def _register_sharding() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(OPERATOR)(_placements)


def _placements(a: Any, b: Any, *others: Any, **keywords: Any) -> list[Any]:
    """Return pairs of placements, of the result and of the arguments.

    ``Partial`` operands (sums over ranks) are summed first; rounding their parts would exceed the mode's error bound.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    ndim = max(a.ndim, b.ndim)
    rest: list[Any] = [None] * len(others)

    def batch(x: Any, axis: int) -> Any:
        """Return the placement of an operand whose batch is split along an axis of the result."""
        own = axis - ndim + x.ndim
        if own < 0 or x.shape[own] == 1:
            return Replicate()
        return Shard(own)

    whole = Replicate()
    inner = [Shard(a.ndim - 1), Shard(b.ndim - 2)]
    found = [
        ([whole], [whole, whole, *rest]),
        ([Shard(ndim - 2)], [Shard(a.ndim - 2), whole, *rest]),
        ([Shard(ndim - 1)], [whole, Shard(b.ndim - 1), *rest]),
        ([Partial()], [*inner, *rest]),
    ]
    for axis in range(ndim - 2):
        found.append(([Shard(axis)], [batch(a, axis), batch(b, axis), *rest]))
    return found
