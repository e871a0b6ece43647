"""The executor cache: one executor per device, dtypes, shapes, strides, mode and epilogue."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from lowprec.arrays import ArrayView
from lowprec.backends import Arguments, Backend, Executor, backend_of
from lowprec.core.arguments import PLAIN, Options, check_devices, check_scalars, check_sizes, spec_of
from lowprec.errors import warn
from lowprec.formats import DType
from lowprec.modes import Mode, ModeSource, ResolvedMode, row
from lowprec.planning import Capabilities, GemmPlan, plan_gemm
from lowprec.policy.resolution import FULL_FP32
from lowprec.recipes import Recipe
from lowprec.util.lock import locked

_CACHE_SIZE = 4096
_log = logging.getLogger("lowprec")
_logs = _log.isEnabledFor
_INFO = logging.INFO
#: The type to convert to, for the warning.
_CONVERTED = {DType.FLOAT64: DType.FLOAT32, DType.COMPLEX128: DType.COMPLEX64}
_CONVERTED |= {single: double for double, single in _CONVERTED.items()}


class CachedExecutor(NamedTuple):
    """An executor with its plan, backend, and the shape and dtype of its result."""

    execute: Executor
    out_shape: tuple[int, ...]
    out_dtype: DType
    plan: GemmPlan
    backend: Backend
    staged: bool = False  # the result is copied to an ``out`` that overlaps an operand
    without_effect: bool = False  # the mode does not act on operands of this type


#: Called before each product with its executor and operands; returns the executor to run.
Observer: TypeAlias = Callable[[CachedExecutor, ResolvedMode, ArrayView, ArrayView], CachedExecutor]

_observer: Observer | None = None
#: Read without the lock; operations of a dictionary are atomic.
_executors: dict[tuple[Any, ...], CachedExecutor] = {}


def observe(observer: Observer | None) -> None:
    """Call ``observer`` before every later product; None removes it."""
    global _observer
    _observer = observer


def clear_caches() -> None:
    _executors.clear()
    plan_gemm.cache_clear()


def look_up(
    resolved: ResolvedMode, x: ArrayView, y: ArrayView, options: Options, *, observed: bool = True
) -> CachedExecutor:
    """Return the cached executor for these operands, or the observer's replacement if ``observed``."""
    mode = resolved.mode
    draw = 0
    if isinstance(mode, Recipe):
        draw = mode.draw
        mode = mode.plannable
    key: tuple[Any, ...] = mode, None if options is PLAIN else options.key, x.layout, y.layout
    if resolved.emulates is not None:
        key = (*key, resolved.emulates)
    if options is not PLAIN and options.out is not None and options.needs_staging(x, y):
        key = (*key, "staged")
    entry = _executors.get(key)
    if entry is None:
        entry = locked(_added, key, mode, x, y, options)
        for oldest in list(_executors)[:-_CACHE_SIZE]:  # dictionaries keep their order
            _executors.pop(oldest, None)
        _warn_widened(entry.plan)
    if entry.without_effect and resolved.source is ModeSource.ARGUMENT:
        warn_without_effect(entry.plan)
    if draw:
        entry = entry._replace(execute=functools.partial(_execute_drawn, entry.execute, draw))
    if observed:
        observer = _observer  # another thread may remove it
        if observer is not None:
            entry = observer(entry, resolved, x, y)
        if _logs(_INFO):
            entry = entry._replace(execute=functools.partial(_execute_logged, entry, resolved))
    return entry


def _execute_logged(entry: CachedExecutor, resolved: ResolvedMode, arguments: Arguments) -> None:
    start = time.perf_counter()
    entry.execute(arguments)
    elapsed = time.perf_counter() - start
    plan = entry.plan
    a = plan.problem.a
    b = plan.problem.b
    mode = "no mode acts"
    if plan.mode_has_effect:
        mode = f"{plan.mode} ({resolved.source})"
    _log.info(
        "matmul %s %s x %s %s, %s: kernel %s, %s %.3g ms", a.dtype, a.shape, b.dtype, b.shape, mode, plan.kernel,
        "took" if arguments.out.device.is_host else "queued in", elapsed * 1e3,
    )  # fmt: skip


def _execute_drawn(execute: Executor, draw: int, arguments: Arguments) -> None:
    execute(arguments._replace(draw=draw))


def _has_no_effect(plan: GemmPlan) -> bool:
    other = plan.compute_dtype in _CONVERTED
    return other and plan.mode not in FULL_FP32 and not row(plan.mode).acts(plan.compute_dtype)


def warn_without_effect(plan: GemmPlan) -> None:
    """Warn, once per process, that a ``math_mode=`` argument does not act on operands of this type."""
    if _has_no_effect(plan):
        other = _CONVERTED[plan.compute_dtype]
        convert = f"; convert them to {other} to use the mode" * row(plan.mode).acts(other)
        warn(plan.note + convert, once="no effect")


def _warn_widened(plan: GemmPlan) -> None:
    """Warn, once per process, that a quantised ``b`` is widened because its blocks are along another axis than k."""
    b = plan.problem.b
    kernel = plan.kernel_row
    is_decoded = b.blocks and b.blocks.format in kernel.decodes_b
    if b.blocks and is_decoded and b.blocks.axis != (k_axis := -min(2, len(b.shape))):
        why = f"b is quantised along axis {b.blocks.axis}, so its numbers are widened in each product, which is slow"
        axes = f"axis={k_axis}, or -1 for the weight of linear"
        warn(f"{why}; quantise it along the axis that is summed over: {axes}", once="widened")


def plan_of(capabilities: Capabilities, mode: Mode, x: ArrayView, y: ArrayView, options: Options) -> GemmPlan:
    """Return the plan of a product; raise if its arguments do not match, or no product supports them."""
    views = options.views(x, y)
    check_devices(views)
    plan = plan_gemm(options.problem(spec_of(x), spec_of(y)), capabilities, mode)
    check_scalars(options, plan.compute_dtype)
    check_sizes(views, plan.out_shape, plan.out_dtype)
    return plan


def _added(key: tuple[Any, ...], mode: Mode, x: ArrayView, y: ArrayView, options: Options) -> CachedExecutor:
    entry = _executors.get(key)
    if entry is not None:  # added by another thread
        return entry
    check_devices(options.views(x, y))  # before a device's capabilities
    backend = backend_of(x.device)
    capabilities = backend.capabilities(x.device)
    staged = key[-1] == "staged"
    plan = plan_of(capabilities, mode, x, y, options)
    if staged:
        dtype = backend.staging_dtype(plan.out_dtype)
        plan = plan_of(capabilities, mode, x, y, options._replace(out=None, out_dtype=dtype))
    entry = _executors[key] = CachedExecutor(
        backend.prepare(plan), plan.out_shape, plan.out_dtype, plan, backend, staged, _has_no_effect(plan)
    )
    return entry
