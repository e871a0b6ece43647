"""Arguments of a cuBLASLt call: its matrices, and the packing of operands before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import add
from typing import Literal, TypeAlias

from lowprec.formats import BlockFormat, ComputeType, DType
from lowprec.planning.layout import MatrixStack
from lowprec.planning.reasons import Reason
from lowprec.recipes import Rule
from lowprec.util.strides import Shape, coalesce, offsets_of

#: Most mantissa bits of fixed-point emulation, cuBLAS's default; with a sign they fill ten 8-bit slices.
MANTISSA_BITS = 79

#: Most matrices of a call (``kMaxBatchCount`` in XLA; PyTorch issue 46001).
MOST_MATRICES = 65535

#: Pointers and leading dimensions of kernels that read 16 bytes at a time are multiples of this.
STEP_BYTES = 16

Op = Literal["N", "T"]
ComplexAs = Literal["no", "pairs", "rotated"]


#: Vectors of a tile of the quantising kernel; scales of blocks of more need another kernel before it.
TILE_VECTORS = 32

#: Packed lines per row and packed elements per number of the source, by ``Packing.complex_as``.
PACKED: dict[ComplexAs, tuple[int, int]] = {"no": (1, 1), "pairs": (1, 2), "rotated": (2, 2)}


@dataclass(frozen=True, slots=True)
class Packing:
    """Packing of an operand: each matrix and part is ``padded_rows`` lines of ``leading_dimension`` elements.

    Row r and column c of the source are written to line r and element c; padding is zero. Numbers are rounded to
    nearest, ties to even; NaN stays NaN, overflow gives infinity.
    """

    source: MatrixStack  # without batch dimensions: one packed matrix for all products
    dtype: DType  # of the packed elements; INT8 for two codes of 4 bits
    leading_dimension: int
    padded_rows: int
    #: Whether row r is multiplied by 2^e (exactly, before rounding to float16) such that its largest finite magnitude
    #: is in [2^14, 2^15); e is written to the exponents, one int32 per row and batch; 0 for a row of zeros.
    scaled: bool = False
    #: "pairs": elements 2c and 2c + 1 of a line are the real and the imaginary part. "rotated": line 2r has (re, -im)
    #: and line 2r + 1 has (im, re); a zero keeps its sign. Real sources have an imaginary part of zero.
    complex_as: ComplexAs = "no"
    #: Number of parts of each number: the rounded number, then each remainder times 2^part_exponent, rounded. With
    #: ``summed`` the last part is the rounded sum of the two before it.
    parts: int = 1
    part_exponent: int = 0
    summed: bool = False
    as_tf32: bool = False  # float32 numbers are rounded to TF32, ties away from zero
    side_by_side: bool = False  # the parts of a line are adjacent; otherwise those of a matrix
    descending: bool = False  # the last part comes first
    #: Rounds each row, a vector along k, to codes with scales instead. With ``scaled`` the scales are written where the
    #: exponents are, a float32 number for each row or as a mode of cuBLASLt has them; otherwise they are multiplied in.
    rule: Rule | None = None
    # name in ``cublasLtMatmulMatrixScale_t``; empty if a kernel applies the scales
    scale_mode: str = ""
    # strides of the batch, not 0 where random numbers differ; by default the source's
    numbers: tuple[int, ...] = ()
    reasons: tuple[Reason, ...] = field(default=(), compare=False)

    @property
    def peaks(self) -> int:
        """Largest magnitudes, of 4 bytes each, that are sought before the numbers are rounded."""
        rule = self.rule
        source = self.source
        if rule is None:
            return 0
        if rule.has_tensor_scale:
            return 1
        if rule.scaling == "vector":
            high = 1
            wide = source.cols
        else:
            high, wide = rule.block
        if rule.scaling != "vector" and high <= TILE_VECTORS:
            return 0
        tall = -(-source.rows // high)
        across = -(-source.cols // max(wide, 1))
        return prod(source.batch_shape) * tall * across

    @property
    def scale_bytes(self) -> int:
        """Bytes of the exponents or scales, and of the largest magnitudes behind them."""
        return 4 * (self.scale_words + self.peaks)

    @property
    def factor_words(self) -> int:
        """Float32 scales of rows that a kernel applies, in front of the scales that cuBLASLt applies."""
        return self.padded_rows if self.scale_mode == "VEC16_UE4M3" else 0

    @property
    def scale_words(self) -> int:
        """Exponents or scales, in words of 4 bytes, with the padding of their mode."""
        if not self.scaled:
            return 0
        lines = self.padded_rows
        tall = -(-lines // 128)
        blocks = -(-self.leading_dimension // 128)
        if self.scale_mode == "VEC128_32F":
            return lines * blocks
        if self.scale_mode == "BLK128x128_32F":
            return tall * (blocks + -blocks % 4)
        if self.scale_mode == "VEC32_UE8M0":  # tiles of 128 x 4 bytes
            return tall * blocks * 128
        if self.scale_mode == "VEC16_UE4M3":  # such tiles, each of 32 bytes of codes along k
            wide = -(-self.leading_dimension // 32)
            return self.factor_words + tall * wide * 128
        return prod(self.source.batch_shape) * max(lines, self.source.rows)

    @property
    def has_factors(self) -> bool:
        """Whether a kernel applies scales of rows to the product."""
        return self.scaled and (not self.scale_mode or self.factor_words > 0)

    @property
    def rows(self) -> int:
        """Lines of each packed matrix, without padding."""
        return self.source.rows * PACKED[self.complex_as][0]

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
        if self.side_by_side:
            return self.leading_dimension // each
        return self.padded_rows

    @property
    def nbytes(self) -> int:
        return prod(self.source.batch_shape) * self.matrix_stride * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LtMatrix:
    """A column-major matrix, as passed to cuBLASLt."""

    dtype: DType
    rows: int
    cols: int
    leading_dimension: int
    batch_stride: int
    codes: BlockFormat | None = None  # of a block-scaled operand, whose values are ``dtype``

    @property
    def elements(self) -> str:
        if self.codes:
            return self.codes.name
        return str(self.dtype)

    @property
    def cuda_data_type(self) -> int:
        return (self.codes or self.dtype).cuda_data_type

    def nbytes(self, elements: int) -> int:
        return elements * (self.codes or self.dtype).bits // 8

    def range_of(
        self, inner: Literal["rows", "cols"], op: Op, k: int, start: int, stop: int
    ) -> tuple[LtMatrix, int]:
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
    # per call, of first, second, c (or d) and d, in elements
    offsets: tuple[tuple[int, int, int, int], ...]
    epilogue: str  # name in cublasLtEpilogue_t
    pack_a: Packing | None
    pack_b: Packing | None
    # reasons to write the product to temporary memory first; empty if D is the result
    staged: tuple[Reason, ...]
    rest: CublasLtCall | None = None  # the last matrices of a batch, if their number differs

    @property
    def runs(self) -> tuple[CublasLtCall, ...]:
        """The calls with equal numbers of matrices, and those for the rest."""
        if self.rest:
            return (self, self.rest)
        return (self,)

    @property
    def scale_modes(self) -> tuple[str, str]:
        """Modes of the scales of first and second, empty without."""
        if self.first.codes:
            return self.first.codes.scale_mode, self.first.codes.scale_mode
        a = getattr(self.pack_a, "scale_mode", "")
        b = getattr(self.pack_b, "scale_mode", "")
        if self.swapped:
            return (b, a)
        return (a, b)

    @property
    def product_bytes(self) -> int:
        each = self.d.nbytes(self.d.cols * self.d.leading_dimension)
        if self.staged:
            return each * sum(x.batch_count * len(x.offsets) for x in self.runs)
        return 0

    @property
    def emulation_bytes(self) -> int:
        """Most workspace of fixed-point emulation: cuBLAS documentation, "Fixed-Point Workspace Requirements"."""
        if self.compute_type is not ComputeType.COMPUTE_64F_EMULATED_FIXEDPOINT:
            return 0
        slices = (MANTISSA_BITS + 1) // 8
        parts = 2 if self.d.dtype.is_complex else 1
        m = self.d.rows
        n = self.d.cols
        k = self.first.cols if self.op_first == "N" else self.first.rows
        padded_m = -(-m // 1024) * 1024
        padded_n = -(-n // 1024) * 1024
        padded_k = -(-k // 128) * 128
        lines = padded_m + padded_n
        operands = lines * (padded_k * slices + 4) * parts
        pieces = -(-k // 8192)
        of_piece = 4 * padded_m * padded_n * parts**2 * slices
        sums = min(of_piece, 1 << 32) * pieces
        complex_sums = 0
        if parts == 2:
            complex_sums = 8 * m * n * 4
        blocks = -(-k // 64)
        exponents = 4 * ((m + n) * blocks + m * n) * parts
        most = max(operands + max(sums, complex_sums), exponents)
        return most * self.batch_count * 5 // 4 + (128 << 20)

    def over(self, k: int, start: int, stop: int) -> tuple[CublasLtCall, int, int]:
        """Return the call for a range of the inner dimension of length ``k``, and its offsets in first and second."""
        if (start, stop) == (0, k):
            return self, 0, 0
        first, before_first = self.first.range_of("cols", self.op_first, k, start, stop)
        second, before_second = self.second.range_of("rows", self.op_second, k, start, stop)
        return replace(self, first=first, second=second), before_first, before_second


#: Calls over the same number of matrices, and for each the offset of every array's first matrix, in elements.
_Run: TypeAlias = tuple[int, tuple[Shape, ...]]


def split_batches(shape: Shape, stacks: Sequence[Shape]) -> tuple[Shape, tuple[_Run, ...]]:
    """Split a batch into calls, each over (a part of) its largest dimension; ``stacks`` has the strides of each array.

    Return the batch stride of each array, in elements, and one run, or two if the calls cannot have the same number of
    matrices. No dimension is empty.
    """
    axes = list(zip(*stacks, strict=True))
    dimensions = coalesce(list(zip(shape, axes, strict=True)))
    # cuBLASLt does not document negative batch strides.
    forward = [i for i, (_, strides) in enumerate(dimensions) if min(strides) >= 0]
    count = 1
    strides = (0,) * len(stacks)
    if forward:
        largest = max(forward, key=lambda i: dimensions[i][0])
        count, strides = dimensions.pop(largest)
    calls = -(-count // MOST_MATRICES)
    each = -(-count // calls)  # calls of similar sizes
    parts, rest = divmod(count, each)
    steps = [tuple(each * i * stride for stride in strides) for i in range(parts + 1)]
    starts = tuple(offsets_of(dimensions, len(stacks)))

    def run(count: int, steps: Sequence[Shape]) -> _Run:
        offsets = [tuple(map(add, start, step)) for start in starts for step in steps]
        return count, tuple(offsets)

    runs = [run(each, steps[:-1])]
    if rest:
        runs.append(run(rest, steps[-1:]))
    matrices = sum(count * len(offsets) for count, offsets in runs)
    assert matrices == prod(shape)
    return strides, tuple(runs)
