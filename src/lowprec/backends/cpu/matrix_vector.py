"""Products of a matrix and a vector in which the matrix is rounded, or widened, as it is read.

Such a product costs as much as reading the matrix once. A pass that rounds, in front of a BLAS's, would read it twice
and write it once. Of a prepared matrix that is rounded to 16 bits these are kept: half the bytes to read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from lowprec.arrays.prepared_view import Form, PreparedView
from lowprec.backends.cpu import buffers, casting, fp32_units, splitting, threads
from lowprec.backends.cpu.panels import columns_for_shape, rows_for_shape
from lowprec.backends.cpu.scaling import FLOAT16_DIGITS, lies_apart, merged
from lowprec.backends.cpu.splitting import Split
from lowprec.backends.cpu.stacks import scratch, stacks_of
from lowprec.backends.execution import Arguments, Executor
from lowprec.formats import FLOAT16, NumberFormat
from lowprec.modes import MathMode, row
from lowprec.planning import GemmPlan
from lowprec.planning.prepared import kept_modes

_LANES = 16


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan for a matrix and a vector."""
    return functools.partial(_execute, plan, kept_modes(plan))


def _execute(plan: GemmPlan, modes: frozenset[str], arguments: Arguments) -> None:
    stacks = stacks_of(plan, arguments)
    to = FLOAT16_DIGITS if any(plan.scaled) else fp32_units.rounding_format(plan)
    prepared, b_read = arguments.b, Split([stacks.b])
    if type(prepared) is PreparedView and prepared.mode in modes and to is not None:
        b_read = _narrowed(prepared, stacks.b, to, is_scaled=plan.scaled[1])

    def multiply(out: Any) -> None:
        operands = (stacks.a, b_read.parts[0])
        a, b = (np.broadcast_to(x, out.shape[:-2] + x.shape[-2:]) for x in operands)
        for index in np.ndindex(out.shape[:-2]):
            if out.shape[-1] == 1:
                _multiply(a[index], b[index][:, 0], out[index][:, 0], to)
            else:
                _multiply(b[index].T, a[index][0], out[index][0], to)
        splitting.unscale(out, Split([]), b_read)

    fp32_units.with_epilogue(plan, arguments, stacks, multiply)


def _narrowed(view: PreparedView, b: Any, to: NumberFormat, *, is_scaled: bool) -> Split:
    """Return a prepared ``b``, rounded, in 16 bits, and multiplied in the same order; itself where NaN need more.

    Numbers of float16 are scaled in any case: then they all are numbers of 16 bits.
    """

    def make() -> Form:
        # In the order in which `_run` reads it, or a copy of it.
        in_columns = b.strides[-2] == b.itemsize or b.strides[-1] != b.itemsize
        fmt, axis = (FLOAT16, -2) if is_scaled else (to, None)
        with contextlib.ExitStack() as stack:
            (part,), exponents = splitting.split(
                b, np.dtype(np.float32), row(MathMode.FP16), fmt, 1, axis, stack
            )
            rounded = np.ascontiguousarray(part.swapaxes(-1, -2) if in_columns else part)
            narrow = np.empty(rounded.shape, getattr(ml_dtypes, fmt.name, fmt.name))
            casting.narrow(rounded, narrow)
            wide = np.empty_like(rounded)
            casting.cast([(narrow, wide)], None)
            if not np.array_equal(wide.view(np.uint32), rounded.view(np.uint32)):
                return Form(Split([b]), 0)
        made = Split([narrow.swapaxes(-1, -2) if in_columns else narrow], exponents)
        return Form(made, narrow.nbytes)

    found: Split = view.form(("16 bits", to.name, b.ctypes.data, b.shape, b.strides), make)
    return found


def _multiply(matrix: Any, vector: Any, out: Any, to: NumberFormat | None) -> None:
    """Compute ``out = matrix @ vector`` in float32, both operands rounded or widened."""
    k = vector.size
    with _padded(k) as x:
        apart = casting.cast([(vector[None], x[None, :k])], to)
        if matrix.itemsize in matrix.strides:
            apart.append(_run(matrix, to, x, out))
        else:
            with scratch(matrix.shape, x.dtype) as compact:
                apart += casting.cast([(matrix, compact)], to)
                _run(compact, None, x, out)
    if any(apart):
        _multiply_scaled(matrix, vector, out)


def _multiply_scaled(matrix: Any, vector: Any, out: Any) -> None:
    k = vector.size
    with _padded(k) as x, contextlib.ExitStack() as stack:
        a, b = splitting.scaled_where_needed(
            (matrix, vector[:, None]), x.dtype, row(MathMode.FP16), stack
        )
        x[:k] = b.parts[0][:, 0]
        # In the order of `_multiply`, which that of the scaled numbers need not be.
        in_columns = matrix.strides[0] == matrix.itemsize != matrix.strides[1]
        scaled = (np.asfortranarray if in_columns else np.ascontiguousarray)(a.parts[0])
        _run(scaled, None, x, out)
        splitting.unscale(out[:, None], a, b)


@contextlib.contextmanager
def _padded(k: int) -> Iterator[Any]:
    """Lend a float32 vector that zeros fill up to whole steps."""
    with scratch((-(-k // _LANES) * _LANES,), np.dtype(np.float32)) as x:
        x[k:] = 0
        yield x


def _run(matrix: Any, to: NumberFormat | None, x: Any, out: Any) -> bool:
    """Multiply a matrix of contiguous rows or columns; return whether it must be scaled."""
    m, k = matrix.shape
    if matrix.strides[1] == matrix.itemsize:
        rows = rows_for_shape(m, k, by_rows=True)
        return _run_pieces(matrix, to, x, out[None], rows, [(0, k)])
    rows, columns = columns_for_shape(m, k)
    if len(columns) == 1 and out.strides[0] == out.itemsize:
        return _run_pieces(matrix, to, x, out[None], rows, columns)
    with scratch((len(columns), m), x.dtype) as sums, np.errstate(all="ignore"):
        apart = _run_pieces(matrix, to, x, sums, rows, columns)
        np.add.reduce(sums, axis=0, out=out)
    return apart


def _run_pieces(
    matrix: Any,
    to: NumberFormat | None,
    x: Any,
    sums: Any,
    rows: list[tuple[int, int]],
    columns: list[tuple[int, int]],
) -> bool:
    """Write what each piece of columns contributes to a row of ``sums``; return whether the matrix must be scaled."""
    index = casting.cast_index(matrix.dtype.name, to)
    assert index is not None, "plans for this kernel multiply what it reads"
    from lowprec.backends.cpu.gemv_kernels import gemv_kernel

    kernel, step = gemv_kernel(index), sums.strides[1]
    source, factors, target = (y.ctypes.data for y in (matrix, x, sums))
    row_stride, col_stride = matrix.strides
    pieces = [
        (
            source + i * row_stride + j * col_stride, row_stride, col_stride, height, width,
            factors + j * x.itemsize, target + number * sums.strides[0] + i * step, step,
        )
        for i, height in rows
        for number, (j, width) in enumerate(columns)
    ]  # fmt: skip
    queue, extrema = iter(pieces), []

    def work() -> None:
        with buffers.borrow(casting.SCRATCH_BYTES) as memory:
            # Taking the next element of a list's iterator is atomic.
            for piece in queue:
                extrema.append(kernel(*piece, memory))

    threads.run(work, min(threads.num_threads(), len(pieces)))
    return lies_apart(functools.reduce(merged, extrema))
