"""``batch_invariant``: an interception in which a row has the same bits alone and in any batch.

PyTorch computes the last elements of a tensor, and of the part of each thread, one by one, and some functions of these
by other instructions than those of vectors. Here these functions have arguments whose parts are whole vectors.
"""

from __future__ import annotations

from functools import cache
from math import lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowprec.core.interception_report import PassedBy
from lowprec.core.ledger import LedgerRow
from lowprec.core.rules import RulesLike, parse_rules
from lowprec.errors import SettingError, UnsupportedError
from lowprec.modes import MathMode, Mode, row, rules_of
from lowprec.torch.aten import Kernel
from lowprec.torch.interception import intercept
from lowprec.torch.registration import Function, count_idle_call, register

#: Functions whose bits depend on the place of an element in memory.
_FUNCTIONS = frozenset(
    [
        "gelu",
        "silu",
        "sigmoid",
        "softplus",
        "mish",
        "elu",
        "exp2",
        "sinh",
        "cosh",
        "atanh",
        "rsqrt",
        "pow",
    ]
)
#: A multiple of the elements of two vectors, which PyTorch computes at a time.
_VECTORS = 64
#: Elements of a tensor for each thread. Some functions use all threads for fewer.
_GRAIN = 1 << 15


class batch_invariant(intercept):
    """Compute products as :class:`intercept`, and a row with the same bits alone and in any batch.

    The functions that depend on the place of an element in PyTorch (sigmoid, SiLU, GELU, softplus, Mish, ELU, powers,
    and some hyperbolic ones) are computed on padded tensors. Compiled graphs do not call them.

    Parameters
    ----------
    math_mode : str, MathMode, Recipe, mapping, list of pairs, or path
        Mode or rules, as for :class:`intercept`.
    statistics : bool
        As for :class:`intercept`.

    Raises
    ------
    SettingError
        In a mode a row depends on others: one scale for an operand, stochastic rounding, float64's own BLAS.
    UnsupportedError
        In the block, at a product that is left to PyTorch, for example of an element type on which the mode does not
        act.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.SiLU())
    >>> x = torch.randn(7, 30)
    >>> with torch.no_grad(), batch_invariant():
    ...     print(torch.equal(model(x)[3:4], model(x[3:4])))
    True
    """

    _depth = 4

    def __init__(self, math_mode: RulesLike = "fp32", statistics: bool = False) -> None:
        for _, mode in parse_rules(math_mode):
            reason = _obstacle(mode)
            if reason:
                raise SettingError(f"batch_invariant: in {mode} {reason}; choose another mode")
        super().__init__(math_mode, statistics)

    def _install(self) -> None:
        super()._install()
        register(_kernels(), _padded)

    def leave(self, product: LedgerRow) -> None:
        if product.passed_by is not PassedBy.VECTORS:
            where = f" in {product.layer}" if product.layer else ""
            raise UnsupportedError(
                f"batch_invariant: {product.operator} of {product.dtype}{where} is left to PyTorch "
                f"({product.passed_by}), where a row may depend on its batch"
            )


def _obstacle(mode: Mode) -> str:
    """Return the reason why rows depend on others."""
    if mode in (MathMode.FP64, MathMode.FP32_EMULATED):
        return "the order of a sum depends on the shapes"
    if row(mode).quantizes:
        of_rows, _ = rules_of(mode)
        if of_rows and of_rows.has_tensor_scale:
            return "a tensor has one scale"
        if of_rows and of_rows.is_stochastic:
            return "the rounding of a row depends on its place"
    return ""


@cache
def _kernels() -> tuple[Kernel, ...]:
    found = []
    for operator in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, name = operator.partition("::")
        base = name.partition(".")[0]
        is_composite = name.startswith("pow.Scalar")  # of a number and a tensor
        if space != "aten" or base.removesuffix("_") not in _FUNCTIONS or is_composite:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU"):
            found.append(Kernel(operator, "CPU", base, in_place=base.endswith("_")))
    return tuple(found)


def _padded(kernel: Kernel, own: Function) -> Function:
    """Return a function that computes PyTorch's on padded tensors in a block."""
    operands = 2 if ".Tensor" in kernel.operator and "Scalar" not in kernel.operator else 1

    def call(keyset: Any, *given: Any, out: Tensor | None = None, **kwargs: Any) -> Any:
        args = (*map(_tensor, given[:operands]), *given[operands:])
        if out is not None:
            kwargs["out"] = out
        if not intercept._holders:
            count_idle_call()
        block = intercept._innermost()
        if block is None or not isinstance(block.scope, batch_invariant):
            return own(keyset, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            tensors = [x for x in args if isinstance(x, Tensor) and x.ndim]
            like = _like(tensors)
            if like is None or _is_whole(tensors, like):
                return own(keyset, *args, **kwargs)
            padded = [_flat(x, like) if isinstance(x, Tensor) and x.ndim else x for x in args]
            if out is not None:
                kwargs["out"] = out.new_empty(_padded_size(like.numel()))
            found = own(keyset, *padded, **kwargs)
            found = found[: like.numel()].as_strided(like.shape, like.stride())
            if kernel.in_place:
                return args[0].copy_(found)
            if out is not None:
                return out.resize_(like.shape).copy_(found)
            return found.clone()

    return call


def _tensor(x: Any) -> Tensor:
    """Return an operand, which PyTorch passes as a number if it is one."""
    return x if isinstance(x, Tensor) else torch.from_numpy(np.asarray(x))


def _like(tensors: list[Tensor]) -> Tensor | None:
    """Return a tensor without memory of the shape and strides of the result."""
    if not tensors or not any(x.is_floating_point() for x in tensors):
        return None
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    whole = [x for x in tensors if x.shape == shape]
    if not shape.numel():
        return None
    if not whole:
        return torch.empty(shape, device="meta")
    return torch.empty_like(whole[0], device="meta")


def _is_whole(tensors: list[Tensor], like: Tensor) -> bool:
    if _padded_size(like.numel()) != like.numel():
        return False
    return all(x.shape == like.shape and x.stride() == like.stride() for x in tensors)


def _flat(x: Tensor, like: Tensor) -> Tensor:
    """Return the elements of a tensor in the order of another one, and further ones."""
    found = x.new_ones(_padded_size(like.numel()))
    found[: like.numel()].as_strided(like.shape, like.stride()).copy_(x)
    return found


def _padded_size(size: int) -> int:
    """Return the number of elements whose parts of threads are whole vectors."""
    threads = torch.get_num_threads()
    padded = size
    while True:
        parts = min(threads, -(-padded // _GRAIN))
        step = _VECTORS * lcm(parts, threads)
        if padded % step == 0:
            return padded
        padded = -(-padded // step) * step
