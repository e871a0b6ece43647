"""The plan of how a product runs, as a value: frozen, hashable, printable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lowprec.formats import ComputeType, DType, NumberFormat
from lowprec.modes import MathMode, ResolvedMode, row
from lowprec.planning.bounds import ErrorBound, scales_rows
from lowprec.planning.kernels import Capabilities, KernelRow
from lowprec.planning.layout import GemmLayout
from lowprec.planning.problem import GemmProblem
from lowprec.planning.reasons import Reason
from lowprec.planning.schedule import Product

if TYPE_CHECKING:  # what only cuBLASLt, or who prints a plan, needs is imported then
    from lowprec.planning.calls import CublasLtCall
    from lowprec.planning.roofline import Roofline


# What only printing a plan needs is imported once: at the exit of Python nothing can be imported, not even again.


@cache
def _rendering() -> Any:
    from lowprec.planning import rendering

    return rendering


@cache
def _roofline() -> Callable[[GemmPlan], Roofline | None]:
    from lowprec.planning.roofline import roofline

    return roofline


class Copy(NamedTuple):
    """A copy that is made because of where or how an array lies."""

    operand: str  # "a", "b" or "out"
    reasons: tuple[Reason, ...]
    nbytes: int

    @property
    def reason(self) -> str:
        """The reasons in words."""
        words: str = _rendering().copy_reason(self)
        return words


class Candidate(NamedTuple):
    """A mode that ``rtol`` considered."""

    mode: MathMode
    bound: float  # guaranteed relative error in the Frobenius norm
    cost: float  # expected time; 1 is numpy.matmul on float32
    accepted: bool  # whether this is the mode that runs
    why: Reason


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """What runs, and why. ``print(plan)`` shows it as a table, ``plan.to_dict()`` is ready for JSON."""

    problem: GemmProblem
    capabilities: Capabilities  # of the device
    mode: MathMode  # in force
    scheme: MathMode  # the mode that it stands for: another one where the mode is ``fp32_emulated``
    mode_has_effect: bool  # whether the mode changes anything for these element types
    layout: GemmLayout
    compute_dtype: DType  # common element type of the operands
    out_dtype: DType
    out_shape: tuple[int, ...]
    operand_format: NumberFormat | None  # of what is multiplied, once rounded; None for integers
    rounded: tuple[bool, bool]  # whether ``a`` and ``b`` are rounded to it
    multiplied_dtype: DType  # element type of what a GPU multiplies
    cublas_compute_type: ComputeType  # what the mode allows, in cuBLASLt's words
    schedule: tuple[Product, ...]  # the matrix products, in the order in which they are summed
    kernel_row: KernelRow  # what runs each of them
    passed_over: tuple[Reason, ...]  # why no more welcome kernel of the device does
    fallback: KernelRow | None  # what takes operands that the kernel cannot treat
    copies: tuple[Copy, ...]
    #: Of the product as the caller wrote it: 2 m n k per real product, 8 m n k per complex one.
    flops: int
    bytes_moved: int  # operands and result, each read or written once
    advice: tuple[Reason, ...]
    bound: ErrorBound  # of the product, before alpha, c, bias and activation
    resolved: ResolvedMode | None = None  # who chose the mode
    candidates: tuple[Candidate, ...] = ()  # what ``rtol`` considered
    call: CublasLtCall | None = None  # what cuBLASLt is asked for, where it computes
    #: Whether what is made of a prepared ``b`` is kept, and why; None where ``b`` is an array.
    prepared: Reason | None = None
    #: What cuBLASLt tells of the algorithm that it chose, by name; empty until a device was asked.
    algorithm: tuple[tuple[str, str], ...] = ()

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.kernel_row.name

    @property
    def accumulator(self) -> DType:
        """Element type in which products are summed, and the epilogue is computed."""
        return row(self.scheme).accumulator(self.compute_dtype)

    @property
    def split(self) -> tuple[int, int]:
        """In how many parts ``a`` and ``b`` are multiplied."""
        return (
            1 + max([product.a_part for product in self.schedule]),
            max([product.b_part + product.terms for product in self.schedule]),
        )

    @property
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
        """Matrix products that the kernel runs: one per pair of parts, and on tile units four real ones per complex."""
        kernel = self.kernel_row
        real = kernel.products_per_complex if self.compute_dtype.is_complex else 1
        return len({x for product in self.schedule for x in product.pairs}) * kernel.parts**2 * real

    @property
    def arithmetic_intensity(self) -> float:
        """Flops per byte moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    @property
    def roofline(self) -> Roofline | None:
        """The least time that the device's peak rate and bandwidth allow; None where they are not known."""
        return _roofline()(self)

    # In words, for people and for JSON.

    @property
    def kernel_reason(self) -> str:
        """What the kernel runs on, and why not on more welcome units."""
        return self._in_words("kernel_reason")

    @property
    def compute_type(self) -> str:
        """What the mode allows, in cuBLASLt's words."""
        return self._in_words("compute_type")

    @property
    def note(self) -> str:
        """Why the mode has no effect, empty if it has one."""
        return self._in_words("note")

    @property
    def a_becomes(self) -> str:
        """What is multiplied in place of ``a``."""
        return self._in_words("a_becomes")

    @property
    def b_becomes(self) -> str:
        """What is multiplied in place of ``b``."""
        return self._in_words("b_becomes")

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What operands the kernel cannot treat get instead."""
        text = self._in_words("fallback")
        return (text,) if text else ()

    def _in_words(self, name: str) -> str:
        words: str = _rendering().WORDS[name](self)
        return words

    def __str__(self) -> str:
        words: str = _rendering().to_text(self)
        return words

    def _repr_html_(self) -> str:
        words: str = _rendering().to_html(self)
        return words

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON."""
        words: dict[str, Any] = _rendering().to_dict(self)
        return words
