"""Scopes as decorators of functions, coroutine functions and generator functions."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Generator
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


def decorated(scope: Scope, function: Callable[..., Any], plain: Callable[..., Any] = _plain) -> Callable[..., Any]:
    """Return a function that enters the scope in each call; ``plain`` wraps an ordinary function.

    For a coroutine function the scope lasts until it ends; for a generator it is open only while the body runs.
    """
    if isinstance(function, staticmethod | classmethod):
        return type(function)(decorated(scope, function.__func__))
    if not callable(function):
        raise TypeError(f"{scope!r} decorates functions, got {type(function).__name__}")
    for is_kind, decorate in _KINDS:
        if is_kind(function) or is_kind(_call_of(function)):
            return functools.wraps(function)(decorate(scope, function))
    return functools.wraps(function)(plain(scope, function))


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
        """Call the function inside the scope."""
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


def _coroutine(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return await function(*args, **kwargs)

    return call


# `yield from` inside the scope would keep it open while the consumer runs. So each step of a generator enters the scope
# separately, and values and exceptions from the consumer are passed to the body.
def _generator(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        steps = function(*args, **kwargs)
        step, value = steps.send, None
        while True:
            try:
                with scope:
                    item = step(value)
            except StopIteration as stop:
                return stop.value
            try:
                step, value = steps.send, (yield item)
            except GeneratorExit:
                with scope:
                    steps.close()
                raise
            except BaseException as error:  # noqa: BLE001 - passed to the body
                step, value = steps.throw, error

    return call


def _async_generator(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps = function(*args, **kwargs)
        step, value = steps.asend, None
        while True:
            try:
                with scope:
                    item = await step(value)
            except StopAsyncIteration:
                return
            try:
                step, value = steps.asend, (yield item)
            except GeneratorExit:
                with scope:
                    await steps.aclose()
                raise
            except BaseException as error:  # noqa: BLE001 - passed to the body
                step, value = steps.athrow, error

    return call


_KINDS = (
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isgeneratorfunction, _generator),
    (inspect.isasyncgenfunction, _async_generator),
)
