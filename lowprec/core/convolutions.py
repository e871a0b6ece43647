"""Convolutions as matrix products: of positions by the elements under the kernel, and of these by the weight.

The elements under the kernel are copied for some positions at a time (`Chunk`), which bounds the temporary memory, or
read by their offsets. A position's bits do not depend on that: those of an element of a product depend on its row and
column alone. Sums of the elements of a gradient, and of chunks, have one order.
Matrices have an axis of groups first. Their rows are contiguous if the channels are last in memory, else the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from lowprec.arrays import ArrayView
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import PreparedView
from lowprec.arrays.view import Array, OffsetView
from lowprec.core import lines
from lowprec.core.arguments import Options
from lowprec.core.convolution_shapes import Convolution, in_order
from lowprec.core.executors import look_up
from lowprec.modes import MathMode, Mode, ResolvedMode, row, rules_of
from lowprec.util.strides import contiguous_strides

#: Bytes of the elements under the kernel that are copied at a time, unless those of one row of an image have more.
CHUNK_BYTES = 2 << 20
#: Modes that round elements, whose products are exact in float32.
_MODES = (MathMode.FP32, MathMode.FP32_PEDANTIC, MathMode.BF16, MathMode.TF32)
#: Fewest positions and filters of products whose operand is read by offsets.
_LEAST_POSITIONS = 128
_LEAST_FILTERS = 16
#: Positions of small images that are multiplied at a time, where the weight is packed each time.
_POSITIONS = 512


class Chunk(NamedTuple):
    """Images [first, end), and rows [top, bottom) of the result."""

    first: int
    end: int
    top: int
    bottom: int

    @property
    def images(self) -> int:
        return self.end - self.first

    @property
    def rows(self) -> int:
        return self.bottom - self.top


def is_compiled(mode: Mode, dtype: Any) -> bool:
    """Whether compiled kernels multiply rounded elements of this type in a mode."""
    return mode in _MODES and dtype == np.float32 and lines.are_available()


class Products:
    """The three products of a convolution in a mode, of arrays in host memory."""

    def __init__(
        self,
        shape: Convolution,
        last: bool,
        resolved: ResolvedMode,
        copy: Callable[[Array, Array], Any] = np.copyto,
    ) -> None:
        self.shape = shape
        self.resolved = resolved
        #: Copies the elements of the second array to the first.
        self.copy = copy
        #: Whether the channels are last in memory.
        self.last = last
        quantizes = row(resolved.mode).quantizes
        # Blocks are along channels x kernel, whatever the memory; otherwise the channels are inner, as in memory.
        self.inner_channels = last and not quantizes
        self.keeps_weight = last or quantizes
        self.image_by_image = quantizes and any(
            rule is not None and rule.has_tensor_scale for rule in rules_of(resolved.mode)
        )
        self._memory: dict[str, Array] = {}

    # -- the products ---------------------------------------------------------------------------

    def forward(self, x: Array, weight: Array, bias: Array | None, y: Array) -> None:
        """Compute the convolution of images, (n, groups * filters, *results)."""
        if self._has_offsets(x.dtype):
            self._multiply_by_offsets(x, weight, bias, y)
            return
        x = self._in_order(x)
        b = self._weight(weight).mT
        operand = self._prepared(b) if self.keeps_weight else b
        for chunk in self._chunks(len(x), _POSITIONS):
            a = self._unfolded(x, chunk)
            out, is_direct = self._result(y, chunk)
            self._multiply(a, operand, out, bias)
            if not is_direct:
                self._store(y, chunk, out)

    def of_images(self, y: Array, weight: Array, bias: Array | None, x: Array) -> None:
        """Compute the gradient of the images, from that of the results; plus a bias."""
        s = self.shape
        back = s.reversed
        if back is not None and (s.is_pointwise or not row(self.resolved.mode).quantizes):
            products = Products(back, self.last, self.resolved, self.copy)
            products.forward(y, s.turned(weight), bias, x)
            return
        y = in_order(y, self.last)
        b = self._weight(weight)
        operand = self._prepared(b) if self.keeps_weight else b
        wide = _wide(y.dtype)
        sums = None
        for chunk in self._chunks(len(y), _POSITIONS):
            a = self._rows(y, chunk)
            out = self._matrix("products", chunk, s.inner, wide)
            self._multiply(a, operand, out)
            if sums is None or chunk.top == 0:
                sums = self._padded("sums", chunk.images, wide)
                sums[...] = 0
            self._fold(out, sums, chunk)
            if chunk.bottom == s.results[0]:
                self._crop(sums, x[chunk.first : chunk.end], bias)

    def of_weight(self, x: Array, y: Array, found: Array, swaps: bool = False) -> None:
        """Compute the gradient of the weight, from the images and the gradient of the results.

        If ``swaps``, the results are the first operand.
        """
        s = self.shape
        wide = _wide(y.dtype)
        sums = np.empty((s.groups, s.filters, s.inner), wide)
        x = self._in_order(x)
        y = in_order(y, self.last)
        for number, chunk in enumerate(self._chunks(len(x), 1 << 60)):
            a = self._unfolded(x, chunk).mT
            b = self._rows(y, chunk)
            if swaps:
                self._multiply(b.mT, a.mT, sums, adds=number > 0)
            else:
                self._multiply(a, b, sums.mT, adds=number > 0)
        found[...] = self._weight_of(sums)

    def operands(self, x: Array | None, y: Array | None, weight: Array | None) -> Any:
        """Return the operands of the first chunk and group of the product of two of these."""
        given = x if x is not None else y
        assert given is not None
        chunk = next(self._chunks(len(given), _POSITIONS))
        if x is None:
            assert y is not None
            assert weight is not None
            return self._rows(in_order(y, self.last), chunk)[0], self._weight(weight)[0]
        a = self._unfolded(self._in_order(x), chunk)[0].copy()
        if weight is not None:
            return a, self._weight(weight)[0].mT
        assert y is not None
        return a.mT, self._rows(in_order(y, self.last), chunk)[0]

    # -- operands by offsets --------------------------------------------------------------------

    def _has_offsets(self, dtype: Any) -> bool:
        """Whether positions are neighbours in memory, but for few at the ends of rows, so that nothing is copied."""
        s = self.shape
        return (
            not self.last
            and not s.is_pointwise
            and set(s.stride) == {1}
            and s.positions >= _LEAST_POSITIONS
            and s.filters >= _LEAST_FILTERS
            and 10 * s.span <= 11 * s.positions
            and is_compiled(self.resolved.mode, dtype)
        )

    def _multiply_by_offsets(self, x: Array, weight: Array, bias: Array | None, y: Array) -> None:
        s = self.shape
        span = s.span
        memory = self._temporary("results", s.groups * s.filters * span, y.dtype)
        out = memory.reshape(s.groups, s.filters, span).mT
        steps = [y.dtype.itemsize * n for n in (span, *contiguous_strides(s.extents))]
        found = as_strided(memory, y.shape[1:], steps)
        shape = (s.groups, span, s.inner)
        strides = (s.channels * prod(s.extents), 1)
        b = self._weight(weight).mT
        for image, to in zip(x, y, strict=True):
            view = host_view(self._placed_once(image))
            if s.groups == 1:
                a = OffsetView(view, shape[1:], strides[1:], s.offsets)
            else:
                a = OffsetView(view, shape, strides, s.offsets)
            self._multiply(a, b, out, bias)
            self.copy(to, found)

    def _placed_once(self, image: Array) -> Array:
        """Return an image whose rows share the zeros between them, with these after the last one."""
        s = self.shape
        if not any(s.padding):
            return np.ascontiguousarray(image)
        size = len(image) * prod(s.extents)
        is_new = "placed" not in self._memory
        memory = self._temporary("placed", size + s.padding[-1], image.dtype)
        if is_new:
            memory[...] = 0
        placed = memory[:size].reshape(1, len(image), *s.extents)
        self.copy(self._inside(placed)[0], image)
        return memory

    # -- chunks ---------------------------------------------------------------------------------

    def _chunks(self, images: int, positions: int) -> Iterator[Chunk]:
        s = self.shape
        rows, *others = s.results
        row_bytes = s.groups * s.inner * prod(others) * 4
        if s.is_pointwise:
            row_bytes = 0 if self.last and not self.image_by_image else row_bytes
        each = rows
        if not s.is_pointwise and rows * row_bytes > CHUNK_BYTES:
            each = max(1, CHUNK_BYTES // row_bytes)
        at_once = 1
        if each == rows and not self.image_by_image:
            at_once = max(1, CHUNK_BYTES // max(1, rows * row_bytes))
            if not self.last:
                at_once = min(at_once, -(-positions // s.positions))
        if not row_bytes:
            at_once = images
        for first in range(0, images, at_once):
            for top in range(0, rows, each):
                yield Chunk(first, min(first + at_once, images), top, min(top + each, rows))

    # -- views and copies -----------------------------------------------------------------------

    def _temporary(self, name: str, size: int, dtype: Any) -> Array:
        found = self._memory.get(name)
        if found is None or found.size < size:
            found = self._memory[name] = np.empty(size, dtype)
        return found[:size]

    def _in_order(self, x: Array) -> Array:
        """Return images whose views are operands, where nothing is copied later."""
        return in_order(x, self.last) if self.shape.is_pointwise else x

    def _matrix(self, name: str, chunk: Chunk, columns: int, dtype: Any) -> Array:
        """Return temporary memory (groups, positions of a chunk, columns)."""
        s = self.shape
        positions = chunk.images * chunk.rows * prod(s.results[1:])
        memory = self._temporary(name, s.groups * positions * columns, dtype)
        if self.last:
            return memory.reshape(positions, s.groups, columns).swapaxes(0, 1)
        return memory.reshape(s.groups, columns, positions).mT

    def _rows(self, x: Array, chunk: Chunk) -> Array:
        """Return images in order as (groups, positions of a chunk, channels)."""
        n, channels, *extents = x[chunk.first : chunk.end].shape
        groups = self.shape.groups
        start = chunk.top * prod(self.shape.results[1:])
        end = chunk.bottom * prod(self.shape.results[1:])
        if self.last:
            images = np.moveaxis(x[chunk.first : chunk.end], 1, -1)
            images = images.reshape(-1, groups, channels // groups)
            if n == 1:
                images = images[start:end]
            return images.swapaxes(0, 1)
        images = x[chunk.first : chunk.end].reshape(n, groups, channels // groups, prod(extents))
        images = images[..., start:end]
        if n == 1:
            matrix: Array = images[0].mT
            return matrix
        return images.transpose(1, 2, 0, 3).reshape(groups, channels // groups, -1).mT

    def _unfolded(self, x: Array, chunk: Chunk) -> Array:
        """Return the elements under the kernel, (groups, positions, inner)."""
        s = self.shape
        if s.is_pointwise:
            return self._rows(x, chunk)
        axes = len(s.kernel)
        images = x[chunk.first : chunk.end]
        if any(s.padding):
            if chunk.top == 0:
                images = self._with_zeros(images)
            else:
                images = self._padded("padded", chunk.images, x.dtype)
        windows = s.windows(images, chunk.top, chunk.rows)
        kernel = range(3, 3 + axes)
        results = range(3 + axes, 3 + 2 * axes)
        to = self._matrix("unfolded", chunk, s.inner, x.dtype)
        memory = to.swapaxes(0, 1) if self.last else to.mT
        if not self.last:
            windows = windows.transpose(1, 2, *kernel, 0, *results)
        elif self.inner_channels:
            windows = windows.transpose(0, *results, 1, *kernel, 2)
        else:
            windows = windows.transpose(0, *results, 1, 2, *kernel)
        self.copy(memory.reshape(windows.shape), windows)
        return to

    def _padded(self, name: str, images: int, dtype: Any) -> Array:
        """Return temporary memory of padded images."""
        s = self.shape
        channels = s.groups * s.channels
        is_new = name not in self._memory
        memory = self._temporary(name, images * channels * prod(s.padded), dtype)
        if is_new:
            memory[...] = 0
        if self.last:
            return np.moveaxis(memory.reshape(images, *s.padded, channels), -1, 1)
        return memory.reshape(images, channels, *s.padded)

    def _with_zeros(self, images: Array) -> Array:
        to = self._padded("padded", len(images), images.dtype)
        self.copy(self._inside(to), images)
        return to

    def _inside(self, padded: Array) -> Array:
        """Return padded images without their borders."""
        s = self.shape
        axes = [slice(p, p + n) for n, p in zip(s.images, s.padding, strict=True)]
        return padded[(slice(None), slice(None), *axes)]

    def _weight(self, weight: Array) -> Array:
        """Return the weight as (groups, filters, inner)."""
        if self.inner_channels:
            weight = np.moveaxis(weight, 1, -1)
        return weight.reshape(self.shape.groups, self.shape.filters, -1)

    def _weight_of(self, x: Array) -> Array:
        """Return the weight of an array (groups, filters, inner)."""
        s = self.shape
        if self.inner_channels:
            return np.moveaxis(x.reshape(-1, *s.kernel, s.channels), -1, 1)
        return x.reshape(-1, s.channels, *s.kernel)

    def _result(self, y: Array, chunk: Chunk) -> tuple[Array, bool]:
        """Return memory for the results of a chunk, and whether it is that of ``y``."""
        if self.last or chunk.images == 1:
            return self._rows(y, chunk), True
        return self._matrix("results", chunk, self.shape.filters, y.dtype), False

    def _store(self, to: Array, chunk: Chunk, matrix: Array) -> None:
        """Copy (groups, positions, channels) to the images of a chunk."""
        images = to[chunk.first : chunk.end]
        groups, positions, channels = matrix.shape
        columns = matrix.mT.reshape(groups, channels, chunk.images, -1)
        shape = (chunk.images, groups, channels, positions // chunk.images)
        self.copy(images.reshape(shape), columns.transpose(2, 0, 1, 3))

    def _fold(self, products: Array, sums: Array, chunk: Chunk) -> None:
        """Add the products of a chunk to the padded images, one element of the kernel after the other."""
        s = self.shape
        targets = s.windows(sums, chunk.top, chunk.rows)
        taps = prod(s.kernel)
        shape = [s.groups, chunk.images, chunk.rows, *s.results[1:]]
        if self.inner_channels:
            x = np.moveaxis(products.reshape(*shape, taps, s.channels), (-2, -1), (0, 2))
        else:
            x = np.moveaxis(products.reshape(*shape, s.channels, taps), (-1, -2), (0, 2))
        x = np.moveaxis(x, 3, 1)  # taps, images, groups, channels, *results
        for number, tap in enumerate(product(*map(range, s.kernel))):
            index: Any = (slice(None), slice(None), slice(None), *tap)
            targets[index] += x[number]

    def _crop(self, sums: Array, x: Array, bias: Array | None) -> None:
        inside = self._inside(sums)
        if bias is not None:
            inside = inside + bias.reshape(-1, *[1] * len(self.shape.images))
        x[...] = inside

    # -- the product ----------------------------------------------------------------------------

    def _prepared(self, b: Array) -> ArrayView:
        return PreparedView(host_view(b[0] if len(b) == 1 else b), self.resolved.mode, {})

    def _multiply(
        self, a: Any, b: Any, out: Array, bias: Array | None = None, adds: bool = False
    ) -> None:
        """Compute ``out = a @ b + bias`` of matrices of groups, or add the product to ``out``."""
        c = None
        if len(out) == 1:
            if not isinstance(a, ArrayView):
                a = a[0]
            out = out[0]
            if not isinstance(b, ArrayView):
                b = b[0]
        elif bias is not None:
            c = host_view(np.broadcast_to(bias.reshape(len(out), 1, -1), out.shape))
            bias = None
        if not isinstance(b, ArrayView):
            b = host_view(b)
        to = host_view(out)
        if adds:
            c = to
        given = Options(
            out=to,
            c=c,
            bias=None if bias is None else host_view(bias),
            beta=0.0 if c is None else 1.0,
            out_dtype=to.dtype,
        )
        x = a if isinstance(a, ArrayView) else host_view(a)
        look_up(self.resolved, x, b, given).execute(given.arguments(x, b, to))


def _wide(dtype: Any) -> Any:
    """Return the type of sums."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype
