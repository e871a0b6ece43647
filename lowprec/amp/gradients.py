"""Gradients lost in 16 bits, and the loss scale that avoids it.

Source: P. Micikevicius et al., "Mixed precision training", arXiv 1710.03740, section 3.2 and figure 3: histograms of a
network's gradients by exponent, of which float16 holds a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from lowprec import plotting
from lowprec.amp.casting import FLOATS
from lowprec.amp.containers import leaves
from lowprec.arrays import library_name, library_of
from lowprec.arrays.namespaces import dtype_name
from lowprec.errors import ArrayError, DTypeError
from lowprec.formats import BFLOAT16, FLOAT16, TF32, NumberFormat
from lowprec.report import Report
from lowprec.util.tables import Table
from lowprec.util.tracing import uncompiled

#: Formats of the report.
FORMATS = (FLOAT16, BFLOAT16, TF32)

_BLOCK = 1 << 18  # elements counted at a time
_LEAST = -1074  # float64's smallest exponent
_EXPONENTS = 2100  # at least the number of its exponents


@dataclass(frozen=True)
class FormatShares:
    """Losses of gradients in one format, as shares of finite nonzero elements.

    >>> FormatShares("float16", 1.0, lost=0.5, subnormal=0.0, overflow=0.0).lost
    0.5
    """

    format: str
    scale: float
    lost: float  #: Rounded to zero.
    subnormal: float  #: Rounded to a subnormal number, with fewer significant digits.
    overflow: float  #: Rounded to infinity.


@dataclass(frozen=True)
class GradientReport(Report):
    """Sizes of gradients. ``print`` shows a table; the figure is the histogram.

    >>> import numpy as np
    >>> gradient_report([np.float32([1e-9, 0.0, 1e-3])]).zeros
    1
    """

    elements: int
    zeros: int
    nonfinite: int  #: Number of Inf and NaN.
    smallest: float  #: Smallest magnitude of a finite nonzero element; NaN if there is none.
    largest: float  #: Largest magnitude of a finite nonzero element; NaN if there is none.
    suggested_scale: float  #: As returned by :func:`suggest_scale`.
    exponents: dict[int, int]  #: Number of magnitudes in [2^e, 2^(e+1)), by e.
    shares: tuple[FormatShares, ...]  #: At scale 1 and at the suggested scale.

    def tables(self) -> list[Table]:
        others = ""
        if not math.isnan(self.largest):
            others = f", others from {self.smallest:.3g} to {self.largest:.3g}"
        title = (
            f"{self.elements} gradients: {self.zeros} zero, {self.nonfinite} Inf or NaN{others}; "
            f"suggested scale {self.suggested_scale:g}"
        )
        columns = ("format", ">scale", ">lost", ">subnormal", ">overflow")
        rows = []
        for s in self.shares:
            shares = [f"{share:.4%}" for share in (s.lost, s.subnormal, s.overflow)]
            rows.append([s.format, f"{s.scale:g}", *shares])
        return [Table(title, columns, rows)]

    def figure(self) -> Any:
        figure, ((panel,),) = plotting.figure(3.6)
        of_bars, of_one, of_suggested, *_ = plotting.COLOURS
        counts = list(self.exponents.values())
        panel.bar(list(self.exponents), counts, width=0.9, color=of_bars)
        shift = math.log2(self.suggested_scale)
        low = math.log2(FLOAT16.smallest_subnormal)
        high = FLOAT16.emax + 1
        ranges = ((0.0, of_one, "1"), (shift, of_suggested, f"2^{shift:g}"))
        for offset, colour, scale in ranges:
            label = f"float16, scale {scale}"
            panel.axvspan(low - offset, high - offset, color=colour, alpha=0.15, label=label)
        panel.set(xlabel="exponent of the gradient", ylabel="elements", yscale="log")
        panel.legend()
        return figure


@uncompiled
def suggest_scale(grads: Any) -> float:
    """Return the largest power of two that keeps gradients in float16's range.

    Inf and NaN are ignored; without finite nonzero gradients the result is 1.

    Parameters
    ----------
    grads : container of arrays
        Unscaled: float64, float32, bfloat16 or float16, of any library.

    Raises
    ------
    ArrayError, DTypeError
        An element is not an array, or not an array of floats.

    Examples
    --------
    >>> import numpy as np
    >>> suggest_scale({"w": np.float32([1e-7, 3e-3])})
    16777216.0
    """
    return _scale([_host(x) for x in leaves(grads)])


@uncompiled
def gradient_report(grads: Any) -> GradientReport:
    """Count gradients by exponent, and the shares lost by float16, bfloat16, TF32.

    Parameters
    ----------
    grads : container of arrays
        Unscaled, as for :func:`suggest_scale`. Arrays on a GPU are copied to the host.

    Raises
    ------
    ArrayError, DTypeError
        An element is not an array, or not an array of floats.

    Examples
    --------
    >>> import numpy as np
    >>> print(gradient_report([np.float32([1e-9, 1e-3])]))
    2 gradients: 0 zero, 0 Inf or NaN, others from 1e-09 to 0.001; suggested scale 3.35544e+07
      format          scale      lost  subnormal  overflow
      float16             1  50.0000%     0.0000%   0.0000%
      bfloat16            1   0.0000%     0.0000%   0.0000%
      tf32                1   0.0000%     0.0000%   0.0000%
      float16   3.35544e+07   0.0000%     0.0000%   0.0000%
      bfloat16  3.35544e+07   0.0000%     0.0000%   0.0000%
      tf32      3.35544e+07   0.0000%     0.0000%   0.0000%
    """
    arrays = [_host(x) for x in leaves(grads)]
    elements = sum(x.size for x in arrays)
    zeros = elements - sum(int(np.count_nonzero(x)) for x in arrays)
    scale = _scale(arrays)
    scales = dict.fromkeys((1.0, scale))
    pairs = list(product(scales, FORMATS))
    losses = np.zeros((len(pairs), 3), np.int64)
    histogram = np.zeros(_EXPONENTS, np.int64)
    smallest = largest = math.nan
    for magnitudes in _blocks(arrays):
        smallest = float(np.fmin(smallest, magnitudes.min()))
        largest = float(np.fmax(largest, magnitudes.max()))
        _, exponents = np.frexp(magnitudes)
        histogram += np.bincount(exponents - 1 - _LEAST, minlength=_EXPONENTS)
        for i, (s, f) in enumerate(pairs):
            losses[i] += _fates(magnitudes * s, f)
    counted = int(histogram.sum())
    shares = []
    for (s, f), (lost, subnormal, overflow) in zip(pairs, losses / max(counted, 1), strict=True):
        shares.append(FormatShares(f.name, s, float(lost), float(subnormal), float(overflow)))
    return GradientReport(
        elements,
        zeros,
        nonfinite=elements - zeros - counted,
        smallest=smallest,
        largest=largest,
        suggested_scale=scale,
        exponents={i + _LEAST: int(n) for i, n in enumerate(histogram) if n},
        shares=tuple(shares),
    )


def _fates(magnitudes: Any, to: NumberFormat) -> tuple[int, int, int]:
    half = to.smallest_subnormal / 2
    # A tie goes to zero, which is even; TF32 rounds ties away.
    lost = magnitudes < half
    if to is not TF32:
        lost = magnitudes <= half
    # Half a unit beyond the largest number, ties upwards: the largest number is odd.
    u = to.unit_roundoff
    limit = to.largest * (1 + u / (2 - 2 * u))
    least = to.smallest_normal * (1 - u)
    below = int(np.count_nonzero(magnitudes < least))
    missing = int(np.count_nonzero(lost))
    beyond = int(np.count_nonzero(magnitudes >= limit))
    return missing, below - missing, beyond


def _blocks(arrays: list[Any]) -> Iterator[Any]:
    for array in arrays:
        flat = array.reshape(-1)
        for first in range(0, flat.size, _BLOCK):
            part = flat[first : first + _BLOCK]
            block = np.abs(part.astype(np.float64))
            block = block[np.isfinite(block) & (block > 0)]
            if block.size:
                yield block


def _scale(arrays: list[Any]) -> float:
    peaks = [float(block.max()) for block in _blocks(arrays)]
    largest = max(peaks, default=0.0)
    if not largest:
        return 1.0
    fraction, exponent = math.frexp(largest)
    most, top = math.frexp(FLOAT16.largest)
    shift = top - exponent - (fraction >= most)
    return math.ldexp(1.0, max(-126, min(127, shift)))


def _host(array: Any) -> Any:
    name = dtype_name(array)
    if name not in FLOATS:
        raise DTypeError(f"gradients must be of {', '.join(FLOATS)}, got {name}; cast them first")
    library = library_name(array)
    if library == "torch":
        array = array.detach().cpu()
    elif library == "cupy":
        array = array.get()
    elif library == "jax":
        array = np.asarray(array)
    view = library_of(array).view(array)
    if not view.device.is_host:
        raise ArrayError(
            f"gradients on {view.device} are known only by DLPack; copy them to the host"
        )
    return view.ndarray()
