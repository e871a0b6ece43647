"""Convolutions of few channels a group, as depthwise ones, without a matrix: sums of the shifted lines of an image.

The terms of a sum have one order, that of channels and kernel, and each is rounded, so that its bits do not depend on
the place. The gradient of the images is such a convolution of the other gradient with zeros between its elements.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from lowprec.core import lines
from lowprec.modes import MathMode, Mode
from lowprec.torch.convolution_shapes import Convolution, empty
from lowprec.torch.convolutions import Products

#: Products of channels and filters of a group up to which sums of lines are faster than products of matrices.
_MOST_PRODUCTS = 16
_EXACT = (MathMode.FP32, MathMode.FP32_PEDANTIC)
#: Modes that round elements, whose products are exact in float32.
_MODES = (*_EXACT, MathMode.BF16, MathMode.TF32)


def suits(shape: Convolution, mode: Mode, dtype: torch.dtype) -> bool:
    """Whether a convolution is computed directly."""
    return (
        shape.groups > 1
        and shape.channels * shape.filters <= _MOST_PRODUCTS
        and mode in _MODES
        and dtype == torch.float32
        and lines.are_available()
    )


class DirectProducts(Products):
    """The three products of a convolution in a mode, by sums of lines."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        s = self.shape
        y = empty((len(x), s.groups * s.filters, *s.results), x, self.last)
        self._sum(x, self._rounded(weight), bias, y)
        return y

    def of_images(self, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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
        axes = tuple(range(3, 3 + len(ones)))
        turned = self._rounded(weight).unflatten(0, (s.groups, s.filters)).flip(axes)
        turned = turned.transpose(1, 2).flatten(0, 1)
        x = empty((len(y), s.groups * s.channels, *s.images), y, self.last)
        DirectProducts(back, self.last, self.resolved)._sum(y, turned, bias, x, self.shape)
        return x

    def of_weight(self, x: Tensor, y: Tensor, swaps: bool = False) -> Tensor:
        s = self.shape
        taps = prod(s.kernel)
        total = y.new_zeros((s.groups * s.filters, s.channels * taps))
        part = torch.empty_like(total)
        described = _dots_of(s)
        for image, gradient in zip(x, y, strict=True):
            padded = self._placed(image, False, None)
            other = self._rounded(gradient).contiguous()
            lines.dot_lines(described, padded.data_ptr(), other.data_ptr(), part.data_ptr())
            total += part
        found = empty((s.groups * s.filters, s.channels, *s.kernel), y, self.last)
        return found.copy_(total.view(found.shape))

    def _sum(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        y: Tensor,
        spread: Convolution | None = None,
    ) -> None:
        s = self.shape
        across = self.last and s.channels == s.filters == 1
        matrix = weight.flatten(1)
        if across:
            matrix = matrix.T
        factors = _with_slack(matrix)
        if bias is not None:
            bias = _with_slack(bias)
        described = _lines_of(s, across)
        to = y
        if self.last and not across:
            to = torch.empty(y.shape[1:])
        for number, image in enumerate(x):
            source = self._placed(image, across, spread)
            out = to[number] if to is y else to
            lines.sum_lines(
                described,
                source.data_ptr(),
                factors.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
            )
            if to is not y:
                y[number].copy_(out)

    def _placed(self, image: Tensor, last: bool, spread: Convolution | None) -> Tensor:
        """Return an image with zeros at its borders or, of a gradient, between its elements."""
        s = self.shape
        extents = s.padded
        slack = lines.SLACK * max(s.stride)
        size = len(image) * prod(extents)
        name = "spread" if spread else "placed"
        is_new = name not in self._memory
        memory = self._temporary(name, size + slack, image.dtype)
        if is_new:
            memory.zero_()
        if last:
            placed = memory[:size].view(*extents, len(image)).movedim(-1, 0)
        else:
            placed = memory[:size].view(len(image), *extents)
        if spread is None:
            self._inside(placed[None])[0].copy_(self._rounded(image))
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
            image = image.narrow(axis + 1, first, count)
            where = start + first * t
            index = slice(where, where + (count - 1) * t + 1, t)
            target = target[(slice(None),) * (axis + 1) + (index,)]
        target.copy_(self._rounded(image))
        return placed

    def _rounded(self, x: Tensor) -> Tensor:
        """Return the numbers of the mode, to nearest; TF32's ties are rounded away from zero."""
        mode = self.resolved.mode
        if mode in _EXACT:
            return x
        if mode is MathMode.BF16:
            return x.bfloat16().float()
        bits = (x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
        return torch.where(torch.isfinite(x), bits.view(torch.float32), x)


def _with_slack(x: Tensor) -> Tensor:
    """Return a contiguous copy after which some numbers may be read."""
    found = x.new_zeros(x.numel() + lines.SLACK)
    found[: x.numel()].view(x.shape).copy_(x)
    return found


def _strides(extents: tuple[int, ...], step: int) -> list[int]:
    return [step * prod(extents[i + 1 :]) for i in range(len(extents))]


@lru_cache(256)
def _lines_of(s: Convolution, across: bool) -> lines.DescribedLines:
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
def _dots_of(s: Convolution) -> lines.DescribedLines:
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
