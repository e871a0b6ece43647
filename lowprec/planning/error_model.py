"""Losses by underflow in the error of a product, and the texts of its bound.

See :mod:`lowprec.planning.bounds` for the notation and sources.
"""

from __future__ import annotations

from math import frexp, sqrt
from typing import NamedTuple

from lowprec.formats import FLOAT64, NumberFormat
from lowprec.planning.split_bounds import Depth, gamma_text

# Twice the smallest normal float16, relative to the largest number of a scaled row.
_SCALED_NORMAL = 2.0**-27


class ErrorModel(NamedTuple):
    """Parameters of the error: rounding of the operands, the sums, and the result."""

    operand: NumberFormat  # format to which operands are rounded
    operands: int  # number of rounded operands
    scaled_over: int  # length of scaled rows, 0 without scaling
    accumulator: NumberFormat
    out: NumberFormat | None  # the result's format, if it is not the accumulator's
    components: int  # 2 for complex numbers
    depth: Depth  # roundings of each real product of the leading parts
    terms: int  # real products per component
    flushes: bool  # the units flush subnormals to zero

    @property
    def growth(self) -> float:
        """Sum of the magnitudes of the terms, relative to ``|A| |B|``."""
        return sqrt(self.components)


def underflow_losses(model: ErrorModel) -> tuple[float, float, float]:
    """Return the losses by underflow per element of an operand, per product, and per element of C.

    Each is half the spacing near zero, or the smallest normal number on units that flush subnormals. Products of
    float16 values are multiples of 2^-48 and never underflow.
    """
    fmt = model.operand
    operand = 0.0
    if model.operands and not model.scaled_over:
        operand = fmt.smallest_subnormal / 2
    out = 0.0
    if model.out:
        out = model.out.smallest_subnormal / 2
    # Undoing the scales may give a subnormal number of the accumulator.
    if model.scaled_over:
        out += model.accumulator.smallest_subnormal
    if fmt.smallest_subnormal**2 >= model.accumulator.smallest_normal:
        return operand, 0.0, out
    if model.flushes:
        smallest = model.accumulator.smallest_normal
        return max(operand, smallest), smallest, out
    if model.depth.truncations:
        # The result of a group loses up to the spacing, more than its terms.
        return operand, 2 * model.accumulator.smallest_subnormal, out
    # Half of float64's spacing is not a float64 number.
    return operand, max(model.accumulator.smallest_subnormal / 2, FLOAT64.smallest_subnormal), out


def alignment_losses(model: ErrorModel, parts: int) -> tuple[float, float, float]:
    """Return the losses of tensor cores that align subnormal factors like the smallest normal number.

    The three losses are relative to the norms, per element of an operand, and per element of C. The factor ``parts`` is
    for the products of each part with all parts of the other operand.
    """
    if not model.depth.truncations:
        return 0.0, 0.0, 0.0
    error = parts * model.growth * model.depth.worst(model.accumulator)
    if model.scaled_over:
        return error * _SCALED_NORMAL * sqrt(model.scaled_over), 0.0, 0.0
    smallest = model.operand.smallest_normal
    return 0.0, error * smallest, error * model.terms * smallest**2


def formula_text(model: ErrorModel) -> str:
    factors = []
    if model.operands:
        scaled = ""
        if model.scaled_over:
            scaled = f" + 2^-39 sqrt({model.scaled_over})"
        square = "^2" if model.operands == 2 else ""
        factors.append(f"(1 + 2^-{model.operand.precision}{scaled}){square}")
    if model.depth.total:
        growth = "sqrt(2) " if model.components == 2 else ""
        factors.append(f"(1 + {growth}gamma_{model.depth.total})")
    if model.out:
        factors.append(f"(1 + 2^-{model.out.precision})")
    if not factors:
        return "exact"
    return f"{' '.join(factors)} - 1; {gamma_text(model.accumulator)}"


def absolute_text(
    operand_loss: float, term_loss: float, out_loss: float, accumulator: NumberFormat
) -> str:
    """Describe the losses by underflow; empty if they are those of the accumulator alone."""
    parts = []
    if operand_loss:
        parts.append(f"{power_text(operand_loss)} per element of an operand")
    if term_loss >= accumulator.smallest_normal:
        parts.append(f"{power_text(term_loss)} per product (units that flush subnormals to zero)")
    if out_loss > accumulator.smallest_subnormal:
        parts.append(f"{power_text(out_loss)} per element of the result")
    return ", ".join(parts)


def power_text(value: float) -> str:
    """Return a number rounded up to a power of two, as text: ``2^-25``."""
    mantissa, exponent = frexp(value)
    return f"2^{exponent - (mantissa == 0.5)}"


def condition_text(model: ErrorModel, is_split: bool) -> str:
    texts = []
    narrow = []
    if model.operands and not model.scaled_over:
        narrow.append((model.operand, "|x|", " in the operands"))
    if model.out:
        narrow.append((model.out, "|result|", ""))
    for fmt, name, where in narrow:
        if fmt.emax < model.accumulator.emax:
            beyond = "Inf" if fmt.has_infinity else "NaN"
            texts.append(f"{name} <= {fmt.largest:.0f}{where} (beyond it {beyond})")
    # With the same exponents, a format with fewer bits has a smaller largest number, so rounding to it may overflow. If
    # a part is infinite, the product is recomputed from the unsplit operands.
    numbers = ["partial sum"]
    if model.operands and not is_split and model.operand.emax == model.accumulator.emax:
        numbers.insert(0, "rounded operand")
    if model.out and model.out.emax == model.accumulator.emax:
        numbers.append("rounded result")
    texts.append(f"no {' or '.join(numbers)} beyond {model.accumulator.name}'s range")
    return "; ".join(texts)
