"""Exception classes, and the text of values in their messages.

Every error derives from :class:`LowprecError` and from the built-in exception that fits.
"""

from __future__ import annotations

__all__ = [
    "ArrayError",
    "BackendError",
    "DTypeError",
    "DeviceError",
    "DeviceMemoryError",
    "EnvironmentVariableError",
    "LowprecError",
    "LowprecWarning",
    "ModeError",
    "ShapeError",
    "UnsupportedError",
]

_LONGEST = 80


def quoted(value: object) -> str:
    """Return the text of a caller's value for a message: shortened, or the type where ``repr`` fails.

    Examples
    --------
    >>> quoted("half"), quoted(10**5000)  # Python writes no integers of more than 4300 digits
    ("'half'", '<int>')
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the caller's own class may raise anything
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class LowprecError(Exception):
    """Base class of every error that lowprec raises.

    ``argument`` is the name of the array argument that the error is about, if any; the message begins with it.
    """

    argument: str | None = None

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.argument is None else f"{self.argument}: {message}"


class ArrayError(LowprecError, TypeError):
    """An argument cannot be read in place: no DLPack, a tracer, a tensor with grad."""


class DelegateError(ArrayError):
    """An array without memory to read now; ``target`` is its library's own product, ``"module:function"``."""

    def __init__(self, message: str, target: str) -> None:
        super().__init__(message)
        self.target = target


class DTypeError(LowprecError, TypeError):
    """An element type, or a pair of them, without a matrix product."""


class ShapeError(LowprecError, ValueError):
    """Shapes that do not fit together, or an ``out`` that overlaps an operand."""


class DeviceError(LowprecError, ValueError):
    """Operands on two devices, or on a device that no backend serves."""


class ModeError(LowprecError, ValueError):
    """An unknown math mode, or an ``rtol`` that no mode meets."""


class EnvironmentVariableError(LowprecError, ValueError):
    """An environment variable holds an illegal value."""


class UnsupportedError(LowprecError, NotImplementedError):
    """A legal request that this version or this machine cannot serve."""


class BackendError(LowprecError, RuntimeError):
    """A numerical library failed while it ran."""


class DeviceMemoryError(BackendError, MemoryError):
    """A device has too little free memory for a workspace or a temporary buffer."""


class LowprecWarning(UserWarning):
    """Category of every warning that lowprec issues."""
