"""``assert_matmul`` and ``tolerance``: the error bounds of a math mode as the oracle of any kernel's product.

>>> import numpy as np
>>> from lowprec import testing
>>> a = np.random.default_rng(0).standard_normal((32, 64), dtype=np.float32)
>>> testing.assert_matmul(a @ a.T, a, a.T)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowprec.arrays import library_of
from lowprec.backends.cpu.library import untaken
from lowprec.backends.cpu.numpy_rounding import rounded
from lowprec.core.dispatch import matmul
from lowprec.core.plan_call import plan
from lowprec.errors import ModeError, ShapeError
from lowprec.formats import FLOAT16, FLOAT32, FLOAT64, TF32, NumberFormat
from lowprec.modes import MathMode, Mode, ModeLike, parse_mode, row
from lowprec.planning import GemmPlan
from lowprec.planning.bounds import ErrorBound, error_bound
from lowprec.planning.kernels import Summation
from lowprec.recipes import Recipe
from lowprec.util.tracing import uncompiled

__all__ = ["Tolerance", "assert_matmul", "tolerance"]


def __dir__() -> list[str]:
    return __all__


Array = npt.NDArray[Any]

#: Modes that round each operand to one number of fewer bits, the most precise first.
_ROUNDING = (MathMode.TF32, MathMode.FP16, MathMode.BF16)
#: A result that another explanation fits this many times better has that explanation.
_BETTER = 4.0
#: Elements of a result below which another product may fit a right result.
_FEWEST = 4
#: Largest ratio of a number rounded to nearest, in a format with zero, to the number itself.
_ROUNDED = 2.0
#: Roundings of the factors that undo the scales of a mode that quantises.
_FACTORS = 4
#: Half of float16's smallest subnormal number: a kernel loses it that does not scale its operands.
_LOST_IN_FLOAT16 = FLOAT16.smallest_subnormal / 2
#: Loss of a kernel that scales rows to float16's range, relative to the largest number of the row.
_LOST_BY_SCALES = 2.0**-39


class Tolerance(NamedTuple):
    """The right product, and how far a right kernel may be from it.

    >>> Tolerance(np.zeros(1), np.ones(1)).holds(np.array([0.5])).all()
    np.True_
    """

    #: float64 or complex128, shape (..., m, n): the exact product of the rounded operands.
    reference: Array
    bound: Array  #: float64, of the same shape: largest absolute error of an element.

    def holds(self, c: Array) -> Array:
        """Return which elements of a result are within the bound; NaN and infinities must be where they belong."""
        with np.errstate(all="ignore"):
            within = np.abs(c - self.reference) <= self.bound
        may_overflow = np.isinf(self.bound) & ~np.isfinite(c)
        same = (c == self.reference) | (np.isnan(c) & np.isnan(self.reference))
        found: Array = np.where(np.isfinite(self.reference), within | may_overflow, same)
        return found


class _Product(NamedTuple):
    """A product that a kernel was given, and its plan for the kernel's device."""

    a: Array
    b: Array
    mode: MathMode | Recipe
    plan: GemmPlan

    @property
    def rounds(self) -> NumberFormat | None:
        """Return the format to which each operand is rounded once; None if it is not, or split, or quantised."""
        planned = self.plan
        if planned.quantized or not planned.mode_has_effect or not any(planned.rounded):
            return None
        is_split = max(planned.split) > 1
        fmt = planned.operand_format
        is_truncated = fmt is TF32 and planned.kernel_row.truncates_tf32
        return None if is_split or is_truncated else fmt

    def exact(self, change: Callable[[Array], Array] = lambda x: x) -> Array:
        """Return the product in float64 of changed operands."""
        a = _wide(change(self.a))
        b = _wide(change(self.b))
        found: Array = untaken(np.matmul, a, b)
        return found

    def reference(self) -> Array:
        fmt = self.rounds
        if self.plan.quantized:
            result = matmul(self.a, self.b, math_mode=self.mode, out_dtype="float32")
            return _wide(np.asarray(result))
        if fmt is None:
            return self.exact()
        return self.exact(partial(_rounded, fmt=fmt))

    def magnitudes(self, bound: ErrorBound) -> Array:
        """Return the factor of the relative error of each element: ``|A| |B|``, or the product of the norms."""
        if self.plan.quantized:
            return _ROUNDED**2 * self.norms
        if bound.by_norms:
            return self.norms
        sums = self.exact(np.abs)
        return sums * (1 + _unit(self.rounds)) ** 2

    @property
    def norms(self) -> Array:
        """Return the norms of rows of ``a`` times those of columns of ``b``."""
        rows = np.linalg.norm(_wide(self.a), axis=-1, keepdims=True)
        columns = np.linalg.norm(_wide(self.b), axis=-2, keepdims=True)
        found: Array = rows * columns
        return found


def _unit(fmt: NumberFormat | None) -> float:
    return 0.0 if fmt is None else fmt.unit_roundoff


def _wide(x: Array) -> Array:
    wide: Array = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    return wide


def _rounded(x: Array, fmt: NumberFormat) -> Array:
    """Round to the precision of a format; to float16 without its limits, as by kernels that scale."""
    single = np.complex64 if x.dtype.kind == "c" else np.float32
    if fmt is not FLOAT16:
        found: Array = rounded(x, np.dtype(single), fmt)
        return found
    parts = x.astype(single).view(np.float32)
    mantissa, exponent = np.frexp(parts)
    nearest = mantissa.astype(np.float16).astype(np.float32)
    return np.ldexp(nearest, exponent).view(single)


def _truncated(x: Array, fmt: NumberFormat) -> Array:
    dtype = np.complex64 if x.dtype.kind == "c" else np.float32
    single = np.ascontiguousarray(x.astype(dtype))
    dropped = FLOAT32.precision - fmt.precision
    kept = np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    bits = single.view(np.uint32) & kept
    return bits.view(single.dtype)


@uncompiled
def tolerance(
    a: Any,
    b: Any,
    /,
    mode: ModeLike = MathMode.FP32,
    *,
    dtype: Any = None,
    device: str | None = None,
) -> Tolerance:
    """Return the product that a kernel of a math mode should give, and the largest error of each element.

    The operands are rounded as :func:`lowprec.matmul` rounds them in the mode, and multiplied exactly. The bound is
    that of a sum of k products in any order, in the accumulator of the mode (``lowprec.plan(...).accumulator``), and of
    rounding the result. For a mode that splits operands, the reference is the product of the operands themselves.

    Parameters
    ----------
    a : array, shape (..., m, k)
        Of any library: the numbers that the kernel was given.
    b : array, shape (..., k, n)
    mode : str, MathMode or Recipe
        Mode that the kernel is meant to compute; not with stochastic rounding.
    dtype : str or dtype, optional
        Element type of the kernel's result; by default that of ``lowprec.matmul``.
    device : str, optional
        As for :func:`lowprec.plan`: a GPU's tensor cores truncate their sums, and may truncate float32 to TF32. By
        default each sum is rounded to nearest.

    Returns
    -------
    Tolerance

    Raises
    ------
    LowprecError
        As for :func:`lowprec.plan`.
    ModeError
        The mode rounds stochastically.

    Examples
    --------
    >>> import numpy as np
    >>> a = np.full((1, 4), 1 + 2.0**-9, np.float32)
    >>> expected = tolerance(a, a.T, "bf16")
    >>> float(expected.reference[0, 0]), float(expected.bound[0, 0]) < 1e-5
    (4.0, True)
    """
    return _tolerance(_product(a, b, mode, dtype, device))[0]


def _product(a: Any, b: Any, mode: ModeLike, dtype: Any, device: str | None) -> _Product:
    parsed = parse_mode(mode, "mode")
    if isinstance(parsed, Recipe) and parsed.rounding == "stochastic":
        raise ModeError(
            f"{parsed} rounds at random, so that no result is expected; test {parsed.forward} without it"
        )
    x = _host(a)
    y = _host(b)
    if min(x.ndim, y.ndim) < 2:
        raise ShapeError(
            f"a and b must be matrices or stacks of them, got shapes {x.shape} and {y.shape}"
        )
    planned = plan(x, y, math_mode=parsed, out_dtype=dtype, device=device)
    return _Product(x, y, parsed, planned)


def _host(x: Any) -> Array:
    for name in ("detach", "cpu", "get"):
        method = getattr(x, name, None)
        if method is not None:
            x = method()
    return library_of(x).view(x).ndarray()


@np.errstate(all="ignore")
def _tolerance(given: _Product) -> tuple[Tolerance, Array]:
    """Return the tolerance, and its part by underflow and by the rounding of the result."""
    planned = given.plan
    k = given.a.shape[-1]
    bound = _bound(given)
    in_float16 = given.rounds is FLOAT16
    lost = bound.operand_absolute + _LOST_IN_FLOAT16 * in_float16
    of_rows = abs(_wide(given.a)).sum(-1, keepdims=True)
    of_columns = abs(_wide(given.b)).sum(-2, keepdims=True)
    ends = [x.format.largest for x in (planned.accumulator, planned.out_dtype) if x.format]
    magnitudes = given.magnitudes(bound)
    # The reference has errors of its own: of float64, or of our own kernel of a mode that quantises.
    kernels = 2 if planned.quantized else 1
    relative = bound.relative * kernels + 2 * k * FLOAT64.unit_roundoff
    absolute = lost * (of_rows + of_columns + k * lost) + bound.result_absolute
    by_scales = np.float64(0)
    if row(planned.runs_as).operand_format is FLOAT16:
        by_scales = 2 * k**0.5 * _LOST_BY_SCALES * given.norms
    if in_float16:
        absolute = absolute + by_scales
    may_overflow = magnitudes > min(ends, default=np.inf)
    size = np.where(may_overflow, np.inf, relative * magnitudes + absolute)
    reference = given.reference()
    of_result = _unit(planned.out_dtype.format) * abs(reference)
    return Tolerance(reference, size), np.maximum(absolute, by_scales) + of_result


def _bound(given: _Product) -> ErrorBound:
    """Return the bound of a product of the rounded operands, summed in any order."""
    planned = given.plan
    mode: Mode = planned.runs_as
    k = given.a.shape[-1]
    if planned.quantized:
        mode = MathMode.FP32
        k += _FACTORS
    is_rounded = given.rounds is not None
    return error_bound(
        mode,
        planned.compute_dtype,
        planned.out_dtype,
        k,
        planned.kernel_row._replace(k_chunk=0, parts=1, summation=_summation(planned)),
        a_exact=is_rounded,
        b_exact=is_rounded,
        capability=planned.capabilities.compute_capability,
    )


def _summation(planned: GemmPlan) -> Summation:
    on_gpu = planned.kernel_row.summation == "tensor_cores"
    return "tensor_cores" if on_gpu else "pairs"  # which flushes subnormal numbers


@uncompiled
def assert_matmul(
    c: Any, a: Any, b: Any, /, mode: ModeLike = MathMode.FP32, *, device: str | None = None
) -> None:
    """Raise AssertionError unless a kernel's result is a right product of a math mode.

    Each element must be within the bound of :func:`tolerance`. Because that bound is the worst case, errors of a lower
    precision may be below it: a result fails as well if it is four times nearer to the product of a narrower format, of
    truncated operands, or without the last element of k.

    Parameters
    ----------
    c : array, shape (..., m, n)
        Result of the kernel, of any library: ``a @ b``, without alpha, bias or activation.
    a, b, mode, device
        As for :func:`tolerance`.

    Raises
    ------
    AssertionError
        With the first wrong element, its error in units of the bound, and the product that ``c`` is nearest to.
    LowprecError
        As for :func:`tolerance`.

    Examples
    --------
    >>> import numpy as np
    >>> a = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    >>> assert_matmul(matmul(a, a, math_mode="tf32"), a, a)
    Traceback (most recent call last):
    AssertionError: not a product in fp32: ...
    """
    result = _host(c)
    given = _product(a, b, mode, result.dtype, device)
    expected, lost = _tolerance(given)
    shape = expected.reference.shape
    if result.shape != shape:
        raise ShapeError(f"c has shape {result.shape}; the product of a and b has {shape}")
    found = _wide(result)
    wrong = ~expected.holds(found)
    nearer = _explanation(given, found, expected.reference, lost)
    if wrong.any() or nearer:
        raise AssertionError(_message(given, expected, found, wrong, nearer))


@np.errstate(all="ignore")
def _explanation(given: _Product, found: Array, reference: Array, lost: Array) -> str:
    """Return another description of a product that a result fits much better than its own; empty if there is none."""
    finite = np.isfinite(found) & (np.abs(found - reference) > lost)
    if finite.sum() < _FEWEST:
        return ""
    for name, other in _others(given):
        counted = finite & np.isfinite(other)
        of_other = _centred((found - other)[counted])
        of_reference = _centred((found - reference)[counted])
        if all(_BETTER * x < y for x, y in zip(of_other, of_reference, strict=True)):
            return name
    return ""


def _centred(error: Array) -> tuple[float, float]:
    """Return the norms of errors, and of their differences from the mean: equal errors may fit a wrong product."""
    mean = error.sum() / max(error.size, 1)
    return float(np.linalg.norm(error)), float(np.linalg.norm(error - mean))


def _others(given: _Product) -> Iterator[tuple[str, Array]]:
    """Yield the products with which a right one is not confused."""
    last = given.a.shape[-1] - 1
    shorter = given._replace(a=given.a[..., :last], b=given.b[..., :last, :])
    yield "the product without the last element of k", shorter.exact()
    if not given.plan.compute_dtype.is_single_precision:
        return
    may_truncate = given.plan.kernel_row.truncates_tf32 and given.mode is MathMode.TF32
    for mode in _ROUNDING:
        fmt = row(mode).operand_format
        if may_truncate and fmt.precision == TF32.precision:
            continue
        if mode != given.mode:
            yield f"a product in {mode}", given.exact(partial(_rounded, fmt=fmt))
        truncated = given.exact(partial(_truncated, fmt=fmt))
        yield f"a product of operands that are truncated to {fmt.name}", truncated


def _message(given: _Product, expected: Tolerance, found: Array, wrong: Array, nearer: str) -> str:
    lines = [f"not a product in {given.mode}"]
    if nearer:
        lines.append(f"c is {_BETTER:.0f} times nearer to {nearer}")
    if wrong.any():
        place = tuple(map(int, np.argwhere(wrong)[0]))
        value, right = found[place], expected.reference[place]
        line = f"{np.count_nonzero(wrong)} of {wrong.size} elements are wrong; the first, "
        line += f"c{list(place)}, is {value:.9g} where {right:.9g} is right"
        if np.isfinite(right):
            line += f": an error of {abs(value - right) / expected.bound[place]:.3g} bounds"
        lines.append(line)
    return ": ".join([lines[0], "; ".join(lines[1:])])
