"""The plan of how a product runs, as a value: frozen, hashable, printable."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from lowprec.formats import ComputeType, DType, NumberFormat
from lowprec.modes import MathMode, ResolvedMode, row
from lowprec.planning.bounds import ErrorBound, error_bound, scales_rows
from lowprec.planning.kernels import Capabilities, KernelRow
from lowprec.planning.layout import GemmLayout
from lowprec.planning.problem import GemmProblem
from lowprec.planning.reasons import Reason
from lowprec.planning.schedule import Product

if TYPE_CHECKING:  # needed by cuBLASLt alone, or by printing alone
    from lowprec.planning.calls import CublasLtCall
    from lowprec.planning.costs import Roofline


@cache
def _rendering() -> Any:
    # Imported once: at the exit of Python nothing can be imported, not even again.
    from lowprec.planning import rendering

    return rendering


class Copy(NamedTuple):
    """A copy that is made because of an array's memory or layout."""

    operand: str  # "a", "b" or "out"
    reasons: tuple[Reason, ...]
    nbytes: int

    @property
    def reason(self) -> str:
        """The reasons in words."""
        return str(_rendering().copy_reason(self))


class Candidate(NamedTuple):
    """A mode that ``rtol`` considered."""

    mode: MathMode
    bound: float  # guaranteed relative error in the Frobenius norm
    cost: float  # expected time; 1 is numpy.matmul on float32
    accepted: bool  # whether this is the mode that runs
    why: Reason


@dataclass(frozen=True)
class GemmPlan:
    """The execution plan of a product; ``print`` shows a table."""

    problem: GemmProblem
    capabilities: Capabilities  # of the device
    mode: MathMode  # in force
    scheme: MathMode  # the mode that runs: another one where the mode is ``fp32_emulated``
    mode_has_effect: bool  # whether the mode changes anything for these element types
    layout: GemmLayout
    compute_dtype: DType  # common element type of the operands
    out_dtype: DType
    out_shape: tuple[int, ...]
    operand_format: NumberFormat | None  # of the multiplied numbers, once rounded; None for integers
    rounded: tuple[bool, bool]  # whether ``a`` and ``b`` are rounded to it
    multiplied_dtype: DType  # element type that a GPU multiplies
    cublas_compute_type: ComputeType  # allowed by the mode, as cuBLASLt names it
    schedule: tuple[Product, ...]  # the matrix products, in the order in which they are summed
    kernel_row: KernelRow  # runs each of them
    passed_over: tuple[Reason, ...]  # why preferred kernels of the device do not
    fallback: KernelRow | None  # takes operands that the kernel refuses
    copies: tuple[Copy, ...]
    #: Of the product as the caller wrote it: 2 m n k per real product, 8 m n k per complex one.
    flops: int
    resolved: ResolvedMode | None = None  # the source of the mode
    candidates: tuple[Candidate, ...] = ()  # what ``rtol`` considered
    call: CublasLtCall | None = None  # the call of cuBLASLt, where it computes
    #: Whether the packed form of a prepared ``b`` is kept, and why; None where ``b`` is an array.
    prepared: Reason | None = None
    #: cuBLASLt's description of its algorithm, by name; empty without a device.
    algorithm: tuple[tuple[str, str], ...] = ()

    @cached_property
    def bound(self) -> ErrorBound:
        """The error of the product, before alpha, c, bias and activation."""
        layout, (a_rounded, b_rounded) = self.layout, self.rounded
        return error_bound(
            self.scheme, self.compute_dtype, self.out_dtype, layout.k, self.kernel_row,
            a_exact=not a_rounded, b_exact=not b_rounded,
            capability=self.capabilities.tensor_cores_of(self.kernel_row),
            schedule=self.schedule, elements=layout.batch_count * layout.m * layout.n,
        )  # fmt: skip

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.kernel_row.name

    @cached_property
    def accumulator(self) -> DType:
        """Element type in which products are summed, and the epilogue is computed."""
        return row(self.scheme).accumulator(self.compute_dtype)

    @cached_property
    def split(self) -> tuple[int, int]:
        """In how many parts ``a`` and ``b`` are multiplied."""
        return (
            1 + max([product.a_part for product in self.schedule]),
            max([product.b_part + product.terms for product in self.schedule]),
        )

    @cached_property
    def scaled(self) -> tuple[bool, bool]:
        """Whether rows of ``a`` and columns of ``b`` are scaled by powers of two before they are rounded."""
        a, b = self.rounded
        scales = scales_rows(self.scheme)
        return scales and a, scales and b

    @property
    def k_chunk(self) -> int:
        """Length of the pieces of k in which the leading product runs."""
        return max(x.k_stop - x.k_start for x in self.schedule if x.pairs == ((0, 0),))

    @property
    def parts(self) -> int:
        """How many parts of each operand the products multiply."""
        return self.kernel_row.parts * max(self.split)

    @property
    def products(self) -> int:
        """Matrix products that the kernel runs, real ones on tile units."""
        kernel = self.kernel_row
        real = kernel.products_per_complex if self.compute_dtype.is_complex else 1
        return len({x for product in self.schedule for x in product.pairs}) * kernel.parts**2 * real

    @property
    def bytes_moved(self) -> int:
        """Bytes of operands, addends and result, each read or written once."""
        problem = self.problem
        read = [problem.a, problem.b, problem.c if problem.has_beta else None, problem.bias]
        stored = sum(x.stored_bytes for x in read if x)
        return stored + self.out_dtype.itemsize * prod(self.out_shape)

    @property
    def arithmetic_intensity(self) -> float:
        """Flops per byte moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    @property
    def roofline(self) -> Roofline | None:
        """The least time by the device's peak rate and bandwidth; None if unknown."""
        found: Roofline | None = _rendering().roofline(self)
        return found

    # In words, for people and for JSON.

    @cached_property
    def advice(self) -> tuple[Reason, ...]:
        """The advice of the field for this product."""
        return tuple(_rendering().advise(self))

    @property
    def kernel_reason(self) -> str:
        """The units of the kernel, and why preferred kernels were not chosen."""
        return str(_rendering().kernel_reason(self))

    @property
    def compute_type(self) -> str:
        """The compute type of the mode, in cuBLASLt's names."""
        return str(_rendering().compute_words(self.cublas_compute_type, self.multiplied_dtype))

    @property
    def note(self) -> str:
        """Why the mode has no effect, empty if it has one."""
        return str(_rendering().note(self))

    @property
    def a_becomes(self) -> str:
        """The operand that is multiplied instead of ``a``."""
        return str(_rendering().becomes(self, "a"))

    @property
    def b_becomes(self) -> str:
        """The operand that is multiplied instead of ``b``."""
        return str(_rendering().becomes(self, "b"))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The replacement for operands that the kernel does not support."""
        return tuple(_rendering().fallbacks(self))

    def __str__(self) -> str:
        return str(_rendering().to_text(self))

    def _repr_html_(self) -> str:
        return str(_rendering().to_html(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON."""
        return dict(_rendering().to_dict(self))
