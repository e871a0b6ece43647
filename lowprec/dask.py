"""Matrix products of Dask arrays: lazy, chunk by chunk, each sum over the chunks of k in one fixed order.

``dask.array.matmul`` stores all partial products and lets Dask add them. Here each product's epilogue adds the sum so
far (``c=acc, beta=1``), in the accumulator's type: no partial product is stored, 16-bit chunks are summed in FP32, and
the order of the sum is independent of scheduling.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from lowprec.arrays import library_of
from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.core.arguments import parse_dtype
from lowprec.core.call import Call
from lowprec.core.dispatch import matmul as matmul
from lowprec.core.executors import CachedExecutor
from lowprec.errors import ArrayError
from lowprec.modes import MathMode, Mode, ResolvedMode, row
from lowprec.policy.scopes import emulate

__all__ = ["product"]


def __dir__() -> list[str]:
    return __all__


def product(
    call: Call, resolved: ResolvedMode, entry: CachedExecutor, backward_mode: Mode | None = None
) -> da.Array:
    """Return a product with a Dask array as a lazy array; Dask records no gradients."""
    plan = entry.plan
    k_chunk = call.options.k_chunk
    x = a = _dask_array("a", call.a)
    y = b = _dask_array("b", call.b)
    if a.ndim == 1:
        x = a[None, :]
    if b.ndim == 1:
        y = b[:, None]
    accumulator = plan.compute_dtype.accumulator.label
    out = plan.out_dtype.label
    widens = plan.mode_has_effect and row(plan.mode).widens
    if widens:
        # The sum over all chunks is in FP64 and rounded once.
        accumulator = out = row(plan.mode).accumulator(plan.compute_dtype).label
        x = x.astype(out)
        y = y.astype(out)
    lazy = _product(x, y, resolved, accumulator, out, k_chunk)
    if widens:
        lazy = lazy.astype(NUMPY_DTYPES[plan.out_dtype])
    if a.ndim == 1:
        lazy = lazy[..., 0, :]
    if b.ndim == 1:
        lazy = lazy[..., 0]
    return lazy


def _dask_array(name: str, x: Any) -> da.Array:
    is_dask = isinstance(x, da.Array)
    if not is_dask and not isinstance(getattr(x, "dtype", None), np.dtype):
        raise ArrayError(
            f"{name} is a {type(x).__qualname__}, which Dask cannot split into chunks; pass a Dask or NumPy array"
        )
    if not is_dask:
        x = da.from_array(x, chunks=-1)
    if isinstance(x._meta, np.ndarray):
        library_of(x._meta)  # refuses masked arrays and others here, not in the workers
    return x


def _product(
    a: da.Array,
    b: da.Array,
    resolved: ResolvedMode,
    accumulator: str,
    out: str,
    k_chunk: int | None,
) -> da.Array:
    a, b, batch = _alike_in_chunks(a, b)
    chunks = (*batch, a.chunks[-2], b.chunks[-1])
    emulates = resolved.emulates
    mode = str(MathMode.FP32)
    # An argument without effect would make the workers warn.
    if row(resolved.mode).acts(parse_dtype(accumulator)):
        mode = str(resolved.mode)
    token = tokenize(a, b, mode, emulates, out, k_chunk)
    name = f"lowprec-matmul-{token}"
    graph: dict[Any, Any] = {}
    numbers = [range(len(axis)) for axis in chunks]
    *others, last = range(a.numblocks[-1])
    for *outer, i, j in itertools.product(*numbers):
        total: Any = None
        x = (a.name, *_block_of(a, outer), i)
        y = (b.name, *_block_of(b, outer))
        for k in others:
            task = (_add_product, total, (*x, k), (*y, k, j), mode, accumulator, emulates, k_chunk)
            total = (f"{name}-sum", *outer, i, j, k)
            graph[total] = task
        task = (_add_product, total, (*x, last), (*y, last, j), mode, out, emulates, k_chunk)
        graph[(name, *outer, i, j)] = task
    layers = HighLevelGraph.from_collections(name, graph, dependencies=[a, b])
    result_type = NUMPY_DTYPES[parse_dtype(out)]
    meta = a._meta
    if isinstance(meta, np.ndarray):
        empty = (0,) * len(chunks)
        meta = np.empty(empty, result_type)
    return da.Array(layers, name, chunks, meta=meta, dtype=result_type)


def _alike_in_chunks(a: da.Array, b: da.Array) -> tuple[da.Array, da.Array, tuple[Any, ...]]:
    """Return the operands with the same chunks along k and along their batches, and the chunks of the batch."""
    a = _without_empty_chunks(a)
    b = _without_empty_chunks(b)
    axes = list(range(max(a.ndim, b.ndim) - 2))
    names_a = [*_last(axes, a.ndim - 2), "m", "k"]
    names_b = [*_last(axes, b.ndim - 2), "k", "n"]
    if a.numblocks[-1] == 1:  # otherwise every task would need all of k
        a = a.rechunk({a.ndim - 1: b.chunks[-2]})
    if b.chunks[-2] != a.chunks[-1]:
        b = b.rechunk({b.ndim - 2: a.chunks[-1]})
    chunks, (a, b) = da.core.unify_chunks(a, names_a, b, names_b)
    return a, b, tuple(chunks[axis] for axis in axes)


def _last(axes: list[int], count: int) -> list[int]:
    return axes[len(axes) - count :]


def _without_empty_chunks(x: da.Array) -> da.Array:
    """Rechunk: an empty chunk of an axis of length 1 would be broadcast; unify_chunks fails on those of empty axes."""
    chunks = [tuple(filter(None, axis)) or (0,) for axis in x.chunks]
    return x.rechunk(tuple(chunks))


def _block_of(x: da.Array, outer: list[int]) -> list[int]:
    """Return the batch index of an operand's block for a chunk of the result; 0 where it is broadcast."""
    mine = _last(outer, x.ndim - 2)
    batch = x.shape[:-2]
    return [0 if length == 1 else i for i, length in zip(mine, batch, strict=True)]


def _add_product(
    acc: Any, a: Any, b: Any, mode: Any, out: str, emulates: Any = None, k_chunk: Any = None
) -> Any:
    """Return ``acc + a @ b`` as a new array, since a task may be repeated with the same ``acc``."""
    scope = emulate(emulates) if emulates else contextlib.nullcontext()
    options: Any = {"math_mode": mode, "out_dtype": out, "k_chunk": k_chunk}
    with scope:
        if acc is None:
            return matmul(a, b, **options)
        if out == "int32":  # integer epilogues add no matrix
            return acc + matmul(a, b)
        return matmul(a, b, c=acc, beta=1.0, **options)
