"""Products of arrays by an emulated tensor core: batches and complex numbers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import library, threads
from lowprec.backends.cpu.emulation import arrays
from lowprec.planning.tensor_cores import Accumulation


def multiply(a: Any, b: Any, c: Any | None, model: Accumulation) -> Any:
    """Return ``c + a @ b`` in the arithmetic of a tensor core, as a new float32 array; batches broadcast.

    ``a`` (..., m, k) and ``b`` (..., k, n) are float32 numbers of the format of ``model``; ``c`` is None for zero.
    """
    shapes = [x.shape[:-2] for x in (a, b, c) if x is not None]
    batch = np.broadcast_shapes(*shapes)
    out = np.zeros((*batch, a.shape[-2], b.shape[-1]), np.float32)
    if c is not None:
        out[...] = c
    a, b = (np.broadcast_to(x, batch + x.shape[-2:]) for x in (a, b))
    for i in np.ndindex(batch):
        _accumulate(a[i], b[i], out[i], model)
    return out


def _accumulate(a: Any, b: Any, c: Any, model: Accumulation) -> None:
    """Compute ``c += a @ b`` in place; ``c`` is contiguous."""
    functions, status = library.library(), library.UNSUPPORTED
    if functions is not None:
        a, b = (np.ascontiguousarray(x, np.float32) for x in (a, b))
        core = library.TensorCoreModel(*model[1:-1])
        status = functions.emulate(
            data_pointer(a), data_pointer(b), data_pointer(c), *c.shape, a.shape[-1],
            ctypes.addressof(core), threads.num_threads(),
        )  # fmt: skip
    if status == library.UNSUPPORTED:
        arrays.accumulate(a, b, c, model)
