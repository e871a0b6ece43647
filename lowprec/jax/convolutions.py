"""Convolutions in a mode, as operations of XLA.

Modes that round each number for itself convolve the rounded numbers. In others, whose scales are those of numbers that
are summed, the elements under the kernel are copied, and a convolution is a product of matrices with axes (groups,
positions, channels x kernel) and (groups, filters, channels x kernel).
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowprec.contractions import BoundConvolution
from lowprec.core.dispatch import matmul
from lowprec.jax.lowering import Contraction, GeneralConvolution, computed, rounds_vectors
from lowprec.modes import Mode, ResolvedMode, parse_mode

_GROUPED = Contraction((((2,), (2,)), ((0,), (0,))), None)


def convolve(x: Any, weight: Any, params: dict[str, Any], **options: Any) -> Any:
    """Convolve two arrays by the parameters of ``lax.conv_general_dilated``; options as of ``computed``."""
    if not rounds_vectors(parse_mode(options["mode"])):
        return computed(x, weight, None, GeneralConvolution(params), **options)

    def multiply(a: Any, b: Any) -> Any:
        return computed(a, b, None, _GROUPED, **options)

    return _multiplied(x, weight, params, multiply)


def convolve_bound(checked: BoundConvolution, resolved: ResolvedMode, backward: Mode) -> Any:
    """Return the convolution of arrays that JAX traces or shards, as a product that it differentiates."""
    s = checked.shape
    axes = tuple(range(2 + len(s.kernel)))
    params: dict[str, Any] = {
        "dimension_numbers": lax.ConvDimensionNumbers(axes, axes, axes),
        "feature_group_count": s.groups,
        "batch_group_count": 1,
        "window_strides": s.stride,
        "padding": [(p, p) for p in s.padding],
        "lhs_dilation": (1,) * len(s.kernel),
        "rhs_dilation": s.dilation,
    }
    weight = jnp.asarray(checked.weight)
    if checked.given.transposed:
        weight = weight.reshape(s.groups, s.filters, s.channels, *s.kernel).swapaxes(1, 2)
        weight = weight.reshape(-1, s.filters, *s.kernel)
        weight = jnp.flip(weight, axes[2:])
        reach = [d * (k - 1) for d, k in zip(s.dilation, s.kernel, strict=True)]
        lows = [n - p for n, p in zip(reach, s.padding, strict=True)]
        params["window_strides"] = (1,) * len(s.kernel)
        params["lhs_dilation"] = s.stride
        params["padding"] = [
            (low, n + d - 1 - t * (r - 1) - low)
            for low, n, d, t, r in zip(lows, s.images, reach, s.stride, s.results, strict=True)
        ]

    def multiply(a: Any, b: Any) -> Any:
        columns = jnp.matrix_transpose(b)
        return matmul(a, columns, math_mode=resolved.mode, backward_mode=backward)

    x = jnp.asarray(checked.x)
    out = _multiplied(x, weight, params, multiply)
    if checked.bias is not None:
        out = out + jnp.expand_dims(checked.bias, axes[1:-1])
    if checked.activation is None:
        return out
    if checked.activation == "gelu":
        return jax.nn.gelu(out, approximate=True)
    return jax.nn.relu(out)


def _multiplied(x: Any, weight: Any, params: dict[str, Any], multiply: Any) -> Any:
    """Return a convolution by a function that multiplies (groups, rows, k) by (groups, columns, k)."""
    numbers = params["dimension_numbers"]
    images = jnp.transpose(x, numbers.lhs_spec)
    kernels = jnp.transpose(weight, numbers.rhs_spec)
    filters, channels, *kernel = kernels.shape
    images = _padded(images, params["padding"], params["lhs_dilation"])
    windows = _windows(images, kernel, params["window_strides"], params["rhs_dilation"])
    groups = params["batch_group_count"] * params["feature_group_count"]
    if params["batch_group_count"] > 1:
        windows = windows.reshape(groups, -1, *windows.shape[1:])
    else:
        windows = windows.reshape(len(windows), groups, channels, *windows.shape[2:])
        windows = jnp.moveaxis(windows, 1, 0)
    # (groups, n, channels, (positions, kernel) of each axis)
    positions = range(3, windows.ndim, 2)
    of_kernel = range(4, windows.ndim, 2)
    extents = [windows.shape[axis] for axis in (1, *positions)]
    rows = jnp.transpose(windows, (0, 1, *positions, 2, *of_kernel))
    a = rows.reshape(groups, prod(extents), channels * prod(kernel))
    b = kernels.reshape(groups, filters // groups, -1)
    out = multiply(a, b)
    out = jnp.moveaxis(out, 0, 1)
    out = out.reshape(*extents, filters)
    out = jnp.moveaxis(out, -1, 1)
    order = sorted(range(out.ndim), key=numbers.out_spec.__getitem__)
    return jnp.transpose(out, order)


def _padded(images: Any, padding: Any, dilation: Any) -> Any:
    """Put zeros at the borders and between the elements of images (n, channels, *extents)."""
    zero = jnp.zeros((), images.dtype)
    borders = [(low, high, d - 1) for (low, high), d in zip(padding, dilation, strict=True)]
    return lax.pad(images, zero, [(0, 0, 0), (0, 0, 0), *borders])


def _windows(images: Any, kernel: Any, strides: Any, dilations: Any) -> Any:
    """Return the elements under the kernel, with the axes (positions, kernel) for each axis of the images."""
    for number, (size, stride, dilation) in enumerate(zip(kernel, strides, dilations, strict=True)):
        axis = 2 + 2 * number
        last = images.shape[axis] - dilation * (size - 1)
        starts = jnp.arange(0, max(0, last), stride)
        places = starts[:, None] + dilation * jnp.arange(size)
        images = jnp.take(images, places, axis, mode="clip")
    return images
