"""PyTorch's convolutions inside an interception: their products by lowprec, in the mode of their layer."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec.core.interception_report import PassedBy
from lowprec.modes import ResolvedMode
from lowprec.torch.accounting import Found
from lowprec.torch.aten import Kernel
from lowprec.torch.convolution_shapes import Convolution, ConvolutionArguments
from lowprec.torch.convolutions import Products
from lowprec.torch.direct_convolutions import DirectProducts, suits
from lowprec.torch.layer_names import NAMES, Part
from lowprec.torch.operator_products import OperatorProduct, computed, operator_kernel
from lowprec.torch.registration import Function

#: The name of all three products, in reports and rules.
_NAME = "convolution"


class _Layout(NamedTuple):
    shape: Convolution
    last: bool  # whether the channels are last in memory


def convolution_kernel(kernel: Kernel, own: Function) -> Function:
    """Return the function that computes a convolution, or its gradients, in a block."""
    compute = _gradients if "backward" in kernel.operator else _forward
    return operator_kernel(own, compute, PassedBy.CONVOLUTION)


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

    product = OperatorProduct(
        _NAME,
        NAMES.of_convolution(x, weight),
        [x, weight],
        layout.shape.multiplications(len(x)),
        partial(_products, layout, x.dtype),
        compute,
        operands,
        lambda: own(*(t.double() if isinstance(t, Tensor) else t for t in args)),
    )
    result, passed_by = computed(found, product, records)
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
        results[i], passed_by = computed(found, product, records)
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
) -> OperatorProduct:
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
    make = partial(_products, layout, x.dtype)
    return OperatorProduct(_NAME, part, [gradient, weight], count, make, compute, operands, exact)


def _of_weight(
    given: ConvolutionArguments,
    layout: _Layout,
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    exact: Any,
) -> OperatorProduct:
    images, results = (gradient, x) if given.transposed else (x, gradient)
    layer = NAMES.of_any([weight])
    part = Part(layer, "grad_weight", 0 if given.transposed else 1)
    return OperatorProduct(
        _NAME,
        part,
        [x, gradient],
        layout.shape.multiplications(len(x)),
        partial(_products, layout, x.dtype),
        lambda products, swaps: products.of_weight(images, results, swaps),
        lambda products: products.operands(images, results, None),
        exact,
    )


def _products(layout: _Layout, dtype: torch.dtype, resolved: ResolvedMode) -> Products:
    kind = Products
    if suits(layout.shape, resolved.mode, dtype):
        kind = DirectProducts
    return kind(*layout, resolved)
