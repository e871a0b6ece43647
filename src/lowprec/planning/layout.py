"""Shapes and strides of a product, to what a GEMM is called with: m, n, k, order, leading dimension, batch.

Sources: the Array API's ``matmul`` (shapes); the CBLAS interface (leading dimensions).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Literal

from lowprec.errors import ShapeError
from lowprec.formats import DType
from lowprec.planning.batches import Shape, coalesce
from lowprec.strides import contiguous_strides, overlaps_itself

Order = Literal["row", "col"]


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """What planning needs to know of an array: everything but its address."""

    dtype: DType
    shape: Shape
    strides: Shape  # in elements, not bytes; zero and negative ones are legal

    @classmethod
    def contiguous(cls, dtype: DType, shape: Shape) -> OperandSpec:
        """Return the spec of a row-major array without gaps."""
        return cls(dtype, shape, contiguous_strides(shape))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the distinct elements; a broadcast dimension (stride 0) counts once."""
        pairs = zip(self.shape, self.strides, strict=True)
        return self.dtype.itemsize * prod(n if s or not n else 1 for n, s in pairs)


@dataclass(frozen=True, slots=True)
class MatrixStack:
    """A stack of matrices in memory, in the words of BLAS: all but its address. Strides count elements."""

    dtype: DType
    rows: int  # of each matrix, as it enters the product
    cols: int
    row_stride: int  # from one row to the next
    col_stride: int
    batch_shape: Shape  # outermost first
    batch_strides: Shape  # 0 where the matrix is broadcast
    order: Order | None  # whether rows or columns are contiguous; None if BLAS cannot express it
    leading_dimension: int | None  # the other stride, at least the contiguous extent; None likewise

    @classmethod
    def of(
        cls,
        dtype: DType,
        rows: int,
        cols: int,
        row_stride: int,
        col_stride: int,
        batch_shape: Shape = (),
        batch_strides: Shape = (),
    ) -> MatrixStack:
        """Return the stack with the order and the leading dimension that its strides have."""
        order, leading_dimension = _blas_order(rows, cols, row_stride, col_stride)
        return cls(
            dtype, rows, cols, row_stride, col_stride, batch_shape, batch_strides, order, leading_dimension
        )  # fmt: skip

    @property
    def batch_stride(self) -> int | None:
        """Elements from each matrix to the next, 0 if all are the same; None if that differs."""
        if 0 in self.batch_shape:
            return 0
        pairs = zip(self.batch_shape, self.batch_strides, strict=True)
        dimensions = coalesce([(n, (s,)) for n, s in pairs]) or [(1, (0,))]
        return dimensions[0][1][0] if len(dimensions) == 1 else None

    @property
    def op(self) -> Literal["N", "T"]:
        """``"T"`` where a row-major BLAS call must transpose what is stored."""
        return "T" if self.order == "col" else "N"

    @property
    def blas_expressible(self) -> bool:
        """Whether BLAS can read the matrices where they are."""
        return self.order is not None

    @property
    def transposed(self) -> MatrixStack:
        """The same memory as the transposed matrices."""
        return self.of(
            self.dtype, self.cols, self.rows, self.col_stride, self.row_stride,
            self.batch_shape, self.batch_strides,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GemmLayout:
    """The products to run: ``batch_count`` times an (m, k) matrix with a (k, n) matrix.

    Where ``collapsed``, the batch became rows of one large GEMM, which m counts: ``b`` is the same matrix throughout
    the batch, and the rows of all matrices of ``out`` have one stride, as those of ``a`` have, if not to be copied.
    """

    m: int
    n: int
    k: int
    batch_shape: Shape  # as it runs: empty where collapsed
    batch_count: int
    out_shape: Shape  # as the caller sees it
    a: MatrixStack
    b: MatrixStack
    out: MatrixStack  # the caller's, or a new row-major array
    collapsed: bool


def _core(shape_a: Shape, shape_b: Shape) -> tuple[int, int, int]:
    """Return (m, n, k), or raise in NumPy's words."""
    for position, shape in enumerate((shape_a, shape_b)):
        if not shape:
            raise ShapeError(
                f"matmul: input operand {position} does not have enough dimensions (has 0, requires 1): "
                f"shapes {shape_a} and {shape_b}"
            )
    m = shape_a[-2] if len(shape_a) > 1 else 1
    n = shape_b[-1] if len(shape_b) > 1 else 1
    k = shape_a[-1]
    k_of_b = shape_b[-2] if len(shape_b) > 1 else shape_b[0]
    if k != k_of_b:
        raise ShapeError(
            f"matmul: input operand 1 has a mismatch in its core dimension 0 (size {k_of_b} is different "
            f"from {k}): shapes {shape_a} and {shape_b}"
        )
    return m, n, k


def _broadcast_batch(shape_a: Shape, shape_b: Shape) -> Shape:
    """Return the common batch shape of two operands, or raise in NumPy's words."""
    result = []
    for x, y in zip_longest(shape_a[-3::-1], shape_b[-3::-1], fillvalue=1):
        if x != y and x != 1 and y != 1:
            raise ShapeError(
                f"matmul: operands could not be broadcast together with shapes {shape_a} and {shape_b}"
            )
        result.append(y if x == 1 else x)
    return tuple(reversed(result))


def result_shape(shape_a: Shape, shape_b: Shape) -> Shape:
    """Return the shape of ``a @ b``."""
    m, n, _ = _core(shape_a, shape_b)
    batch = _broadcast_batch(shape_a, shape_b)
    return batch + (m,) * (len(shape_a) > 1) + (n,) * (len(shape_b) > 1)


def _blas_order(
    rows: int, cols: int, row_stride: int, col_stride: int
) -> tuple[Order | None, int | None]:
    """Return (order, leading dimension), or (None, None) where BLAS cannot express these strides.

    The stride of a dimension of extent 1 does not matter.

    Examples
    --------
    >>> _blas_order(4, 5, 8, 1), _blas_order(4, 5, 1, 4), _blas_order(4, 5, 10, 2)
    (('row', 8), ('col', 4), (None, None))
    """
    if rows == 0 or cols == 0:
        return "row", max(cols, 1)
    if col_stride == 1 or cols == 1:
        if rows == 1:
            return "row", cols
        if row_stride >= cols:
            return "row", row_stride
    if row_stride == 1 or rows == 1:
        if cols == 1:
            return "col", rows
        if col_stride >= rows:
            return "col", col_stride
    return None, None


def _batch_strides(spec: OperandSpec, batch: Shape) -> Shape:
    """Return the strides of an operand's batch after broadcasting to ``batch``."""
    own = [0 if n == 1 else s for n, s in zip(spec.shape[:-2], spec.strides[:-2], strict=True)]
    return (0,) * (len(batch) - len(own)) + tuple(own)


def _matrix_strides(spec: OperandSpec, vector_is_row: bool) -> tuple[int, int]:
    """Return (row stride, column stride); a 1-D operand is one row or one column."""
    if len(spec.shape) > 1:
        return spec.strides[-2], spec.strides[-1]
    return (0, spec.strides[0]) if vector_is_row else (spec.strides[0], 0)


def _out_strides(
    strides: Shape, batch_ndim: int, has_rows: bool, has_cols: bool
) -> tuple[tuple[int, int], Shape]:
    """Return ((row stride, column stride), batch strides) of a result whose 1-D dimensions were removed."""
    core = strides[batch_ndim:]
    return (core[0] if has_rows else 0, core[-1] if has_cols else 0), strides[:batch_ndim]


def gemm_layout(
    a: OperandSpec,
    b: OperandSpec,
    out: OperandSpec | None = None,
    out_dtype: DType | None = None,
) -> GemmLayout:
    """Return the layout of ``a @ b``, into ``out`` where it is given.

    ``out_dtype`` is that of a new result, by default the one of ``a``. Raises ShapeError if the shapes do not fit
    together, or two elements of ``out`` may share memory.
    """
    return _collapse(stacked_layout(a, b, out, out_dtype))


def stacked_layout(
    a: OperandSpec,
    b: OperandSpec,
    out: OperandSpec | None = None,
    out_dtype: DType | None = None,
) -> GemmLayout:
    """Return the layout of ``a @ b`` as the stack of products that the shapes name, nothing collapsed."""
    m, n, k = _core(a.shape, b.shape)
    batch = _broadcast_batch(a.shape, b.shape)
    shape = result_shape(a.shape, b.shape)
    if out is None:
        out = OperandSpec.contiguous(out_dtype or a.dtype, shape)
    else:
        _check_out(out, shape)
    core, batch_strides = _out_strides(out.strides, len(batch), len(a.shape) > 1, len(b.shape) > 1)
    return GemmLayout(
        m, n, k, batch, prod(batch), shape,
        MatrixStack.of(a.dtype, m, k, *_matrix_strides(a, True), batch, _batch_strides(a, batch)),
        MatrixStack.of(b.dtype, k, n, *_matrix_strides(b, False), batch, _batch_strides(b, batch)),
        MatrixStack.of(out.dtype, m, n, *core, batch, batch_strides),
        collapsed=False,
    )  # fmt: skip


def addend_layout(
    c: OperandSpec, a: OperandSpec, b: OperandSpec, layout: GemmLayout
) -> MatrixStack | None:
    """Return the matrices of an array that broadcasts to the result, one for each product of a layout.

    None where the layout is collapsed and the rows of this array have no one stride.
    """
    missing = len(layout.out_shape) - len(c.shape)
    own = tuple(0 if n == 1 else s for n, s in zip(c.shape, c.strides, strict=True))
    batch = _broadcast_batch(a.shape, b.shape)
    core, batch_strides = _out_strides(
        (0,) * missing + own, len(batch), len(a.shape) > 1, len(b.shape) > 1
    )
    m, n, _ = _core(a.shape, b.shape)
    found = MatrixStack.of(c.dtype, m, n, *core, batch, batch_strides)
    return rows_of_all(found, prod(batch)) if layout.collapsed else found


def _check_out(out: OperandSpec, shape: Shape) -> None:
    if out.shape != shape:
        raise ShapeError(f"out has shape {out.shape}, but the result has shape {shape}")
    if overlaps_itself(out.shape, out.strides):
        raise ShapeError(
            f"out has elements that may share memory (shape {out.shape}, strides {out.strides} in elements); "
            "pass an array of its own memory"
        )


def rows_of_all(operand: MatrixStack, batch_count: int) -> MatrixStack | None:
    """Return a batch coalesced with its rows to one matrix, or None where the rows have no one stride."""
    stride = operand.batch_stride
    if stride is None or (operand.rows > 1 and stride != operand.rows * operand.row_stride):
        return None
    row_stride = stride if operand.rows == 1 else operand.row_stride
    coalesced = MatrixStack.of(
        operand.dtype, operand.rows * batch_count, operand.cols, row_stride, operand.col_stride
    )
    # Of windows that slide over one buffer BLAS can express each, but not all as one matrix.
    return None if operand.blas_expressible and not coalesced.blas_expressible else coalesced


def with_rows_copied(layout: GemmLayout) -> GemmLayout:
    """Return a layout with the batch as rows where copying ``a`` allows it and ``a`` repeats no matrix."""
    repeats = 0 in layout.a.batch_strides
    return layout if repeats else _collapse(layout, copies_a=True)


def _collapse(layout: GemmLayout, copies_a: bool = False) -> GemmLayout:
    """Turn the batch into rows where one GEMM can stand for all."""
    count = layout.batch_count
    if count < 2 or layout.m == 0 or layout.b.batch_stride != 0:
        return layout
    a = rows_of_all(layout.a, count)
    out = rows_of_all(layout.out, count)
    if a is None and copies_a:
        # No strides describe it, so BLAS expresses it as little.
        a = MatrixStack(layout.a.dtype, layout.m * count, layout.k, 0, 0, (), (), None, None)
    if a is None or out is None:
        return layout
    b = MatrixStack.of(layout.b.dtype, layout.k, layout.n, layout.b.row_stride, layout.b.col_stride)
    return GemmLayout(
        layout.m * count, layout.n, layout.k, (), 1, layout.out_shape, a, b, out, collapsed=True
    )
