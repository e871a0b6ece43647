"""The update rule of the loss scale, for numbers and for arrays in a traced program.

Sources: PyTorch's ``torch.amp.GradScaler`` (its arguments, defaults and arithmetic: the product of the scale and a
factor is rounded once, to float32); P. Micikevicius et al., "Mixed precision training", arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from lowprec.errors import DTypeError, LowprecError, SettingError, quoted

_SMALLEST_NORMAL = 2.0**-126  # of float32
_LEAST = 2.0**-127  # the least scale whose inverse is finite in float32


class ScalerStateError(LowprecError, RuntimeError):
    """A method of :class:`~lowprec.amp.LossScaler` that was called out of order.

    >>> issubclass(ScalerStateError, RuntimeError)
    True
    """


class GradientTypeError(DTypeError, ValueError):
    """Gradients in float16, which must not be unscaled: small ones would be lost.

    >>> issubclass(GradientTypeError, TypeError)
    True
    """


@dataclass(frozen=True)
class ScaleRule:
    """When and how the loss scale changes.

    Parameters
    ----------
    growth_factor : float
        Factor after ``growth_interval`` consecutive steps without Inf or NaN; above 1.
    backoff_factor : float
        Factor after a step with Inf or NaN; between 0 and 1.
    growth_interval : int
        At least 1.
    min_scale, max_scale : float, optional
        Limits of the scale. The lower one is 2^-126 by default, the smallest normal float32; jmp has a lower limit of
        1, MXNet an upper limit of 2^24.
    dynamic : bool
        False keeps the scale constant.

    Raises
    ------
    SettingError
        A number is out of its range.

    Examples
    --------
    >>> rule = ScaleRule(growth_interval=2)
    >>> rule.next(1024.0, 1, False), rule.next(1024.0, 1, True)
    ((2048.0, 0), (512.0, 0))
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    dynamic: bool = True

    def __post_init__(self) -> None:
        check_number("growth_factor", self.growth_factor, lambda x: 1 < x < math.inf, "above 1")
        check_number("backoff_factor", self.backoff_factor, lambda x: 0 < x < 1, "between 0 and 1")
        check_count("growth_interval", self.growth_interval, 1)
        for name in ("min_scale", "max_scale"):
            limit = getattr(self, name)
            if limit is not None:
                check_scale(name, limit)
        if self._floor < _LEAST:
            raise SettingError(
                f"min_scale must be at least 2^-127, so that float32 holds its inverse, got {self._floor}"
            )
        if self.max_scale is not None and self._floor > self.max_scale:
            raise SettingError(
                f"min_scale={self._floor} is above max_scale={self.max_scale}; exchange them"
            )

    @property
    def _floor(self) -> float:
        if self.min_scale is None:
            return _SMALLEST_NORMAL
        return self.min_scale

    def next(self, scale: float, tracker: int, found_inf: bool) -> tuple[float, int]:
        """Return scale (a float32 value) and growth tracker (int32) after a step.

        Parameters
        ----------
        scale : float
        tracker : int
            Number of consecutive steps without Inf or NaN since the last change of the scale.
        found_inf : bool
            Whether this step's gradients contain Inf or NaN.
        """
        if not self.dynamic:
            return scale, tracker
        if found_inf:
            return self.limited(_rounded(scale * self.backoff_factor)), 0
        if tracker + 1 != self.growth_interval:
            return scale, tracker + 1
        grown = _rounded(scale * self.growth_factor)
        if math.isfinite(grown):
            scale = self.limited(grown)
        return scale, 0

    def next_traced(self, xp: Any, scale: Any, tracker: Any, found_inf: Any) -> tuple[Any, Any]:
        """Return :meth:`next` for arrays of no axes, without a branch on values."""
        if not self.dynamic:
            return scale, tracker
        shrunk = self._limited_traced(xp, scale * self.backoff_factor)
        product = scale * self.growth_factor
        grown = xp.where(xp.isfinite(product), self._limited_traced(xp, product), scale)
        counted = tracker + 1
        grows = counted == self.growth_interval
        none = xp.zeros_like(tracker)
        after = xp.where(grows, grown, scale)
        counted = xp.where(grows, none, counted)
        return xp.where(found_inf, shrunk, after), xp.where(found_inf, none, counted)

    def limited(self, scale: float) -> float:
        """Return the scale within its limits, rounded to float32."""
        if self.max_scale is not None:
            scale = min(scale, self.max_scale)
        return _rounded(max(scale, self._floor))

    def _limited_traced(self, xp: Any, scale: Any) -> Any:
        if self.max_scale is not None:
            most = xp.full_like(scale, self.max_scale)
            scale = xp.where(scale > self.max_scale, most, scale)
        least = xp.full_like(scale, self._floor)
        return xp.where(scale < self._floor, least, scale)


def _rounded(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def check_number(name: str, value: Any, is_legal: Callable[[float], bool], words: str) -> None:
    """Raise :class:`SettingError` unless a value is a legal number."""
    if not (isinstance(value, Real) and is_legal(float(value))):
        raise SettingError(f"{name} must be {words}, got {quoted(value)}")


def check_count(name: str, value: Any, least: int) -> int:
    """Return an integer; raise :class:`SettingError` if it is not one, or too small."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name} must be an integer of at least {least}, got {quoted(value)}")
    return int(value)


def check_entries(what: str, state: Any, names: Iterable[str], remedy: str) -> None:
    """Raise :class:`SettingError` if a state is not a mapping or lacks an entry."""
    if not isinstance(state, Mapping):
        raise SettingError(f"{what} must be a mapping, got {quoted(state)}; {remedy}")
    if lacking := [name for name in names if name not in state]:
        raise SettingError(f"{what} lacks {', '.join(lacking)}; {remedy}")


def check_scale(name: str, value: Any, *, zero: bool = False) -> float:
    """Return a scale rounded to float32; SettingError unless it is finite and positive (``zero``: or 0)."""
    try:
        scale = _rounded(float(value))
    except (TypeError, ValueError, OverflowError):
        scale = math.nan
    if not (0 < scale < math.inf or (zero and scale == 0)):
        words = "number from 0 on" if zero else "positive number"
        raise SettingError(f"{name} must be a {words} that float32 holds, got {quoted(value)}")
    return scale
