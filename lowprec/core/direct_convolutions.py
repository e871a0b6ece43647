"""Convolutions of few channels a group, as depthwise ones, without a matrix: sums of the shifted lines of an image.

The terms of a sum have one order, that of channels and kernel, and each is rounded, so that its bits do not depend on
the place. The gradient of the images is such a convolution of the other gradient with zeros between its elements.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from lowprec.arrays.view import NUMPY_DTYPES, Array, data_pointer
from lowprec.core import lines
from lowprec.core.convolution_shapes import Convolution
from lowprec.core.convolutions import Products, is_compiled
from lowprec.formats import DType
from lowprec.modes import MathMode, Mode

#: Products of channels and filters of a group up to which sums of lines are faster than products of matrices.
_MOST_PRODUCTS = 16
_EXACT = (MathMode.FP32, MathMode.FP32_PEDANTIC)


def suits(shape: Convolution, mode: Mode, dtype: Any) -> bool:
    """Whether a convolution is computed directly."""
    return (
        shape.groups > 1
        and shape.channels * shape.filters <= _MOST_PRODUCTS
        and is_compiled(mode, dtype)
    )


class DirectProducts(Products):
    """The three products of a convolution in a mode, by sums of lines."""

    def forward(self, x: Array, weight: Array, bias: Array | None, y: Array) -> None:
        self._sum(x, self._rounded(weight), bias, y)

    def of_images(self, y: Array, weight: Array, bias: Array | None, x: Array) -> None:
        s = self.shape
        extents = tuple(
            n + d * (k - 1) for n, d, k in zip(s.images, s.dilation, s.kernel, strict=True)
        )
        ones = (1,) * len(s.kernel)
        back = s._replace(
            channels=s.filters,
            filters=s.channels,
            stride=ones,
            padding=(0,) * len(ones),
            images=extents,
            results=s.images,
        )
        turned = s.turned(self._rounded(weight))
        back_products = DirectProducts(back, self.last, self.resolved, self.copy)
        back_products._sum(y, turned, bias, x, self.shape)

    def of_weight(self, x: Array, y: Array, found: Array, swaps: bool = False) -> None:
        s = self.shape
        taps = prod(s.kernel)
        total = np.zeros((s.groups * s.filters, s.channels * taps), np.float32)
        part = np.empty_like(total)
        described = _dots_of(s)
        for image, gradient in zip(x, y, strict=True):
            padded = self._placed(image, False, None)
            other = np.ascontiguousarray(self._rounded(gradient))
            lines.dot_lines(described, *map(data_pointer, (padded, other, part)))
            total += part
        found[...] = total.reshape(found.shape)

    def _sum(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        y: Array,
        spread: Convolution | None = None,
    ) -> None:
        s = self.shape
        across = self.last and s.channels == s.filters == 1
        matrix = weight.reshape(len(weight), -1)
        if across:
            matrix = matrix.T
        factors = _with_slack(matrix)
        of_bias = 0
        if bias is not None:
            bias = _with_slack(bias)
            of_bias = data_pointer(bias)
        described = _lines_of(s, across)
        is_direct = across or not self.last
        for number, image in enumerate(x):
            source = self._placed(image, across, spread)
            out = y[number] if is_direct else np.empty(y.shape[1:], np.float32)
            lines.sum_lines(
                described, data_pointer(source), data_pointer(factors), of_bias, data_pointer(out)
            )
            if not is_direct:
                y[number] = out

    def _placed(self, image: Array, last: bool, spread: Convolution | None) -> Array:
        """Return an image with zeros at its borders or, of a gradient, between its elements."""
        s = self.shape
        extents = s.padded
        slack = lines.SLACK * max(s.stride)
        size = len(image) * prod(extents)
        name = "spread" if spread else "placed"
        is_new = name not in self._memory
        memory = self._temporary(name, size + slack, image.dtype)
        if is_new:
            memory[...] = 0
        if last:
            placed = np.moveaxis(memory[:size].reshape(*extents, len(image)), -1, 0)
        else:
            placed = memory[:size].reshape(len(image), *extents)
        if spread is None:
            self.copy(self._inside(placed[None])[0], self._rounded(image))
            return placed
        target = placed
        for axis, (d, k, p, t, n) in enumerate(
            zip(
                spread.dilation,
                spread.kernel,
                spread.padding,
                spread.stride,
                spread.results,
                strict=True,
            )
        ):
            start = d * (k - 1) - p
            first = max(0, -(start // t))
            count = min(n, (extents[axis] - 1 - start) // t + 1) - first
            if count < 1:
                return placed
            before = (slice(None),) * (axis + 1)
            image = image[(*before, slice(first, first + count))]
            where = start + first * t
            target = target[(*before, slice(where, where + (count - 1) * t + 1, t))]
        self.copy(target, self._rounded(image))
        return placed

    def _rounded(self, x: Array) -> Array:
        """Return the numbers of the mode, to nearest; TF32's ties are rounded away from zero."""
        mode = self.resolved.mode
        if mode in _EXACT:
            return x
        if mode is MathMode.BF16:
            return x.astype(NUMPY_DTYPES[DType.BFLOAT16]).astype(np.float32)
        bits = np.ascontiguousarray(x).view(np.int32)
        bits = (bits + 0x1000) & ~0x1FFF
        return np.where(np.isfinite(x), bits.view(np.float32), x)


def _with_slack(x: Array) -> Array:
    """Return a contiguous copy after which some numbers may be read."""
    found = np.zeros(x.size + lines.SLACK, np.float32)
    found[: x.size] = x.ravel()
    return found


def _strides(extents: tuple[int, ...], step: int) -> list[int]:
    return [step * prod(extents[i + 1 :]) for i in range(len(extents))]


@lru_cache(256)
def _lines_of(s: Convolution, across: bool) -> Any:
    """Return the lines of an image: of rows of the result or, ``across`` the channels, of its positions."""
    channels = s.groups * s.channels
    steps = _strides(s.padded, channels if across else 1)
    plane = prod(s.padded)
    rows = s.results if across else s.results[:-1]
    of_rows = [(n, t * step) for n, t, step in zip(rows, s.stride, steps, strict=False)]
    of_kernel = [(k, d * step) for k, d, step in zip(s.kernel, s.dilation, steps, strict=True)]
    others = [(n, 0) for n in rows]
    width = channels if across else s.results[-1]
    if across:
        return lines.lines_of(
            width,
            1,
            True,
            out_lines=lines.offsets([(prod(rows), width)]),
            x_lines=lines.offsets(of_rows),
            w_lines=lines.offsets(others),
            x_terms=lines.offsets(of_kernel),
            w_terms=lines.offsets([(prod(s.kernel), channels)]),
        )
    return lines.lines_of(
        width,
        s.stride[-1],
        out_lines=lines.offsets([(s.groups * s.filters * prod(rows), width)]),
        x_lines=lines.offsets([(s.groups, s.channels * plane), (s.filters, 0), *of_rows]),
        w_lines=lines.offsets([(s.groups * s.filters, s.inner), *others]),
        bias_lines=lines.offsets([(s.groups * s.filters, 1), *others]),
        x_terms=lines.offsets([(s.channels, plane), *of_kernel]),
        w_terms=lines.offsets([(s.inner, 1)]),
    )


@lru_cache(256)
def _dots_of(s: Convolution) -> Any:
    """Return the dot products of the weight's gradient: one for each filter, with a term for each number of it."""
    steps = _strides(s.padded, 1)
    plane = prod(s.padded)
    rows = s.results[:-1]
    of_rows = [(n, t * step) for n, t, step in zip(rows, s.stride, steps, strict=False)]
    of_kernel = [(k, d * step) for k, d, step in zip(s.kernel, s.dilation, steps, strict=True)]
    return lines.lines_of(
        s.results[-1],
        s.stride[-1],
        dots=s.groups * s.filters,
        out_lines=lines.offsets([(prod(rows), s.results[-1])]),
        x_lines=lines.offsets(of_rows),
        w_lines=lines.offsets([(s.groups * s.filters, s.positions)]),
        bias_lines=lines.offsets([(s.groups, s.channels * plane), (s.filters, 0)]),
        x_terms=lines.offsets([(s.channels, plane), *of_kernel]),
    )
