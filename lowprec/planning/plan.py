"""``GemmPlan``: the execution plan of a product."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from lowprec.formats import ComputeType, DType, NumberFormat
from lowprec.modes import Mode, row
from lowprec.planning.bounds import ErrorBound, error_bound, scales_rows
from lowprec.planning.cublaslt.calls import CublasLtCall
from lowprec.planning.kernels import Capabilities, KernelRow, format_name
from lowprec.planning.layout import GemmLayout
from lowprec.planning.problem import GemmProblem
from lowprec.planning.quantized_bounds import quantized_bound
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.planning.schedule import PartProduct
from lowprec.recipes import Rule
from lowprec.util.strides import Shape


def compute_words(compute: ComputeType, data: DType | None) -> str:
    """Return a compute type with the type of its data, unless its name implies it."""
    if data is None or data.bits >= 32 or data.format is None:
        return str(compute)
    return f"{compute} on {'float8' if data.is_float8 else data} data"


class Copy(NamedTuple):
    """A copy of an array, and the reasons for it."""

    operand: str  # "a", "b" or "out"
    reasons: tuple[Reason, ...]
    nbytes: int

    @property
    def reason(self) -> str:
        text = "; ".join(map(str, self.reasons))
        if self.operand == "out":
            return f"staged in temporary memory: {text}"
        return text


class Quantized(NamedTuple):
    """The rounding of the operands to codes with scales, and the product of the rounded numbers."""

    # of ``a`` and ``b``; None for a stored operand, which is not rounded again
    rules: tuple[Rule | None, Rule | None]
    inner: GemmPlan  # of the rounded numbers, over the first piece of k
    # length of the pieces of k, each with its scales, whose sums are added; 0: one sum
    k_piece: int
    last: GemmPlan  # over the last piece of k, which may be shorter


@dataclass(frozen=True, repr=False)
class GemmPlan:
    """The execution plan of a product: frozen and hashable."""

    problem: GemmProblem
    capabilities: Capabilities  # of the device
    mode: Mode  # the resolved mode
    runs_as: Mode  # the mode that runs; differs from ``mode`` for ``fp32_emulated``
    mode_has_effect: bool  # whether the mode applies to these element types
    layout: GemmLayout
    compute_dtype: DType  # common element type of the operands
    out_dtype: DType
    operand_format: NumberFormat | None  # format of the rounded operands; None for integers
    rounded: tuple[bool, bool]  # whether ``a`` and ``b`` are rounded to it
    multiplied_dtype: DType  # element type that a GPU multiplies
    cublas_compute_type: ComputeType  # cuBLASLt's compute type
    schedule: tuple[PartProduct, ...]  # the matrix products, in the order of their summation
    kernel_row: KernelRow  # the kernel
    passed_over: tuple[Reason, ...]  # reasons against preferred kernels of the device
    copies: tuple[Copy, ...]
    call: CublasLtCall | None = None  # arguments of cuBLASLt, if it is the kernel
    quantized: Quantized | None = None  # of a mode that quantises, if it acts

    # element type of the sums and the epilogue
    accumulator: DType = field(init=False, compare=False)
    # number of parts of ``a`` and of ``b``
    split: tuple[int, int] = field(init=False, compare=False)
    #: Whether rows of ``a`` and columns of ``b`` are scaled by powers of two before rounding.
    scaled: tuple[bool, bool] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        accumulator = DType.FLOAT32
        if not self.problem.is_scaled:
            accumulator = row(self.runs_as).accumulator(self.compute_dtype)
        object.__setattr__(self, "accumulator", accumulator)
        scaled = (False, False)
        if scales_rows(self.runs_as):
            scaled = self.rounded
        object.__setattr__(self, "scaled", scaled)
        of_a = max([1 + product.a_part for product in self.schedule])
        of_b = max([product.b_part + product.terms for product in self.schedule])
        object.__setattr__(self, "split", (of_a, of_b))

    @property
    def out_shape(self) -> Shape:
        return self.layout.out_shape

    @property
    def flops(self) -> int:
        """2 m n k (complex: 8 m n k) times the batch, without the additional products of split operands."""
        if self.problem.ignores_product:
            return 0
        layout = self.layout
        each = 8 if self.compute_dtype.is_complex else 2
        return each * layout.batch_count * layout.m * layout.n * layout.k

    @property
    def bound(self) -> ErrorBound:
        """Error bound of the product, before alpha, c, bias and activation."""
        if self.quantized:
            rules, inner, k_piece, _ = self.quantized
            return quantized_bound(rules, inner.bound, self.layout, self.out_dtype, k_piece)
        layout = self.layout
        a_rounded, b_rounded = self.rounded
        return error_bound(
            self.runs_as,
            self.compute_dtype,
            self.out_dtype,
            layout.k,
            self.kernel_row,
            a_exact=not a_rounded,
            b_exact=not b_rounded,
            capability=self.capabilities.tensor_cores_of(self.kernel_row),
            schedule=self.schedule,
            elements=layout.batch_count * layout.m * layout.n,
        )

    @property
    def multiplied_format(self) -> NumberFormat | None:
        """Format in which the operands are multiplied; None for integers."""
        return self.quantized.inner.operand_format if self.quantized else self.operand_format

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.kernel_row.name

    @property
    def k_chunk(self) -> int:
        """Length of the chunks of k in which the leading product is summed."""
        leading = [x for x in self.schedule if x.pairs == ((0, 0),)]
        return max(x.k_stop - x.k_start for x in leading)

    @property
    def parts(self) -> int:
        """Number of parts of each operand."""
        return self.kernel_row.parts * max(self.split)

    @property
    def products(self) -> int:
        """Number of matrix products that the kernel runs; a complex product may be several real ones."""
        kernel = self.kernel_row
        real = kernel.products_per_complex if self.compute_dtype.is_complex else 1
        pairs = set().union(*(product.pairs for product in self.schedule))
        return len(pairs) * kernel.parts**2 * real

    @property
    def bytes_moved(self) -> int:
        """Total bytes of operands, addends and result."""
        problem = self.problem
        read = [problem.a, problem.b, problem.bias]
        if problem.has_beta:
            read.append(problem.c)
        stored = sum(x.stored_bytes for x in read if x)
        return stored + self.out_dtype.itemsize * prod(self.out_shape)

    @property
    def arithmetic_intensity(self) -> float:
        """Flops per byte moved."""
        if self.bytes_moved:
            return self.flops / self.bytes_moved
        return 0.0

    @property
    def kernel_reason(self) -> str:
        """Units of the kernel, and the reasons against preferred kernels."""
        texts = [self.kernel_row.units, *map(str, self.passed_over)]
        if self.compute_dtype.is_complex and self.kernel_row.products_per_complex > 1:
            texts.append("four real products")
        return "; ".join(texts)

    @property
    def compute_type(self) -> str:
        """Compute type of cuBLASLt."""
        if self.call and self.call.first.codes:
            return f"{self.cublas_compute_type} on {self.call.first.codes.name} data"
        return compute_words(self.cublas_compute_type, self.multiplied_dtype)

    @property
    def note(self) -> str:
        """The reason if the mode has no effect, otherwise empty."""
        if self.mode_has_effect:
            return ""
        dtype = self.compute_dtype
        mode = row(self.mode)
        summed_in = str(dtype.accumulator)
        if dtype.format:
            summed_in = format_name(dtype.accumulator.format)
        *labels, last = (d.label for d in DType if mode.acts(d))
        why = f"it acts on {', '.join(labels)} and {last} only"
        if mode.acts(dtype):
            why = f"cuBLASLt does not emulate {dtype} products on this device"
        stay = f"{dtype} operands stay as they are and are summed in {summed_in}"
        return f"the mode {self.mode} has no effect: {why}; {stay}"

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Sentences on the treatment of operands that the kernel does not support."""
        is_split = max(self.split) > 1 or self.kernel_row.parts > 1
        if is_split:
            return (str(Reason(ReasonKind.NOT_FINITE_IN_PARTS)),)
        return ()
