"""Convolutions as matrix products: of positions by the elements under the kernel, and of these by the weight.

The elements under the kernel are copied for some positions at a time (`Chunk`), which bounds the temporary memory. A
position's bits do not depend on the chunk: those of an element of a product depend on its row and column alone. Sums of
the elements of a gradient, and of chunks, have one order.
Matrices have an axis of groups first. Their rows are contiguous if the channels are last in memory, else the columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec.arrays import ArrayView, library_of
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import PreparedView
from lowprec.modes import ResolvedMode, row, rules_of
from lowprec.torch.aten_products import execute_into
from lowprec.torch.convolution_shapes import Convolution, empty, in_order

#: Bytes of the elements under the kernel that are copied at a time, unless those of one row of an image have more.
CHUNK_BYTES = 2 << 20
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


class Products:
    """The three products of a convolution in a mode."""

    def __init__(self, shape: Convolution, last: bool, resolved: ResolvedMode) -> None:
        self.shape = shape
        self.resolved = resolved
        #: Whether the channels are last in memory.
        self.last = last
        quantizes = row(resolved.mode).quantizes
        # Blocks are along channels x kernel, whatever the memory; otherwise the channels are inner, as in memory.
        self.inner_channels = last and not quantizes
        self.keeps_weight = last or quantizes
        self.image_by_image = quantizes and any(
            rule is not None and rule.has_tensor_scale for rule in rules_of(resolved.mode)
        )
        self._memory: dict[str, Tensor] = {}

    # -- the products ---------------------------------------------------------------------------

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of images, (n, groups * filters, *results)."""
        s = self.shape
        y = empty((len(x), s.groups * s.filters, *s.results), x, self.last)
        x = self._in_order(x)
        b = self._weight(weight).mT
        operand = self._prepared(b) if self.keeps_weight else b
        for chunk in self._chunks(len(x), _POSITIONS):
            a = self._unfolded(x, chunk)
            out, is_direct = self._result(y, chunk)
            self._multiply(a, operand, out, bias)
            if not is_direct:
                self._store(y, chunk, out)
        return y

    def of_images(self, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the gradient of the images, from that of the results; plus a bias."""
        s = self.shape
        x = empty((len(y), s.groups * s.channels, *s.images), y, self.last)
        y = in_order(y, self.last)
        b = self._weight(weight)
        operand = self._prepared(b) if self.keeps_weight else b
        wide = _wide(y.dtype)
        sums = None
        for chunk in self._chunks(len(y), _POSITIONS):
            a = self._rows(y, chunk)
            if s.is_pointwise and bias is None:
                out, is_direct = self._rows(x, chunk), self.last or chunk.images == 1
                if not is_direct:
                    out = self._matrix("products", chunk, s.channels, y.dtype)
                self._multiply(a, operand, out)
                if not is_direct:
                    self._store(x, chunk, out)
                continue
            out = self._matrix("products", chunk, s.inner, wide)
            self._multiply(a, operand, out)
            if sums is None or chunk.top == 0:
                sums = self._padded("sums", chunk.images, y, wide).zero_()
            self._fold(out, sums, chunk)
            if chunk.bottom == s.results[0]:
                self._crop(sums, x[chunk.first : chunk.end], bias)
        return x

    def of_weight(self, x: Tensor, y: Tensor, swaps: bool = False) -> Tensor:
        """Return the gradient of the weight, from the images and the gradient of the results.

        If ``swaps``, the results are the first operand.
        """
        s = self.shape
        wide = _wide(y.dtype)
        sums = y.new_empty((s.groups, s.filters, s.inner), dtype=wide)
        x = self._in_order(x)
        y = in_order(y, self.last)
        for number, chunk in enumerate(self._chunks(len(x), 1 << 60)):
            a = self._unfolded(x, chunk).mT
            b = self._rows(y, chunk)
            if swaps:
                self._multiply(b.mT, a.mT, sums, adds=number > 0)
            else:
                self._multiply(a, b, sums.mT, adds=number > 0)
        found = empty((s.groups * s.filters, s.channels, *s.kernel), y, self.last)
        return found.copy_(self._weight_of(sums))

    def operands(self, x: Tensor | None, y: Tensor | None, weight: Tensor | None) -> Any:
        """Return the operands of the first chunk and group of the product of two of these."""
        given = x if x is not None else y
        assert given is not None
        chunk = next(self._chunks(len(given), _POSITIONS))
        if x is None:
            assert y is not None
            assert weight is not None
            return self._rows(in_order(y, self.last), chunk)[0], self._weight(weight)[0]
        a = self._unfolded(self._in_order(x), chunk)[0].clone()
        if weight is not None:
            return a, self._weight(weight)[0].mT
        assert y is not None
        return a.mT, self._rows(in_order(y, self.last), chunk)[0]

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

    def _temporary(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        found = self._memory.get(name)
        if found is None or found.numel() < size:
            found = self._memory[name] = torch.empty(size, dtype=dtype)
        return found[:size]

    def _in_order(self, x: Tensor) -> Tensor:
        """Return images whose views are operands, where nothing is copied later."""
        return in_order(x, self.last) if self.shape.is_pointwise else x

    def _matrix(self, name: str, chunk: Chunk, columns: int, dtype: torch.dtype) -> Tensor:
        """Return temporary memory (groups, positions of a chunk, columns)."""
        s = self.shape
        positions = chunk.images * chunk.rows * prod(s.results[1:])
        memory = self._temporary(name, s.groups * positions * columns, dtype)
        if self.last:
            return memory.view(positions, s.groups, columns).transpose(0, 1)
        return memory.view(s.groups, columns, positions).mT

    def _rows(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return images in order as (groups, positions of a chunk, channels)."""
        groups = self.shape.groups
        start = chunk.top * prod(self.shape.results[1:])
        end = chunk.bottom * prod(self.shape.results[1:])
        if self.last:
            images = x[chunk.first : chunk.end].movedim(1, -1).flatten(1, -2)
            if chunk.images > 1:
                return images.reshape(-1, groups, x.shape[1] // groups).transpose(0, 1)
            return images[0, start:end].unflatten(-1, (groups, -1)).transpose(0, 1)
        images = x[chunk.first : chunk.end].flatten(2)[..., start:end].unflatten(1, (groups, -1))
        if chunk.images == 1:
            return images[0].mT
        return images.permute(1, 2, 0, 3).flatten(2).mT

    def _unfolded(self, x: Tensor, chunk: Chunk) -> Tensor:
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
                images = self._padded("padded", chunk.images, x, x.dtype)
        windows = s.windows(images, chunk.top, chunk.rows)
        kernel = range(3, 3 + axes)
        results = range(3 + axes, 3 + 2 * axes)
        to = self._matrix("unfolded", chunk, s.inner, x.dtype)
        if not self.last:
            windows = windows.permute(1, 2, *kernel, 0, *results)
            to.mT.view(windows.shape).copy_(windows)
        elif self.inner_channels:
            windows = windows.permute(0, *results, 1, *kernel, 2)
            to.transpose(0, 1).view(windows.shape).copy_(windows)
        else:
            windows = windows.permute(0, *results, 1, 2, *kernel)
            to.transpose(0, 1).view(windows.shape).copy_(windows)
        return to

    def _padded(self, name: str, images: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return temporary memory of padded images."""
        s = self.shape
        channels = s.groups * s.channels
        is_new = name not in self._memory
        memory = self._temporary(name, images * channels * prod(s.padded), dtype)
        if is_new:
            memory.zero_()
        if self.last:
            return memory.view(images, *s.padded, channels).movedim(-1, 1)
        return memory.view(images, channels, *s.padded)

    def _with_zeros(self, images: Tensor) -> Tensor:
        to = self._padded("padded", len(images), images, images.dtype)
        self._inside(to).copy_(images)
        return to

    def _inside(self, padded: Tensor) -> Tensor:
        """Return padded images without their borders."""
        for axis, (n, p) in enumerate(zip(self.shape.images, self.shape.padding, strict=True)):
            padded = padded.narrow(axis + 2, p, n)
        return padded

    def _weight(self, weight: Tensor) -> Tensor:
        """Return the weight as (groups, filters, inner)."""
        groups = self.shape.groups
        if self.inner_channels:
            return weight.movedim(1, -1).reshape(groups, self.shape.filters, -1)
        return weight.reshape(groups, self.shape.filters, -1)

    def _weight_of(self, x: Tensor) -> Tensor:
        """Return the weight of a tensor (groups, filters, inner)."""
        s = self.shape
        if self.inner_channels:
            return x.view(s.groups * s.filters, *s.kernel, s.channels).movedim(-1, 1)
        return x.view(s.groups * s.filters, s.channels, *s.kernel)

    def _result(self, y: Tensor, chunk: Chunk) -> tuple[Tensor, bool]:
        """Return memory for the results of a chunk, and whether it is that of ``y``."""
        if self.last or chunk.images == 1:
            return self._rows(y, chunk), True
        return self._matrix("results", chunk, self.shape.filters, y.dtype), False

    def _store(self, to: Tensor, chunk: Chunk, matrix: Tensor) -> None:
        """Copy (groups, positions, channels) to the images of a chunk."""
        images = to[chunk.first : chunk.end].flatten(2).unflatten(1, (self.shape.groups, -1))
        images.copy_(matrix.mT.unflatten(2, (chunk.images, -1)).permute(2, 0, 1, 3))

    def _fold(self, products: Tensor, sums: Tensor, chunk: Chunk) -> None:
        """Add the products of a chunk to the padded images, one element of the kernel after the other."""
        s = self.shape
        targets = s.windows(sums, chunk.top, chunk.rows)
        results = (chunk.rows, *s.results[1:])
        taps = prod(s.kernel)
        x = products.unflatten(1, (chunk.images, *results))
        if self.inner_channels:
            x = x.unflatten(-1, (taps, s.channels)).movedim(-2, 0).movedim(-1, 2)
        else:
            x = x.unflatten(-1, (s.channels, taps)).movedim(-1, 0).movedim(-1, 2)
        x = x.movedim(3, 1)  # taps, images, groups, channels, *results
        for number, tap in enumerate(product(*map(range, s.kernel))):
            targets[(slice(None), slice(None), slice(None), *tap)].add_(x[number])

    def _crop(self, sums: Tensor, x: Tensor, bias: Tensor | None) -> None:
        inside = self._inside(sums)
        if bias is not None:
            inside = inside + bias.view(-1, *[1] * len(self.shape.images))
        x.copy_(inside)

    # -- the product ----------------------------------------------------------------------------

    def _prepared(self, b: Tensor) -> ArrayView:
        if b.shape[0] == 1:
            b = b[0]
        view = library_of(b).describe(b)
        return PreparedView(host_view(view.ndarray()), self.resolved.mode, {})

    def _multiply(
        self, a: Tensor, b: Any, out: Tensor, bias: Tensor | None = None, adds: bool = False
    ) -> None:
        """Compute ``out = a @ b + bias`` of matrices of groups, or add the product to ``out``."""
        library = library_of(a)
        options: dict[str, Any] = {}
        if len(a) == 1:
            a = a[0]
            out = out[0]
            if isinstance(b, Tensor):
                b = b[0]
        if isinstance(b, Tensor):
            b = library.describe(b)
        to = library.describe(out)
        options["out_dtype"] = to.dtype
        if bias is not None and out.ndim == 2:
            options["bias"] = library.describe(bias)
        elif bias is not None:
            options["c"] = library.describe(bias.view(len(out), 1, -1).expand(out.shape))
            options["beta"] = 1.0
        elif adds:
            options["c"] = to
            options["beta"] = 1.0
        execute_into(to, library.describe(a), b, self.resolved, options)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums."""
    return torch.float32 if dtype.itemsize == 2 else dtype
