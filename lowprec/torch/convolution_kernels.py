"""PyTorch's convolutions inside an interception: their products by lowprec, in the mode of their layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec.core.interception_report import PassedBy, Statistics
from lowprec.modes import Recipe, ResolvedMode, row
from lowprec.torch.accounting import REFUSALS, Found, count, reason_against, resolve, thread
from lowprec.torch.aten import Kernel
from lowprec.torch.convolution_shapes import Convolution, ConvolutionArguments
from lowprec.torch.convolutions import Products
from lowprec.torch.direct_convolutions import DirectProducts, suits
from lowprec.torch.layer_names import NAMES, Part
from lowprec.torch.passes import mode_of_product
from lowprec.torch.registration import Function
from lowprec.torch.statistics import operand_statistics

#: The name of all three products, in reports and rules.
_NAME = "convolution"


class _ConvolutionProduct(NamedTuple):
    """One of the three products of a convolution."""

    part: Part
    tensors: list[Tensor]
    multiplications: int
    compute: Callable[[Products, bool], Tensor]
    operands: Callable[[Products], Any]
    exact: Callable[[], Tensor]  # by PyTorch, in float64


class _Layout(NamedTuple):
    shape: Convolution
    last: bool  # whether the channels are last in memory


def convolution_kernel(kernel: Kernel, own: Function) -> Function:
    """Return the function that computes a convolution, or its gradients, in a block."""
    compute = _gradients if "backward" in kernel.operator else _forward

    def act(found: Found, keyset: Any, args: Any, kwargs: Any) -> Any:
        if thread.watched is not None:
            return own(keyset, *args, **kwargs)
        records = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return compute(found, lambda *x: _by_torch(own, keyset, *x), args, records)
        finally:
            torch._C._set_grad_enabled(records)

    return act


def _by_torch(own: Function, keyset: Any, *args: Any) -> Any:
    """Return the result of PyTorch's kernel, whose own operators are not counted."""
    thread.watched = PassedBy.CONVOLUTION
    try:
        return own(keyset, *args)
    finally:
        thread.watched = None


def _layout(
    given: ConvolutionArguments, x: Tensor, weight: Tensor, others: list[Tensor | None], bias: Any
) -> _Layout | None:
    """Return the convolution of these tensors; None where PyTorch computes it or raises its error."""
    for each in (weight, *others):
        if each is not None and (each.dtype != x.dtype or not each.is_cpu):
            return None
    if x.layout is not torch.strided or weight.layout is not torch.strided or x.is_complex():
        return None
    shape = given.of(x, weight)
    if shape is None:
        return None
    return _Layout(shape, given.puts_channels_last(x, weight, bias))


def _forward(found: Found, own: Function, args: Any, records: bool) -> Tensor:
    x, weight, bias, *rest = args
    given = ConvolutionArguments(*rest[:6])
    layout = _layout(given, x, weight, [bias], bias)
    outputs = 0
    if layout is not None:
        s = layout.shape
        outputs = s.groups * (s.channels if given.transposed else s.filters)
    if layout is None or (bias is not None and tuple(bias.shape) != (outputs,)):
        return own(*args)

    def compute(products: Products, _: bool) -> Tensor:
        if given.transposed:
            return products.of_images(x, weight, bias)
        return products.forward(x, weight, bias)

    def operands(products: Products) -> Any:
        if given.transposed:
            return products.operands(None, x, weight)
        return products.operands(x, None, weight)

    product = _ConvolutionProduct(
        NAMES.of_convolution(x, weight),
        [x, weight],
        layout.shape.multiplications(len(x)),
        compute,
        operands,
        lambda: own(*(t.double() if isinstance(t, Tensor) else t for t in args)),
    )
    result, passed_by = _computed(found, product, layout, records)
    if result is None:
        result = own(*args)
        passed_by(result)
    return result


def _gradients(found: Found, own: Function, args: Any, records: bool) -> Any:
    gradient, x, weight, _, *rest, wanted = args
    given = ConvolutionArguments(*rest)
    layout = _layout(given, x, weight, [gradient], None)
    if layout is None or tuple(gradient.shape) != _result_shape(given, layout.shape, x):
        return own(*args)
    results: list[Any] = [None, None, None]
    left = [False, False, False]
    notes = []
    for i, make in enumerate((_of_input, _of_weight)):
        if not wanted[i]:
            continue
        product = make(given, layout, gradient, x, weight, lambda i=i: _exact(own, args, i))
        results[i], passed_by = _computed(found, product, layout, records)
        left[i] = results[i] is None
        if left[i]:
            notes.append((i, passed_by))
    if notes:
        left[2] = wanted[2]
        for i, each in enumerate(own(*args[:-1], left)):
            if left[i]:
                results[i] = each
        for i, passed_by in notes:
            passed_by(results[i])
    elif wanted[2]:
        results[2] = gradient.sum((0, *range(2, gradient.ndim)))
    return tuple(results)


def _result_shape(given: ConvolutionArguments, shape: Convolution, x: Tensor) -> tuple[int, ...]:
    if given.transposed:
        return len(x), shape.groups * shape.channels, *shape.images
    return len(x), shape.groups * shape.filters, *shape.results


def _exact(own: Function, args: Any, i: int) -> Tensor:
    mask = [i == j for j in range(3)]
    wide = (t.double() if isinstance(t, Tensor) else t for t in args[:-1])
    result: Tensor = own(*wide, mask)[i]
    return result


def _of_input(
    given: ConvolutionArguments,
    layout: _Layout,
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    exact: Any,
) -> _ConvolutionProduct:
    def compute(products: Products, _: bool) -> Tensor:
        if given.transposed:
            return products.forward(gradient, weight, None)
        return products.of_images(gradient, weight)

    def operands(products: Products) -> Any:
        if given.transposed:
            return products.operands(gradient, None, weight)
        return products.operands(None, gradient, weight)

    part = Part(NAMES.of_any([weight]), "grad_input", 1)
    count = layout.shape.multiplications(len(x))
    return _ConvolutionProduct(part, [gradient, weight], count, compute, operands, exact)


def _of_weight(
    given: ConvolutionArguments,
    layout: _Layout,
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    exact: Any,
) -> _ConvolutionProduct:
    images, results = (gradient, x) if given.transposed else (x, gradient)
    layer = NAMES.of_any([weight])
    part = Part(layer, "grad_weight", 0 if given.transposed else 1)
    return _ConvolutionProduct(
        part,
        [x, gradient],
        layout.shape.multiplications(len(x)),
        lambda products, swaps: products.of_weight(images, results, swaps),
        lambda products: products.operands(images, results, None),
        exact,
    )


def _computed(found: Found, product: _ConvolutionProduct, layout: _Layout, records: bool) -> Any:
    """Return a product in the mode of its layer, and a function that counts what PyTorch computes instead of it."""
    scope, context = found
    part = product.part
    shown = scope.mode_of(part.layer, _NAME)
    mode, swaps = mode_of_product(scope, shown, part, _NAME, True)
    reason = reason_against(shown, mode, _NAME, product.tensors[0].dtype)
    detail = ""
    if reason is None:
        resolved = resolve(mode, context)
        try:
            again = _in_reference(scope, product, layout, resolved, context)
            products = _products(product, layout, resolved)
            result = product.compute(products, swaps)
        except REFUSALS as error:
            reason = PassedBy.REFUSED
            detail = str(error)
        else:
            statistics = None
            if scope.statistics:
                statistics = _measured(product, products, result)
            if isinstance(mode, Recipe) and resolved.mode == mode:
                mode = shown
            else:
                if not part.layer and row(shown).quantizes > row(mode).quantizes:
                    detail = f"no parameter found: computed in {mode}"
                mode = resolved.mode
            _count(
                scope,
                product,
                mode.value,
                None,
                detail,
                records,
                statistics,
                result,
                again,
                products,
            )
            return result, None

    def passed_by(result: Tensor) -> None:
        _count(scope, product, "", reason, detail, records, None, result)

    return None, passed_by


def _in_reference(
    scope: Any, product: _ConvolutionProduct, layout: _Layout, resolved: ResolvedMode, context: Any
) -> Tensor | None:
    """Return the product in the reference of a comparison."""
    if scope.recorder is None or scope.recorder.reference is None:
        return None
    reference = resolve(scope.recorder.reference, context)
    if reference.mode == resolved.mode:
        return None
    return product.compute(_products(product, layout, reference), False)


def _products(product: _ConvolutionProduct, layout: _Layout, resolved: ResolvedMode) -> Products:
    kind = Products
    if suits(layout.shape, resolved.mode, product.tensors[0].dtype):
        kind = DirectProducts
    return kind(*layout, resolved)


def _measured(product: _ConvolutionProduct, products: Products, result: Tensor) -> Statistics:
    """Return the statistics of the operands of the first chunk, and the error of the whole product."""
    exact = product.exact()
    error = 0.0
    if exact.any():
        error = float((result - exact).norm() / exact.norm())
    a, b = product.operands(products)
    return Statistics(*operand_statistics(a, b, products.resolved.mode), error)


def _count(
    scope: Any, product: _ConvolutionProduct, mode: str, reason: Any, detail: str, records: bool, statistics: Any,
    result: Any, again: Tensor | None = None, products: Products | None = None,
) -> None:  # fmt: skip
    matrices = None
    if products is not None:
        matrices = lambda: product.operands(products)  # noqa: E731
    torch._C._set_grad_enabled(records)
    try:
        count(
            scope, product.part.layer, _NAME, product.tensors, product.multiplications, mode, reason, detail,
            statistics, product.part.product, result, again, matrices,
        )  # fmt: skip
    finally:
        torch._C._set_grad_enabled(False)
