"""Products of modes that quantise on NumPy: both operands are rounded, then multiplied as their plan requires."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays import block_codes
from lowprec.arrays.block_layout import part_shapes
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import PreparedView, QuantizedView
from lowprec.arrays.view import CPU, NUMPY_DTYPES, ArrayView, PackedOperand, data_pointer
from lowprec.backends.cpu import numpy_execution, numpy_products, quantizing
from lowprec.backends.interface import Arguments, Executor
from lowprec.formats import FLOAT32
from lowprec.modes import MathMode
from lowprec.planning import GemmPlan, OperandSpec
from lowprec.recipes import Rule


class Rounded(NamedTuple):
    """A rounded operand."""

    view: ArrayView
    scales: Any = None  # float32 scales of its vectors or blocks
    scale: float = 1.0  # of the tensor


#: Scales of vectors from this on lose a factor, so that the product of two is below 2^127.
_LARGE_SCALE = 2.0**63
_FACTOR = 2.0**58


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan that rounds its operands, as ``native/quantized.cpp`` does."""
    assert plan.quantized is not None
    rules = plan.quantized.rules
    problem = plan.quantized.inner.problem
    axis_of_b = -min(2, len(problem.b.shape))
    multiply = _at_once(plan)
    if plan.quantized.k_piece:
        multiply = _in_pieces(plan)

    def execute(arguments: Arguments) -> None:
        of_a, of_b = (rule and rule.drawn(arguments.draw, i) for i, rule in enumerate(rules))
        a = _operand(arguments.a, -1, of_a, problem.a, plan)
        b = _operand(arguments.b, axis_of_b, of_b, problem.b, plan)
        multiply(arguments, a, b)

    return execute


def _operand(
    view: ArrayView, inner: int, rule: Rule | None, spec: OperandSpec, plan: GemmPlan
) -> Rounded:
    """Return a rounded operand; one that is prepared for the mode is rounded once."""
    if rule is None:
        return Rounded(view)
    if not view.is_prepared or view.mode != plan.mode:
        return _rounded(view, inner, rule, spec)

    def make() -> PackedOperand:
        found = _rounded(view, inner, rule, spec)
        x = found.view
        if isinstance(x, QuantizedView):
            return found, x.quantized.codes.nbytes + x.quantized.scales.nbytes
        nbytes = x.nbytes
        if found.scales is not None:
            nbytes += found.scales.nbytes
        return found._replace(view=PreparedView(x, MathMode.FP32, view.packed)), nbytes

    key = (
        "rounded",
        inner,
        spec.dtype,
        spec.blocks,
        rule._replace(stream=0),
        view.address,
        view.shape,
        view.strides,
    )
    found: Rounded = view.packed_operand(key, make)
    return found


def _once(x: Any, rule: Rule) -> Any:
    """Return the matrices of a batch without the copies of a broadcast one, unless random bits differ between these."""
    if rule.is_stochastic:
        return x
    return numpy_execution.once(x)


def _coded(view: ArrayView, inner: int, rule: Rule, spec: OperandSpec) -> Rounded:
    """Round an operand to codes; matrices of a broadcast batch once."""
    assert spec.blocks is not None
    row = spec.blocks.row
    x = _once(view.ndarray(), rule)
    with np.errstate(all="ignore"):
        if row.has_float_scales:
            values, found, scale = block_codes.rounded(np.atleast_2d(x), inner, rule, np)
            of_codes, of_scales, _ = part_shapes(x.shape, inner % x.ndim, row)
            codes = np.zeros(of_codes, np.uint8)
            codes[..., : x.shape[inner]] = (
                np.moveaxis(values, inner, -1).view(np.uint8).reshape(*of_codes[:-1], -1)
            )
            scales = np.ascontiguousarray(found.swapaxes(-1, -2)).reshape(of_scales)
        else:
            codes, scales, scale = block_codes.rounded(x, inner, rule, np, row=row)
    described = ArrayView(
        spec.dtype, view.shape, spec.strides, CPU, codes, True, data_pointer(codes)
    )
    # the parts of a `QuantizedArray` that kernels read
    quantized = SimpleNamespace(codes=codes, scales=scales, zeros=None)
    return Rounded(QuantizedView(described, spec.blocks, quantized), scale=float(scale))


def _rounded(view: ArrayView, inner: int, rule: Rule, spec: OperandSpec) -> Rounded:
    """Round an operand; matrices of a broadcast batch once, so that their scales have axes of length 1.

    A factor of large scales of vectors is moved to that of the tensor, because the product of two could overflow.
    """
    if spec.blocks is not None:
        return _coded(view, inner, rule, spec)
    x = np.atleast_2d(view.ndarray())
    dtype = NUMPY_DTYPES[spec.dtype]
    if rule.is_float8 and quantizing.reads(view) and 0 not in view.strides:
        values, scales, scale = quantizing.rounded(host_view(x), inner, rule)
        values = np.moveaxis(values, -1, inner)
        dtype = np.dtype(np.float32)  # in which these are multiplied
    else:
        with np.errstate(all="ignore"):
            values, scales, scale = block_codes.rounded(_once(x, rule), inner, rule, np)
    scale = float(scale)
    if view.ndim == 1 and rule.scaling == "vector":
        scales = scales[0]
    # without NaN
    if scales is not None and np.fmax.reduce(scales, None, initial=0) >= _LARGE_SCALE:
        scales = np.asarray(scales / _FACTOR, np.float32)  # of one vector, not a scalar
        scale *= _FACTOR
    values = np.broadcast_to(values.astype(dtype), x.shape)
    if view.ndim == 1:
        values = values[0]
    return Rounded(host_view(values), scales, scale)


def with_numbers_of_forward(plan: GemmPlan, multiply: Executor) -> Executor:
    """Return the executor of a plan that multiplies an operand as it is rounded in the forward product."""
    assert plan.quantized is not None
    rules = plan.quantized.rules

    def numbers(view: ArrayView, inner: int, rule: Rule | None) -> ArrayView:
        if rule is None:
            return view
        x = np.atleast_2d(view.ndarray())
        with np.errstate(all="ignore"):
            found = block_codes.rounded_numbers(_once(x, rule), -3 - inner, rule, np)
        found = np.broadcast_to(found, x.shape).reshape(view.shape)
        return host_view(np.ascontiguousarray(found))

    def execute(arguments: Arguments) -> None:
        of_a, of_b = (rule and rule.drawn(arguments.draw, i) for i, rule in enumerate(rules))
        a = numbers(arguments.a, -1, of_a)
        b = numbers(arguments.b, -min(2, arguments.b.ndim), of_b)
        multiply(arguments._replace(a=a, b=b))

    return execute


def _at_once(plan: GemmPlan) -> Callable[[Arguments, Rounded, Rounded], None]:
    assert plan.quantized is not None
    execute = numpy_products.prepare(plan.quantized.inner)

    def multiply(arguments: Arguments, a: Rounded, b: Rounded) -> None:
        alpha, rows = _in_range(arguments.alpha * a.scale * b.scale, a, b)
        execute(
            arguments._replace(
                a=a.view, b=b.view, alpha=alpha, row_scales=rows, col_scales=b.scales
            )
        )

    return multiply


def _in_range(alpha: Any, a: Rounded, b: Rounded) -> tuple[Any, Any]:
    """Return alpha as a finite float32 number, and the scales of rows with a factor of it.

    Times infinity, sums of zero would be NaN.
    """
    rows = a.scales
    if not FLOAT32.largest < abs(alpha) < inf:
        return alpha, rows
    if rows is None or b.scales is None:
        if rows is None:
            rows = np.ones(a.view.shape[-2:-1])
        rows = np.asarray(rows * _FACTOR, np.float32)
        alpha /= _FACTOR
    return max(min(alpha, FLOAT32.largest), -FLOAT32.largest), rows


def _in_pieces(plan: GemmPlan) -> Callable[[Arguments, Rounded, Rounded], None]:
    """Return the product as a sum over pieces of k, each with its scales; then the epilogue."""
    assert plan.quantized is not None
    quantized = plan.quantized
    k = plan.layout.k
    step = quantized.k_piece
    axis_of_b = -min(2, len(plan.problem.b.shape))
    execute = {k % step: numpy_products.prepare(quantized.last)}
    execute[step] = numpy_products.prepare(quantized.inner)

    def multiply(arguments: Arguments, a: Rounded, b: Rounded) -> None:
        total = host_view(np.zeros(plan.out_shape, np.float32))
        x = a.view.widened().ndarray()
        y = np.moveaxis(b.view.widened().ndarray(), axis_of_b, 0)
        sums = Arguments(a.view, b.view, total, total, None, a.scale * b.scale, 1.0)
        for number, start in enumerate(range(0, k, step)):
            piece = slice(start, min(start + step, k))
            multiply_piece = execute[piece.stop - start]
            multiply_piece(
                sums._replace(
                    a=host_view(x[..., piece]),
                    b=host_view(np.moveaxis(y[piece], 0, axis_of_b)),
                    row_scales=_of_piece(a.scales, quantized.rules[0], number),
                    col_scales=_of_piece(b.scales, quantized.rules[1], number, plan.layout.n),
                )
            )

        def finish(plan: GemmPlan, arguments: Arguments, a: Any, b: Any, out: Any) -> None:
            out[...] = total.ndarray().reshape(out.shape)

        numpy_execution.execute(plan, finish, arguments)

    return multiply


def _of_piece(scales: Any, rule: Rule | None, number: int, count: int | None = None) -> Any:
    """Return the scales of ``count`` vectors in a piece of k, from those of blocks of vectors."""
    if rule is None or rule.block_scale != "float32":
        return scales
    return np.repeat(scales[..., number, :], rule.block[0], -1)[..., :count]
