"""Exceptions of a library's own, and interrupts, which come from elsewhere.

A signal handler may raise anywhere, also inside a library's call, and an exception of any class (a time limit raises
TimeoutError as a rule). Nothing tells it from one of the library's but this: the library's comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lowprec.errors import UnsupportedError

__all__ = ["attempt", "attempt_again", "comes_again", "in_words"]

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
    errors, own, value = [error], None, None
    for _ in range(_ATTEMPTS):
        try:
            value, own = step(), None
            break
        except Exception as again:  # noqa: BLE001
            own = again
            errors.append(again)
            if [e for e in errors if _is_same(e, own)] != [own]:
                break
    else:
        # Its words are new each time.
        errors = [e for e in errors if type(e) is not type(own)]
    interrupts = [e for e in errors if not _is_same(e, own)]
    errors.clear()  # whose tracebacks lead here
    if interrupts:
        raise interrupts.pop()
    return value, own


def _is_same(error: Exception, own: Exception | None) -> bool:
    return type(error) is type(own) and str(error) == str(own)


def comes_again(step: Callable[[], object], error: Exception) -> bool:
    """Whether the step raises this again, with the same words: for an ``except`` that raises an interrupt on."""
    _, own = attempt(step)
    return _is_same(error, own)


def in_words(error: BaseException | None) -> str:
    """Return why a library could not be set or read."""
    return str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
