"""Products of modes that quantise: both operands are rounded, then multiplied by the executor of their plan."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import PreparedView
from lowprec.arrays.view import NUMPY_DTYPES, ArrayView, PackedOperand
from lowprec.backends.cpu import numpy_products
from lowprec.backends.cpu.quantizing import quantize_view
from lowprec.backends.cpu.workspaces import Workspace
from lowprec.backends.interface import Arguments, Executor
from lowprec.formats import FLOAT32, DType
from lowprec.modes import MathMode
from lowprec.planning import GemmPlan
from lowprec.recipes import Rule

#: A rounded operand, the float32 scales of its vectors or blocks or None, and the scale of the tensor.
Rounded = tuple[ArrayView, Any, float]
#: Vectors of ``b`` in a block of ``fp8_blocks``.
_VECTORS = 128
#: Scales of vectors from this on lose a factor, so that the product of two is below 2^127.
_LARGE_SCALE, _FACTOR = 2.0**63, 2.0**58
Prepare = Callable[[GemmPlan], Executor]


def prepare(plan: GemmPlan, prepare_inner: Prepare) -> Executor:
    """Return the executor of a plan that rounds its operands; ``prepare_inner`` that of the rounded ones."""
    assert plan.quantized is not None
    axis_of_b = -2 if len(plan.problem.b.shape) > 1 else -1
    rules, problem = plan.quantized.rules, plan.quantized.inner.problem
    multiply = (_in_pieces if plan.quantized.k_piece else _at_once)(plan, prepare_inner)

    def execute(arguments: Arguments) -> None:
        of_a, of_b = (rule and rule.drawn(arguments.draw, i) for i, rule in enumerate(rules))
        memory = Workspace()
        a = _operand(arguments.a, -1, of_a, problem.a.dtype, plan, memory)
        b = _operand(arguments.b, axis_of_b, of_b, problem.b.dtype, plan, memory)
        multiply(arguments, a, b)
        memory.close()

    return execute


def _operand(
    view: ArrayView, inner: int, rule: Rule | None, dtype: DType, plan: GemmPlan, memory: Workspace
) -> Rounded:
    """Return a rounded operand; one that is prepared for the mode is rounded once."""
    if rule is None:
        return view, None, 1.0
    if not view.is_prepared or view.mode != plan.mode:
        return _rounded(view, inner, rule, dtype, memory.empty)

    def make() -> PackedOperand:
        x, scales, scale = _rounded(view, inner, rule, dtype)
        kept = PreparedView(x, MathMode.FP32, view.packed)
        return PackedOperand((kept, scales, scale), x.nbytes + (0 if scales is None else scales.nbytes))

    key = "rounded", inner, dtype, rule._replace(stream=0), view.address, view.shape, view.strides
    found: Rounded = view.packed_operand(key, make)
    return found


def _rounded(view: ArrayView, inner: int, rule: Rule, dtype: DType, empty: Any = np.empty) -> Rounded:
    """Round an operand; matrices of a broadcast batch once, so that their scales have axes of length 1.

    A factor of large scales of vectors is moved to that of the tensor, because the product of two could overflow.
    """
    shape, strides = view.shape, view.strides
    repeated = [s == 0 and n > 1 for s, n in zip(strides[:-2], shape, strict=False)]
    once = (*(1 if again else n for again, n in zip(repeated, shape, strict=False)), *shape[-2:])
    if view.ndim == 1:
        x, scales, scale = _quantized(view.strided((1, *shape), (0, *strides)), -1, rule, dtype, empty)
        x = x.strided(shape, x.strides[1:])
        if rule.scaling == "vector":
            scales = scales.reshape(scales.shape[1:])
    else:
        x, scales, scale = _quantized(view.strided(once, strides) if any(repeated) else view, inner, rule, dtype, empty)
        if any(repeated):
            own = (0 if again else s for again, s in zip(repeated, x.strides, strict=False))
            x = x.strided(shape, (*own, *x.strides[-2:]))
    if scales is not None and scales.size and scales.max() >= _LARGE_SCALE:
        scales, scale = np.asarray(scales / _FACTOR, np.float32), scale * _FACTOR  # of one vector, not a scalar
    return x, scales, scale


def _quantized(view: ArrayView, inner: int, rule: Rule, dtype: DType, empty: Any) -> Rounded:
    """Round matrices to numbers of a type, which represents them."""
    x, scales, scale = quantize_view(view, inner, rule, empty)
    return x if x.dtype is dtype else host_view(x.ndarray().astype(NUMPY_DTYPES[dtype])), scales, scale


def _at_once(plan: GemmPlan, prepare_inner: Prepare) -> Callable[[Arguments, Rounded, Rounded], None]:
    assert plan.quantized is not None
    execute = prepare_inner(plan.quantized.inner)

    def multiply(arguments: Arguments, a: Rounded, b: Rounded) -> None:
        alpha, rows = _in_range(arguments.alpha * a[2] * b[2], a, b)
        execute(arguments._replace(a=a[0], b=b[0], alpha=alpha, row_scales=rows, col_scales=b[1]))

    return multiply


def _in_range(alpha: Any, a: Rounded, b: Rounded) -> tuple[Any, Any]:
    """Return alpha as a finite float32 number, and the scales of rows with a factor of it.

    Times infinity, sums of zero would be NaN.
    """
    rows = a[1]
    if FLOAT32.largest < abs(alpha) < inf:
        if rows is None or b[1] is None:
            rows = np.asarray((np.ones(a[0].shape[-2:-1]) if rows is None else rows) * _FACTOR, np.float32)
            alpha /= _FACTOR
        alpha = max(min(alpha, FLOAT32.largest), -FLOAT32.largest)
    return alpha, rows


def _in_pieces(plan: GemmPlan, prepare_inner: Prepare) -> Callable[[Arguments, Rounded, Rounded], None]:
    """Return the product as a sum over pieces of k, each with its scales; then the epilogue."""
    assert plan.quantized is not None
    inner, step, k = plan.quantized.inner, plan.quantized.k_piece, plan.layout.k
    problem = inner.problem
    in_blocks = any(rule is not None and rule.block_scale == "float32" for rule in plan.quantized.rules)
    axes = -1, -2 if len(problem.b.shape) > 1 else -1
    counts = (*problem.a.shape[-2:-1], 1)[0], (*problem.b.shape[-1:], 1)[len(problem.b.shape) == 1]
    execute = {n: prepare_inner(x) for n, x in ((step, inner), (k % step or step, plan.quantized.last))}

    def multiply(arguments: Arguments, a: Rounded, b: Rounded) -> None:
        total = host_view(np.zeros(plan.out_shape, np.float32))
        views = [x[0].widened() for x in (a, b)]
        for number, start in enumerate(range(0, k, step)):
            length = min(step, k - start)
            x, y = (_part(v, axis, start, length) for v, axis in zip(views, axes, strict=True))
            rows, cols = (
                _of_piece(x[1], number, count) if in_blocks else x[1] for x, count in zip((a, b), counts, strict=True)
            )
            execute[length](Arguments(x, y, total, total, None, a[2] * b[2], 1.0, row_scales=rows, col_scales=cols))

        def finish(plan: GemmPlan, arguments: Arguments, a: Any, b: Any, out: Any) -> None:
            out[...] = total.ndarray().reshape(out.shape)

        numpy_products.execute(plan, finish, arguments)

    return multiply


def _part(view: ArrayView, axis: int, start: int, length: int) -> ArrayView:
    shape = list(view.shape)
    shape[axis] = length
    return view.strided(tuple(shape), view.strides, start * view.strides[axis])


def _of_piece(scales: Any, number: int, count: int) -> Any:
    """Return the scales of all vectors in a piece of k, from those of blocks of vectors."""
    if scales is None:
        return None
    found = scales[..., number, :]
    return found if found.shape[-1] == count else np.repeat(found, _VECTORS, -1)[..., :count]
