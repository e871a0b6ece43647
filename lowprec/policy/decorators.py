"""Scopes: blocks of code, and decorators of functions and coroutine functions."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import CodeType
from typing import Any, TypeVar, cast
from weakref import ref

from lowprec.errors import LowprecWarning, warn
from lowprec.policy.entries import OUTSIDE, Entry, Frame
from lowprec.util.tracing import is_traced

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
S = TypeVar("S", bound="ContextScope")


class ContextScope(AbstractContextManager[Any]):
    """A block for ``with``, and a decorator; threads and tasks may share an instance.

    ``__exit__`` closes the instance's innermost entry in this context, or else its last one in another context. An
    instance that is collected unused or open gives a warning.
    """

    #: The innermost block of this thread or task; it may have ended.
    _current: ContextVar[Entry | None]
    _own: Frame = OUTSIDE
    _libraries: frozenset[str] | None = None
    _watch: ref[ContextScope] | None = None

    def __init__(self, depth: int = 2) -> None:
        """Call :func:`_collected` unless ``_watch`` is dropped before; ``__del__`` would lose interrupts.

        ``depth`` is that of the caller's frame.
        """
        self._open: dict[Entry, None] = {}
        if is_traced():  # by PyTorch's compiler
            return
        caller = sys._getframe(depth)
        collected = functools.partial(
            _collected, type(self), self._open, caller.f_code, caller.f_lasti
        )
        self._watch = ref(self, collected)

    def __enter__(self: S) -> S:
        entry = Entry()
        entry.own = self._own
        entry.libraries = self._libraries
        entry.outer = self._current.get()
        try:
            self._open[entry] = None
            self._current.set(entry)
            self._begin(entry)
        except BaseException:
            self._leave(entry, self._open)
            self._watch = None
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        remarks = []
        entry = self._current.get()
        while entry is not None and entry not in self._open:
            entry = entry.outer
        if entry is None:
            # The event loop closes an abandoned generator in another task, or a finalizer runs in another thread. An
            # error would hide an exception of the block.
            remarks.append("was left in another thread or task than it was entered in")
            entry = [None, *self._open][-1]
        if entry is not None:
            remarks += self._leave(entry, self._open)
        self._watch = None
        for sentence in remarks:
            warn(f"{self!r} {sentence}")

    def _begin(self, entry: Entry) -> None:
        """Do what an open block does."""

    @staticmethod
    def _end(entry: Entry) -> list[str]:
        """Undo :meth:`_begin`, or the part of it that was done; return warnings."""
        raise NotImplementedError

    @classmethod
    def _leave(cls, entry: Entry, opened: dict[Entry, None]) -> list[str]:
        """End one of a scope's open blocks, in all contexts; return warnings."""
        entry.is_open = False
        top = cls._current.get()
        while top is not None and not top.is_open:
            top = top.outer
        cls._current.set(top)
        remarks = cls._end(entry)
        opened.pop(entry, None)
        return remarks

    def __call__(self, function: F) -> F:
        """Return a function that enters this scope in each call.

        For an ``async def`` the scope lasts until the coroutine ends. A generator function raises TypeError: write the
        block in its body, around the statements between two yields.
        """
        return cast(F, decorated(self, function))


def _collected(
    kind: type[ContextScope], opened: dict[Entry, None], code: CodeType, at: int, _: object
) -> None:
    """Leave a scope's open blocks, and warn at the call that made it."""
    if sys.is_finalizing():
        return
    text = "the scope was made and not used, so it had no effect; open it by 'with', or decorate a function with it"
    for entry in list(opened):  # an interrupt has prevented __exit__
        text = "the scope was collected without being left, and has ended"
        kind._leave(entry, opened)
    number = 0
    for start, end, line in code.co_lines():
        if start <= at < end:
            number = line or 0
            break
    warnings.warn_explicit(text, LowprecWarning, code.co_filename, number, registry=_registry)


#: The warnings that were issued.
_registry: dict[Any, Any] = {}


def _plain(scope: ContextScope, function: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return function(*args, **kwargs)

    return call


def _coroutine(scope: ContextScope, function: Function) -> Function:
    async def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return await function(*args, **kwargs)

    return call


def decorated(scope: ContextScope, function: Function, plain: Function = _plain) -> Function:
    """Return a function that enters the scope in each call; ``plain`` wraps an ordinary function.

    For a coroutine function the scope lasts until the coroutine ends.
    """
    scope._watch = None
    if isinstance(function, staticmethod | classmethod):
        return type(function)(decorated(scope, function.__func__))
    if not callable(function):
        raise TypeError(f"{scope!r} decorates functions, got {type(function).__name__}")
    kinds = (function, _call_of(function))
    if any(map(inspect.isgeneratorfunction, kinds)) or any(map(inspect.isasyncgenfunction, kinds)):
        raise TypeError(
            f"{scope!r} does not decorate generator functions, because the consumer's code would run inside it; write "
            f"'with {scope!r}:' in the body, around the statements between two yields"
        )
    wrap = _coroutine if any(map(inspect.iscoroutinefunction, kinds)) else plain
    return functools.wraps(function)(wrap(scope, function))


def _call_of(function: Function) -> Any:
    """Return the ``__call__`` of an object's class, which may be a coroutine or generator function."""
    while isinstance(function, functools.partial):
        function = function.func
    return type(function).__call__


def picklable(scope: ContextScope, function: Function) -> Function:
    """Return a function that enters the scope in each call; it can be pickled if ``function`` can."""
    return functools.partial(_call, scope, function)


def _call(scope: ContextScope, function: Function, /, *args: Any, **kwargs: Any) -> Any:
    with scope:
        return function(*args, **kwargs)
