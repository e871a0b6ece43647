"""Guaranteed errors of the product, before alpha, c, bias and the activation.

Notation: u is the unit roundoff of a format, gamma_d = d u / (1 - d u) with u of the accumulator. A value that a sum
carries through at most d roundings is off by a factor within 1 +- gamma_d (Higham, *Accuracy and Stability of
Numerical Algorithms*, 2nd ed., Lemma 3.1 and section 3.1); d = k for a sum of k products in any order. Then, for every
element and therefore for the Frobenius norms,

    |C - AB| <= ((1 + u_a) (1 + u_b) (1 + gamma_d) (1 + u_out) - 1) |A| |B|  +  an absolute term,

where u_a and u_b round the operands and u_out the result. The absolute term is the error of underflow.

*Tile units* (Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS): each instruction adds 32
products to an element as two sums of 16, so d = 17 plus the number of instructions per element. Products of two
bfloat16 values are exact in FP32; subnormal inputs and results count as zero.

*Vector units for bfloat16* (the same manual, VDPBF16PS): each instruction adds two products to an element. Whether one
after the other, or their sum at once, no product goes through more than two roundings in it, so d = k, rounded up to an
even number. Subnormal inputs and results count as zero here, too.

*Products of parts in one pass* over packed operands (``KernelRow.shares_sums``) share their sums, which start again
with each chunk of k, of 2048 / parts at most, and are added in FP32. Tile units add all products of a step before the
next step, so that a term meets the roundings of all of them over the chunk; vector units add one product over the
whole chunk after the other, the smallest first, so that a term meets those of its own and of the larger ones. One more
rounding for each further chunk.

*Tensor cores* (see ``planning.tensor_cores``): d counts the roundings of their model. How cuBLAS rounds float32 data
to TF32 is not documented; truncation is assumed, the worst case, which loses 2^-10. Products are aligned before they
are normalised, a subnormal factor with the exponent of nu, the smallest normal number: the loss is gamma_d of the
sum of (|a| + nu) (|b| + nu), which adds gamma_d nu per element of an operand and gamma_d k nu^2 per element of the
result (in scaled rows, which reach 2^28 nu, of the norms: gamma_d 2^-27 sqrt(k)). Results below float32's normal range
are cut, too.

*Scaling* (``fp16`` and its schemes): rows of a and columns of b are scaled by powers of two so that the largest number
of each is in [2^14, 2^15). Numbers that then fall below float16's normal range lose at most 2^-25, which is 2^-39 of
that largest number; over a row of k numbers that is at most sqrt(k) 2^-39 of the row's norm.

*Chunks of k* add one rounding for each sum of a chunk. *Products of parts* and *probable* bounds are in
``planning.split_bounds``. Underflow in the parts of a number loses at most twice the loss of one part: the rest, and
its share of the products that are not formed.

*Complex*: rounding the components of x moves x by at most u |x|. Each component of the result is a sum of 2k real
products, off by at most gamma_d of its magnitudes; the vector (|ar||br| + |ai||bi|, |ar||bi| + |ai||br|) has norm at
most sqrt(2) |a| |b|, hence a factor sqrt(2) on gamma.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import expm1, frexp, log1p, sqrt
from typing import NamedTuple

from lowprec.formats import FLOAT16, FLOAT32, FLOAT64, TF32, DType, NumberFormat
from lowprec.modes import MathMode, Pair, row
from lowprec.planning.kernels import KernelRow, Summation
from lowprec.planning.schedule import Product, make_schedule
from lowprec.planning.split_bounds import (
    FAILURE,
    Depth,
    RelativeError,
    confidence,
    depths,
    in_one_pass,
    on_tensor_cores,
    split_error,
)

#: Largest k for which a sum of int8 products cannot leave int32: each is at most 2^14.
MAX_K_INT8 = 2**17 - 1

#: Inner dimension of one tile instruction on bfloat16 data, and of a step of packed operands.
TILE_K = 32

#: Steps over which parts of split operands are summed in one piece, times the number of the parts.
CHUNK_STEPS = 64

# TF32 as it is where numbers may be cut instead of rounded: one bit less is guaranteed.
_TRUNCATED_TF32 = replace(TF32, precision=TF32.precision - 1)

# The loss by underflow after scaling, over the largest number of a row.
_SCALED_LOSS = 2.0**-39

# Twice the smallest normal float16 over the same number.
_SCALED_NORMAL = 2.0**-27

# Roundings within one tile instruction: 16 products one after another, then two such sums together.
_TILE_DEPTH = 17


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """A guaranteed bound of the error of a product, element by element and in the Frobenius norm.

    Element by element, with sums over k,

    ``|C - AB| <= relative |A||B| + operand_absolute (sum_k |A| + sum_k |B| + k operand_absolute) + result_absolute``
    """

    relative: float  # factor of ``|A| |B|``, and of the product of the Frobenius norms
    #: The loss of an operand's element by underflow, beyond its relative rounding.
    operand_absolute: float
    result_absolute: float  # the loss of a result's element by underflow
    k: int  # length of the sums
    formula: str  # the expression behind ``relative``
    #: The cost of underflow in words; empty where it is no more than the accumulator's own underflow.
    absolute: str
    condition: str  # the condition on the data for the bound to hold
    #: Whether ``relative`` alone describes the mode: false where the mode's own range can be left.
    unconditional: bool
    #: Replaces ``relative`` with probability ``probability`` at least, where rounding errors have a mean
    #: of zero.
    probable: float = 0.0
    by_norms: bool = False  # whether it holds for the norms only, because rows were scaled

    @property
    def probability(self) -> float:
        """With which ``probable`` holds, for the whole product."""
        return 1 - FAILURE

    def frobenius(self, norm_a: float, norm_b: float, m: int, n: int) -> float:
        """Return the bound of ``|C - AB|`` in the Frobenius norm, from the norms of the operands (m, k) and (k, n)."""
        spread = sqrt(self.k) * (sqrt(n) * norm_a + sqrt(m) * norm_b)
        lost = self.operand_absolute * (spread + self.k * sqrt(m * n) * self.operand_absolute)
        return self.relative * norm_a * norm_b + lost + sqrt(m * n) * self.result_absolute


def holds(fmt: NumberFormat, values_of: NumberFormat) -> bool:
    """Whether ``fmt`` represents every number of another format."""
    return (
        fmt.precision >= values_of.precision
        and fmt.largest >= values_of.largest
        and fmt.smallest_subnormal <= values_of.smallest_subnormal
    )


def operand_format(mode: MathMode, compute_dtype: DType) -> NumberFormat | None:
    """Return the format of the multiplied numbers: that of the mode in single precision, else of the storage."""
    if compute_dtype.is_single_precision:
        return row(mode).operand_format
    return compute_dtype.format


class _Case(NamedTuple):
    """The parts of an error: rounding the operands, the sums, and rounding the result."""

    operand: NumberFormat  # to which operands are rounded
    operands: int  # how many are
    scaled_over: int  # length of the rows that were scaled before, 0 where none was
    accumulator: NumberFormat
    out: NumberFormat | None  # the result's format, if it is not the accumulator's
    components: int
    depth: Depth  # roundings of each real product of the leading parts
    terms: int  # real products per component
    flushes: bool  # whether the units count subnormals as zero

    @property
    def growth(self) -> float:
        """Magnitudes of the terms together, over ``|A| |B|``."""
        return sqrt(self.components)


def _depths(
    schedule: tuple[Product, ...],
    kernel: KernelRow,
    fmt: NumberFormat,
    accumulator: NumberFormat,
    components: int,
    capability: tuple[int, int] | None,
) -> dict[Pair, tuple[Depth, float]]:
    """Return of each pair of parts the depth of its sums, and its factor."""
    summation, products = kernel.summation, kernel.parts**2

    def of_sum(length: int) -> Depth:
        if not length:
            return Depth(0)
        if summation is Summation.TILES:
            # The two parts of a value are its truncation and the rest. Both have its sign, so the magnitudes of the
            # products of parts add up to those of one product.
            instructions = components * products * -(-length // TILE_K)
            return Depth(_TILE_DEPTH + instructions + components - 1)
        if summation is Summation.PAIRS:
            return Depth(components * 2 * -(-length // 2) + components - 1)
        if summation is Summation.TENSOR_CORES and accumulator is FLOAT32 and capability:
            return on_tensor_cores(components * length, fmt.name, capability)
        return Depth(components * length)

    def of_chunk(number: int, length: int) -> int:
        if summation is Summation.PAIRS:  # one product after the other
            return (len(schedule) - number) * 2 * -(-length // 2)
        return _TILE_DEPTH + len(schedule) * products * -(-length // TILE_K)

    if not (kernel.shares_sums and len(schedule) > 1):
        return depths(schedule, of_sum)
    parts = 1 + max(max(product.pairs[0]) for product in schedule)
    chunk = TILE_K * (CHUNK_STEPS // (kernel.parts * parts))
    return in_one_pass(schedule, of_chunk, chunk, components - 1)


def scales_rows(mode: MathMode) -> bool:
    """Whether rows of ``a`` and columns of ``b`` are scaled by powers of two before they are rounded."""
    return row(mode).operand_format is FLOAT16


def error_bound(
    mode: MathMode,
    compute_dtype: DType,
    out_dtype: DType,
    k: int,
    kernel: KernelRow,
    *,
    a_exact: bool = False,
    b_exact: bool = False,
    capability: tuple[int, int] | None = None,
    schedule: tuple[Product, ...] | None = None,
    elements: int = 1,
) -> ErrorBound:
    """Return the guaranteed error of a product.

    An operand is ``exact`` where its own element type holds only numbers of the mode's format, so that nothing is
    rounded; ``capability`` is the compute capability of the GPU that multiplies, None for a CPU. The ``schedule`` is
    the mode's over the whole of k where none is given; ``elements`` counts those of the result.

    Examples
    --------
    >>> numpy = KernelRow("numpy", "NumPy's BLAS", "module:function")
    >>> error_bound(MathMode.TF32, DType.FLOAT32, DType.FLOAT32, 1024, numpy).formula
    '(1 + 2^-11)^2 (1 + gamma_1024) - 1; gamma_d = d u / (1 - d u), u = 2^-24'
    """
    fmt, acts = operand_format(mode, compute_dtype), compute_dtype.is_single_precision
    accumulator = row(mode).accumulator(compute_dtype).format
    if fmt is None or accumulator is None:
        condition = f"k <= {MAX_K_INT8}, so that no sum leaves int32; with a bias it saturates"
        return ErrorBound(0.0, 0.0, 0.0, k, "exact", "", condition, unconditional=True)
    rounds = fmt is not accumulator and acts
    rounded = (rounds and not a_exact, rounds and not b_exact)
    out = None if out_dtype.format is accumulator else out_dtype.format
    scaled = k if acts and any(rounded) and scales_rows(mode) else 0
    components = 2 if compute_dtype.is_complex else 1
    schedule = schedule or make_schedule(row(mode if acts else MathMode.FP32), rounded, k)
    found = _depths(schedule, kernel, fmt, accumulator, components, capability)
    is_split = acts and row(mode).parts > 1 and any(rounded)
    # Parts are rounded before, and nothing is left to cut.
    cuts = kernel.cuts_tf32 and fmt is TF32 and not is_split
    # A sum that is scaled, and one that is added, may underflow like a product.
    terms = sum(components * product.length + 1 for product in schedule) - 1
    case = _Case(
        _TRUNCATED_TF32 if cuts else fmt, sum(rounded), scaled, accumulator, out, components,
        found[0, 0][0], terms * kernel.parts**2, kernel.summation in (Summation.TILES, Summation.PAIRS),
    )  # fmt: skip
    size = confidence(max(elements, 1) * max(case.terms, 1))
    if is_split:
        error = split_error(row(mode), rounded, found, accumulator, growth=case.growth, scaled_over=scaled, size=size)
    else:
        error = _plain_error(case, size)
    narrow = any(rounded) and not scaled and fmt.emax < accumulator.emax
    return _with_losses(case, error, k, row(mode).parts * is_split, unconditional=not narrow)


def _with_losses(case: _Case, error: RelativeError, k: int, parts: int, *, unconditional: bool) -> ErrorBound:
    """Return the bound with the losses by underflow; ``parts`` is 0 where no operand is split."""
    is_split, out = parts > 0, case.out
    norms_loss, *early = _aligned_early(case, 1 + parts)
    operand_loss, term_loss, out_loss = _underflow(case)
    operand_loss, out_loss = operand_loss * (1 + is_split) + early[0], out_loss + early[1]
    last = [out.unit_roundoff if out else 0.0, norms_loss]
    relative, probable = _joint(error.worst, *last), _joint(error.probable, *last)
    # A loss is itself carried through the roundings that follow. Of complex numbers, the sum of the components'
    # magnitudes and the modulus of the components' errors give sqrt(2) each.
    carried = min(1 + relative, FLOAT64.largest) * case.components
    return ErrorBound(
        relative,
        carried * operand_loss,
        carried * (case.terms * term_loss + out_loss),
        k,
        error.formula,
        _absolute_text(operand_loss, term_loss, out_loss, case.accumulator),
        _condition(case, is_split),
        unconditional=unconditional,
        probable=probable,
        by_norms=case.scaled_over > 0,
    )


def _joint(*errors: float) -> float:
    return expm1(sum(map(log1p, errors)))


def _plain_error(case: _Case, size: float) -> RelativeError:
    """Return the relative error of a product of whole operands, before it is rounded to the result's format."""
    loss = case.operand.unit_roundoff + _SCALED_LOSS * sqrt(case.scaled_over)
    sums = case.depth.worst(case.accumulator), case.depth.probable(case.accumulator, size)
    worst, probable = (_joint(case.growth * x, *[loss] * case.operands) for x in sums)
    return RelativeError(worst, probable, _formula(case))


def _underflow(case: _Case) -> tuple[float, float, float]:
    """Return the losses by underflow per element of an operand, per product, and per element of C.

    Each is half the spacing near zero where subnormals are kept, and the smallest normal number on units that flush
    them. Products of float16 values are multiples of 2^-48 and never underflow.
    """
    fmt = case.operand
    operand = fmt.smallest_subnormal / 2 if case.operands and not case.scaled_over else 0.0
    out = case.out.smallest_subnormal / 2 if case.out else 0.0
    # Taking the scales back may leave a subnormal number of the accumulator.
    out += case.accumulator.smallest_subnormal if case.scaled_over else 0.0
    if fmt.smallest_subnormal**2 >= case.accumulator.smallest_normal:
        return operand, 0.0, out
    if case.flushes:
        smallest = case.accumulator.smallest_normal
        return max(operand, smallest), smallest, out
    if case.depth.cut:
        # The result of a group, by up to the spacing; more than its terms, which are cut below that.
        return operand, 2 * case.accumulator.smallest_subnormal, out
    # Half of float64's spacing is no float64.
    return operand, max(case.accumulator.smallest_subnormal / 2, FLOAT64.smallest_subnormal), out


def _aligned_early(case: _Case, parts: int) -> tuple[float, float, float]:
    """Return the losses of tensor cores that align subnormal factors like the smallest normal number.

    They are relative to the norms, per element of an operand, and per element of C. Each part is multiplied by all
    parts of the other operand, together less than one part more than the first.
    """
    if not case.depth.cut:
        return 0.0, 0.0, 0.0
    cut = parts * case.growth * case.depth.worst(case.accumulator)
    if case.scaled_over:
        return cut * _SCALED_NORMAL * sqrt(case.scaled_over), 0.0, 0.0
    smallest = case.operand.smallest_normal
    return 0.0, cut * smallest, cut * case.terms * smallest**2


def _formula(case: _Case) -> str:
    factors = []
    if case.operands:
        scaled = f" + 2^-39 sqrt({case.scaled_over})" if case.scaled_over else ""
        square = "^2" if case.operands == 2 else ""
        factors.append(f"(1 + 2^-{case.operand.precision}{scaled}){square}")
    if case.depth.total:
        growth = "sqrt(2) " if case.components == 2 else ""
        factors.append(f"(1 + {growth}gamma_{case.depth.total})")
    if case.out:
        factors.append(f"(1 + 2^-{case.out.precision})")
    if not factors:
        return "exact"
    text = f"{' '.join(factors)} - 1"
    return f"{text}; gamma_d = d u / (1 - d u), u = 2^-{case.accumulator.precision}"


def _absolute_text(operand_loss: float, term_loss: float, out_loss: float, accumulator: NumberFormat) -> str:
    """Return the cost of underflow in words; empty at the level of the accumulator's own underflow."""
    parts = []
    if operand_loss:
        parts.append(f"{_power(operand_loss)} per element of an operand")
    if term_loss >= accumulator.smallest_normal:
        parts.append(f"{_power(term_loss)} per product (units that count subnormals as zero)")
    if out_loss > accumulator.smallest_subnormal:
        parts.append(f"{_power(out_loss)} per element of the result")
    return ", ".join(parts)


def _power(value: float) -> str:
    """Return the power of two that is not below a number as text: ``2^-25``."""
    mantissa, exponent = frexp(value)
    return f"2^{exponent - (mantissa == 0.5)}"


def _condition(case: _Case, is_split: bool) -> str:
    texts = []
    narrow = [(case.operand, "|x|", " in the operands")] if case.operands else []
    if case.scaled_over:
        narrow = []
    if case.out:
        narrow.append((case.out, "|result|", ""))
    for fmt, name, where in narrow:
        if fmt.emax < case.accumulator.emax:
            beyond = "Inf" if fmt.has_infinity else "NaN"
            texts.append(f"{name} <= {fmt.largest:.0f}{where} (beyond it {beyond})")
    # The largest number of a format with the same exponents is smaller by the digits that it lacks. Where a part is
    # infinite, the product is computed again from the operands as they are.
    numbers = ["partial sum"]
    if case.operands and not is_split and case.operand.emax == case.accumulator.emax:
        numbers.insert(0, "rounded operand")
    if case.out and case.out.emax == case.accumulator.emax:
        numbers.append("rounded result")
    texts.append(f"no {' or '.join(numbers)} beyond {case.accumulator.name}'s range")
    return "; ".join(texts)
