"""Products of a matrix and a few vectors: the matrix is read once, and rounded or widened as it is read.

A prepared matrix that is rounded to 16 bits is stored as 16-bit numbers, half the bytes to read. The vectors are the
columns of ``b`` or the rows of ``a``, whichever are fewer; for rows the transposed product is computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lowprec.arrays.prepared_view import PackedOperand, PreparedView
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import buffers, casting, fp32_units, splitting, team, threads
from lowprec.backends.cpu.buffers import Workspace
from lowprec.backends.cpu.panels import columns_for_shape, rows_for_shape
from lowprec.backends.cpu.scaling import FLOAT16_DIGITS, merged, needs_scaling
from lowprec.backends.cpu.splitting import Split
from lowprec.backends.cpu.stacks import KEPT, addresses_of, array_at, offsets_of, stacks_of
from lowprec.backends.execution import Arguments, Executor
from lowprec.formats import FLOAT16, NumberFormat, dtype_from_name
from lowprec.modes import MathMode, row
from lowprec.planning import GemmPlan
from lowprec.planning.prepared import kept_modes, multiplies_b


class _Geometry(NamedTuple):
    """Shapes, dtypes and strides (in bytes) of a product of a matrix and vectors."""

    m: int
    k: int
    vectors: int
    to: NumberFormat | None  # rounding of matrix and vectors
    dtype: str  # of the matrix, whose rows or columns are contiguous
    row_stride: int
    col_stride: int
    vector_dtype: str
    vector_stride: int  # between vectors
    vector_step: int  # between elements of a vector
    out_stride: int  # of the result, whose elements have four bytes, likewise
    out_step: int


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan for a matrix and a few vectors."""
    modes, geometry = kept_modes(plan), _geometry_of_plan(plan)
    if geometry is None:
        return functools.partial(_execute, plan, modes)
    gemv, layout = _gemv(geometry), plan.layout
    exchanged = multiplies_b(layout)
    stacks = layout.a, layout.b, layout.out, None
    offsets = offsets_of(stacks) if 1 < layout.batch_count <= KEPT else None

    def execute(arguments: Arguments) -> None:
        if type(arguments.b) is PreparedView and arguments.b.mode in modes:
            _execute(plan, modes, arguments)
            return
        apart: list[int] = []

        def arrays(number: int) -> list[Any]:
            a, b, out = stacks_of(plan, arguments)[:3]
            a, b = (np.broadcast_to(x, layout.batch_shape + x.shape[-2:]) for x in (a, b))
            index = np.unravel_index(number, layout.batch_shape)
            return _exchanged(plan, a[index], b[index], out[index])

        def multiply(product: tuple[int, Sequence[int]]) -> None:
            number, (a, b, out, *_) = product
            matrix, vectors = (b, a) if exchanged else (a, b)
            result = None if gemv.in_place else arrays(number)[2]
            if gemv.multiply(matrix, vectors, out, result):
                apart.append(number)

        if layout.batch_count == 1:
            multiply((0, [x.address for x in arguments[:3]]))
        else:
            table = addresses_of(stacks, arguments, offsets)
            team.share(multiply, list(enumerate(table.tolist())))
        for number in apart:
            _multiply_scaled(*arrays(number))

    return execute


def _geometry_of_plan(plan: GemmPlan) -> _Geometry | None:
    layout, problem = plan.layout, plan.problem
    if problem.has_epilogue or layout.out.dtype is not plan.accumulator:
        return None
    a, b, out = layout.a, layout.b, layout.out
    if multiplies_b(layout):
        a, b, out = b.transposed, a.transposed, out.transposed
    if 1 not in (a.row_stride, a.col_stride):
        return None
    item, width, four = a.dtype.itemsize, b.dtype.itemsize, out.dtype.itemsize
    return _Geometry(
        a.rows, a.cols, b.cols, _rounding(plan),
        a.dtype.label, a.row_stride * item, a.col_stride * item,
        b.dtype.label, b.col_stride * width, b.row_stride * width,
        out.col_stride * four, out.row_stride * four,
    )  # fmt: skip


def _rounding(plan: GemmPlan) -> NumberFormat | None:
    return FLOAT16_DIGITS if any(plan.scaled) else fp32_units.rounding_format(plan)


def _exchanged(plan: GemmPlan, a: Any, b: Any, out: Any) -> list[Any]:
    return [b.T, a.T, out.T] if multiplies_b(plan.layout) else [a, b, out]


def _execute(plan: GemmPlan, modes: frozenset[str], arguments: Arguments) -> None:
    stacks = stacks_of(plan, arguments)
    to = _rounding(plan)
    prepared, b_read = arguments.b, Split([stacks.b])
    if type(prepared) is PreparedView and prepared.mode in modes and to is not None:
        b_read = _narrowed(prepared, stacks.b, to, is_scaled=plan.scaled[1])

    def multiply(out: Any) -> None:
        operands = (stacks.a, b_read.parts[0])
        a, b = (np.broadcast_to(x, out.shape[:-2] + x.shape[-2:]) for x in operands)
        for index in np.ndindex(out.shape[:-2]):
            _multiply(*_exchanged(plan, a[index], b[index], out[index]), to=to)
        splitting.unscale(out, Split([]), b_read)

    fp32_units.with_epilogue(plan, arguments, stacks, multiply)


def _narrowed(view: PreparedView, b: Any, to: NumberFormat, *, is_scaled: bool) -> Split:
    """Return a prepared ``b`` rounded to 16 bits, or ``b`` itself if NaN payloads need more bits.

    For float16 the numbers are always scaled, so that they fit 16 bits.
    """

    def make() -> PackedOperand:
        # In the order in which `_run` reads it.
        in_columns = b.strides[-2] == b.itemsize or b.strides[-1] != b.itemsize
        fmt, axis = (FLOAT16, -2) if is_scaled else (to, None)
        with Workspace() as workspace:
            (part,), exponents = splitting.split(b, np.dtype(np.float32), row(MathMode.FP16), fmt, 1, axis, workspace)
            rounded = np.ascontiguousarray(part.swapaxes(-1, -2) if in_columns else part)
            narrow = np.empty(rounded.shape, getattr(ml_dtypes, fmt.name, fmt.name))
            casting.narrow(rounded, narrow)
            wide = np.empty_like(rounded)
            casting.cast([(narrow, wide)], None)
            if not np.array_equal(wide.view(np.uint32), rounded.view(np.uint32)):
                return PackedOperand(Split([b]), 0)
        made = Split([narrow.swapaxes(-1, -2) if in_columns else narrow], exponents)
        return PackedOperand(made, narrow.nbytes)

    found: Split = view.packed_operand(("16 bits", to.name, data_pointer(b), b.shape, b.strides), make)
    return found


def _multiply(matrix: Any, vectors: Any, out: Any, *, to: NumberFormat | None) -> None:
    """Compute ``out = matrix @ vectors`` with rounded or widened operands, in float32, or in int32 for int8."""
    if matrix.itemsize in matrix.strides:
        is_apart = _run(matrix, vectors, out, to)
    elif matrix.dtype == np.int8:
        is_apart = _run(np.ascontiguousarray(matrix), vectors, out, to)
    else:
        with Workspace() as workspace:
            compact = workspace.array(matrix.shape, out.dtype)
            (is_apart,) = casting.cast([(matrix, compact)], to)
            is_apart |= _run(compact, vectors, out, to)
    if is_apart:
        _multiply_scaled(matrix, vectors, out)


def _multiply_scaled(matrix: Any, vectors: Any, out: Any) -> None:
    with Workspace() as workspace:
        a, b = splitting.scaled_where_needed((matrix, vectors), out.dtype, row(MathMode.FP16), workspace)
        # The result must have the order of `_multiply`'s, which may differ from that of the scaled matrix.
        in_columns = matrix.strides[0] == matrix.itemsize != matrix.strides[1]
        scaled = (np.asfortranarray if in_columns else np.ascontiguousarray)(a.parts[0])
        _run(scaled, b.parts[0], out, None)
        splitting.unscale(out, a, b)


def _run(matrix: Any, vectors: Any, out: Any, to: NumberFormat | None) -> bool:
    """Multiply a matrix with contiguous rows or columns; return whether an operand must be scaled."""
    (m, k), (row_stride, col_stride) = matrix.shape, matrix.strides
    geometry = _Geometry(
        m, k, vectors.shape[1], to,
        casting.name_of(matrix.dtype), row_stride, col_stride,
        casting.name_of(vectors.dtype), vectors.strides[1], vectors.strides[0],
        out.strides[1], out.strides[0],
    )  # fmt: skip
    source, factors, target = (data_pointer(x) for x in (matrix, vectors, out))
    return _gemv(geometry).multiply(source, factors, target, out)


_Piece = tuple[int, int, int, int, int]


def _pieces(g: _Geometry, width: int, by_rows: bool) -> tuple[list[_Piece], tuple[int, ...], tuple[int, int, int]]:
    """Return the pieces of a matrix, the shape of their partial results, and the strides of a result.

    A piece is (offset, rows, columns, first column, offset of its result). The shape is (pieces of columns, vectors,
    m), or () if results are written in place. The strides are those between vectors and between elements, followed by
    the number of vectors to write.
    """
    if by_rows:
        rows, columns = rows_for_shape(g.m, g.k, by_rows=True), [(0, g.k)]
    else:
        rows, columns = columns_for_shape(g.m, g.k, width)
    shape: tuple[int, ...] = ()
    piece_stride, stride, step, written = 0, g.out_stride, g.out_step, g.vectors
    if not by_rows and (len(columns) > 1 or written < width or step != 4):
        shape = len(columns), width, g.m
        piece_stride, stride, step, written = 4 * width * g.m, 4 * g.m, 4, width
    pieces = [
        (i * g.row_stride + j * g.col_stride, height, cols, j, number * piece_stride + i * step)
        for i, height in rows
        for number, (j, cols) in enumerate(columns)
    ]
    return pieces, shape, (stride, step, written)


class _Gemv(NamedTuple):
    #: A function of the addresses of matrix, vectors and result, and of the result as an array if it is not written in
    #: place. Returns whether an operand must be scaled.
    multiply: Callable[[int, int, int, Any], bool]
    in_place: bool


@functools.lru_cache(maxsize=256)
def _gemv(geometry: _Geometry) -> _Gemv:
    from lowprec.backends.cpu import gemv_kernels as native

    g = geometry
    of_matrix, of_vectors = (casting.cast_index(x, g.to) for x in (g.dtype, g.vector_dtype))
    # Guaranteed by the plan.
    assert of_matrix is not None
    assert of_vectors is not None
    by_rows = g.col_stride == dtype_from_name(g.dtype).itemsize
    width = next(width for width in native.WIDTHS if width >= g.vectors)
    kernel = native.gemv_kernel(of_matrix, width, by_rows)
    numbers, is_integer = native.arithmetic(of_matrix), g.dtype == "int8"
    read = native.vectors_kernel(is_integer)
    cast = 0 if is_integer else team.address_of(casting.kernels().cast_kernel(of_vectors))
    sum_dtype = np.dtype(np.int32 if is_integer else np.float32)
    pieces, shape, (stride, step, written) = _pieces(g, width, by_rows)
    in_place = not shape
    x_stride = -(-g.k // numbers.step) * numbers.step * numbers.factor_bytes
    sums_bytes = 4 * math.prod(shape) if shape else 0

    function, factor_bytes = team.address_of(kernel), numbers.factor_bytes
    table = np.array([
        (
            function, source, g.row_stride, g.col_stride, height, cols, first * factor_bytes, x_stride, to,
            stride, step, written, 0,
        )
        for source, height, cols, first, to in pieces
    ], np.int64)  # fmt: skip

    def multiply(matrix: int, vectors: int, out: int, result: Any) -> bool:
        workers = min(threads.num_threads(), len(table)) if len(table) > 1 else 1
        own, nbytes = native.GEMV_SCRATCH_BYTES, width * x_stride
        extrema = np.empty(len(table), np.int64)
        with buffers.borrow(workers * own + nbytes + sums_bytes) as memory:
            x = memory + workers * own
            target = out if in_place else x + nbytes
            found = read(
                cast, vectors, g.vector_stride, g.vector_step, g.vectors, g.k,
                x, x_stride, memory,
            )  # fmt: skip
            team.run_rows(
                "allllblcllls", table, workers, bases=(matrix, x, target),
                results=data_pointer(extrema), scratch=memory, scratch_bytes=own,
            )  # fmt: skip
            if not in_place:
                sums = array_at(target, shape, sum_dtype)
                with np.errstate(all="ignore"):
                    np.add.reduce(sums[:, : g.vectors], axis=0, out=result.T)
        return bool(needs_scaling(found) or needs_scaling(functools.reduce(merged, extrema.tolist())))

    return _Gemv(multiply, in_place)
