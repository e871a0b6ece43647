"""Independent answers for the numerical tests: exact products, roundings, and bounds on the error.

Nothing here uses lowprec. Products are formed in float64, where those of float32 numbers are exact
(24 + 24 bits fit into 53), or in rational arithmetic where the operands are float64 themselves.

The bounds are those of N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd edition,
SIAM 2002 (ASNA):

* rounding to nearest in a format of unit roundoff ``u``: ``fl(x) = x (1 + d)``, ``|d| <= u`` (ASNA theorem 2.2), plus
  half of the smallest subnormal number where the format is left at the lower end (ASNA equation
  2.8);
* a sum of ``k`` products, in any order, blocked or not, has ``|fl(x.y) - x.y| <= gamma_k |x|.|y|`` with
  ``gamma_k = k u / (1 - k u)`` (ASNA section 3.1). Where the products themselves are exact, it is a
  little less.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:  # as where only a GPU's tests are run
    _one_thread = contextlib.nullcontext
else:
    _OPENBLAS = ThreadpoolController().select(internal_api="openblas")

    def _one_thread():
        return _OPENBLAS.limit(limits=1)


bfloat16 = ml_dtypes.bfloat16

#: Unit roundoff of what a result is stored in, and half of its smallest subnormal number.
STORAGE = {
    "float64": (2.0**-53, 2.0**-1074),
    "float32": (2.0**-24, 2.0**-150),
    "float16": (2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-8, 2.0**-134),
    "complex128": (2.0**-53, 2.0**-1074),
    "complex64": (2.0**-24, 2.0**-150),
}

#: Unit roundoff of the format that each mode rounds float32 operands to, and what it loses at least near zero.
MODES = {
    "fp32": (0.0, 0.0),
    "fp32_pedantic": (0.0, 0.0),
    "tf32": (2.0**-11, 2.0**-137),
    "bf16": (2.0**-8, 2.0**-134),
    # Of the largest number of a row or column, which is scaled to 2^14 or more.
    "fp16": (2.0**-11, 2.0**-39),
}
ALL_MODES = tuple(MODES)
ROUNDING_MODES = ("tf32", "bf16", "fp16")

# -- rounding -------------------------------------------------------------------------------------


def _to_tf32(x):
    """Round float32 to 11 significant bits, ties away from zero, by float64 arithmetic without any bit trick."""
    with np.errstate(invalid="ignore"):
        wide = np.abs(x.astype(np.float64))
        # frexp's exponents: x = f 2^e with 1/2 <= f < 1. Below the normal range the spacing stays.
        exponent = np.maximum(np.frexp(wide)[1], -125)
        spacing = np.ldexp(1.0, exponent - 11)
        rounded = np.floor(wide / spacing + 0.5) * spacing
        rounded = np.where(rounded > (2.0 - 2.0**-10) * 2.0**127, np.inf, rounded)
        signed = np.copysign(rounded, x).astype(np.float32)
    return np.where(np.isfinite(x), signed, x)


def _via(dtype, x):
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype).astype(np.float32)


_ROUNDINGS = {
    "tf32": _to_tf32,
    "bf16": lambda x: _via(bfloat16, x),
    "fp16": lambda x: _via(np.float16, x),
}


def round_to(x, mode, axis=None):
    """Return the operand as the mode sees it; only float32 and complex64 change, the latter part by part.

    With an ``axis``, ``fp16`` scales the lines along it: -1 for rows of ``a``, -2 for columns of ``b``.
    """
    x = np.asarray(x)
    rounding = _ROUNDINGS.get(mode)
    if rounding is None or x.dtype.name not in ("float32", "complex64"):
        return x
    if mode == "fp16" and axis is not None:
        with np.errstate(over="ignore"):
            return _scaled_to_float16(x, axis).astype(x.dtype)
    if x.dtype.name == "complex64":
        out = np.empty(x.shape, x.dtype)
        out.real, out.imag = (
            rounding(np.ascontiguousarray(x.real)),
            rounding(np.ascontiguousarray(x.imag)),
        )
        return out
    return rounding(x)


def _largest(x, axis):
    """Return the largest finite magnitude along an axis, of either component."""
    with np.errstate(invalid="ignore"):
        parts = np.abs(np.stack([x.real, x.imag]).astype(np.float64))
    sizes = np.where(np.isfinite(parts), parts, 0.0)
    return np.asarray(sizes.max(0).max(axis, keepdims=True, initial=0.0))


def _scaled_to_float16(x, axis):
    """Scale so that the largest magnitude is in [2^14, 2^15), round to float16, and scale back, in float64."""
    largest = _largest(x, axis)
    exponent = np.where(largest > 0, 15 - np.frexp(largest)[1], 0)

    def rounded(part):
        scaled = np.ldexp(part.astype(np.float64), exponent).astype(np.float16)
        return np.ldexp(scaled.astype(np.float64), -exponent)

    with np.errstate(all="ignore"):
        if x.dtype.kind != "c":
            return rounded(x)
        out = np.empty(x.shape, np.complex128)
        out.real, out.imag = rounded(x.real), rounded(x.imag)
    return out


def round_both(a, b, mode):
    """Return the operands of a product as the mode sees them; in float64, whose range they need, where it scales."""
    pair = [(np.asarray(a), -1), (np.asarray(b), -min(2, np.ndim(b)))]
    x, y = (
        _scaled_to_float16(x, axis)
        if mode == "fp16" and x.dtype.name in ("float32", "complex64")
        else round_to(x, mode)
        for x, axis in pair
    )
    return x, y


# -- products -------------------------------------------------------------------------------------


def widen(x):
    """Return the array in float64 or complex128, with its values as they are."""
    x = np.asarray(x)
    # A signalling NaN announces itself when it is converted.
    with np.errstate(invalid="ignore"):
        return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _times(a, b):
    """Multiply by one thread: where other work has the CPUs, OpenBLAS's threads mostly wait for each other."""
    with _one_thread():
        return np.asarray(np.matmul(a, b))


def product(a, b):
    """Return ``a @ b`` in float64 or complex128, Inf and NaN as IEEE 754 has them."""
    with np.errstate(all="ignore"):
        return _times(widen(a), widen(b))


def magnitude(x):
    """Return what bounds every product of parts: ``|x|``, or ``|Re x| + |Im x|``."""
    x = widen(x)
    return np.abs(x.real) + np.abs(x.imag) if x.dtype.kind == "c" else np.abs(x)


# -- bounds ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arithmetic:
    """How a product of rounded operands is summed, at worst.

    Parameters
    ----------
    u : float
        Unit roundoff of the sums.
    parts : int
        Exact products per product of two elements. A TF32 or float16 number may be taken as the sum
        of two bfloat16 numbers, which makes four of them; their magnitudes sum to at most (1 +
        2^-7)^2 of the one.
    lost : float
        What one operation may lose below the normal range. A tile unit takes a subnormal sum for
        zero.
    unseen : float
        What an operand's element may lose on its way in. A tile unit takes a subnormal number for
        zero.
    """

    u: float
    parts: int
    lost: float
    unseen: float = 0.0

    @property
    def stretch(self):
        return 1.0 if self.parts == 1 else (1 + 2.0**-7) ** 2


_TINY = 2.0**-126
_DOUBLE = Arithmetic(2.0**-53, 1, 2.0**-1074)
_SINGLE = Arithmetic(2.0**-24, 1, 2.0**-150)
_TF32 = Arithmetic(2.0**-24, 4, _TINY, _TINY)
_BFLOAT16 = Arithmetic(2.0**-24, 1, _TINY, _TINY)
# Products of float16 numbers are multiples of 2^-48, and their bfloat16 parts multiples of 2^-24.
_FLOAT16 = Arithmetic(2.0**-24, 4, 0.0)

_OF_STORAGE = {
    "float64": _DOUBLE,
    "complex128": _DOUBLE,
    "float32": _SINGLE,
    "complex64": _SINGLE,
    "float16": _FLOAT16,
    "bfloat16": _BFLOAT16,
}
_OF_MODE = {"tf32": _TF32, "bf16": _BFLOAT16, "fp16": _FLOAT16}


def arithmetic(a, b, mode):
    """Return how a product is summed: as its storage has it, or as the mode has it for single precision."""
    found = {_OF_STORAGE[np.asarray(x).dtype.name] for x in (a, b)}
    if _DOUBLE in found:
        return _DOUBLE
    if _SINGLE in found or len(found) > 1:
        return _OF_MODE.get(mode, _SINGLE)
    return found.pop()


def gamma(k, u):
    """Return ``gamma_k`` (ASNA lemma 3.1)."""
    assert k * u < 1
    return k * u / (1 - k * u)


def accumulation_bound(a, b, mode, how=None):
    """Return the bound on the error of multiplying and summing operands that have been rounded already.

    A complex product is two real ones per part. Where the operands are float64, the float64 product
    that the result is compared with errs as much again.
    """
    a, b = np.asarray(a), np.asarray(b)
    how = how or arithmetic(a, b, mode)
    components = 2 if "c" in (a.dtype.kind, b.dtype.kind) else 1
    terms = a.shape[-1] * how.parts * components
    with np.errstate(all="ignore"):
        bound = gamma(terms, how.u) * how.stretch * _times(magnitude(a), magnitude(b))
        # One loss per product and one per addition; both are nothing where there is nothing to sum.
        bound = bound + 2 * terms * how.lost
        if how.unseen:
            unseen = how.unseen * np.sqrt(components)  # in each component
            bound = bound + 1.01 * _absolute(a, b, unseen, unseen)
        return bound * (2.0 if how is _DOUBLE else 1.0)


def _absolute(a, b, loss_a, loss_b):
    """Return what absolute errors of the elements do: ``|A| t_b + t_a |B| + t_a t_b``, summed along k."""
    size_a, size_b = magnitude(a), magnitude(b)
    lost_a, lost_b = size_a * 0 + loss_a, size_b * 0 + loss_b
    return _times(size_a, lost_b) + _times(lost_a, size_b) + _times(lost_a, lost_b)


def storage_bound(value, dtype):
    """Return the bound on the error of rounding a value of about this size to what the result is stored in."""
    u, tiny = STORAGE[dtype]
    with np.errstate(all="ignore"):
        return u * np.abs(value) + tiny


# -- assertions -----------------------------------------------------------------------------------


def assert_close(result, want, allowed):
    """Compare element by element under an absolute bound each; where ``want`` is not finite, it must be met exactly.

    An Inf must have its sign; a NaN must be one. Names the first differing element.
    """
    got, want = widen(result), np.asarray(want)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    allowed = np.broadcast_to(allowed, want.shape)
    with np.errstate(all="ignore"):
        close = np.abs(got - want) <= allowed
        same = (got == want) | (np.isnan(got) & np.isnan(want))
    bad = ~np.where(np.isfinite(want), close, same)
    if bad.any():
        where = tuple(map(int, np.argwhere(bad)[0]))
        raise AssertionError(
            f"{bad.sum()} of {bad.size} elements differ, first {where}: got {got[where]}, expected {want[where]}, "
            f"error {abs(got[where] - want[where])}, allowed {allowed[where]}"
        )


def assert_equal(result, want):
    """Compare without tolerance, apart from the sign of zero; names the first differing element."""
    result, want = np.asarray(result), np.asarray(want)
    assert result.dtype == want.dtype, f"dtype {result.dtype}, expected {want.dtype}"
    assert_close(result, widen(want), 0.0)


# -- the whole expression -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What follows the product: ``activation(alpha * a @ b + beta * c + bias)``."""

    alpha: complex = 1.0
    beta: complex = 0.0
    c: Any = None
    bias: Any = None
    activation: str | None = None


def gelu(x):
    """Return GELU in its tanh form, in float64 (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


_NOTHING = Epilogue()


def assert_expression(result, a, b, mode="fp32", then=_NOTHING):
    """Compare the whole of what one call computes with float64, under the bound of accumulating and storing.

    This is sharper than the mode's bound: a rounding of the wrong kind fails it where the operands
    are chosen for it.

    The sum ``S = alpha P + beta C + bias`` adds at most six roundings to those of ``P``: the two
    factors as they are converted, the two products with them, two additions; each relative to ``M =
    |alpha||A||B| + |beta||C| + |bias|``. ReLU does not enlarge an error and rounds nothing. GELU
    enlarges it by at most 1.13, its largest slope. Its own evaluation: the argument t of tanh
    carries 7 roundings, and ``|t| / cosh(t)^2 < 0.448``; so ``1 + tanh(t)`` is wrong by less than
    ``0.448 * 7u + 5u``, tanh taken to be good to 4u; half of that and two more products make ``|S|
    (4.1 + 2) u`` of it, which 8u bounds.
    """
    result = np.asarray(result)
    how = arithmetic(a, b, mode)
    a, b = round_both(a, b, mode)
    value = then.alpha * product(a, b) if then.alpha != 1 else product(a, b)
    with np.errstate(all="ignore"):
        allowed = 1.01 * abs(then.alpha) * accumulation_bound(a, b, mode, how)
        if then is not _NOTHING:
            size = abs(then.alpha) * _times(magnitude(a), magnitude(b))
            if then.beta:
                value = value + then.beta * widen(then.c)
                size = size + abs(then.beta) * magnitude(then.c)
            if then.bias is not None:
                value, size = value + widen(then.bias), size + magnitude(then.bias)
            allowed = allowed + gamma(6, how.u) * size + 6 * _SINGLE.lost
        if then.activation == "relu":
            value = np.maximum(value, 0.0)
        elif then.activation == "gelu":
            allowed = 1.13 * allowed + 8 * how.u * np.abs(value)
            value = gelu(value)
        allowed = allowed + storage_bound(np.abs(value) + allowed, result.dtype.name)
    assert_close(result, value, allowed)


#: A product alone.
assert_within_bound = assert_expression


# -- operands -------------------------------------------------------------------------------------


def every_exponent(rng, per_exponent=64):
    """Return finite float32 numbers of both signs with every exponent, ties and near-ties of all the formats."""
    exponent = np.repeat(np.arange(255, dtype=np.uint32), per_exponent)
    mantissa = rng.integers(0, 1 << 23, exponent.size, dtype=np.uint32)
    # Half of them end in a tie of TF32, bfloat16 or float16 (bit 12 or 15), or one unit next to it.
    kind = rng.integers(0, 8, exponent.size)
    for k, bit in ((0, 12), (1, 12), (2, 15), (3, 15)):
        cut = np.uint32(1 << bit)
        beside = rng.integers(-1, 2, exponent.size) * (k % 2)
        tie = (mantissa & ~(cut * np.uint32(2) - np.uint32(1))) | cut
        mantissa = np.where(kind == k, (tie.astype(np.int64) + beside).astype(np.uint32), mantissa)
    sign = rng.integers(0, 2, exponent.size, dtype=np.uint32) << np.uint32(31)
    return (sign | exponent << np.uint32(23) | mantissa).view(np.float32)


# -- NaN, and strides of operands -----------------------------------------------------------------

#: Bits after the exponent, as shares of a significand: the lowest alone, all of them, and those where the roundings
#: to 16 bits and TF32 add their half. Quiet NaN have the highest, signalling ones have not.
_MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


def nans(dtype):
    """Return NaN of every class of a dtype: quiet and signalling, few and all bits of the payload, both signs."""
    dtype = np.dtype(dtype)
    width = _MANTISSA_BITS[dtype.name]
    quiet = 1 << (width - 1)
    low = sorted(
        {
            0,
            1,
            quiet - 1,
            *(1 << i for i in range(width - 1)),
            *(quiet - (1 << i) for i in range(width - 1)),
        }
    )
    payloads = [*low[1:], *(quiet | bits for bits in low)]  # no payload at all is an infinity
    whole = 8 * dtype.itemsize
    exponent = ((1 << (whole - 1)) - 1) >> width << width
    bits = [exponent | p | sign << (whole - 1) for p in payloads for sign in (0, 1)]
    found = np.array(bits, f"u{dtype.itemsize}").view(dtype)
    assert np.isnan(widen(found)).all()
    return found


def random_matrix(rng, shape, dtype):
    """Return normal numbers of a floating-point dtype, or any of an integer one; names of ml_dtypes are known."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
    if dtype.kind == "i":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)


def _within(x, *step):
    """Return the values of ``x`` as a view of a larger array, read with these slices."""
    base = np.zeros([n * (s.step or 1) + 1 for n, s in zip(x.shape, step, strict=True)], x.dtype)
    view = base[step][: x.shape[0], : x.shape[1]]
    view[...] = x
    return view


def _twice(view):
    return view, view


#: Kinds of strides: from a matrix to an array that may be written and the view of it that is read.
STRIDES = {
    "C": lambda x: _twice(x.copy()),
    "F": lambda x: _twice(np.asfortranarray(x)),
    "transposed": lambda x: _twice(np.ascontiguousarray(x.T).T),
    "columns of a wider matrix": lambda x: _twice(_within(x, slice(None), slice(None))),
    "step 2": lambda x: _twice(_within(x, slice(None), slice(None, None, 2))),
    "step 3, rows": lambda x: _twice(_within(x, slice(None, None, 3), slice(None))),
    "negative": lambda x: _twice(x[::-1, ::-1].copy()[::-1, ::-1]),
    "negative rows": lambda x: _twice(x[::-1].copy()[::-1]),
    "broadcast rows": lambda x: (row := x[:1].copy(), np.broadcast_to(row, x.shape)),
    "broadcast columns": lambda x: (column := x[:, :1].copy(), np.broadcast_to(column, x.shape)),
}
