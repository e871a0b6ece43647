"""Division of gradients in host memory by a loss scale, with the detection of Inf and NaN in the same pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import casting, team, threads
from lowprec.backends.execution import imported

#: Elements per block with NumPy alone; source, result and flags fit the L2 cache.
_BLOCK = 1 << 16

#: Elements per piece of a thread; elements from which several threads are used.
_PIECE, _PAYS_TO_SHARE = 1 << 18, 1 << 20

#: Elements from which numba is imported, and from which a kernel is faster than NumPy.
_PAYS_TO_IMPORT, _PAYS_TO_CALL = 1 << 18, 1 << 10

_KERNELS = "lowprec.backends.cpu.unscaling_kernels"

#: A contiguous array and its result, and their addresses.
_Pair: TypeAlias = tuple[Any, Any, int, int]


def unscale(pairs: Sequence[tuple[Any, Any]], inverse: Any) -> bool:
    """Multiply float32, float64 or bfloat16 arrays by ``inverse``; return whether any has Inf or NaN."""
    found: list[bool] = []
    flat: dict[Any, list[_Pair]] = {}
    for x, out in pairs:
        first = data_pointer(x)
        target = first if out is x else data_pointer(out)
        aligned = not (first | target) % x.itemsize
        if aligned and x.dtype.isnative and is_flat(x, out, first, target):
            flat.setdefault(x.dtype, []).append((x, out, first, target))
        else:
            found.append(_unscale_plain(x, out, inverse))
    elements = sum([x.size for x, _ in pairs])
    return any(found + [_run(members, inverse, elements) for members in flat.values()])


def is_flat(x: Any, out: Any, first: int, target: int) -> bool:
    """Whether both arrays are contiguous in the same order, and identical or not overlapping."""
    one_run = x.flags.forc and x.strides == out.strides
    return one_run and (first == target or abs(first - target) >= x.nbytes)


def _unscale_plain(x: Any, out: Any, inverse: Any) -> bool:
    with np.errstate(all="ignore"):
        found = not np.isfinite(x).all()
        if x.dtype.itemsize == 2:  # rounded once, from float32
            out[...] = x.astype(np.float32) * inverse
        else:
            np.multiply(x, x.dtype.type(inverse), out=out)
    return found


def _run(pairs: Sequence[_Pair], inverse: Any, elements: int) -> bool:
    loaded = _KERNELS in sys.modules and elements >= _PAYS_TO_CALL
    compiled = casting.has_kernels() and (loaded or (elements >= _PAYS_TO_IMPORT and casting.can_compile()))
    kernel = imported(f"{_KERNELS}:unscale_kernel")(casting.name_of(pairs[0][0].dtype)) if compiled else None
    workers = threads.num_threads() if elements > _PAYS_TO_SHARE else 1
    if kernel is None:
        return _run_blocks(pairs, inverse, workers)
    return _run_kernel(kernel, pairs, inverse, workers)


def _run_kernel(kernel: int, pairs: Sequence[_Pair], inverse: Any, workers: int) -> bool:
    factor = np.array(inverse, pairs[0][0].dtype)
    at = data_pointer(factor)
    rows = [
        (kernel, first + i * x.itemsize, target + i * x.itemsize, min(_PIECE, x.size - i), at)
        for x, _, first, target in pairs
        for i in range(0, x.size, _PIECE)
    ]
    found = np.zeros(len(rows), np.int64)
    if rows:
        table = np.array(rows, np.int64)
        team.run_rows("llll", table, min(workers, len(rows)), results=data_pointer(found))
    return bool(found.any())


def _run_blocks(pairs: Sequence[_Pair], inverse: Any, workers: int) -> bool:
    flat = [(x.ravel("K"), out.ravel("K")) for x, out, *_ in pairs]
    blocks = [
        (x[first : first + _BLOCK], out[first : first + _BLOCK])
        for x, out in flat
        for first in range(0, x.size, _BLOCK)
    ]
    found: list[bool] = []
    team.distribute(lambda block: found.append(_unscale_plain(*block, inverse)), blocks, workers)
    return any(found)
