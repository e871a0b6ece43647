"""Products by NumPy: every plan without the compiled library; float64, complex128 and mode ``fp64`` in any case.

Operands are scaled, split and rounded as the plan requires, and multiplied by ``numpy.matmul`` in the accumulator's
type. For Inf, NaN and values that overflow in the format the second part of a split operand is NaN, and so are the
sums, which are recomputed from the unsplit operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from lowprec.arrays import block_codes
from lowprec.arrays.narrow_numbers import rounded_to_odd
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.view import NUMPY_DTYPES, ArrayView, PackedOperand, data_pointer
from lowprec.backends.cpu.emulation import arithmetic, products
from lowprec.backends.cpu.library import untaken
from lowprec.backends.interface import Arguments, Executor
from lowprec.formats import FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT32, TF32, DType, NumberFormat
from lowprec.modes import ModeRow, row
from lowprec.planning import ACTIVATIONS, GemmPlan, Summation
from lowprec.planning.layout import GemmLayout, stacked_layout
from lowprec.planning.schedule import chunk_length
from lowprec.planning.stored import kept_modes

#: Elements per block, which fits the cache; length of sums of int8 products that are exact in float32.
_BLOCK, _INT8_CHUNK = 1 << 16, 1 << 10

#: The rounded parts of an operand, and the exponents by which rows of ``a`` or columns of ``b`` were scaled, or None.
Split: TypeAlias = tuple[list[Any], Any]


def prepare(plan: GemmPlan) -> Executor:
    if _is_plain(plan):
        return _matmul
    if plan.compute_dtype is DType.INT8:
        return functools.partial(execute, plan, _multiply_int8)
    kernel = plan.kernel_row
    if kernel.summation is Summation.BLOCKS:
        return functools.partial(_execute_blocks, plan)
    times = _emulated(plan, *(kernel.formats or ())) if kernel.emulates else multiply
    return functools.partial(execute, plan, functools.partial(_sum_products, times))


def _is_plain(plan: GemmPlan) -> bool:
    problem, layout = plan.problem, plan.layout
    return (
        problem.a.dtype is problem.b.dtype is plan.out_dtype is plan.accumulator
        and _rounding(plan) is None
        and len(plan.schedule) == 1  # no chunks of k
        and not (problem.has_epilogue or layout.collapsed or plan.kernel_row.emulates)
        and all(x.blas_expressible for x in (layout.a, layout.b, layout.out))
    )


def _matmul(arguments: Arguments) -> None:
    with np.errstate(all="ignore"):
        untaken(np.matmul, arguments.a.ndarray(), arguments.b.ndarray(), out=arguments.out.ndarray())


def multiply(a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` by ``numpy.matmul``, whose loop runs over batches; arrays of one dtype, at least 2-D."""
    a, b = (x if _is_expressible(x) else np.ascontiguousarray(x) for x in (a, b))
    if _is_expressible(out):
        untaken(np.matmul, a, b, out=out)
    else:
        out[...] = untaken(np.matmul, a, b)


def _is_expressible(x: Any) -> bool:
    """Whether BLAS reads the matrices of ``x`` in place; if not, NumPy multiplies by a slow loop of its own."""
    (rows, cols), (row_step, col_step), item = x.shape[-2:], x.strides[-2:], x.itemsize
    in_rows = col_step == item and row_step >= cols * item and row_step % item == 0
    in_columns = row_step == item and col_step >= rows * item and col_step % item == 0
    return bool(in_rows or in_columns or x.flags.c_contiguous)


def execute(plan: GemmPlan, multiply: Callable[..., None], arguments: Arguments) -> None:
    a, b, out, c = _stacks(plan, arguments)
    dtype = NUMPY_DTYPES[plan.accumulator]
    # ``c`` may be ``out``, so the product must not overwrite it before it is read.
    product = out if out.dtype == dtype and c is None else np.empty(out.shape, dtype)
    with np.errstate(all="ignore"):
        multiply(plan, arguments, a, b, product)
        _scale(plan, arguments, product)
        if plan.problem.has_epilogue or product is not out:
            _apply_epilogue(plan, arguments, product, out, c)


def _scale(plan: GemmPlan, arguments: Arguments, product: Any) -> None:
    """Multiply a product by the scales of its rows times those of its columns, as the kernels do."""
    if arguments.row_scales is None is arguments.col_scales:
        return
    layout = stacked_layout(plan.problem.a, plan.problem.b)
    rows, cols = scales_of_batch(layout, arguments)
    if cols is not None:
        cols = cols[(0,) * len(layout.batch_shape)] if plan.layout.collapsed else cols[..., None, :]
    if rows is not None:
        rows = rows.reshape((*product.shape[:-1], 1))
        cols = rows if cols is None else rows * cols
    product *= cols


def scales_of_batch(layout: GemmLayout, arguments: Arguments) -> tuple[Any, Any]:
    """Return the scales of rows and columns of all matrices of a batch, None for none."""
    given = (arguments.row_scales, layout.m), (arguments.col_scales, layout.n)
    rows, cols = (
        None if scales is None else np.broadcast_to(scales, (*layout.batch_shape, count)) for scales, count in given
    )
    return rows, cols


def _stacks(plan: GemmPlan, arguments: Arguments) -> tuple[Any, Any, Any, Any]:
    """Return a, b, out and c (None if beta is zero) as matrices or stacks of them; batches of a and b broadcast."""
    a, b, out = arguments.a.ndarray(), arguments.b.ndarray(), arguments.out.ndarray()
    if b.ndim == 1:
        b, out = b[:, None], out[..., None]
    if a.ndim == 1:
        a, out = a[None, :], out[..., None, :]
    if plan.layout.collapsed:
        m = plan.layout.m  # explicit, because -1 is ambiguous if k or n is 0
        a = np.broadcast_to(a, out.shape[:-2] + a.shape[-2:]).reshape(m, a.shape[-1])
        b = b[(0,) * (b.ndim - 2)]
        out = out.reshape(m, out.shape[-1], copy=False)
    c = None
    if arguments.c is not None and plan.problem.has_beta:
        c = np.broadcast_to(arguments.c.ndarray(), plan.out_shape).reshape(out.shape)
    if out.ndim > 2:  # without the copies of a broadcast matrix, which would each be rounded
        a, b = (x[tuple([slice(None) if step else slice(1) for step in x.strides[:-2]])] for x in (a, b))
    return a, b, out, c


def set_to_zero(plan: GemmPlan, arguments: Arguments, a: Any, b: Any, out: Any) -> None:
    """Compute the product where ``k`` or alpha is zero."""
    out[...] = 0


def _multiply_int8(plan: GemmPlan, arguments: Arguments, a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` in int32, exactly, by float32 products over chunks of k."""
    product, total = np.empty(out.shape, np.float32), np.zeros(out.shape, np.int32)
    for first in range(0, a.shape[-1], _INT8_CHUNK):
        k = slice(first, first + _INT8_CHUNK)
        multiply(a[..., k].astype(np.float32), b[..., k, :].astype(np.float32), product)
        total += product.astype(np.int32)
    out[...] = total


def _execute_blocks(plan: GemmPlan, arguments: Arguments) -> None:
    """Multiply integers in blocks with the bits of the kernels."""
    numbers, scales = zip(*map(_integers, arguments[:2]), strict=True)
    of_a, of_b, *_ = _stacks(plan, arguments._replace(a=scales[0], b=scales[1]))
    rows = [x.blocks.row for x in (plan.problem.a, plan.problem.b) if x.blocks]
    size = 16 if any(row.block == 16 for row in rows) else 32
    rounds = rows[1].has_float_scales

    def multiply(plan: GemmPlan, arguments: Arguments, a: Any, b: Any, out: Any) -> None:
        k = a.shape[-1]
        step = chunk_length(k, plan.kernel_row.k_chunk)
        for start in range(0, k, step):
            total = np.zeros(out.shape, np.float32)
            for first in range(start, min(start + step, k), size):
                part = slice(first, min(first + size, start + step, k))
                scaled = np.matmul(a[..., part], b[..., part, :]) * of_b[..., first : first + 1, :]
                scaled = scaled.astype(np.float32).astype(np.float64) if rounds else scaled
                total = _rounded_sum(scaled * of_a[..., first : first + 1], total)
            out[...] = out + total if start else total

    execute(plan, multiply, arguments._replace(a=numbers[0], b=numbers[1]))


def _integers(view: ArrayView) -> tuple[ArrayView, ArrayView]:
    """Return the numbers of codes without scales, and the scale of each, in float64."""
    assert view.blocks is not None
    row, axis, stored = view.blocks.row.of_length(view.shape[view.blocks.axis]), view.blocks.axis, view.quantized
    codes, scales = np.asarray(stored.codes), np.asarray(stored.scales)
    zeros = None if stored.zeros is None else np.asarray(stored.zeros).reshape(-1)
    assert row.scales is not None
    dtype = np.dtype(getattr(ml_dtypes, row.scales.name, row.scales.name))
    ones = np.ones(scales.size, dtype).view(scales.dtype)
    numbers = block_codes.decode(codes.reshape((scales.size, -1)), ones, zeros, row, 1.0, np)
    spread = np.repeat(scales.view(dtype).astype(np.float64), row.block, -1)
    found = (np.moveaxis(x.reshape(spread.shape)[..., : view.shape[axis]], -1, axis) for x in (numbers, spread))
    of_numbers, of_scales = (host_view(np.broadcast_to(x.astype(np.float64), view.shape)) for x in found)
    return of_numbers, of_scales


def _rounded_sum(x: Any, y: Any) -> Any:
    """Return float64 numbers plus float32 ones, rounded once to float32: the float64 sum is rounded to odd."""
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)
    inexact = (error != 0) & np.isfinite(total) & (total.view(np.int64) & 1 == 0)
    away = np.where((error > 0) == (total > 0), 1, -1)
    return (total.view(np.int64) + np.where(inexact, away, 0)).view(np.float64).astype(np.float32)


def _sum_products(
    times: Callable[[Any, Any, Any], None], plan: GemmPlan, arguments: Arguments, a: Any, b: Any, out: Any
) -> None:
    dtype = out.dtype
    a_parts, a_exponents = _operand(plan, 0, arguments.a, a, dtype)
    b_parts, b_exponents = _operand(plan, 1, arguments.b, b, dtype)
    term = np.empty(out.shape, dtype) if len(plan.schedule) > 1 else None
    for product in plan.schedule:
        k, to = slice(product.k_start, product.k_stop), term if product.accumulates else out
        times(a_parts[product.a_part][..., k], b_parts[product.b_part][..., k, :], to)
        if product.factor != 1:
            to *= dtype.type(product.factor)
        if product.accumulates:
            out += to
    finite = max(plan.split) == 1 or np.isfinite(out)
    exponents = [x for x in (a_exponents, b_exponents) if x is not None]
    if exponents:
        for component in _components(out):
            np.ldexp(component, -sum(exponents), out=component)
    if not np.all(finite):
        whole = np.empty(out.shape, dtype)
        multiply(a.astype(dtype, copy=False), b.astype(dtype, copy=False), whole)
        np.copyto(out, whole, where=~finite)


def _emulated(plan: GemmPlan, fmt: str) -> Callable[[Any, Any, Any], None]:
    """Return the multiplication by an architecture's tensor cores, in place of :func:`multiply`.

    Both FP8 types have one arithmetic. If an operand is E4M3 and the other E5M2, numbers of E4M3 are multiplied by a
    power of two, by which their least exponent becomes that of E5M2, and the sums by its inverse.
    """
    architecture = plan.kernel_row.emulates
    assert architecture is not None
    times = functools.partial(products.multiply, model=arithmetic.arithmetic(architecture, fmt))
    types = plan.problem.a.dtype, plan.problem.b.dtype
    if DType.FLOAT8_E5M2 in types and types[0] is not types[1]:
        least = FLOAT8_E5M2.emin - FLOAT8_E4M3FN.emin
        first, second = ((least, 0)[x is DType.FLOAT8_E5M2] for x in types)
        of_e5m2 = functools.partial(products.multiply, model=arithmetic.arithmetic(architecture, FLOAT8_E5M2.name))

        def multiply_types(a: Any, b: Any, out: Any) -> None:
            np.ldexp(of_e5m2(np.ldexp(a, first), np.ldexp(b, second), None), -least, out=out)

        return multiply_types

    def multiply(a: Any, b: Any, out: Any) -> None:
        if out.dtype.kind != "c":
            out[...] = times(a, b, None)
        else:  # one chain of 2k products per component
            out.real = times(-a.imag, b.imag, times(a.real, b.real, None))
            out.imag = times(a.imag, b.real, times(a.real, b.imag, None))

    return multiply


def _rounding(plan: GemmPlan) -> NumberFormat | None:
    fmt = plan.operand_format
    return fmt if plan.mode_has_effect and fmt is not plan.accumulator.format else None


def _operand(plan: GemmPlan, operand: int, view: ArrayView, x: Any, dtype: np.dtype[Any]) -> Split:
    """Return ``a`` (0) or ``b`` (1) as the plan multiplies it; a prepared ``b`` keeps it from the first product on."""
    axis = -1 - operand if plan.scaled[operand] else None
    how = dtype, row(plan.runs_as), _rounding(plan), plan.split[operand], axis
    if not (view.is_prepared and view.mode in kept_modes(plan)):
        return split(x, *how)

    def make() -> PackedOperand:
        parts, exponents = split(x, *how)
        return PackedOperand((parts, exponents), sum(part.nbytes for part in parts))

    return view.packed_operand((*how, data_pointer(x), x.shape, x.strides), make)  # type: ignore[no-any-return]


def split(
    x: Any, dtype: np.dtype[Any], mode: ModeRow, fmt: NumberFormat | None, count: int, scaled_over: int | None = None
) -> Split:
    """Split an operand, whose rows (-1) or columns (-2) may be scaled, into parts; one may be ``x`` itself."""
    exponents = None
    if scaled_over is not None:
        x, exponents = _scaled(x.astype(dtype), scaled_over)
    rest, parts = x, [rounded(x, dtype, fmt)]
    while len(parts) < min(count, mode.parts):
        rest = (rest - parts[-1]).astype(dtype, copy=False) * dtype.type(2.0**mode.part_exponent)
        parts.append(rounded(rest, dtype, fmt))
    if count > mode.parts:  # mode ``fp16_karatsuba``
        parts.append(rounded(parts[0] + parts[1], dtype, fmt))
    return parts, exponents


def _components(x: Any) -> tuple[Any, ...]:
    return (x.real, x.imag) if x.dtype.kind == "c" else (x,)


def _scaled(x: Any, axis: int) -> tuple[Any, Any]:
    """Multiply rows (``axis`` -1) or columns (-2) by 2^e, in place; return ``x`` and e, which is 0 for rows of zeros.

    The largest finite magnitude is then in [2^14, 2^15), the second highest binade of float16.
    """
    magnitudes = [np.where(np.isfinite(part), np.abs(part), 0) for part in _components(x)]
    largest = functools.reduce(np.maximum, magnitudes).max(axis, keepdims=True, initial=0)
    exponents = np.where(largest, 15 - np.frexp(largest)[1], 0)
    for part in _components(x):
        np.ldexp(part, exponents, out=part)
    return x, exponents


def rounded(x: Any, dtype: np.dtype[Any], fmt: NumberFormat | None) -> Any:
    """Return ``x`` in this dtype, rounded to a format; a copy, unless there is nothing to do.

    TF32 is rounded to nearest with ties away from zero, as the PTX instruction ``cvt.rna.tf32.f32`` does (PTX ISA,
    "cvt"); bfloat16 and float16 with ties to even (IEEE 754-2019, section 4.3.1). NaN and infinities are unchanged,
    finite numbers beyond the largest of the format overflow to infinity, subnormal numbers are kept.
    """
    if fmt is None:
        return x.astype(dtype, copy=False)
    out = x.astype(dtype, "K" if _is_expressible(x) else "C")
    flat = out.ravel("K").view(np.float32)
    for first in range(0, flat.size, _BLOCK):
        _round_block(flat[first : first + _BLOCK], fmt)
    return out


def _round_block(x: Any, fmt: NumberFormat) -> None:
    if fmt.emin > FLOAT32.emin:  # float16, float8
        x[...] = x.astype(getattr(ml_dtypes, fmt.name, fmt.name))
        return
    one, dropped, bits = np.uint32(1), np.uint32(24 - fmt.precision), x.view(np.uint32)
    half = one << dropped - one
    up = half if fmt is TF32 else (bits >> dropped & one) + (half - one)
    # Except NaN, whose payloads could carry into the exponent.
    np.copyto(bits, (bits + up) >> dropped << dropped, where=x == x)


def _apply_epilogue(plan: GemmPlan, arguments: Arguments, product: Any, out: Any, c: Any | None) -> None:
    """Compute ``out = activation(alpha * product + beta * c + bias)``, rounded once; ``product`` is overwritten.

    It is computed in the accumulator's type (float32 for 16-bit results), as in cuBLASLt (``cublasLtEpilogue_t``).
    Sums with an int32 bias saturate, as in oneDNN.
    """
    dtype, activation = product.dtype, plan.problem.activation
    bias = None if arguments.bias is None else arguments.bias.ndarray().astype(dtype, copy=False)
    # ml_dtypes rounds float64 to bfloat16 and float8 via float32, which would round twice.
    twice = dtype == np.float64 and out.dtype.itemsize <= 2
    step = max(1, _BLOCK * out.shape[-2] // max(1, out.size))
    for first in range(0, out.shape[-2], step):
        rows = slice(first, first + step)
        x = product[..., rows, :]
        if arguments.alpha != 1:
            x *= dtype.type(arguments.alpha)
        if c is not None:
            addend = c[..., rows, :].astype(dtype, copy=False)
            x += addend if arguments.beta == 1 else addend * dtype.type(arguments.beta)
        if bias is not None:
            if dtype.kind == "i":
                limits = np.iinfo(dtype)
                np.clip(x, limits.min - np.minimum(bias, 0), limits.max - np.maximum(bias, 0), out=x)
            x += bias
        if activation is not None:
            x[...] = ACTIVATIONS[activation].host(x, np)
        if product is not out:
            out[..., rows, :] = rounded_to_odd(x, np) if twice else x
