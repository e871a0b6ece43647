"""The executor cache: one executor per device, dtypes, shapes, strides, mode and epilogue."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from lowprec.arrays import ArrayView
from lowprec.backends import Arguments, Backend, Executor, backend_of
from lowprec.core.arguments import (
    PLAIN,
    Options,
    check_devices,
    check_scalars,
    check_sizes,
    spec_of,
)
from lowprec.errors import warn
from lowprec.formats import DType
from lowprec.modes import Mode, ModeSource, ResolvedMode, row
from lowprec.planning import Capabilities, GemmPlan, plan_gemm
from lowprec.policy.resolution import FULL_FP32
from lowprec.recipes import Recipe
from lowprec.util.lock import locked
from lowprec.util.strides import Shape

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
    out_shape: Shape
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
    of_options = None if options is PLAIN else options.key
    key: tuple[Any, ...] = (mode, of_options, x.layout, y.layout)
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
        execute = functools.partial(_execute_drawn, entry.execute, draw)
        entry = entry._replace(execute=execute)
    if observed:
        observer = _observer  # another thread may remove it
        if observer is not None:
            entry = observer(entry, resolved, x, y)
        if _logs(_INFO):
            execute = functools.partial(_execute_logged, entry, resolved)
            entry = entry._replace(execute=execute)
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
    verb = "took" if arguments.out.device.is_host else "queued in"
    operands = f"{a.dtype} {a.shape} x {b.dtype} {b.shape}"
    _log.info(
        "matmul %s, %s: kernel %s, %s %.3g ms", operands, mode, plan.kernel, verb, elapsed * 1e3
    )


def _execute_drawn(execute: Executor, draw: int, arguments: Arguments) -> None:
    execute(arguments._replace(draw=draw))


def _has_no_effect(plan: GemmPlan) -> bool:
    dtype = plan.compute_dtype
    if dtype not in _CONVERTED or plan.mode in FULL_FP32:
        return False
    return not row(plan.mode).acts(dtype)


def warn_without_effect(plan: GemmPlan) -> None:
    """Warn, once per process, that a ``math_mode=`` argument does not act on operands of this type."""
    if _has_no_effect(plan):
        other = _CONVERTED[plan.compute_dtype]
        convert = f"; convert them to {other} to use the mode" * row(plan.mode).acts(other)
        warn(plan.note + convert, once="no effect")


def _warn_widened(plan: GemmPlan) -> None:
    """Warn, once per process, that a quantised ``b`` is widened because its blocks are along another axis than k."""
    b = plan.problem.b
    if b.blocks is None or b.blocks.format not in plan.kernel_row.decodes_b:
        return
    k_axis = -min(2, len(b.shape))
    if b.blocks.axis != k_axis:
        why = f"b is quantised along axis {b.blocks.axis}, so its numbers are widened in each product, which is slow"
        axes = f"axis={k_axis}, or -1 for the weight of linear"
        warn(f"{why}; quantise it along the axis that is summed over: {axes}", once="widened")


def plan_of(
    capabilities: Capabilities, mode: Mode, x: ArrayView, y: ArrayView, options: Options
) -> GemmPlan:
    """Return the plan of a product; raise if its arguments do not match, or no product supports them."""
    views = options.views(x, y)
    check_devices(views)
    problem = options.problem(spec_of(x), spec_of(y))
    plan = plan_gemm(problem, capabilities, mode)
    check_scalars(options, plan.compute_dtype)
    check_sizes(views, plan.out_shape, plan.out_dtype)
    return plan


def _added(
    key: tuple[Any, ...], mode: Mode, x: ArrayView, y: ArrayView, options: Options
) -> CachedExecutor:
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
        options = options._replace(out=None, out_dtype=dtype)
        plan = plan_of(capabilities, mode, x, y, options)
    execute = backend.prepare(plan)
    without_effect = _has_no_effect(plan)
    entry = CachedExecutor(
        execute, plan.out_shape, plan.out_dtype, plan, backend, staged, without_effect
    )
    _executors[key] = entry
    return entry
