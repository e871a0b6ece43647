"""What mixed-precision training refuses."""

from __future__ import annotations

from lowprec.errors import DTypeError, LowprecError


class ScalerStateError(LowprecError, RuntimeError):
    """A method of :class:`~lowprec.amp.LossScaler` that was called out of order."""


class GradientTypeError(DTypeError, ValueError):
    """Gradients of an element type that must not be unscaled: float16, where small ones would be lost again."""


class SettingError(LowprecError, ValueError):
    """A number or a word that a scaler, a policy or a schedule does not take."""
