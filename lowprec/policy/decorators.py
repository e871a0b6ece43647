"""Scopes as decorators of functions and coroutine functions."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from types import MethodType
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


class Wrapped:
    """A function that enters a scope in each call; its pickle is its qualified name, or the scope and the function."""

    def __init__(self, scope: Scope, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._lowprec_wrapped = scope, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scope, function = self._lowprec_wrapped
        with scope:
            return function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str | tuple[Any, ...]:
        try:
            name: str = self.__dict__["__qualname__"]
            named = attrgetter(name)(sys.modules[self.__module__])
        except (AttributeError, KeyError):
            named = None
        return name if named is self else (Wrapped, self._lowprec_wrapped)
