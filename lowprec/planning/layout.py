"""From shapes and strides to GEMM arguments: m, n, k, order, leading dimension, batch.

Sources: the Array API's ``matmul`` (shapes); the CBLAS interface (leading dimensions).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from typing import Literal

from lowprec.errors import ShapeError
from lowprec.formats import Blocks, DType
from lowprec.util.strides import Shape, coalesce, contiguous_strides, overlaps_itself

Order = Literal["row", "col"]


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """Shape, strides and element type of an array."""

    dtype: DType
    shape: Shape
    strides: Shape  # in elements; zero and negative strides are legal
    # of a quantised array; dtype and strides are then those of its widened numbers
    blocks: Blocks | None = None
    # of the last axis, in place of multiples of its stride
    inner_offsets: Shape | None = None

    @classmethod
    def contiguous(cls, dtype: DType, shape: Shape) -> OperandSpec:
        return cls(dtype, shape, contiguous_strides(shape))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the distinct elements; a broadcast dimension (stride 0) counts once."""
        if self.blocks is not None:
            return self.blocks.row.stored_bytes(self.shape, self.blocks.axis)
        distinct = 1
        for extent, stride in zip(self.shape, self.strides, strict=True):
            if stride or not extent:
                distinct *= extent
        return self.dtype.itemsize * distinct


@dataclass(frozen=True, slots=True)
class MatrixStack:
    """The BLAS layout of a stack of matrices. Strides count elements."""

    dtype: DType
    rows: int  # of each matrix in the product
    cols: int
    row_stride: int  # between rows
    col_stride: int
    batch_shape: Shape  # outermost first
    batch_strides: Shape  # 0 in dimensions along which the matrix is broadcast
    order: Order | None  # contiguous dimension; None if BLAS cannot express the strides
    # stride of the other dimension, at least the contiguous extent; None as ``order``
    leading_dimension: int | None

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
        """Return the stack with order and leading dimension derived from the strides."""
        order, leading = _blas_order(rows, cols, row_stride, col_stride)
        return cls(
            dtype, rows, cols, row_stride, col_stride, batch_shape, batch_strides, order, leading
        )

    @property
    def batch_stride(self) -> int | None:
        """Elements between matrices, 0 if all are the same; None if the batch has no single stride."""
        if 0 in self.batch_shape:
            return 0
        pairs = zip(self.batch_shape, self.batch_strides, strict=True)
        dimensions = coalesce([(n, (s,)) for n, s in pairs])
        if not dimensions:
            return 0
        (_, strides), *others = dimensions
        return None if others else strides[0]

    @property
    def op(self) -> Literal["N", "T"]:
        """``"T"`` if a row-major BLAS call must transpose the stored matrix, otherwise ``"N"``."""
        return "T" if self.order == "col" else "N"

    @property
    def blas_expressible(self) -> bool:
        return self.order is not None

    @property
    def transposed(self) -> MatrixStack:
        return self.of(
            self.dtype, self.cols, self.rows, self.col_stride, self.row_stride,
            self.batch_shape, self.batch_strides,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GemmLayout:
    """The GEMMs of a product: ``batch_count`` times an (m, k) matrix with a (k, n) matrix.

    If ``collapsed``, the batch is one GEMM, and m counts the rows of all matrices. This needs one matrix ``b`` for the
    whole batch and a single row stride of ``out`` and of ``a``.
    """

    m: int
    n: int
    k: int
    batch_shape: Shape  # empty if collapsed
    batch_count: int
    out_shape: Shape  # of the result
    a: MatrixStack
    b: MatrixStack
    out: MatrixStack  # the caller's, or a new row-major array
    collapsed: bool


def _extents(shape_a: Shape, shape_b: Shape) -> tuple[int, int, int, Shape]:
    """Return m, n, k and the common batch shape of two operands; errors have NumPy's text."""
    for position, shape in enumerate((shape_a, shape_b)):
        if not shape:
            raise ShapeError(
                f"input operand {position} does not have enough dimensions (has 0, requires 1): "
                f"shapes {shape_a} and {shape_b}"
            )
    *_, m, k = (1, *shape_a)
    n = 1
    k_of_b = shape_b[0]
    if len(shape_b) > 1:
        k_of_b, n = shape_b[-2:]
    if k != k_of_b:
        raise ShapeError(
            f"input operand 1 has a mismatch in its core dimension 0 (size {k_of_b} is different "
            f"from {k}): shapes {shape_a} and {shape_b}"
        )
    batch = []
    for x, y in zip_longest(shape_a[-3::-1], shape_b[-3::-1], fillvalue=1):
        if x != y and x != 1 and y != 1:
            raise ShapeError(
                f"operands could not be broadcast together with shapes {shape_a} and {shape_b}"
            )
        batch.append(y if x == 1 else x)
    return m, n, k, tuple(reversed(batch))


def _blas_order(
    rows: int, cols: int, row_stride: int, col_stride: int
) -> tuple[Order | None, int | None]:
    """Return (order, leading dimension), or (None, None) if BLAS cannot express these strides."""
    if rows == 0 or cols == 0:
        return "row", max(cols, 1)
    if col_stride == 1 or cols == 1:
        if rows == 1:
            return "row", cols
        if row_stride >= cols:
            return "row", row_stride
    if (row_stride == 1 or rows == 1) and col_stride >= rows:
        return "col", col_stride
    return None, None


def _broadcast_strides(shape: Shape, strides: Shape) -> Shape:
    """Return strides with 0 for dimensions of extent 1, along which an array is broadcast."""
    return tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True))


def _operand(spec: OperandSpec, rows: int, cols: int, batch: Shape, *, is_a: bool) -> MatrixStack:
    strides = _broadcast_strides(spec.shape[:-2], spec.strides[:-2])
    if len(spec.shape) > 1:
        row_stride, col_stride = spec.strides[-2:]
    elif is_a:
        row_stride, col_stride = (0, *spec.strides)
    else:
        row_stride, col_stride = (*spec.strides, 0)
    missing = (0,) * (len(batch) - len(strides))
    batch_strides = (*missing, *strides)
    return MatrixStack.of(spec.dtype, rows, cols, row_stride, col_stride, batch, batch_strides)


def _result(
    dtype: DType, strides: Shape, m: int, n: int, batch: Shape, a: OperandSpec, b: OperandSpec
) -> MatrixStack:
    """Return the matrices of a result or addend, which has one dimension less for each 1-D operand."""
    core = strides[len(batch) :]
    row_stride = 0
    if len(a.shape) > 1:
        row_stride = core[0]
    col_stride = 0
    if len(b.shape) > 1:
        col_stride = core[-1]
    return MatrixStack.of(dtype, m, n, row_stride, col_stride, batch, strides[: len(batch)])


def gemm_layout(
    a: OperandSpec, b: OperandSpec, out: OperandSpec | None = None, out_dtype: DType | None = None
) -> GemmLayout:
    """Return the layout of ``a @ b``, into ``out`` or a new array of ``out_dtype`` (default: that of ``a``)."""
    return _collapse(stacked_layout(a, b, out, out_dtype))


def stacked_layout(
    a: OperandSpec, b: OperandSpec, out: OperandSpec | None = None, out_dtype: DType | None = None
) -> GemmLayout:
    """Return the layout of ``a @ b`` without collapsing the batch."""
    m, n, k, batch = _extents(a.shape, b.shape)
    shape = batch
    if len(a.shape) > 1:
        shape += (m,)
    if len(b.shape) > 1:
        shape += (n,)
    if out is None:
        out = OperandSpec.contiguous(out_dtype or a.dtype, shape)
    elif out.shape != shape:
        raise ShapeError(f"out has shape {out.shape}, but the result has shape {shape}")
    elif overlaps_itself(out.shape, out.strides):
        raise ShapeError(
            f"out has elements that may share memory (shape {out.shape}, strides {out.strides} in elements); "
            "pass an array without overlapping elements"
        )
    left = _operand(a, m, k, batch, is_a=True)
    right = _operand(b, k, n, batch, is_a=False)
    result = _result(out.dtype, out.strides, m, n, batch, a, b)
    return GemmLayout(m, n, k, batch, prod(batch), shape, left, right, result, collapsed=False)


def addend_layout(
    c: OperandSpec, a: OperandSpec, b: OperandSpec, layout: GemmLayout
) -> MatrixStack | None:
    """Return ``c`` as matrices of a layout; None if it is collapsed, but the rows of ``c`` have no single stride."""
    missing = len(layout.out_shape) - len(c.shape)
    strides = _broadcast_strides(c.shape, c.strides)
    m, n, _, batch = _extents(a.shape, b.shape)
    addend = _result(c.dtype, (0,) * missing + strides, m, n, batch, a, b)
    if layout.collapsed:
        return as_one_matrix(addend, prod(batch))
    return addend


def as_one_matrix(operand: MatrixStack, batch_count: int) -> MatrixStack | None:
    """Return a batch as one matrix of all rows, or None if the rows have no single stride."""
    stride = operand.batch_stride
    if stride is None or (operand.rows > 1 and stride != operand.rows * operand.row_stride):
        return None
    row_stride = stride if operand.rows == 1 else operand.row_stride
    rows = operand.rows * batch_count
    coalesced = MatrixStack.of(operand.dtype, rows, operand.cols, row_stride, operand.col_stride)
    # The matrices may be overlapping windows of one buffer: BLAS can express each, but not all of them as one matrix.
    if operand.blas_expressible and not coalesced.blas_expressible:
        return None
    return coalesced


def _collapse(layout: GemmLayout) -> GemmLayout:
    count = layout.batch_count
    if count < 2 or layout.m == 0 or layout.b.batch_stride != 0:
        return layout
    a = as_one_matrix(layout.a, count)
    out = as_one_matrix(layout.out, count)
    if a is None or out is None:
        return layout
    b = replace(layout.b, batch_shape=(), batch_strides=())
    return replace(
        layout, m=layout.m * count, batch_shape=(), batch_count=1, a=a, b=b, out=out, collapsed=True
    )
