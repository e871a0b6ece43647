"""The arguments of a convolution, and the views of its images by which it is a matrix product."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from lowprec.arrays.view import Array
from lowprec.util.strides import contiguous_strides


class Convolution(NamedTuple):
    """A convolution of images (n, groups * channels, *extents) with a weight (groups * filters, channels, *kernel).

    Its three products are this one, and those of the gradients. A transposed convolution is the gradient of the images
    of another convolution with the same weight; ``images`` and ``results`` are of that one.
    """

    groups: int
    channels: int  # of a group
    filters: int  # of a group
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    images: tuple[int, ...]  # extents
    results: tuple[int, ...]  # extents

    @property
    def inner(self) -> int:
        """The number of products in an element of the result."""
        return self.channels * prod(self.kernel)

    @property
    def positions(self) -> int:
        """The number of elements of a channel of the result."""
        return prod(self.results)

    @property
    def padded(self) -> tuple[int, ...]:
        """Extents of an image with zeros at its borders."""
        return tuple(n + 2 * p for n, p in zip(self.images, self.padding, strict=True))

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of an image whose rows share the zeros between them."""
        *others, length = self.padded
        return *others, length - self.padding[-1]

    @property
    def span(self) -> int:
        """The number of elements of a channel of ``extents`` from the first position to the last one."""
        steps = contiguous_strides(self.extents)
        return 1 + sum((n - 1) * step for n, step in zip(self.results, steps, strict=True))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of the elements under the kernel in an image of ``extents``."""
        return _offsets_of(self)

    @property
    def is_pointwise(self) -> bool:
        """Whether the images are an operand as they are."""
        return all(
            (k, s, p) == (1, 1, 0)
            for k, s, p in zip(self.kernel, self.stride, self.padding, strict=True)
        )

    @property
    def reversed(self) -> Convolution | None:
        """The convolution that is the gradient of the images, with a turned weight; None where it has strides."""
        padding = tuple(
            d * (k - 1) - p
            for d, k, p in zip(self.dilation, self.kernel, self.padding, strict=True)
        )
        if set(self.stride) != {1} or min(padding) < 0:
            return None
        return self._replace(
            channels=self.filters,
            filters=self.channels,
            padding=padding,
            images=self.results,
            results=self.images,
        )

    def turned(self, weight: Array) -> Array:
        """Return the weight of the gradient of the images, (groups * channels, filters, *kernel)."""
        axes = tuple(range(3, weight.ndim + 1))
        turned = np.flip(weight.reshape(self.groups, self.filters, *weight.shape[1:]), axes)
        return turned.swapaxes(1, 2).reshape(-1, self.filters, *self.kernel)

    def multiplications(self, count: int) -> int:
        return count * self.groups * self.filters * self.positions * self.inner

    def windows(self, images: Array, first: int, rows: int) -> Array:
        """Return padded images as (n, groups, channels, *kernel, rows, *others): the elements under the kernel.

        ``first`` and ``rows`` are of the first axis of the result.
        """
        by_image, by_channel, *steps = images.strides
        of_kernel = [d * s for d, s in zip(self.dilation, steps, strict=True)]
        of_result = [t * s for t, s in zip(self.stride, steps, strict=True)]
        sizes = (len(images), self.groups, self.channels, *self.kernel, rows, *self.results[1:])
        strides = (by_image, by_channel * self.channels, by_channel, *of_kernel, *of_result)
        return as_strided(images[:, :, first * self.stride[0] :], sizes, strides)


class ConvolutionArguments(NamedTuple):
    """The arguments of a convolution after the arrays, as of ``aten::convolution``."""

    stride: Any
    padding: Any
    dilation: Any
    transposed: bool
    output_padding: Any
    groups: int

    def of(self, x: Any, weight: Any) -> Convolution | None:
        """Return the convolution of an input; None if the arguments do not fit, or nothing is multiplied."""
        axes = weight.ndim - 2
        groups = self.groups
        lists = [self.stride, self.padding, self.dilation, self.output_padding]
        if not 1 <= axes <= 3 or x.ndim != weight.ndim or groups < 1:
            return None
        if any(len(values) not in (1, axes) for values in lists) or 0 in x.shape:
            return None
        stride, padding, dilation, more = (
            tuple(int(v) for v in values) * (axes // len(values)) for values in lists
        )
        if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0 or min(more) < 0:
            return None
        outputs, channels, *kernel = weight.shape
        inputs, *extents = x.shape[1:]
        if 0 in weight.shape or outputs % groups:
            return None
        shape = tuple(kernel), stride, padding, dilation
        if self.transposed:
            if inputs != outputs or any(
                m >= max(t, d) for m, t, d in zip(more, stride, dilation, strict=True)
            ):
                return None
            images = tuple(
                (n - 1) * t - 2 * p + d * (k - 1) + m + 1
                for n, t, p, d, k, m in zip(
                    extents, stride, padding, dilation, kernel, more, strict=True
                )
            )
            found = Convolution(groups, channels, outputs // groups, *shape, images, tuple(extents))
            return found if min(images) > 0 else None
        if inputs != channels * groups:
            return None
        results = tuple(
            (n + 2 * p - d * (k - 1) - 1) // t + 1
            for n, t, p, d, k in zip(extents, stride, padding, dilation, kernel, strict=True)
        )
        found = Convolution(groups, channels, outputs // groups, *shape, tuple(extents), results)
        return found if min(results) > 0 else None


@lru_cache(256)
def _offsets_of(s: Convolution) -> tuple[int, ...]:
    steps = (prod(s.extents), *contiguous_strides(s.extents))
    factors = (1, *s.dilation)
    found = np.zeros(1, np.int64)
    for n, step, d in zip((s.channels, *s.kernel), steps, factors, strict=True):
        found = np.add.outer(found, d * step * np.arange(n)).ravel()
    return tuple(found.tolist())


def in_order(x: Array, last: bool) -> Array:
    """Return an array (n, channels, *extents) that is contiguous, with the channels last in memory if ``last``."""
    if last:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    return np.ascontiguousarray(x)
