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
from lowprec.arrays.base import Delegate
from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.core import dispatch
from lowprec.core.arguments import parse_dtype
from lowprec.core.call import Call, bind, run
from lowprec.core.executors import CachedExecutor
from lowprec.core.tolerance import mode_of
from lowprec.errors import ArrayError
from lowprec.modes import BoundName, MathMode, Mode, ModeName, Recipe, ResolvedMode, row
from lowprec.policy.scopes import emulate


def matmul(
    a: Any,
    b: Any,
    /,
    *,
    out_dtype: Any = None,
    math_mode: ModeName | MathMode | Recipe | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    k_chunk: int | None = None,
) -> da.Array:
    """Return the product of two Dask arrays as a lazy Dask array.

    The mode is resolved here, from the scopes, the guard and the environment of the caller, and stored in the graph. A
    worker's own ``LOWPREC_FP32_GUARD`` and ``LOWPREC_FORCE_MATH_MODE`` override it.

    Parameters
    ----------
    a : dask.array.Array, shape (..., m, k) or (k,)
        Chunks of any library that :func:`lowprec.matmul` supports. A NumPy array is one chunk.
    b : dask.array.Array, shape (..., k, n) or (k,)
        Rechunked along k as ``a``; an ``a`` with one chunk along k is rechunked as ``b``.
    out_dtype, math_mode, rtol, bound
        As for :func:`lowprec.matmul`. ``rtol`` selects the mode for the whole of k, including the sums over its chunks.
    k_chunk : int, optional
        As for :func:`lowprec.matmul`, for each chunk's product.

    Returns
    -------
    dask.array.Array, shape (..., m, n)
        Chunked as ``a`` along m and as ``b`` along n.

    Examples
    --------
    >>> import dask.array as da
    >>> a, b = da.ones((6, 4), chunks=2, dtype="float32"), da.ones((4, 5), chunks=(2, 5), dtype="float32")
    >>> c = matmul(a, b, math_mode="bf16")
    >>> c.numblocks, c.compute()[0].tolist()
    ((3, 1), [4.0, 4.0, 4.0, 4.0, 4.0])
    """
    call = bind(a, b, out_dtype=out_dtype, k_chunk=k_chunk)
    call = call._replace(delegate=call.delegate or _ALWAYS)
    lazy: da.Array = run(call, mode_of(call, math_mode, rtol, bound))
    return lazy


_ALWAYS = Delegate("dask", "Dask computes the products of lowprec.dask")


def product(call: Call, resolved: ResolvedMode, entry: CachedExecutor, backward_mode: Mode | None = None) -> da.Array:
    """Return a product with a Dask array as a lazy array; Dask records no gradients."""
    a, b, plan, k_chunk = _dask_array("a", call.a), _dask_array("b", call.b), entry.plan, call.options.k_chunk
    x = a if a.ndim > 1 else a[None, :]
    y = b if b.ndim > 1 else b[:, None]
    accumulator, out = plan.compute_dtype.accumulator.label, plan.out_dtype.label
    if plan.mode_has_effect and row(plan.mode).widens:
        # The sum over all chunks is in FP64 and rounded once.
        wide = row(plan.mode).accumulator(plan.compute_dtype).label
        lazy = _product(x.astype(wide), y.astype(wide), resolved, wide, wide, k_chunk)
        lazy = lazy.astype(NUMPY_DTYPES[plan.out_dtype])
    else:
        lazy = _product(x, y, resolved, accumulator, out, k_chunk)
    if a.ndim == 1:
        lazy = lazy[..., 0, :]
    return lazy[..., 0] if b.ndim == 1 else lazy


def _dask_array(name: str, x: Any) -> da.Array:
    if not isinstance(x, da.Array):
        if not isinstance(getattr(x, "dtype", None), np.dtype):
            raise ArrayError(
                f"{name} is a {type(x).__qualname__}, which Dask cannot split into chunks; pass a Dask or NumPy array"
            )
        x = da.from_array(x, chunks=-1)
    if isinstance(x._meta, np.ndarray):
        library_of(x._meta)  # refuses masked arrays and others here, not in the workers
    return x


def _product(
    a: da.Array, b: da.Array, resolved: ResolvedMode, accumulator: str, out: str, k_chunk: int | None
) -> da.Array:
    a, b, batch = _alike_in_chunks(a, b)
    chunks = (*batch, a.chunks[-2], b.chunks[-1])
    emulates = None if resolved.emulates is None else str(resolved.emulates)
    # An argument without effect would make the workers warn.
    acts = row(resolved.mode).acts(parse_dtype(accumulator))
    mode = str(resolved.mode if acts else MathMode.FP32)
    name = f"lowprec-matmul-{tokenize(a, b, mode, emulates, out, k_chunk)}"
    depth = a.numblocks[-1]
    graph: dict[Any, Any] = {}
    for *outer, i, j in itertools.product(*(range(len(c)) for c in chunks)):
        key: Any = None
        for k in range(depth):
            before, last = key, k == depth - 1
            key = (name, *outer, i, j) if last else (f"{name}-sum", *outer, i, j, k)
            x = (a.name, *_block_of(a, outer), i, k)
            y = (b.name, *_block_of(b, outer), k, j)
            dtype = out if last else accumulator
            graph[key] = (_add_product, before, x, y, mode, dtype, emulates, k_chunk)
    layers = HighLevelGraph.from_collections(name, graph, dependencies=[a, b])
    result_type, meta = NUMPY_DTYPES[parse_dtype(out)], a._meta
    if isinstance(meta, np.ndarray):
        meta = np.empty((0,) * len(chunks), result_type)
    return da.Array(layers, name, chunks, meta=meta, dtype=result_type)


def _alike_in_chunks(a: da.Array, b: da.Array) -> tuple[da.Array, da.Array, tuple[Any, ...]]:
    """Return the operands with the same chunks along k and along their batches, and the chunks of the batch."""
    a, b = (
        # An empty chunk of an axis of length 1 would be broadcast; unify_chunks fails on those of empty axes.
        x.rechunk(tuple(tuple(n for n in axis if n) or (0,) for axis in x.chunks))
        for x in (a, b)
    )
    count = max(a.ndim, b.ndim) - 2
    axes = [*range(count), "m", "k", "n"]
    names_a = [*axes[count - (a.ndim - 2) : count], "m", "k"]
    names_b = [*axes[count - (b.ndim - 2) : count], "k", "n"]
    if a.numblocks[-1] == 1:  # otherwise every task would need all of k
        a = a.rechunk({a.ndim - 1: b.chunks[-2]})
    if b.chunks[-2] != a.chunks[-1]:
        b = b.rechunk({b.ndim - 2: a.chunks[-1]})
    chunks, (a, b) = da.core.unify_chunks(a, names_a, b, names_b)
    return a, b, tuple(chunks[axis] for axis in axes[:count])


def _block_of(x: da.Array, outer: list[int]) -> list[int]:
    """Return the batch index of an operand's block for a chunk of the result; 0 where it is broadcast."""
    mine = outer[len(outer) - (x.ndim - 2) :]
    return [0 if length == 1 else i for i, length in zip(mine, x.shape[:-2], strict=True)]


def _add_product(acc: Any, a: Any, b: Any, mode: Any, out: str, emulates: Any = None, k_chunk: Any = None) -> Any:
    """Return ``acc + a @ b`` as a new array, since a task may be repeated with the same ``acc``."""
    with contextlib.nullcontext() if emulates is None else emulate(emulates):
        if acc is None:
            return dispatch.matmul(a, b, math_mode=mode, out_dtype=out, k_chunk=k_chunk)
        if out == "int32":  # integer epilogues add no matrix
            return acc + dispatch.matmul(a, b)
        return dispatch.matmul(a, b, c=acc, beta=1.0, math_mode=mode, out_dtype=out, k_chunk=k_chunk)
