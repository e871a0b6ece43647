"""Products of a matrix and a vector in which the matrix is rounded, or widened, as it is read.

Such a product costs as much as reading the matrix once. A pass that rounds, in front of a BLAS's, would read it twice
and write it once. Of a prepared matrix that is rounded to 16 bits these are kept: half the bytes to read.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from lowprec.arrays.prepared_view import Form, PreparedView
from lowprec.backends.cpu import buffers, casting, fp32_units, threads
from lowprec.backends.cpu.panels import columns_for_shape, rows_for_shape
from lowprec.backends.cpu.stacks import scratch, stacks_of
from lowprec.backends.execution import Arguments, Executor
from lowprec.formats import NumberFormat
from lowprec.planning import GemmPlan
from lowprec.planning.prepared import kept_modes

_LANES = 16


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan for a matrix and a vector."""
    return functools.partial(_execute, plan, kept_modes(plan))


def _execute(plan: GemmPlan, modes: frozenset[str], arguments: Arguments) -> None:
    stacks = stacks_of(plan, arguments)
    to = fp32_units.rounding_format(plan)
    prepared, b_read = arguments.b, stacks.b
    if type(prepared) is PreparedView and prepared.mode in modes and to is not None:
        b_read = _narrowed(prepared, stacks.b, to)

    def multiply(out: Any) -> None:
        a, b = (np.broadcast_to(x, out.shape[:-2] + x.shape[-2:]) for x in (stacks.a, b_read))
        for index in np.ndindex(out.shape[:-2]):
            if out.shape[-1] == 1:
                _multiply(a[index], b[index][:, 0], out[index][:, 0], to)
            else:
                _multiply(b[index].T, a[index][0], out[index][0], to)

    fp32_units.with_epilogue(plan, arguments, stacks, multiply)


def _narrowed(view: PreparedView, b: Any, to: NumberFormat) -> Any:
    """Return a prepared ``b``, rounded, in 16 bits, and multiplied in the same order; itself where NaN need more."""

    def make() -> Form:
        # In the order in which `_run` reads it, or a copy of it.
        in_columns = b.strides[-2] == b.itemsize or b.strides[-1] != b.itemsize
        x = b.swapaxes(-1, -2) if in_columns else b
        rounded = np.empty(x.shape, np.float32)
        casting.cast([(x, rounded)], to)
        narrow = np.empty(x.shape, getattr(ml_dtypes, to.name, to.name))
        casting.narrow(rounded, narrow)
        wide = np.empty_like(rounded)
        casting.cast([(narrow, wide)], None)
        if not np.array_equal(wide.view(np.uint32), rounded.view(np.uint32)):
            return Form(b, 0)
        return Form(narrow.swapaxes(-1, -2) if in_columns else narrow, narrow.nbytes)

    return view.form(("16 bits", to.name, b.ctypes.data, b.shape, b.strides), make)


def _multiply(matrix: Any, vector: Any, out: Any, to: NumberFormat | None) -> None:
    """Compute ``out = matrix @ vector`` in float32, both operands rounded or widened."""
    m, k = matrix.shape
    float32 = np.dtype(np.float32)
    with scratch((-(-k // _LANES) * _LANES,), float32) as x:
        x[k:] = 0
        casting.cast([(vector[None], x[None, :k])], to)
        if matrix.itemsize in matrix.strides:
            _run(matrix, to, x, out)
            return
        with scratch((m, k), float32) as compact:
            casting.cast([(matrix, compact)], to)
            _run(compact, None, x, out)


def _run(matrix: Any, to: NumberFormat | None, x: Any, out: Any) -> None:
    m, k = matrix.shape
    if matrix.strides[1] == matrix.itemsize:
        _run_pieces(matrix, to, x, out[None], rows_for_shape(m, k, by_rows=True), [(0, k)])
        return
    rows, columns = columns_for_shape(m, k)
    if len(columns) == 1 and out.strides[0] == out.itemsize:
        _run_pieces(matrix, to, x, out[None], rows, columns)
        return
    with scratch((len(columns), m), x.dtype) as sums, np.errstate(all="ignore"):
        _run_pieces(matrix, to, x, sums, rows, columns)
        np.add.reduce(sums, axis=0, out=out)


def _run_pieces(
    matrix: Any,
    to: NumberFormat | None,
    x: Any,
    sums: Any,
    rows: list[tuple[int, int]],
    columns: list[tuple[int, int]],
) -> None:
    """Write what each piece of columns contributes to a row of ``sums``."""
    index = casting.cast_index(matrix.dtype.name, to)
    assert index is not None, "plans for this kernel multiply what it reads"
    kernels = casting.kernels()
    kernel, step = kernels.gemv_kernel(index), sums.strides[1]
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
    queue = iter(pieces)

    def work() -> None:
        with buffers.borrow(casting.SCRATCH_BYTES) as memory:
            # Taking the next element of a list's iterator is atomic.
            for piece in queue:
                kernel(*piece, memory)

    threads.run(work, min(threads.num_threads(), len(pieces)))
