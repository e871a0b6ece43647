"""Arguments of a cuBLASLt call: its matrices, and the packing of operands before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

from lowprec.formats import ComputeType, DType
from lowprec.planning.reasons import Reason

#: Most mantissa bits of fixed-point emulation, cuBLAS's default; with a sign they fill ten 8-bit slices.
MANTISSA_BITS = 79

Op = Literal["N", "T"]
ComplexAs = Literal["no", "pairs", "rotated"]


@dataclass(frozen=True, slots=True)
class Pack:
    """Packing of an operand before the product; padding is zero."""

    dtype: DType  # of the packed elements
    transposed: bool  # the packed rows are the operand's columns
    rows: int  # of each packed matrix, without padding
    cols: int
    leading_dimension: int  # including padding
    padded_rows: int
    batch_shape: tuple[int, ...]  # of the packed matrices; empty: one for all products
    scaled: bool  # each source row is scaled by a power of two
    complex_as: ComplexAs  # (re, im) for ``a`` is "pairs", a real 2 x 2 matrix per number for ``b`` is "rotated"
    reason: Reason
    parts: int = 1  # number of parts, concatenated along the inner dimension; those of ``a`` in reverse order
    side_by_side: bool = False  # each packed row contains all parts, because the inner dimension is contiguous

    @property
    def count(self) -> int:
        return prod(self.batch_shape)

    @property
    def line_stride(self) -> int:
        return self.leading_dimension * (self.parts if self.side_by_side else 1)

    @property
    def matrix_stride(self) -> int:
        """Stride between packed matrices, all parts included, in elements."""
        return self.parts * self.padded_rows * self.leading_dimension

    @property
    def part_bytes(self) -> int:
        lines = 1 if self.side_by_side else self.padded_rows
        return lines * self.leading_dimension * self.dtype.itemsize

    @property
    def part_length(self) -> int:
        each = 1 if self.complex_as == "no" else 2
        return self.leading_dimension // each if self.side_by_side else self.padded_rows

    @property
    def nbytes(self) -> int:
        return self.count * self.matrix_stride * self.dtype.itemsize


class BlockCodes(NamedTuple):
    """Codes of a block-scaled operand, as passed to cuBLASLt."""

    format: str  # key of ``formats.BLOCK_FORMATS``
    bits: int  # of a code
    cuda_data_type: int
    scale_mode: str  # name in ``cublasLtMatmulMatrixScale_t``


#: Block-scaled formats that cuBLASLt multiplies.
BLOCK_CODES = {"mxfp8": BlockCodes("mxfp8", 8, 28, "VEC32_UE8M0"), "nvfp4": BlockCodes("nvfp4", 4, 33, "VEC16_UE4M3")}


@dataclass(frozen=True, slots=True)
class LtMatrix:
    """A column-major matrix, as passed to cuBLASLt."""

    dtype: DType
    rows: int
    cols: int
    leading_dimension: int
    batch_stride: int
    codes: BlockCodes | None = None  # of a block-scaled operand, whose values are ``dtype``

    @property
    def elements(self) -> str:
        return self.codes.format if self.codes else str(self.dtype)

    @property
    def cuda_data_type(self) -> int:
        return (self.codes or self.dtype).cuda_data_type

    def nbytes(self, elements: int) -> int:
        return elements * (self.codes or self.dtype).bits // 8

    def range_of(self, inner: Literal["rows", "cols"], op: Op, k: int, start: int, stop: int) -> tuple[LtMatrix, int]:
        """Return the submatrix for a range of the inner dimension, which is ``inner`` after ``op``; and its offset."""
        if op == "T":
            inner = "cols" if inner == "rows" else "rows"
        # A complex number may be two real ones along the inner dimension.
        each = getattr(self, inner) // k
        step = self.leading_dimension if inner == "cols" else 1
        extents = {inner: (stop - start) * each}
        return replace(self, **extents), start * each * step


@dataclass(frozen=True, slots=True)
class CublasLtCall:
    """Arguments of the cuBLASLt calls of one plan."""

    compute_type: ComputeType
    scale_dtype: DType  # of alpha and beta
    swapped: bool  # b is the first operand, which gives a row-major result
    op_first: Op
    op_second: Op
    first: LtMatrix
    second: LtMatrix
    d: LtMatrix
    c: LtMatrix | None  # the addend, if cuBLASLt adds it
    batch_count: int
    offsets: tuple[tuple[int, int, int, int], ...]  # per call, of the matrices first, second, c and d, in elements
    epilogue: str  # name in cublasLtEpilogue_t
    pack_a: Pack | None
    pack_b: Pack | None
    staged: tuple[Reason, ...]  # reasons to write the product to temporary memory first; empty if D is the result
    rest: CublasLtCall | None = None  # the last matrices of a batch, if their number differs
    gemm_ex: bool = False  # cuBLAS's ``cublasGemmStridedBatchedEx`` is called instead of cuBLASLt

    @property
    def parts(self) -> tuple[CublasLtCall, ...]:
        """The calls with equal numbers of matrices, and those for the rest."""
        return (self, self.rest) if self.rest else (self,)

    @property
    def product_bytes(self) -> int:
        each = self.d.nbytes(self.d.cols * self.d.leading_dimension)
        return each * sum(x.batch_count * len(x.offsets) for x in self.parts) if self.staged else 0

    @property
    def emulation_bytes(self) -> int:
        """Most workspace of fixed-point emulation: cuBLAS documentation, "Fixed-Point Workspace Requirements"."""
        if self.compute_type is not ComputeType.COMPUTE_64F_EMULATED_FIXEDPOINT:
            return 0
        slices, parts = (MANTISSA_BITS + 1) // 8, 2 if self.d.dtype.is_complex else 1
        m, n = self.d.rows, self.d.cols
        k = self.first.cols if self.op_first == "N" else self.first.rows
        padded_m, padded_n, padded_k = -(-m // 1024) * 1024, -(-n // 1024) * 1024, -(-k // 128) * 128
        operands = ((padded_m + padded_n) * padded_k * slices + 4 * (padded_m + padded_n)) * parts
        sums = min(4 * padded_m * padded_n * parts**2 * slices, 1 << 32) * -(-k // 8192)
        complex_sums = 8 * m * n * 4 if parts == 2 else 0
        exponents = 4 * ((m + n) * -(-k // 64) + m * n) * parts
        most = max(operands + max(sums, complex_sums), exponents)
        return most * self.batch_count * 5 // 4 + (128 << 20)

    def over(self, k: int, start: int, stop: int) -> tuple[CublasLtCall, int, int]:
        """Return the call for a range of the inner dimension of length ``k``, and its offsets in first and second."""
        if (start, stop) == (0, k):
            return self, 0, 0
        first, before_first = self.first.range_of("cols", self.op_first, k, start, stop)
        second, before_second = self.second.range_of("rows", self.op_second, k, start, stop)
        return replace(self, first=first, second=second), before_first, before_second
