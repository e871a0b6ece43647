"""``conv``: a convolution of arrays of any library in host memory, as products of matrices."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any, NamedTuple

import numpy as np

from lowprec import policy
from lowprec.arrays import CPU, ArrayView, Library, library_of
from lowprec.arrays.signatures import of_first
from lowprec.arrays.view import Array
from lowprec.core.call import bind
from lowprec.core.convolution_shapes import Convolution, ConvolutionArguments
from lowprec.core.convolutions import Products
from lowprec.core.direct_convolutions import DirectProducts, suits
from lowprec.core.tolerance import mode_of
from lowprec.errors import (
    ArrayError,
    DeviceError,
    DTypeError,
    ModeError,
    SettingError,
    ShapeError,
    UnsupportedError,
    quoted,
)
from lowprec.formats import DType
from lowprec.modes import ActivationName, BoundName, Mode, ModeLike, ResolvedMode, parse_mode
from lowprec.planning import parse_activation
from lowprec.planning.activations import ACTIVATIONS
from lowprec.util.tracing import uncompiled

_DTYPES = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
#: By ``Delegate.product``: the module whose ``convolve_bound`` computes what a library records or traces.
_DELEGATES = {"torch": "lowprec.torch.convolving", "jax": "lowprec.jax.convolutions"}


class BoundConvolution(NamedTuple):
    """A convolution with checked arguments, whose first array has an axis of images."""

    x: Any
    weight: Any
    bias: Any
    views: list[ArrayView]  # of these
    given: ConvolutionArguments
    shape: Convolution
    activation: ActivationName | None

    @property
    def out_shape(self) -> tuple[int, ...]:
        s = self.shape
        if self.given.transposed:
            return self.views[0].shape[0], s.groups * s.channels, *s.images
        return self.views[0].shape[0], s.groups * s.filters, *s.results


@of_first
@uncompiled
def conv(
    x: Any,
    weight: Any,
    /,
    bias: Any = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    activation: ActivationName | None = None,
    math_mode: ModeLike | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    backward_mode: ModeLike | None = None,
) -> Any:
    """Convolve arrays of 1 to 3 axes on the CPU, as PyTorch's functions do.

    These are ``torch.nn.functional.conv1d`` to ``conv3d`` and ``conv_transpose1d`` to ``conv_transpose3d``. The axes
    are those of PyTorch: images, channels, extents. The weight is not flipped. An element is a product of the elements
    under the kernel and a filter, in the mode of this product; formats with blocks have them along channels x kernel.
    An image has the same bits alone and in any batch. Functions that JAX compiles multiply the elements of all images
    at once: bits differ from those outside of ``jit``, and ``fp8`` and ``nvfp4`` have one scale for the batch.

    Parameters
    ----------
    x : array, shape (n, channels, ...) or (channels, ...), with 1 to 3 extents
        float64, float32, float16 or bfloat16.
    weight : array, shape (filters, channels / groups, ...); (channels, filters / groups, ...) if ``transposed``
        Of the element type of ``x``.
    bias : array, shape (filters,), optional
    stride, dilation : int or sequence of int
        One number, or one for each axis of the extents.
    padding : int, sequence of int, "valid" or "same"
        Zeros at both ends of each axis. ``"same"`` keeps the extents, with a stride of 1 and where ``dilation * (kernel
        - 1)`` is even.
    groups : int
        Number of groups of channels that are convolved separately.
    transposed : bool
        Compute the transposed convolution, the gradient of another one's input.
    output_padding : int or sequence of int
        Further numbers at the end of each axis of the result, if ``transposed``.
    activation, math_mode, rtol, bound, backward_mode
        As for :func:`~lowprec.matmul`. ``rtol`` is for convolutions that are not ``transposed``, and bounds the error
        relative to the norms of the elements under the kernel and of the weight.

    Returns
    -------
    array, shape (n, filters, *results)
        Of the library of ``x``. PyTorch records gradients, JAX traces and differentiates.

    Raises
    ------
    ShapeError
        The shapes do not match, or the result has no elements.
    SettingError
        An argument that is not an array has an illegal value.
    DTypeError
        The element types differ, or are not supported.
    UnsupportedError
        An array is in the memory of a GPU, or of a library without convolutions here; or PyTorch computes a second
        derivative.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(5.0, dtype=np.float32).reshape(1, 1, 5)
    >>> conv(x, np.ones((1, 1, 3), np.float32), padding="same", math_mode="bf16")
    array([[[1., 3., 6., 9., 7.]]], dtype=float32)
    """
    lists = (stride, padding, dilation, output_padding)
    checked, has_images, delegate = _bound(x, weight, bias, lists, groups, transposed, activation)
    resolved = _mode_of(checked, math_mode, rtol, bound)
    backward: Mode | None = None
    if backward_mode is not None:
        backward = parse_mode(backward_mode, "backward_mode")
    library = library_of(x)
    name = delegate.product if delegate is not None else library.name
    if name == "torch" or (delegate is not None and name in _DELEGATES):
        convolve = importlib.import_module(_DELEGATES[name]).convolve_bound
        out = convolve(checked, resolved, backward or resolved.mode)
        return out if has_images else out[0]
    if delegate is not None:
        raise UnsupportedError(f"conv has no product for lazy arrays: {delegate.why}")
    return _computed(checked, library, resolved, has_images)


def _bound(
    x: Any, weight: Any, bias: Any, lists: Any, groups: Any, transposed: bool, activation: Any
) -> tuple[BoundConvolution, bool, Any]:
    """Return a convolution with checked arguments, whether ``x`` has several images, and a library's own product."""
    views, delegate = _views(x, weight, bias)
    of_x, of_weight, *of_bias = views
    axes = of_weight.ndim - 2
    if not 1 <= axes <= 3 or of_x.ndim - axes not in (1, 2):
        raise ShapeError(
            f"conv takes x of shape (n, channels, *extents) and a weight (filters, channels, *kernel) with 1 to 3 axes "
            f"of extents, got {of_x.shape} and {of_weight.shape}"
        )
    has_images = of_x.ndim == axes + 2
    if not has_images:
        views[0] = of_x = of_x.strided((1, *of_x.shape), (0, *of_x.strides))
        x = x[None] if delegate is not None or library_of(x).name == "torch" else x
    stride, padding, dilation, more = lists
    groups = _numbers("groups", groups, 1, 1)[0]
    strides = _numbers("stride", stride, axes, 1)
    dilations = _numbers("dilation", dilation, axes, 1)
    borders = _padding(padding, axes, of_weight.shape[2:], strides, dilations)
    further = _numbers("output_padding", more, axes, 0)
    if not transposed and any(further):
        raise SettingError("output_padding is for transposed=True; omit it")
    given = ConvolutionArguments(strides, borders, dilations, bool(transposed), further, groups)
    shape = given.of(of_x, of_weight)
    if shape is None:
        raise ShapeError(_why_not(given, of_x.shape, of_weight.shape))
    filters = shape.groups * (shape.channels if transposed else shape.filters)
    if of_bias and of_bias[0].shape != (filters,):
        raise ShapeError(f"bias has shape {of_bias[0].shape}, but the weight gives ({filters},)")
    function = parse_activation(activation)
    bound = BoundConvolution(x, weight, bias, views, given, shape, function)
    return bound, has_images, delegate


def _views(x: Any, weight: Any, bias: Any) -> tuple[list[ArrayView], Any]:
    """Return the views of the arrays, and the product that one of them needs."""
    views: list[ArrayView] = []
    delegate = None
    for name, array in (("x", x), ("weight", weight), ("bias", bias)):
        if array is None and name == "bias":
            continue
        try:
            library = library_of(array)
            view = library.describe(array)
            delegate = delegate or library.delegate(array)
        except (ArrayError, DTypeError) as error:
            error.argument = name
            raise
        first = views[0] if views else view
        if view.dtype not in _DTYPES or view.dtype is not first.dtype:
            raise DTypeError(
                f"conv takes arrays of one of the types {', '.join(d.label for d in _DTYPES)}; x is {first.dtype} and "
                f"{name} is {view.dtype}"
            )
        if view.device != first.device and not view.is_description:
            raise DeviceError(f"x is on {first.device} and {name} on {view.device}")
        if view.device != CPU:
            raise UnsupportedError(
                f"conv computes on the CPU, and {name} is on {view.device}: call the library's own convolution, whose "
                "precision lowprec.math_mode(..., frameworks=True) sets"
            )
        views.append(view)
    return views, delegate


def _numbers(name: str, value: Any, axes: int, least: int) -> tuple[int, ...]:
    """Return an integer for each axis."""
    try:
        values = [index(value)] * axes if hasattr(value, "__index__") else [*map(index, value)]
    except TypeError:
        values = []
    if len(values) != axes or min(values) < least:
        raise SettingError(
            f"{name} is an integer of at least {least}, or {axes} of them, got {quoted(value)}"
        )
    return tuple(values)


def _padding(
    padding: Any, axes: int, kernel: Any, strides: tuple[int, ...], dilations: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the number of zeros at both ends of each axis."""
    if padding == "valid":
        return (0,) * axes
    if padding != "same":
        if isinstance(padding, str):
            raise SettingError(f"padding {padding!r} is not 'same', 'valid' or a number of zeros")
        return _numbers("padding", padding, axes, 0)
    both = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    if set(strides) != {1} or any(n % 2 for n in both):
        raise SettingError(
            f"padding='same' needs a stride of 1 and an even dilation * (kernel - 1), got stride {strides} and {both}; "
            "pad x, or pass numbers"
        )
    return tuple(n // 2 for n in both)


def _why_not(given: ConvolutionArguments, x: Any, weight: Any) -> str:
    """Return why no convolution has these shapes."""
    channels = weight[1] * given.groups
    if given.transposed:
        channels = weight[0]
    shapes = f"conv of shape {x} with a weight {weight} and {given.groups} groups"
    if x[1] != channels or weight[0] % given.groups:
        return f"{shapes}: x has {x[1]} channels, and the weight takes {channels} in equal groups"
    if any(
        m >= max(t, d)
        for m, t, d in zip(given.output_padding, given.stride, given.dilation, strict=True)
    ):
        return f"{shapes}: output_padding {given.output_padding} must be below the stride or the dilation"
    return f"{shapes}: the result has no elements"


def _mode_of(checked: BoundConvolution, math_mode: Any, rtol: Any, bound: Any) -> ResolvedMode:
    if rtol is None and bound is None:
        return policy.resolve(math_mode)
    if checked.given.transposed:
        raise ModeError(
            "rtol= bounds one product, and a transposed convolution adds several; pass math_mode="
        )
    s = checked.shape
    dtype = checked.views[0].dtype
    rows = checked.views[0].shape[0] * prod(s.results)
    a = ArrayView.description(dtype, (s.groups, rows, s.inner))
    b = ArrayView.description(dtype, (s.groups, s.inner, s.filters))
    return mode_of(bind(a, b), math_mode, rtol, bound)[0]


def _computed(
    checked: BoundConvolution, library: Library, resolved: ResolvedMode, has_images: bool
) -> Any:
    x, *others = checked.views
    shape = checked.out_shape
    out = library.allocate(shape if has_images else shape[1:], x.dtype, CPU, checked.x)
    to: Array = out.ndarray().reshape(shape)
    kind = Products
    if x.dtype is DType.FLOAT32 and suits(checked.shape, resolved.mode, np.float32):
        kind = DirectProducts
    products = kind(checked.shape, False, resolved)
    compute = products.of_images if checked.given.transposed else products.forward
    weight, *biases = [each.ndarray() for each in others]
    compute(x.ndarray(), weight, biases[0] if biases else None, to)
    if checked.activation is not None:
        to[...] = ACTIVATIONS[checked.activation].host(to, np)
    return library.wrap(out.owner, checked.x, checked.weight, None, checked.bias)
