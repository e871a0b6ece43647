"""Attention as matrix products: scores of blocks of queries by the keys, and weights by the values.

In the modes that the compiled library computes in one call they are its own (`core/attention.py`). Otherwise a block
has as many queries and heads as its scores have room in `BLOCK_SCORES`, so that memory is linear in the length.
The keys of a block begin with the first one that its queries attend to. The weights of masked keys are zero, and adding
these changes no sum, so a query has the same bits with any number of masked keys before and after its own: in any
batch, and in the prefill of a prompt as in the decoding of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowprec.arrays import block_codes, library_of
from lowprec.core import attention
from lowprec.modes import MathMode, ResolvedMode, row, rules_of
from lowprec.recipes import Rule
from lowprec.torch.aten_products import multiply_into

#: Scores of a block, unless those of `_FEWEST` queries and one head are more.
BLOCK_SCORES = 1 << 19
_FEWEST = 128
_MOST = 256
#: Keys whose products with values are one sum, from the first to the last (docs/reproducibility.md).
_KEYS = 384
#: Rows of scores are multiples of this number: PyTorch's softmax sums shorter ones in another order.
_LANES = 16
#: Queries of a block of a compiled attention, of all heads that share their keys.
ROWS = 128


class Attention(NamedTuple):
    """The arguments of an attention: (images, heads, tokens, width); keys and values may have fewer heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # added to the scores, of the shape of all of them
    is_causal: bool
    scale: float

    @property
    def multiplications(self) -> int:
        """Return those of one of the products."""
        return self.q.numel() * self.k.shape[2]


class QueryBlock(NamedTuple):
    """Images, heads of the keys, queries and keys of a block."""

    images: slice
    heads: slice
    queries: slice
    keys: slice

    def of(self, x: Tensor, tokens: slice) -> Tensor:
        return x[self.images, self.heads, tokens]


class AttentionProducts:
    """The products of an attention in a mode."""

    def __init__(self, given: Attention, resolved: ResolvedMode) -> None:
        self.given = given
        self.resolved = resolved
        self.groups = given.q.shape[1] // given.k.shape[1]
        self.product: Any = None  # of the compiled library
        if given.q.dtype is torch.float32:
            device = library_of(given.q).describe(given.q).device
            self.product = attention.product_of(resolved, device)
        self._memory: dict[str, Tensor] = {}

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the result, and the logarithm of the sum of the exponentials of each query's scores."""
        result = torch.empty_like(self.given.q)
        if self.product is not None:
            images, heads, tokens, _ = result.shape
            largest, sums = result.new_empty(2, images, tokens, heads)
            self._compute((result, largest, sums))
            is_empty = sums == 0
            largest += sums.log_()
            if self.given.mask is not None:
                largest.masked_fill_(is_empty, 0)
            return result, largest.transpose(1, 2)
        return result, self._forward_by_blocks(result)

    def _forward_by_blocks(self, result: Tensor) -> Tensor:
        images, heads, tokens, _ = result.shape
        sums = result.new_empty(images, tokens, heads, dtype=torch.float32).transpose(1, 2)
        for block in self._blocks():
            weights = self._scores(block)
            largest = weights.amax(-1, keepdim=True)
            torch.softmax(weights, -1, out=weights)
            logarithm = largest - weights.amax(-1, keepdim=True).log_()
            if self.given.mask is not None:  # of a query without keys they are zero
                is_empty = largest == -torch.inf
                if is_empty.any():
                    weights.masked_fill_(is_empty, 0)
                    logarithm.masked_fill_(is_empty, 0)
            self._store(result, block, self._weighted(weights, block))
            self._store(sums.unsqueeze(-1), block, logarithm)
        return sums

    def backward(
        self, gradient: Tensor, result: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values."""
        given = self.given
        of_q = _like(given.q, given.q.dtype)
        of_k = _like(given.k, torch.float32).zero_()
        of_v = _like(given.v, torch.float32).zero_()
        if self.product is not None:
            shifts = (gradient * result).sum(-1)
            of_queries = (x.transpose(1, 2).contiguous() for x in (sums, shifts))
            self._compute((gradient, *of_queries), (of_q, of_k, of_v))
            return of_q, of_k, of_v
        for block in self._blocks():
            keys = block.keys
            weights = self._scores(block)
            weights.sub_(self._rows(sums.unsqueeze(-1), block)).exp_()
            weights = weights[..., : keys.stop - keys.start]
            of_result = self._rows(gradient, block)
            self._add(block.of(of_v, keys), weights.mT, of_result)
            of_scores = self._matrix("gradient", *weights.shape)
            self._multiply(of_scores, of_result, block.of(given.v, keys).mT)
            shift = (of_result * self._rows(result, block)).sum(-1, keepdim=True)
            of_scores.sub_(shift).mul_(weights)
            rows = self._matrix("rows", *weights.shape[:-1], given.q.shape[-1])
            self._multiply(rows, of_scores, block.of(given.k, keys), alpha=given.scale)
            self._store(of_q, block, rows)
            q = self._rows(given.q, block)
            self._add(block.of(of_k, keys), of_scores.mT, q, given.scale)
        return of_q, of_k.to(given.k.dtype), of_v.to(given.v.dtype)

    def _compute(self, of_queries: tuple[Tensor, ...], gradients: tuple[Tensor, ...] = ()) -> None:
        """Compute attention, or its gradients, by one call of the compiled library."""
        given = self.given
        describe = library_of(given.q).describe
        mask = None if given.mask is None else describe(given.mask)
        operands = *map(describe, given[:3]), mask, *map(describe, of_queries)
        attention.attend(
            self.product,
            attention.Sequences._make(operands),
            self._ranges(),
            given.scale,
            given.is_causal,
            _KEYS,
            tuple(map(describe, gradients)),
        )

    def operands(self) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of the first block and head."""
        block = next(self._blocks())
        return self._rows(self.given.q, block)[0, 0], block.of(self.given.k, block.keys)[0, 0].mT

    # -- blocks ---------------------------------------------------------------------------------

    def _blocks(self) -> Iterator[QueryBlock]:
        heads = self.given.k.shape[1]
        for some, queries, first in _runs(self._open_keys()[0]):
            keys = self.given.k.shape[2] - first
            most = BLOCK_SCORES // (self.groups * keys)
            rows = min(queries.stop - queries.start, max(_FEWEST // self.groups, min(most, _MOST)))
            at_once = max(1, most // rows)
            together = max(1, at_once // heads)
            for image, head, start in product(
                range(some.start, some.stop, together),
                range(0, heads, at_once),
                range(queries.start, queries.stop, rows),
            ):
                end = min(start + rows, queries.stop)
                yield QueryBlock(
                    slice(image, min(image + together, some.stop)),
                    slice(head, min(head + at_once, heads)),
                    slice(start, end),
                    slice(first, min(end, first + keys) if self.given.is_causal else first + keys),
                )

    def _ranges(self) -> NDArray[np.int64]:
        """Return the image, first and last query, first and last key of each block of a compiled attention."""
        rows = max(1, ROWS // self.groups)
        firsts, of_queries = self._open_keys()
        ends = of_queries.numpy()
        found = []
        for images, queries, first in _runs(firsts):
            for image in range(images.start, images.stop):
                for start in range(queries.start, queries.stop, rows):
                    end = min(start + rows, queries.stop)
                    found.append((image, start, end, first, ends[image, start:end].max()))
        return np.array(found, np.int64)

    def _open_keys(self) -> tuple[Tensor, Tensor]:
        """Return the first key that each query attends to, and the one after the last, or all for a masked query."""
        images, _, tokens, _ = self.given.q.shape
        mask = self.given.mask
        keys = self.given.k.shape[2]
        firsts = torch.zeros(1, 1, dtype=torch.int64)
        ends = firsts + keys
        if self.given.is_causal:
            ends = torch.arange(1, tokens + 1).clamp(max=keys)
        if mask is not None:
            is_open = (_collapsed(mask) > torch.finfo(mask.dtype).min).any(1).byte()
            firsts = is_open.argmax(-1)
            ends = keys - is_open.flip(-1).argmax(-1)
        return firsts.expand(images, tokens), ends.expand(images, tokens)

    # -- matrices -------------------------------------------------------------------------------

    def _matrix(self, name: str, *shape: int) -> Tensor:
        """Return temporary memory."""
        size = torch.Size(shape).numel()
        found = self._memory.get(name)
        if found is None or found.numel() < size:
            found = self._memory[name] = torch.empty(size)
        return found[:size].view(shape)

    def _rows(self, x: Tensor, block: QueryBlock) -> Tensor:
        """Return the queries of a block as (images, heads of the keys, rows, width)."""
        heads = x.unflatten(1, (-1, self.groups))
        return heads[block.images, block.heads, :, block.queries].flatten(2, 3)

    def _store(self, to: Tensor, block: QueryBlock, rows: Tensor) -> None:
        heads = to.unflatten(1, (-1, self.groups))
        target = heads[block.images, block.heads, :, block.queries]
        target.copy_(rows.view(target.shape))

    def _scores(self, block: QueryBlock) -> Tensor:
        given = self.given
        q = self._rows(given.q, block)
        keys = block.keys.stop - block.keys.start
        found = self._matrix("scores", *q.shape[:3], -(-keys // _LANES) * _LANES)
        scores = found[..., :keys]
        self._multiply(scores, q, block.of(given.k, block.keys).mT, alpha=given.scale)
        found[..., keys:] = -torch.inf
        by_head = scores.unflatten(2, (self.groups, -1))
        if given.mask is not None:
            mask = given.mask.unflatten(1, (-1, self.groups))
            by_head += mask[block.images, block.heads, :, block.queries, block.keys]
        if given.is_causal and keys > 1:
            start = block.queries.start
            last = by_head[..., start:]
            later = torch.ones(last.shape[-2:], dtype=torch.bool).triu_(1)
            last.masked_fill_(later, -torch.inf)
        return found

    # -- products -------------------------------------------------------------------------------

    def _weighted(self, weights: Tensor, block: QueryBlock) -> Tensor:
        """Return the sums of values, in chunks of keys.

        A mode that quantises rounds the values of each key along their width: those of other keys change no bit.
        """
        values = block.of(self.given.v, block.keys)
        rows = self._matrix("rows", *weights.shape[:3], values.shape[-1])
        mode = self.resolved.mode
        resolved = self.resolved
        if row(mode).quantizes:
            resolved = replace(resolved, mode=MathMode.FP32)
            of_weights, of_values = rules_of(mode)
            values = rounded(values, of_values)
        for start in range(0, values.shape[2], _KEYS):
            some = values[:, :, start : start + _KEYS]
            chunk = weights[..., start : start + some.shape[2]]
            if row(mode).quantizes:
                chunk = rounded(chunk, of_weights)
            multiply_into(rows, chunk.to(some.dtype), some, resolved, adds=start > 0)
        return rows

    def _multiply(self, out: Tensor, a: Tensor, b: Tensor, **given: Any) -> None:
        multiply_into(out, a.to(b.dtype), b, self.resolved, **given)

    def _add(self, out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
        """Add a product with queries, of all heads that share their keys."""
        self._multiply(out, a, b, adds=True, alpha=alpha)


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for a gradient, in PyTorch's order."""
    images, heads, tokens, width = x.shape
    return x.new_empty(images, tokens, heads, width, dtype=dtype).transpose(1, 2)


def _runs(firsts: Tensor) -> Iterator[tuple[slice, slice, int]]:
    """Yield images, and queries of these whose first keys that are not masked are the same, with these."""
    images, tokens = firsts.shape
    if not firsts.any():
        yield slice(0, images), slice(0, tokens), 0
        return
    for image, of_queries in enumerate(firsts):
        start = 0
        values, counts = of_queries.unique_consecutive(return_counts=True)
        for first, length in zip(values.tolist(), counts.tolist(), strict=True):
            yield slice(image, image + 1), slice(start, start + length), first
            start += length


def _collapsed(x: Tensor) -> Tensor:
    """Return a view with one element along the axes along which a tensor was expanded."""
    for axis in range(3):
        if x.stride(axis) == 0:
            x = x.narrow(axis, 0, 1)
    return x


def rounded(x: Tensor, rule: Rule | None) -> Tensor:
    """Return numbers in float32 that are rounded to nearest along the last axis, without a transform."""
    assert rule is not None  # of a forward product
    rule = rule._replace(rounding="nearest", hadamard=0)
    return torch.from_numpy(block_codes.rounded_numbers(x.float().numpy(), -1, rule, np))
