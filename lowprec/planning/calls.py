"""A call of cuBLASLt as values: its matrices, the packing before it, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from lowprec.formats import ComputeType, DType
from lowprec.planning.reasons import Reason

Op = Literal["N", "T"]
ComplexAs = Literal["no", "pairs", "rotated"]


@dataclass(frozen=True, slots=True)
class Pack:
    """An operand that is rewritten before the product; padding is zero."""

    dtype: DType  # of the packed elements
    transposed: bool  # the rows that are written are the operand's columns
    rows: int  # of each matrix that is written, without padding
    cols: int
    leading_dimension: int  # with padding
    padded_rows: int
    batch_shape: tuple[int, ...]  # matrices that are written; empty: one for every product
    scaled: bool  # each source row is scaled by a power of two
    complex_as: ComplexAs  # how complex numbers become real ones
    reason: Reason
    parts: int = 1  # of the operand, side by side along the inner dimension, those of ``a`` the last part first
    side_by_side: bool = False  # the inner dimension is along the lines

    @property
    def count(self) -> int:
        """Number of matrices."""
        return prod(self.batch_shape)

    @property
    def line_stride(self) -> int:
        """Elements from line to line."""
        return self.leading_dimension * (self.parts if self.side_by_side else 1)

    @property
    def matrix_stride(self) -> int:
        """Elements from matrix to matrix, all parts included."""
        return self.parts * self.padded_rows * self.leading_dimension

    @property
    def part_bytes(self) -> int:
        """Bytes from part to part."""
        lines = 1 if self.side_by_side else self.padded_rows
        return lines * self.leading_dimension * self.dtype.itemsize

    @property
    def part_length(self) -> int:
        """Numbers of the inner dimension from part to part."""
        each = 1 if self.complex_as == "no" else 2
        return self.leading_dimension // each if self.side_by_side else self.padded_rows

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return self.count * self.matrix_stride * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LtMatrix:
    """A matrix as passed to cuBLASLt: column-major."""

    dtype: DType
    rows: int
    cols: int
    leading_dimension: int
    batch_stride: int

    def range_of(self, inner: Literal["rows", "cols"], op: Op, k: int, start: int, stop: int) -> tuple[LtMatrix, int]:
        """Return a part of the inner dimension, which is ``inner`` once ``op`` is applied, and the elements before."""
        if op == "T":
            inner = "cols" if inner == "rows" else "rows"
        # A complex number may have become two real ones along the inner dimension.
        each = getattr(self, inner) // k
        step = self.leading_dimension if inner == "cols" else 1
        extents = {inner: (stop - start) * each}
        return replace(self, **extents), start * each * step


@dataclass(frozen=True, slots=True)
class CublasLtCall:
    """The request to cuBLASLt for one plan."""

    compute_type: ComputeType
    scale_dtype: DType  # of alpha and beta
    swapped: bool  # b is the first operand: the result is row-major
    op_first: Op
    op_second: Op
    first: LtMatrix
    second: LtMatrix
    d: LtMatrix
    c: LtMatrix | None  # the addend, where the call itself adds it
    batch_count: int
    # For each call, the elements before its first matrices of the first, the second, c and d.
    offsets: tuple[tuple[int, int, int, int], ...]
    epilogue: str  # name of a cublasLtEpilogue_t
    pack_a: Pack | None
    pack_b: Pack | None
    # Why the product goes into temporary memory, from which a kernel writes the result; or empty.
    staged: tuple[Reason, ...]

    @property
    def product_bytes(self) -> int:
        """Bytes of temporary memory for a staged product."""
        each = self.d.cols * self.d.leading_dimension * self.d.dtype.itemsize
        return each * self.batch_count * len(self.offsets) if self.staged else 0

    def over(self, k: int, start: int, stop: int) -> tuple[CublasLtCall, int, int]:
        """Return the call for a range of the inner dimension, and the elements before it in the first and the second.

        ``k`` is the whole length of the inner dimension.
        """
        if (start, stop) == (0, k):
            return self, 0, 0
        first, before_first = self.first.range_of("cols", self.op_first, k, start, stop)
        second, before_second = self.second.range_of("rows", self.op_second, k, start, stop)
        return replace(self, first=first, second=second), before_first, before_second
