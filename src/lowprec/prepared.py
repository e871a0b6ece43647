"""Plans ready to run, kept for the next call like the one they were made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from lowprec.arrays import ArrayView
from lowprec.backends import Executor, backend_of
from lowprec.formats import DType
from lowprec.modes import MathMode, ResolvedMode
from lowprec.planning import GemmPlan, plan_gemm
from lowprec.request import PLAIN, Request, check_devices, check_scalars, check_sizes, spec_of

__all__ = ["Observer", "Prepared", "look_up", "observe"]

_CACHE_SIZE = 4096


class Prepared(NamedTuple):
    """An executor, what its result is like, and the plan behind it."""

    execute: Executor
    out_shape: tuple[int, ...]
    out_dtype: DType
    plan: GemmPlan


#: Sees what is about to run on which operands, and returns what runs in its place.
Observer: TypeAlias = Callable[[Prepared, ResolvedMode, ArrayView, ArrayView], Prepared]

_observer: Observer | None = None
#: Without a lock, which a fork or a signal handler could find taken: each operation of a dictionary is atomic.
_prepared: dict[tuple[Any, ...], Prepared] = {}


def observe(observer: Observer | None) -> None:
    """Show every product from now on to ``observer`` before it runs; None ends that."""
    global _observer
    _observer = observer


def look_up(
    resolved: ResolvedMode, x: ArrayView, y: ArrayView, request: Request, *, observed: bool = True
) -> Prepared:
    """Return the executor for these operands, from the cache where a call like this one was made before.

    With ``observed``, it is the one that also tells the observer, where there is one.
    """
    key = (
        resolved.mode, None if request is PLAIN else request.key,
        x.device, x.dtype, x.shape, x.strides,
        y.device, y.dtype, y.shape, y.strides,
    )  # fmt: skip
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepared[key] = _prepare(resolved.mode, x, y, request)
        excess = len(_prepared) - _CACHE_SIZE
        if excess > 0:
            for oldest in list(_prepared)[:excess]:  # dictionaries keep their order
                _prepared.pop(oldest, None)
    observer = _observer
    if observer is None or not observed:
        return prepared
    return observer(prepared, resolved, x, y)


def _prepare(mode: MathMode, x: ArrayView, y: ArrayView, request: Request) -> Prepared:
    views = request.views(x, y)
    check_devices(views)
    backend = backend_of(x.device)
    made = plan_gemm(request.problem(spec_of(x), spec_of(y)), backend.capabilities(x.device), mode)
    check_scalars(request, made.compute_dtype)
    check_sizes(views, made.out_shape, made.out_dtype)
    return Prepared(backend.prepare(made), made.out_shape, made.out_dtype, made)
