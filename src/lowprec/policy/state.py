"""Which math mode is in force: the process default, the scopes, and the order of precedence.

The order is written in :func:`resolve` and nowhere else. The state is two things: one process default, and one
``ContextVar`` that holds the open ``with`` blocks of this thread and task.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from lowprec.errors import LowprecWarning, ModeError
from lowprec.modes import MathMode, ModeSource, ResolvedMode, parse_mode, row
from lowprec.policy import environment
from lowprec.policy.environment import EnvironmentSnapshot

__all__ = [
    "FULL_FP32",
    "PolicyScope",
    "finish",
    "get_math_mode",
    "math_mode",
    "overriding_mode",
    "resolve",
    "set_math_mode",
]

#: What the guard lets pass. ``fp32_emulated`` is not among them: a bound as good as fp32's is a promise about the
#: error, while the guard promises the arithmetic.
FULL_FP32 = frozenset({MathMode.FP32, MathMode.FP32_PEDANTIC})

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound="PolicyScope")


# -- state ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scopes:
    """The open scopes of one context, outermost first; the mode of a guard's entry is None."""

    entries: tuple[tuple[PolicyScope, MathMode | None], ...]
    guarded: bool
    mode: MathMode | None

    @classmethod
    def of(cls, entries: tuple[tuple[PolicyScope, MathMode | None], ...]) -> _Scopes:
        modes = [mode for _, mode in entries]
        innermost = next((mode for mode in reversed(modes) if mode is not None), None)
        return cls(entries, None in modes, innermost)


_NO_SCOPES = _Scopes((), guarded=False, mode=None)
_scopes: ContextVar[_Scopes] = ContextVar("lowprec_scopes", default=_NO_SCOPES)
_process_mode: MathMode | None = None


class PolicyScope:
    """A change of policy that lasts as long as a ``with`` block or a decorated function.

    An instance holds no state: each entry is noted in the context (thread and task) that made it. So one instance may
    be entered twice, and be shared by threads and tasks. An exit takes away the instance's own innermost entry,
    wherever that lies, which keeps scopes that close out of order from undoing each other.
    """

    __slots__ = ("_mode",)
    _mode: MathMode | None

    def __enter__(self: S) -> S:
        _scopes.set(_Scopes.of((*_scopes.get().entries, (self, self._mode))))
        return self

    def __exit__(self, *exc_info: object) -> None:
        entries = _scopes.get().entries
        for i in reversed(range(len(entries))):
            if entries[i][0] is self:
                _scopes.set(_Scopes.of(entries[:i] + entries[i + 1 :]))
                return
        # Not an error: it would hide the exception that is on its way through a generator closed elsewhere.
        warnings.warn(
            f"{self!r} was left in a thread or task in which it was not entered; "
            "nothing changes here, and the scope stays open where it was entered",
            LowprecWarning,
            stacklevel=2,
        )

    def __call__(self, function: F) -> F:
        """Return the function with this scope around each of its calls.

        The scope of an ``async def`` lasts until its coroutine ends. That of a generator is open while the body
        runs and closed while the consumer does. (A ``with`` block inside a generator's body, by contrast, stays open
        at a ``yield``: a generator shares the context of its consumer.)
        """
        return cast(F, _decorated(self, function))


# -- decorators -----------------------------------------------------------------------------------


def _decorated(scope: PolicyScope, function: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(function):
        raise TypeError(f"{scope!r} decorates functions, got {type(function).__name__}")
    for is_kind, decorate in _KINDS:
        if is_kind(function):
            return functools.wraps(function)(decorate(scope, function))
    return functools.wraps(function)(_plain(scope, function))


def _plain(scope: PolicyScope, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return function(*args, **kwargs)

    return call


def _coroutine(scope: PolicyScope, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return await function(*args, **kwargs)

    return call


# `yield from` inside the scope would leave it open for the consumer, so both kinds of generator are driven step by
# step, and whatever the consumer sends or throws is handed on.
def _generator(scope: PolicyScope, function: Callable[..., Any]) -> Callable[..., Any]:
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
            except BaseException as error:  # noqa: BLE001 - the body gets it
                step, value = steps.throw, error

    return call


def _async_generator(scope: PolicyScope, function: Callable[..., Any]) -> Callable[..., Any]:
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
            except BaseException as error:  # noqa: BLE001 - the body gets it
                step, value = steps.athrow, error

    return call


_KINDS = (
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isgeneratorfunction, _generator),
    (inspect.isasyncgenfunction, _async_generator),
)


# -- the three ways to choose ---------------------------------------------------------------------


class math_mode(PolicyScope):
    """Multiply in this mode inside a ``with`` block or a decorated function.

    The mode holds for ``lowprec`` in this thread and task, and in tasks that are started inside; other threads and
    other libraries do not see it. It acts on float32 and complex64 operands only. A ``math_mode=`` argument and an
    inner block stand above it, and so do ``fp32_guard`` and ``LOWPREC_FORCE_MATH_MODE``.

    Parameters
    ----------
    name : str or MathMode
        A mode or an alias, checked here; it takes effect where the block is entered.

    Raises
    ------
    ModeError
        If there is no such mode, or this version cannot run it.

    Examples
    --------
    >>> with math_mode("bf16"):
    ...     get_math_mode()
    <MathMode.BF16: 'bf16'>

    As a decorator it serves functions, coroutine functions and both kinds of generator:

    >>> @math_mode("tf32")
    ... def step():
    ...     return get_math_mode()
    >>> step()
    <MathMode.TF32: 'tf32'>
    """

    __slots__ = ()

    def __init__(self, name: str | MathMode) -> None:
        self._mode = parse_mode(name)

    def __repr__(self) -> str:
        return f"math_mode({str(self._mode)!r})"


def set_math_mode(name: str | MathMode | None) -> None:
    """Set the default mode of this process, for all its threads.

    It stands below ``with math_mode(...)`` and every argument, and above ``LOWPREC_MATH_MODE``.

    Parameters
    ----------
    name : str, MathMode or None
        A mode or an alias; None returns to ``LOWPREC_MATH_MODE``, or to ``fp32`` where that is not set.

    Raises
    ------
    ModeError
        If there is no such mode, or this version cannot run it.

    Examples
    --------
    >>> set_math_mode("tf32")
    >>> get_math_mode()
    <MathMode.TF32: 'tf32'>
    >>> set_math_mode(None)
    """
    global _process_mode
    _process_mode = None if name is None else parse_mode(name)


def get_math_mode() -> MathMode:
    """Return the mode in force here: in this thread, in this task, without an argument.

    Raises
    ------
    EnvironmentVariableError
        If one of lowprec's environment variables holds a value that it may not hold.

    Examples
    --------
    >>> get_math_mode()
    <MathMode.FP32: 'fp32'>
    """
    return resolve().mode


# -- the order of precedence ----------------------------------------------------------------------


def resolve(argument: str | MathMode | None = None) -> ResolvedMode:
    """Return the mode in force for a call with this ``math_mode=`` argument, and why.

    The first match wins:

    1. ``fp32_guard``, a floor: a mode of :data:`FULL_FP32` stays, any other becomes ``fp32``;
    2. ``LOWPREC_FORCE_MATH_MODE``;
    3. the ``math_mode=`` argument;
    4. the innermost ``with math_mode(...)``;
    5. ``set_math_mode(...)``;
    6. ``LOWPREC_MATH_MODE``;
    7. ``fp32``.

    Then ``NVIDIA_TF32_OVERRIDE=0`` turns a mode that is based on TF32 into ``fp32``.

    Parameters
    ----------
    argument : str, MathMode or None
        The caller's ``math_mode=``.

    Returns
    -------
    ResolvedMode
        The same object for the same question, so a warm call costs a fraction of a microsecond.

    Raises
    ------
    ModeError
        If the argument is not a mode that this version runs, whether or not it would have been overruled.
    EnvironmentVariableError
        If one of lowprec's environment variables holds a value that it may not hold.

    Examples
    --------
    >>> resolve("bf16").source
    <ModeSource.ARGUMENT: 'math_mode= argument'>
    """
    scopes = _scopes.get()
    taken = environment.snapshot()
    try:
        return _resolve(argument, scopes.guarded, scopes.mode, _process_mode, taken)
    except TypeError:
        if argument is None or isinstance(argument, str):
            raise
        # The cache hashes the argument before anybody can look at it.
        raise ModeError(
            f"math_mode must be a name or a MathMode, got {type(argument).__name__}"
        ) from None


def overriding_mode() -> ResolvedMode | None:
    """Return the mode that the guard or ``LOWPREC_FORCE_MATH_MODE`` decides, None if neither acts.

    It is for a caller that has a choice of its own to make in the place of the ``math_mode=`` argument, as ``rtol=``
    does; what it chooses goes through :func:`finish`.

    Examples
    --------
    >>> overriding_mode() is None
    True
    """
    guarded, taken = _scopes.get().guarded, environment.snapshot()
    if not guarded and taken.force_math_mode is None:
        return None
    return _impose(None, ModeSource.DEFAULT, guarded, taken)


def finish(mode: MathMode, source: ModeSource) -> ResolvedMode:
    """Return what becomes of a mode that was chosen already: overruled, raised or without TF32, with the reasons.

    Examples
    --------
    >>> finish(MathMode.BF16, ModeSource.RTOL).mode
    <MathMode.BF16: 'bf16'>
    """
    return _impose(mode, source, _scopes.get().guarded, environment.snapshot())


# Everything that can change the answer is an argument, so the cached answers never go stale. A bound, since the
# spellings of a name are without number ("TF32", " tf32").
@functools.lru_cache(maxsize=1024)
def _resolve(
    argument: str | MathMode | None,
    guarded: bool,
    context: MathMode | None,
    process: MathMode | None,
    taken: EnvironmentSnapshot,
) -> ResolvedMode:
    requests = (
        (ModeSource.ARGUMENT, None if argument is None else parse_mode(argument)),
        (ModeSource.CONTEXT, context),
        (ModeSource.PROCESS, process),
        (ModeSource.ENVIRONMENT, taken.math_mode),
    )
    nothing = (ModeSource.DEFAULT, None)
    source, asked = next((r for r in requests if r[1] is not None), nothing)
    return _impose(asked, source, guarded, taken)


@functools.lru_cache(maxsize=1024)
def _impose(
    asked: MathMode | None, source: ModeSource, guarded: bool, taken: EnvironmentSnapshot
) -> ResolvedMode:
    """Apply what stands above a request (None: nothing was asked for), lowest first."""
    mode, reasons = asked or MathMode.FP32, []
    if taken.force_math_mode is not None:
        if asked not in (None, taken.force_math_mode):
            reasons.append(
                f"{ModeSource.FORCED}={taken.force_math_mode} overrules {asked} ({source})."
            )
        mode, source = taken.force_math_mode, ModeSource.FORCED
    decided = mode
    if guarded:
        mode, source, reason = _floor(mode, source)
        reasons.append(reason)
    if taken.tf32_off and row(mode).uses_tf32:
        reasons.append(f"NVIDIA_TF32_OVERRIDE=0 turns {mode} into {MathMode.FP32}.")
        mode = MathMode.FP32
    requested = next((m for m in (asked, decided) if m not in (None, mode)), None)
    return ResolvedMode(mode, source, requested, tuple(reasons))


def _floor(mode: MathMode, source: ModeSource) -> tuple[MathMode, ModeSource, str]:
    guard = ModeSource.GUARD
    if mode not in FULL_FP32:
        return MathMode.FP32, guard, f"{guard} raises {mode} ({source}) to {MathMode.FP32}."
    if mode is MathMode.FP32:
        return mode, guard, f"{guard} keeps the precision at {MathMode.FP32} or above."
    return mode, source, f"{guard} is active, and {mode} is no less precise than {MathMode.FP32}."
