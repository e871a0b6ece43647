"""Exception classes, each derived from :class:`LowprecError` and a built-in exception; and warnings."""

from __future__ import annotations

import re
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
    "SettingError",
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
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    return text


#: Words of other libraries, and the names for them here, the first choice first.
_WORDS = """
fp4 float4 f4 nf4 e2m1 fp4_e2m1 f4_e2m1 float4_e2m1 float4_e2m1fn float4_e2m1fn_x2: nvfp4
int4 uint4 s4 u4 i4 w4a16 q4_0: int4 nvfp4
fp6 float6 f6 e2m3 e3m2 mxfp6: mxfp8
fp8 float8 f8 e4m3 e4m3fn fp8_e4m3 fp8_e4m3fn f8_e4m3 float8_e4m3 float8_e4m3fn: fp8 float8_e4m3fn
e5m2 fp8_e5m2 f8_e5m2 float8_e5m2: fp8_e5m2 float8_e5m2 fp8
s8 i8 w8a8 q8_0: int8
fp16 half f16: fp16 float16
bf16 bfloat: bf16 bfloat16
fp32 single float f32: fp32 float32
fp64 double f64: fp64 float64
volta v100 sm_70 7.0: volta v100
ampere a100 a100-40gb sm_80 8.0: ampere a100
ada l4 l40s rtx-4090 sm_89 8.9: ada l4
hopper h100 h200 gh200 sm_90 9.0: hopper h100
blackwell b200 sm_100 10.0: blackwell b200
int16 int32 int64 uint8 uint16 uint32 uint64 float128:
"""
_MEANT = {
    word: names.split()
    for words, names in re.findall("(.+):(.*)", _WORDS)
    for word in words.split()
}


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """Return a suggestion to append to a message, "" if no name is similar to the value."""
    from difflib import get_close_matches

    word = value.lower() if isinstance(value, str) else ""
    known = {name.lower(): name for name in names}
    similar = get_close_matches(word, known, n=1)
    if word in _MEANT:
        similar = [x for x in _MEANT[word] if x in known]
    if not similar:
        return ""
    return f"; did you mean {known[similar[0]]!r}?"


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
        if self.argument is None:
            return message
        return f"{self.argument}: {message}"


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


class SettingError(LowprecError, ValueError):
    """An illegal value of an argument that is not an array.

    >>> import lowprec
    >>> lowprec.emulate("turing")
    Traceback (most recent call last):
    lowprec.errors.SettingError: the tensor cores of architecture 'turing' are not emulated; ...
    """


class ModeError(SettingError):
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
    >>> a = lowprec.ShapeDtype((2, 2), "int8")
    >>> lowprec.plan(a, a, activation="gelu")
    Traceback (most recent call last):
    lowprec.errors.UnsupportedError: activation gelu cannot be used with int8 operands, ...
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
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    file = frame.f_code.co_filename
    warnings.warn_explicit(
        text, LowprecWarning, file, frame.f_lineno, names.get("__name__"), registry
    )
