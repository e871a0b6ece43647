"""Operators of PyTorch that are several products in lowprec: their mode, their row in the report, their comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec.core.interception_report import PassedBy, Statistics
from lowprec.modes import Recipe, ResolvedMode, row
from lowprec.torch.accounting import (
    REFUSALS,
    Found,
    count,
    reason_against,
    reference_of,
    resolve,
    thread,
)
from lowprec.torch.layer_names import Part
from lowprec.torch.passes import mode_of_product
from lowprec.torch.registration import Function
from lowprec.torch.statistics import operand_statistics


class OperatorProduct(NamedTuple):
    """An operator, or one of its results, whose products have one mode."""

    name: str  # in reports and rules
    part: Part
    tensors: list[Tensor]
    multiplications: int
    make: Callable[[ResolvedMode], Any]  # returns the products in a mode
    compute: Callable[[Any, bool], Any]  # of these; returns a tensor, or several
    operands: Callable[[Any], Any]  # of these
    exact: Callable[[], Any]  # by PyTorch, in float64
    quantizes: bool = True  # modes that quantise act on it


def operator_kernel(own: Function, compute: Function, reason: PassedBy) -> Function:
    """Return the function that replaces an operator in a block.

    ``compute`` has the arguments scope, PyTorch's kernel, those of the operator, and whether gradients are recorded.
    """

    def by_torch(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        thread.watched = reason  # its own operators are not counted
        try:
            return own(keyset, *args, **kwargs)
        finally:
            thread.watched = None

    def act(found: Found, keyset: Any, args: Any, kwargs: Any) -> Any:
        if thread.watched is not None:
            return own(keyset, *args, **kwargs)
        records = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return compute(
                found, lambda *x, **k: by_torch(keyset, *x, **k), args, records, **kwargs
            )
        finally:
            torch._C._set_grad_enabled(records)

    return act


def computed(found: Found, product: OperatorProduct, records: bool) -> Any:
    """Return the result in the mode of its layer, and a function that counts what PyTorch computes instead of it."""
    scope, context = found
    part = product.part
    shown = scope.mode_of(part.layer, product.name)
    mode, swaps = mode_of_product(scope, shown, part, product.name, product.quantizes)
    reason = reason_against(shown, mode, product.name, product.tensors[0].dtype)
    detail = ""
    if reason is None:
        resolved = resolve(mode, context)
        try:
            again = _in_reference(scope, product, resolved, context)
            products = product.make(resolved)
            result = product.compute(products, swaps)
        except REFUSALS as error:
            reason = PassedBy.REFUSED
            detail = str(error)
        else:
            statistics = None
            if scope.statistics:
                statistics = _measured(product, products, resolved, _first(result))
            if isinstance(mode, Recipe) and resolved.mode == mode:
                mode = shown
            else:
                known = part.layer and product.quantizes
                if not known and row(shown).quantizes > row(mode).quantizes:
                    detail = f"no parameter found: computed in {mode}"
                mode = resolved.mode
            matrices = lambda: product.operands(products)  # noqa: E731
            _count(
                scope,
                product,
                records,
                mode.value,
                None,
                detail,
                statistics,
                result,
                again,
                matrices,
            )
            return result, None

    def passed_by(result: Any) -> None:
        _count(scope, product, records, "", reason, detail, None, result)

    return None, passed_by


def _first(result: Any) -> Any:
    return result if isinstance(result, Tensor) else result[0]


def _in_reference(
    scope: Any, product: OperatorProduct, resolved: ResolvedMode, context: Any
) -> Tensor | None:
    """Return the result in the reference of a comparison."""
    reference = reference_of(scope, resolved, context)
    if reference is None:
        return None
    found: Tensor = _first(product.compute(product.make(reference), False))
    return found


def _measured(
    product: OperatorProduct, products: Any, resolved: ResolvedMode, result: Tensor
) -> Statistics:
    """Return the statistics of the first operands, and the error of the whole result."""
    exact = _first(product.exact())
    error = 0.0
    if exact.any():
        error = float((result - exact).norm() / exact.norm())
    a, b = product.operands(products)
    return Statistics(*operand_statistics(a, b, resolved.mode), error)


def _count(
    scope: Any, product: OperatorProduct, records: bool, mode: str, reason: Any, detail: str, statistics: Any,
    result: Any, again: Tensor | None = None, matrices: Any = None,
) -> None:  # fmt: skip
    torch._C._set_grad_enabled(records)
    try:
        count(
            scope, product.part.layer, product.name, product.tensors, product.multiplications, mode, reason, detail,
            statistics, product.part.product, result, again, matrices,
        )  # fmt: skip
    finally:
        torch._C._set_grad_enabled(False)
