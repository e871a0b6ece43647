"""Why a plan is as it is: kinds of reasons with their data. The sentences are in ``planning.rendering``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto, unique

__all__ = ["Reason", "Why"]


@unique
class Why(Enum):
    """Kinds of reasons, by what they explain."""

    # Why a kernel was passed over.
    REQUIREMENT_NOT_MET = auto()
    SINGLE_PRODUCT = auto()
    TOO_FEW_ELEMENTS = auto()
    TOO_SMALL_EXTENT = auto()
    TOO_LARGE_FOR_32_BITS = auto()
    TOO_SMALL_PRODUCTS = auto()

    # What a kernel cannot treat, and what happens then.
    NOT_FINITE_IN_TWO_PARTS = auto()

    # Why an operand is rewritten, or copied.
    OTHER_DTYPE = auto()
    SEVERAL_PARTS = auto()
    STRIDES = auto()
    INNER_CONTIGUOUS = auto()
    READ_IN_STEPS = auto()
    OVERLAP = auto()
    EXPORTED_COPY = auto()

    # Why the result is staged: computed in temporary memory, from which it is written.
    NOT_WRITTEN_AS = auto()
    RESULT_STRIDES = auto()
    WRITTEN_IN_STEPS = auto()
    SCALED_OPERANDS = auto()
    PADDED_COLUMNS = auto()
    ROWS_ONLY = auto()
    REAL_PRODUCT = auto()
    SEVERAL_PRODUCTS = auto()
    NO_FUSED_ALGORITHM = auto()
    ADDEND_DIFFERS = auto()
    BIAS_NOT_FUSED = auto()
    ACTIVATION_NOT_FUSED = auto()

    # Why ``rtol`` took a mode, or passed it over.
    EXCLUDED = auto()
    BOUND_TOO_LARGE = auto()
    BOUND_NEEDS_RANGE = auto()
    CHEAPEST = auto()
    NO_CHEAPER = auto()

    # Advice.
    MISALIGNED = auto()
    SMALL_DIMENSIONS = auto()
    LOW_INTENSITY = auto()
    ROUNDING_COSTS_MORE = auto()


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason; ``str`` gives its sentence.

    Parameters
    ----------
    why : Why
    data : tuple of (str, object)
        What the sentence names, by the words of its template.

    Examples
    --------
    >>> str(Reason.of(Why.NO_CHEAPER, chosen="tf32"))
    'no cheaper than tf32'
    """

    why: Why
    data: tuple[tuple[str, object], ...] = ()

    @classmethod
    def of(cls, why: Why, **data: object) -> Reason:
        """Return the reason of this kind with its data."""
        return cls(why, tuple(data.items()))

    def __str__(self) -> str:
        from lowprec.planning import rendering  # only who prints a plan needs it

        return rendering.sentence(self)
