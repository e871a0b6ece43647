"""Exceptions of a library's own, and interrupts, which come from elsewhere.

A signal handler may raise anywhere, also inside a library's call, and an exception of any class (a time limit raises
TimeoutError as a rule); so may another thread, through Python's C API. What tells a library's own exception from these:
it comes again.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, TypeVar

from lowprec.errors import UnsupportedError

T = TypeVar("T")

#: How often a step that fails is done again to hear the same words twice.
_ATTEMPTS = 4


def attempt(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what a step of a library's returns, or the exception that is its own.

    An exception that does not come again when the step is done again was an interrupt, and is raised on.

    Examples
    --------
    >>> attempt(lambda: 2)
    (2, None)
    >>> attempt(lambda: {}["no"])
    (None, KeyError('no'))
    """
    try:
        return step(), None
    except Exception as error:  # noqa: BLE001 - whatever a library does, the others are to act
        return attempt_again(step, error)


def attempt_again(step: Callable[[], T], error: Exception) -> tuple[T | None, Exception | None]:
    """Return what :func:`attempt` does, for a step that has raised this exception."""
    errors = [error]
    own: Exception | None = None
    value: T | None = None
    is_same = _has_same_words
    for _ in range(_ATTEMPTS):
        try:
            value, own = step(), None
            break
        except Exception as again:  # noqa: BLE001
            own = None if _is_of_a_handler(again) else again
            if own is not None and [e for e in errors if is_same(e, own)]:
                break
            errors.append(again)
    else:
        is_same = _has_same_class  # its words are new each time
    interrupts = [e for e in errors if own is None or _is_of_a_handler(e) or not is_same(e, own)]
    errors.clear()  # whose tracebacks lead here
    if interrupts:
        raise interrupts.pop()
    return value, own


def _is_of_a_handler(error: Exception) -> bool:
    """Whether a signal handler raised it, one that is still installed; then there is no need to guess."""
    installed = filter(callable, map(signal.getsignal, signal.valid_signals()))
    codes = list(map(_code_of, installed))
    position = error.__traceback__
    while position is not None:
        if position.tb_frame.f_code in codes:
            return True
        position = position.tb_next
    return False


def _code_of(handler: Any) -> Any:
    handler = getattr(handler, "func", handler)  # of a partial
    method = getattr(handler, "__func__", handler)
    return getattr(method, "__code__", getattr(type(method).__call__, "__code__", None))


def _has_same_class(error: Exception, own: Exception) -> bool:
    return type(error) is type(own)


def _has_same_words(error: Exception, own: Exception) -> bool:
    return type(error) is type(own) and str(error) == str(own)


def comes_again(step: Callable[[], object], error: Exception) -> bool:
    """Whether the step raises this again, with the same words: for an ``except`` that raises an interrupt on."""
    _, own = attempt(step)
    return own is not None and _has_same_words(error, own)


def in_words(error: BaseException | None) -> str:
    """Return why a library could not be set or read."""
    return str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
