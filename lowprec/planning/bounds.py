"""Guaranteed errors of the product, before alpha, c, bias and the activation.

Notation: u is the unit roundoff of a format, and gamma_d = d u / (1 - d u) with u of the accumulator. After at most d
roundings a term of a sum has a relative error of at most gamma_d (Higham, *Accuracy and Stability of Numerical
Algorithms*, 2nd ed., Lemma 3.1 and section 3.1); d = k for a sum of k products in any order. For every element, and
therefore for the Frobenius norms,

    |C - AB| <= ((1 + u_a) (1 + u_b) (1 + gamma_d) (1 + u_out) - 1) |A| |B|  +  an absolute term,

where u_a and u_b are those of rounding the operands and u_out that of rounding the result. The absolute term bounds the
losses by underflow.

*Compiled kernels* (``KernelRow.k_chunk``) sum each product of parts over one chunk of k from zero, and then add the sum
to the result: d is the number of roundings in a chunk, plus one for each addition from then on. With c chunks, p
products of parts and s sums for each (the four products of bfloat16 parts of TF32 or float16 numbers, twice as many
for complex numbers) there are c p s - 1 additions, of which product i in the order of summation is in all but i - 1. In
a chunk of length l, d is

- on *FP32 units*, by fused multiply-adds, l;
- on *vector units for bfloat16* (Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS), where an
  instruction adds two products to an element, each with at most two roundings, l, rounded up to an even number;
- by the same instruction of AArch64 (Arm Architecture Reference Manual, BFDOT), which rounds to odd, with errors of up
  to twice the unit roundoff, so that the variances of four times as many roundings to nearest bound its own: 4 l;
- on *tile units* (the Intel manual, TDPBF16PS), where an instruction adds 32 products to an element as two sums of 16,
  17 plus the number of instructions. Products of two bfloat16 values are exact in FP32;
- of *integers in blocks* of at least 16, whose sums are exact, the number of blocks, each of which is added by one
  fused multiply-add, and 1 for the product of the sum and a scale.

The units for bfloat16 flush subnormal inputs and results to zero.

*Tensor cores* (see ``planning.tensor_cores``): d is the number of roundings of their model. cuBLAS does not document
how it rounds float32 data to TF32; truncation is assumed, the worst case, with a loss of 2^-10. The terms of a sum are
aligned by the exponents of their factors, and a subnormal factor has the exponent of nu, the smallest normal number.
The error is gamma_d times the sum of (|a| + nu) (|b| + nu). It exceeds gamma_d |a| |b| by gamma_d nu per element of an
operand and gamma_d k nu^2 per element of the result; for scaled rows, whose largest number is at least 2^28 nu, by
gamma_d 2^-27 sqrt(k) relative to the norms. Results below float32's normal range are truncated as well.

*Scaling* (``fp16`` and its schemes): rows of a and columns of b are scaled by powers of two so that the largest number
of each is in [2^14, 2^15). Numbers that are then below float16's normal range lose at most 2^-25, which is 2^-39 of the
largest number, and over a row of k numbers at most sqrt(k) 2^-39 of the row's norm.

*Chunks of k* add one rounding per chunk. *Products of parts* and *probable* bounds are in ``planning.split_bounds``.
Underflow in the parts of a number loses at most twice as much as in one part: the rest of the number itself, and the
products of that rest, which are not computed.

*Emulation by cuBLASLt* (``KernelRow.cublas_emulation``): an assumption, not a derivation. For finite operands,
subnormal ones included, the error is assumed to be within the bound of native FP32 or FP64, element by element. The
cuBLAS documentation, "Floating Point Emulation", states the same or better accuracy for BF16x9, and for fixed-point
numbers with the dynamic mantissa control that lowprec sets, unless a variable of cuBLAS sets the number of bits. cuBLAS
may return NaN instead of an infinity.

*Complex*: rounding the components of x changes x by at most u |x|. Each component of the result is a sum of 2k real
products with an error of at most gamma_d times their magnitudes; the vector (|ar||br| + |ai||bi|, |ar||bi| + |ai||br|)
has norm at most sqrt(2) |a| |b|, hence a factor sqrt(2) on gamma.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import expm1, log1p, sqrt

from lowprec.formats import FLOAT16, FLOAT32, FLOAT64, TF32, DType, NumberFormat
from lowprec.modes import MathMode, Mode, row
from lowprec.planning.error_model import (
    ErrorModel,
    absolute_text,
    alignment_losses,
    condition_text,
    formula_text,
    underflow_losses,
)
from lowprec.planning.kernels import KernelRow, Summation
from lowprec.planning.schedule import PartProduct, chunk_length, make_schedule
from lowprec.planning.split_bounds import (
    FAILURE,
    Depth,
    Depths,
    RelativeError,
    confidence,
    depths,
    depths_by_chunks,
    on_tensor_cores,
    split_error,
)
from lowprec.planning.tensor_cores import Cores

#: Largest k for which a sum of int8 products, each at most 2^14, cannot overflow int32.
MAX_K_INT8 = 2**17 - 1

#: Inner dimension of one tile instruction on bfloat16 data.
TILE_K = 32

# Truncation to TF32 has twice the largest error of rounding, as if TF32 had one bit less.
_TRUNCATED_TF32 = replace(TF32, precision=TF32.precision - 1)

# Loss by underflow after scaling, relative to the largest number of a row.
_SCALED_LOSS = 2.0**-39

# Twice the smallest normal float16, relative to the largest number of a scaled row.
_SCALED_NORMAL = 2.0**-27

# Roundings within one tile instruction: 16 sequential additions, then the sum of two such sums.
_TILE_DEPTH = 17
# Of the integers whose sum is exact.
_SHORTEST_BLOCK = 16

# Units that flush subnormal numbers to zero.
_FLUSHES = ("tiles", "pairs", "pairs_to_odd")


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """Guaranteed bound of the error of a product, elementwise and in the Frobenius norm.

    Elementwise, with sums over k,

    ``|C - AB| <= relative |A||B| + operand_absolute (sum_k |A| + sum_k |B| + k operand_absolute) + result_absolute``
    """

    relative: float  # factor of ``|A| |B|``, and of the product of the Frobenius norms
    operand_absolute: float  # loss by underflow of an element of an operand
    result_absolute: float  # loss by underflow of an element of the result
    k: int  # length of the sums
    formula: str  # of ``relative``
    # description of the losses by underflow; empty if they are those of the accumulator alone
    absolute: str
    condition: str  # the data for which the bound holds
    # false if operands are rounded to a format of smaller range, in which they may overflow
    unconditional: bool
    # replaces ``relative`` with probability ``probability``, for rounding errors of mean zero
    probable: float = 0.0
    by_norms: bool = False  # holds for the norms only, because rows were scaled

    @property
    def probability(self) -> float:
        """Probability with which ``probable`` holds for the whole product."""
        return 1 - FAILURE

    def frobenius(self, norm_a: float, norm_b: float, m: int, n: int) -> float:
        """Return the bound of ``|C - AB|`` in the Frobenius norm, given the norms of ``a`` (m, k) and ``b`` (k, n)."""
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


def operand_format(mode: Mode, compute_dtype: DType) -> NumberFormat | None:
    """Return the format of the multiplied numbers: the mode's in single precision, otherwise that of the dtype."""
    if compute_dtype.is_single_precision and row(mode).acts(compute_dtype):
        return row(mode).operand_format
    return compute_dtype.format


def _depths(
    schedule: tuple[PartProduct, ...],
    kernel: KernelRow,
    fmt: NumberFormat,
    accumulator: NumberFormat,
    components: int,
    capability: Cores | None,
) -> Depths:
    def of_sum(length: int) -> Depth:
        if length and kernel.summation == "tensor_cores" and accumulator is FLOAT32 and capability:
            name = fmt.name
            if kernel.imitates:
                (name,) = kernel.formats or (name,)
            return on_tensor_cores(components * length, name, capability)
        return Depth(components * length)

    k = schedule[0].length
    if not (kernel.k_chunk and k):
        return depths(schedule, of_sum)
    # The parts of a value are its truncation and the rest, which have the same sign, so that the magnitudes of the
    # products of parts sum to the magnitude of the product.
    length = chunk_length(k, kernel.k_chunk)
    of_chunk = _OF_CHUNK[kernel.summation](length)
    chunks = -(-k // length)
    sums = components * kernel.parts**2
    return depths_by_chunks(schedule, of_chunk, chunks, sums)


#: Roundings of a term in a sum of this length.
_OF_CHUNK: dict[Summation, Callable[[int], int]] = {
    "sequential": lambda length: length,
    "pairs": lambda length: 2 * -(-length // 2),
    "pairs_to_odd": lambda length: 8 * -(-length // 2),
    "tiles": lambda length: _TILE_DEPTH + -(-length // TILE_K),
    "blocks": lambda length: 1 + -(-length // _SHORTEST_BLOCK),
}


def scales_rows(mode: Mode) -> bool:
    """Whether rows of ``a`` and columns of ``b`` are scaled by powers of two before rounding."""
    return row(mode).operand_format is FLOAT16


def error_bound(
    mode: Mode,
    compute_dtype: DType,
    out_dtype: DType,
    k: int,
    kernel: KernelRow,
    *,
    a_exact: bool = False,
    b_exact: bool = False,
    capability: Cores | None = None,
    schedule: tuple[PartProduct, ...] | None = None,
    elements: int = 1,
) -> ErrorBound:
    """Return the guaranteed error of a product.

    ``a_exact`` and ``b_exact``: the mode's format represents every number of the operand, which is not rounded.
    ``capability`` is that of the GPU, None for a CPU; ``elements`` the size of the result. By default k is one chunk.
    """
    fmt = operand_format(mode, compute_dtype)
    if kernel.cublas_emulation:
        fmt = compute_dtype.format
    accumulator = row(mode).accumulator(compute_dtype).format
    if fmt is None or accumulator is None:
        return _exact_integers(k)
    acts = compute_dtype.is_single_precision
    rounds = fmt is not accumulator and acts
    rounded = (rounds and not a_exact, rounds and not b_exact)
    scaled = k if acts and any(rounded) and scales_rows(mode) else 0
    components = 2 if compute_dtype.is_complex else 1
    schedule = schedule or make_schedule(row(mode if acts else MathMode.FP32), rounded, k)
    sums = _depths(schedule, kernel, fmt, accumulator, components, capability)
    is_split = acts and row(mode).parts > 1 and any(rounded)
    narrow = any(rounded) and not scaled and fmt.emax < accumulator.emax
    # Parts are TF32 numbers already, which truncation leaves unchanged.
    if kernel.truncates_tf32 and fmt is TF32 and not is_split:
        fmt = _TRUNCATED_TF32
    model = ErrorModel(
        operand=fmt,
        operands=sum(rounded),
        scaled_over=scaled,
        accumulator=accumulator,
        out=None if out_dtype.format is accumulator else out_dtype.format,
        components=components,
        depth=sums[0, 0][0],
        terms=_terms(schedule, kernel, k, components),
        flushes=kernel.summation in _FLUSHES,
    )
    size = confidence(max(elements, 1) * max(model.terms, 1))
    if is_split:
        error = split_error(
            row(mode),
            rounded,
            sums,
            accumulator,
            growth=model.growth,
            scaled_over=scaled,
            size=size,
        )
    else:
        error = _plain_error(model, size)
    bound = _with_losses(model, error, k, row(mode).parts * is_split, unconditional=not narrow)
    if kernel.cublas_emulation:
        return _emulated(bound)
    return bound


def _exact_integers(k: int) -> ErrorBound:
    condition = f"k <= {MAX_K_INT8}, so that no sum overflows int32; with a bias it saturates"
    return ErrorBound(0.0, 0.0, 0.0, k, "exact", "", condition, unconditional=True)


def _emulated(bound: ErrorBound) -> ErrorBound:
    """Return the bound of cuBLASLt's emulation, an assumption: that of the native product of finite operands."""
    formula = f"{bound.formula}; cuBLAS documents its emulation to be as accurate"
    return replace(bound, formula=formula, condition=f"finite operands; {bound.condition}")


def _terms(schedule: tuple[PartProduct, ...], kernel: KernelRow, k: int, components: int) -> int:
    """Return the real products of a component; scaling a sum, and adding it to another, may underflow like one."""
    additions = 0
    if kernel.k_chunk and k:
        additions = -(-k // chunk_length(k, kernel.k_chunk)) - 1
    terms = sum(components * (product.length + additions) + 1 for product in schedule) - 1
    return terms * kernel.parts**2


def _with_losses(
    model: ErrorModel, error: RelativeError, k: int, parts: int, *, unconditional: bool
) -> ErrorBound:
    """Return the bound with the losses by underflow; ``parts`` is 0 if no operand is split."""
    is_split = parts > 0
    worst, likely, formula = error
    norms_loss, operand_alignment, out_alignment = alignment_losses(model, 1 + parts)
    operand_loss, term_loss, out_loss = underflow_losses(model)
    operand_loss = operand_loss * (1 + is_split) + operand_alignment
    out_loss = out_loss + out_alignment
    last = [getattr(model.out, "unit_roundoff", 0.0), norms_loss]
    relative = joint(worst, *last)
    probable = joint(likely, *last)
    # A lost amount is increased by later roundings. For complex numbers it grows by sqrt(2) in the sum of the
    # components' magnitudes, and by sqrt(2) in the modulus of the components' errors.
    carried = min(1 + relative, FLOAT64.largest) * model.components
    return ErrorBound(
        relative,
        carried * operand_loss,
        carried * (model.terms * term_loss + out_loss),
        k,
        formula,
        absolute_text(operand_loss, term_loss, out_loss, model.accumulator),
        condition_text(model, is_split),
        unconditional=unconditional,
        probable=probable,
        by_norms=model.scaled_over > 0,
    )


def joint(*errors: float) -> float:
    return expm1(sum(map(log1p, errors)))


def _plain_error(model: ErrorModel, size: float) -> RelativeError:
    """Return the relative error of a product of unsplit operands, before rounding to the result's format."""
    loss = model.operand.unit_roundoff + _SCALED_LOSS * sqrt(model.scaled_over)
    losses = [loss] * model.operands
    worst = model.depth.worst(model.accumulator)
    probable = model.depth.probable(model.accumulator, size)
    return (
        joint(model.growth * worst, *losses),
        joint(model.growth * probable, *losses),
        formula_text(model),
    )
