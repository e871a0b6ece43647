"""Exception classes, each derived from :class:`LowprecError` and a built-in exception; and warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

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
    "SparsityError",
    "UnsupportedError",
]

_LONGEST = 80


def quoted(value: object) -> str:
    """Return the ``repr`` of a value for a message, shortened; the type's name if ``repr`` fails."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the caller's own class may raise anything
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """Return a suggestion to append to a message, "" if no name is similar to the value."""
    from difflib import get_close_matches

    similar = get_close_matches(value.lower(), names, n=1) if isinstance(value, str) else ()
    return f"; did you mean {similar[0]!r}?" if similar else ""


class LowprecError(Exception):
    """Base class of every error that lowprec raises.

    ``argument`` is the name of the array argument that caused the error, or None; the message begins with it.

    >>> import lowprec
    >>> try:
    ...     lowprec.matmul([[1.0]], [[1.0]])
    ... except LowprecError as error:
    ...     error.argument, isinstance(error, TypeError)
    ('a', True)
    """

    argument: str | None = None

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.argument is None else f"{self.argument}: {message}"


class ArrayError(LowprecError, TypeError):
    """An argument that is not an array readable in place, such as a tracer.

    >>> import lowprec
    >>> lowprec.matmul([[1.0]], [[1.0]])
    Traceback (most recent call last):
    lowprec.errors.ArrayError: a: expected an array (...), got list; wrap it with numpy.asarray
    """


class DTypeError(LowprecError, TypeError):
    """An element type, or a pair of element types, that cannot be multiplied.

    >>> import lowprec
    >>> lowprec.ShapeDtype((2, 2), "int16")
    Traceback (most recent call last):
    lowprec.errors.DTypeError: ...
    """


class ShapeError(LowprecError, ValueError):
    """Shapes that do not match, or an ``out`` whose elements overlap.

    >>> import lowprec
    >>> a = lowprec.ShapeDtype((2, 3), "float32")
    >>> lowprec.plan(a, a)
    Traceback (most recent call last):
    lowprec.errors.ShapeError: ...
    """


class DeviceError(LowprecError, ValueError):
    """Operands on different devices, or on an unsupported device.

    >>> import lowprec
    >>> a = lowprec.ShapeDtype((2, 2), "float32")
    >>> lowprec.plan(a, a, device="h1000")
    Traceback (most recent call last):
    lowprec.errors.DeviceError: device 'h1000' is not known; choose one of: ...
    """

    places: dict[str, object] | None = None  # the devices of two arrays, by the names of these


class ModeError(LowprecError, ValueError):
    """An unknown math mode, or an ``rtol`` that no mode meets.

    >>> import lowprec
    >>> lowprec.math_mode("tf16")
    Traceback (most recent call last):
    lowprec.errors.ModeError: math_mode 'tf16' is not a math mode; choose one of: ...
    """


class SparsityError(LowprecError, ValueError):
    """An operand that violates its sparsity pattern, or an unknown pattern.

    >>> import lowprec
    >>> import numpy as np
    >>> lowprec.prepare(np.ones((4, 1), np.float32), sparsity="2:4")
    Traceback (most recent call last):
    lowprec.errors.SparsityError: b is not 2:4 sparse: b[0:4, 0] has 4 nonzero elements, ...
    """


class EnvironmentVariableError(LowprecError, ValueError):
    """An environment variable holds an illegal value.

    >>> issubclass(EnvironmentVariableError, ValueError)
    True
    """


class UnsupportedError(LowprecError, NotImplementedError):
    """Legal arguments that this version or this device does not support.

    >>> import lowprec
    >>> lowprec.emulate("turing")
    Traceback (most recent call last):
    lowprec.errors.UnsupportedError: the tensor cores of architecture 'turing' are not emulated; ...
    """


class BackendError(LowprecError, RuntimeError):
    """A numerical library failed during execution.

    >>> issubclass(BackendError, RuntimeError)
    True
    """


class DeviceMemoryError(BackendError, MemoryError):
    """A device has too little free memory for a workspace or a temporary buffer.

    >>> issubclass(DeviceMemoryError, MemoryError)
    True
    """


class LowprecWarning(UserWarning):
    """Category of every warning that lowprec issues.

    >>> warnings.simplefilter("ignore", LowprecWarning)
    """


#: Packages between the caller's line and a warning.
_SKIPPED = frozenset({"lowprec", "contextlib", "importlib", "jax", "torch"})
#: Keys of the warnings that were issued once.
_given: set[str] = set()


def warn(text: str, once: str = "") -> None:
    """Issue a LowprecWarning at the line of the caller of lowprec; with ``once``, one per process for that key."""
    if once in _given:
        return
    if once:  # recorded first, because a filter may turn the warning into an exception
        _given.add(once)
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED:
        frame = frame.f_back
    line, names = (frame.f_code.co_filename, frame.f_lineno), frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, LowprecWarning, *line, names.get("__name__"), registry)
