"""PyTorch's convolutions inside an interception: their products by lowprec, in the mode of their layer."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowprec.arrays import library_of
from lowprec.arrays.view import Array
from lowprec.core.convolution_shapes import Convolution, ConvolutionArguments
from lowprec.core.convolutions import Products
from lowprec.core.direct_convolutions import DirectProducts, suits
from lowprec.core.interception_report import PassedBy
from lowprec.modes import ResolvedMode
from lowprec.torch.accounting import Found
from lowprec.torch.aten import Kernel
from lowprec.torch.layer_names import NAMES, Part
from lowprec.torch.operator_products import OperatorProduct, computed, operator_kernel
from lowprec.torch.registration import Function

#: The name of all three products, in reports and rules.
_NAME = "convolution"
#: Memory formats with the channels last, by the number of axes of an image.
_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


class TensorConvolution(NamedTuple):
    """A convolution of tensors, and the order of memory of its results."""

    shape: Convolution
    last: bool  # whether the channels are last in memory

    def empty(self, like: Tensor, n: int, channels: int, extents: tuple[int, ...]) -> Tensor:
        """Return a new tensor (n, channels, *extents) in this order of memory."""
        if not self.last:
            return like.new_empty((n, channels, *extents))
        return like.new_empty((n, *extents, channels)).movedim(-1, 1)

    def products(self, dtype: torch.dtype, resolved: ResolvedMode) -> Products:
        kind = Products
        if dtype is torch.float32 and suits(self.shape, resolved.mode, np.float32):
            kind = DirectProducts
        return kind(*self, resolved, _copy)

    def forward(self, products: Products, x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        s = self.shape
        y = self.empty(x, len(x), s.groups * s.filters, s.results)
        products.forward(*_arrays(x, weight, bias, y))
        return y

    def of_images(self, products: Products, y: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        s = self.shape
        x = self.empty(y, len(y), s.groups * s.channels, s.images)
        products.of_images(*_arrays(y, weight, bias, x))
        return x

    def of_weight(self, products: Products, x: Tensor, y: Tensor, swaps: bool) -> Tensor:
        s = self.shape
        found = self.empty(y, s.groups * s.filters, s.channels, s.kernel)
        of_x, of_y, to = _arrays(x, y, found)
        products.of_weight(of_x, of_y, to, swaps)
        return found


def _arrays(*tensors: Tensor | None) -> list[Any]:
    """Return views of tensors as arrays of NumPy."""
    return [None if t is None else library_of(t).describe(t).ndarray() for t in tensors]


def _copy(to: Array, source: Array) -> None:
    """Copy an array by PyTorch's threads."""
    if to.dtype != np.float32:
        return np.copyto(to, source)
    torch.from_numpy(to).copy_(torch.from_numpy(source))
    return None


def _operands(products: Products, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return the operands of the first product."""
    return tuple(
        torch.from_numpy(each.astype(np.float32, copy=False))
        for each in products.operands(*_arrays(*tensors))
    )


def convolution_kernel(kernel: Kernel, own: Function) -> Function:
    """Return the function that computes a convolution, or its gradients, in a block."""
    compute = _gradients if "backward" in kernel.operator else _forward
    return operator_kernel(own, compute, PassedBy.CONVOLUTION)


def _layout(
    given: ConvolutionArguments, x: Tensor, weight: Tensor, others: list[Tensor | None], bias: Any
) -> TensorConvolution | None:
    """Return the convolution of these tensors; None where PyTorch computes it or raises its error."""
    for each in (weight, *others):
        if each is not None and (each.dtype != x.dtype or not each.is_cpu):
            return None
    if x.layout is not torch.strided or weight.layout is not torch.strided or x.is_complex():
        return None
    shape = given.of(x, weight)
    if shape is None:
        return None
    return layout_of(given, shape, x, weight, bias)


def layout_of(
    given: ConvolutionArguments, shape: Convolution, x: Tensor, weight: Tensor, bias: Any
) -> TensorConvolution:
    """Return a convolution with the order of memory of PyTorch's results, on which Inductor relies."""
    named = given._asdict()
    if bias is None:
        named["bias_sizes"] = None
    backend = torch._C._select_conv_backend(x, weight, bias=bias, **named)
    if weight.ndim == 3:
        x = x.contiguous().unsqueeze(2)
        weight = weight.unsqueeze(2)
    found = torch._C._conv_determine_backend_memory_format(x, weight, backend)
    return TensorConvolution(shape, found in _CHANNELS_LAST)


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
            return layout.of_images(products, x, weight, bias)
        return layout.forward(products, x, weight, bias)

    def operands(products: Products) -> Any:
        if given.transposed:
            return _operands(products, None, x, weight)
        return _operands(products, x, None, weight)

    product = OperatorProduct(
        _NAME,
        NAMES.of_convolution(x, weight),
        [x, weight],
        layout.shape.multiplications(len(x)),
        partial(layout.products, x.dtype),
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
    layout: TensorConvolution,
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    exact: Any,
) -> OperatorProduct:
    def compute(products: Products, _: bool) -> Tensor:
        if given.transposed:
            return layout.forward(products, gradient, weight)
        return layout.of_images(products, gradient, weight)

    def operands(products: Products) -> Any:
        if given.transposed:
            return _operands(products, gradient, None, weight)
        return _operands(products, None, gradient, weight)

    part = Part(NAMES.of_any([weight]), "grad_input", 1)
    count = layout.shape.multiplications(len(x))
    make = partial(layout.products, x.dtype)
    return OperatorProduct(_NAME, part, [gradient, weight], count, make, compute, operands, exact)


def _of_weight(
    given: ConvolutionArguments,
    layout: TensorConvolution,
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
        partial(layout.products, x.dtype),
        lambda products, swaps: layout.of_weight(products, images, results, swaps),
        lambda products: _operands(products, images, results, None),
        exact,
    )
