"""Plans ready to run, kept for the next call like the one they were made for."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from lowprec.arrays import ArrayView
from lowprec.backends import Executor, backend_of
from lowprec.formats import DType
from lowprec.modes import MathMode
from lowprec.planning import plan_gemm
from lowprec.request import PLAIN, Request, check_devices, check_scalars, spec_of

__all__ = ["Prepared", "look_up"]

_CACHE_SIZE = 4096


class Prepared(NamedTuple):
    """An executor, and what its result is like."""

    execute: Executor
    out_shape: tuple[int, ...]
    out_dtype: DType


_prepared: dict[tuple[Any, ...], Prepared] = {}
_lock = threading.Lock()


def look_up(mode: MathMode, x: ArrayView, y: ArrayView, request: Request) -> Prepared:
    """Return the executor for these operands, from the cache where a call like this one was made before."""
    key = (
        mode, None if request is PLAIN else request.key,
        x.device, x.dtype, x.shape, x.strides,
        y.device, y.dtype, y.shape, y.strides,
    )  # fmt: skip
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepare(mode, x, y, request)
        with _lock:
            if len(_prepared) >= _CACHE_SIZE:
                # Dictionaries keep their order: the oldest entry goes.
                del _prepared[next(iter(_prepared))]
            _prepared[key] = prepared
    return prepared


def _prepare(mode: MathMode, x: ArrayView, y: ArrayView, request: Request) -> Prepared:
    check_devices(request.views(x, y))
    backend = backend_of(x.device)
    made = plan_gemm(request.problem(spec_of(x), spec_of(y)), backend.capabilities(x.device), mode)
    check_scalars(request, made.compute_dtype)
    return Prepared(backend.prepare(made), made.out_shape, made.out_dtype)
