"""Division of gradients in host memory by a loss scale, with the detection of Inf and NaN in the same pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowprec.arrays.view import NUMPY_DTYPES, data_pointer
from lowprec.backends.cpu import library, threads
from lowprec.formats import DType

#: ``type`` of an ``lp_flat`` by element type.
_TYPES = {
    NUMPY_DTYPES[DType.FLOAT32]: 0,
    NUMPY_DTYPES[DType.BFLOAT16]: 1,
    NUMPY_DTYPES[DType.FLOAT64]: 100,
}

#: Elements per block with NumPy alone; source, result and flags fit the L2 cache.
_BLOCK = 1 << 16


def unscale(pairs: Sequence[tuple[Any, Any]], inverse: Any) -> bool:
    """Multiply float32, float64 or bfloat16 arrays by ``inverse``; return whether any has Inf or NaN."""
    functions = library.library()
    if not library.units():
        functions = None
    not_finite = False
    rows = []
    for x, out in pairs:
        first = data_pointer(x)
        target = data_pointer(out)
        if not is_flat(x, out, first, target):
            not_finite |= _unscale_plain(x, out, inverse)
        elif functions is not None and x.dtype in _TYPES:
            rows.append((first, target, x.size, _TYPES[x.dtype]))
        else:
            source = x.ravel("K")
            result = out.ravel("K")
            for i in range(0, x.size, _BLOCK):
                not_finite |= _unscale_plain(
                    source[i : i + _BLOCK], result[i : i + _BLOCK], inverse
                )
    if functions is not None and rows:
        table = np.array(rows, np.int64)  # of lp_flat
        not_finite |= bool(
            functions.unscale(data_pointer(table), len(rows), inverse, threads.num_threads())
        )
    return not_finite


def is_flat(x: Any, out: Any, first: int, target: int) -> bool:
    """Whether both arrays are contiguous in the same order, and identical or not overlapping."""
    one_run = x.flags.forc and x.strides == out.strides
    return one_run and (first == target or abs(first - target) >= x.nbytes)


def _unscale_plain(x: Any, out: Any, inverse: Any) -> bool:
    with np.errstate(all="ignore"):
        not_finite = not np.isfinite(x).all()
        if x.dtype.itemsize == 2:  # rounded once, from float32
            out[...] = x.astype(np.float32) * inverse
        else:
            np.multiply(x, x.dtype.type(inverse), out=out)
    return not_finite
