"""Guaranteed and probable errors of products whose operands are rounded to codes with scales.

With A' and B' the rounded operands, |A' - A| <= e_a |A| and |B' - B| <= e_b |B| in Frobenius norms give

    |C - AB| <= ((1 + e_a) (1 + e_b) (1 + e) - 1) |A| |B|,

where e is the error of the product of A' and B' in its own plan, and of the factors that undo the scales, each with one
rounding. For an element x of a block with largest magnitude M and scale s, the rounded number is within max(u |x|, h):

- u is the unit roundoff of the elements, or the loss of a clipped number if that is larger. Only the scales of OCP MX,
  s = 2^(floor(log2 M) - emax), clip: numbers up to 2^(emax + 1) s become the largest one. E4M3 scales of NVFP4 are
  rounded with 2^-4 (those of E5M3, too), by which the largest numbers may exceed the largest element;
- h = s d / 2, with d the spacing of the elements near zero: the smallest subnormal number, 1 for int8.

A block of n numbers has |x' - x|^2 <= u^2 |x|^2 + n h^2 in its norm, and M is at most the norm, so that
e = sqrt(u^2 + n (h / M)^2). For a scale of a tensor or of a block of several vectors, n counts all of its numbers.
Scales of 8 bits that underflow lose in addition up to 6 S t / 2 per number of NVFP4, with t = 2^-9 the least such scale
and S = peak / (6 * 448) the tensor's or row's; of two peaks the better is at least as good as the first.

Stochastic rounding has twice the errors: u and h become 2 u and 2 h. A Hadamard transform preserves norms; its own
roundings, four additions and a factor, and the rounding of the transformed numbers are counted with 2^-21.

*Probable*: if each error d has mean zero given the previous ones, the matrices d_ik (row k of B, as row i) are the
differences of a martingale. Their norms are at most max(u |a_ik|, h) |b_k|, whose squares sum to at most
(u^2 + (h / M)^2) |A|^2 |B|^2, because M is at most the norm of the row. The norm of the sum exceeds lambda times the
root with a probability of at most 2 exp(-lambda^2 / 2) (I. Pinelis, "Optimum bounds for the distributions of
martingales in Banach spaces", 1994, Theorem 3.5). The terms of both operands are one such martingale; that of the
products of two errors is another, with a factor k. Clipping has no mean of zero and is counted in full.
"""

from __future__ import annotations

from math import sqrt

from lowprec.formats import FLOAT32, DType
from lowprec.planning import bounds
from lowprec.planning.error_model import power_text
from lowprec.planning.layout import GemmLayout
from lowprec.planning.split_bounds import confidence
from lowprec.recipes import Rule

#: Roundings of the factors that undo the scales: alpha with both tensors' scales, a row's scale and a column's.
_FACTORS = 4
_HADAMARD = 2.0**-21


def _losses(rule: Rule, vectors: int, k: int) -> tuple[float, float, float, float]:
    """Return u, the loss of clipped numbers, h / M, and the count of numbers with a common scale."""
    fmt = rule.number_format
    rows, length = rule.block
    # M / s: the largest element, and at least half of it with scales that are powers of two.
    if fmt is None:
        u = 0.0
        clip = 0.0
        h = 0.5
        largest = 127.0
    else:
        u = fmt.unit_roundoff
        clip = 0.0
        h = fmt.smallest_subnormal / 2
        largest = fmt.largest
        if rule.block_scale == "floor":
            largest = 2.0**fmt.emax
            clip = 1 - fmt.largest / 2.0 ** (fmt.emax + 1)
        elif rule.block_scale == "rceil" or rule.power_scales:
            largest /= 2
        elif rule.block_scale == "even":
            limit = 2.0**fmt.emax * (2 - 2.0**-fmt.precision)
            largest = limit / 2
            clip = 1 - fmt.largest / limit
        elif rule.scales:
            clip = rule.scales.unit_roundoff
            largest = min(rule.peaks, default=largest) / (1 + clip)
    twice = 2 if rule.is_stochastic else 1
    if rule.scaling == "tensor":
        count = vectors * k
    elif rule.scaling == "vector":
        count = k
    else:
        count = min(rows, vectors) * min(length or k, k)
    return u * twice, clip, h * twice / largest, float(count)


def _operand(rule: Rule | None, vectors: int, k: int, batch: int) -> tuple[float, float, float]:
    """Return the guaranteed error of an operand, and those of its elements by rounding and by clipping."""
    if rule is None or not k:
        return 0.0, 0.0, 0.0
    size = batch * vectors * k
    if rule.across:
        k = vectors
    u, clip, h, count = _losses(rule, size // max(k, 1), k)
    lost = 0.0
    if rule.scales:
        lost = rule.scales.smallest_subnormal / 2 / rule.largest_scale * sqrt(size)
    if rule.hadamard:
        lost += _HADAMARD
    if clip <= u:
        clip = 0.0
    of_tensor = sqrt(max(u, clip) ** 2 + count * h * h) + lost
    of_element = sqrt(u * u + h * h)
    if rule.across:  # M is not one of the row's numbers
        of_element = of_tensor
    return of_tensor, of_element, clip + lost


def quantized_bound(
    rules: tuple[Rule | None, Rule | None],
    inner: bounds.ErrorBound,
    layout: GemmLayout,
    out_dtype: DType,
    k_piece: int,
) -> bounds.ErrorBound:
    """Return the error bound of a mode that quantises; ``inner`` is that of the rounded numbers."""
    batch = layout.batch_count
    k = layout.k
    pieces = 1
    if k_piece:
        pieces = max(-(-k // k_piece), 1)
    u = FLOAT32.unit_roundoff
    out = out_dtype.format
    narrow = out.unit_roundoff if out and out is not FLOAT32 else 0.0
    # Additions of pieces: one rounding each.
    after = [narrow if k_piece else 0.0, *[u] * (_FACTORS + pieces - 1)]
    sums = bounds.joint(inner.relative, *after)
    a, a_each, a_clip = _operand(rules[0], layout.m, k, batch)
    b, b_each, b_clip = _operand(rules[1], layout.n, k, batch)
    size = confidence(2)
    relative = bounds.joint(a, b, sums)
    second = min(a * b, size * sqrt(k) * a_each * b_each)
    first = size * sqrt(a_each**2 + b_each**2)
    probable = (1 + sums) * (1 + first + a_clip + b_clip + second) - 1
    smallest = FLOAT32.smallest_normal
    return bounds.ErrorBound(
        relative,
        max(inner.operand_absolute, smallest),
        max(inner.result_absolute, smallest) * (1 + relative),
        k,
        f"(1 + e_a) (1 + e_b) (1 + {sums:.3g}) - 1; e_a = {a:.3g}, e_b = {b:.3g}, of blocks with their scales",
        f"{power_text(smallest)} per element of an operand",
        "no sum beyond float32's range",
        unconditional=inner.unconditional,
        probable=min(relative, probable),
        by_norms=True,
    )
