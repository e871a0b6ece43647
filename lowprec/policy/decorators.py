"""Scopes as decorators of functions and coroutine functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Scope = AbstractContextManager[Any]


def _plain(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return function(*args, **kwargs)

    return call


def _coroutine(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return await function(*args, **kwargs)

    return call


def decorated(scope: Scope, function: Callable[..., Any], plain: Callable[..., Any] = _plain) -> Callable[..., Any]:
    """Return a function that enters the scope in each call; ``plain`` wraps an ordinary function.

    For a coroutine function the scope lasts until the coroutine ends.
    """
    if isinstance(function, staticmethod | classmethod):
        return type(function)(decorated(scope, function.__func__))
    if not callable(function):
        raise TypeError(f"{scope!r} decorates functions, got {type(function).__name__}")
    kinds = function, _call_of(function)
    if any(inspect.isgeneratorfunction(x) or inspect.isasyncgenfunction(x) for x in kinds):
        raise TypeError(
            f"{scope!r} does not decorate generator functions, because the consumer's code would run inside it; write "
            f"'with {scope!r}:' in the body, around the statements between two yields"
        )
    wrap = _coroutine if any(map(inspect.iscoroutinefunction, kinds)) else plain
    return functools.wraps(function)(wrap(scope, function))


def _call_of(function: Callable[..., Any]) -> Any:
    """Return the ``__call__`` of an object's class, which may be a coroutine or generator function."""
    while isinstance(function, functools.partial):
        function = function.func
    return type(function).__call__


def picklable(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that enters the scope in each call; it can be pickled if ``function`` can."""
    return functools.partial(_call, scope, function)


def _call(scope: Scope, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with scope:
        return function(*args, **kwargs)
