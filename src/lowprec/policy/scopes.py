"""The open ``with`` blocks of each thread and task, as one ``ContextVar``.

A block holds two things: lowprec's own policy, noted in the context that entered it, and other libraries' switches,
which ``policy.switches`` looks after.

An interrupt (an exception that a signal handler raises, or that another thread sends) may come at every call and at
every turn of a loop. Entering undoes what it has done, and leaving is done again to its end, before the exception
goes on. One before the first line of ``__exit__``, where no ``try`` covers it, is what :class:`_Exit` is about.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, TypeVar, cast
from weakref import ref

from lowprec.errors import LowprecWarning, UnsupportedError, quoted
from lowprec.modes import MathMode
from lowprec.policy import environment
from lowprec.policy.controllers import controllers, loaded_controllers
from lowprec.policy.decorators import decorated
from lowprec.policy.protocol import Controller, Tier
from lowprec.policy.switches import FLOOR, NOTHING, Block, hold, release

__all__ = ["Frameworks", "LibraryStatus", "PolicyScope", "guarded_libraries", "open_scopes"]

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound="PolicyScope")

#: What ``frameworks=`` takes: every loaded library, none, or those of these names.
Frameworks = bool | Iterable[str] | None

#: As :func:`selection` returns it: no library at all.
_NO_LIBRARY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """What a block does for one library.

    Parameters
    ----------
    library : str
        Its name, as in ``frameworks=[...]``.
    status : str
        ``"protected"`` (the guard), ``"set"`` (a math mode), ``"not protected"``, ``"not set"`` or ``"not loaded"``.
    reason : str
        Why, or how far the switches reach.
    """

    library: str
    status: str
    reason: str

    def __str__(self) -> str:
        return f"{self.library}: {self.status} ({self.reason})"


class Entry(Block):
    """One entry of a block; in a context, the innermost of a chain of open ones."""

    __slots__ = ("guarded", "is_open", "mode", "origin", "outer", "scope", "statement")

    def __init__(self, scope: PolicyScope | None) -> None:
        self.layers = self.failures = NOTHING  # as Block has it; a block is entered often
        self.thread = get_ident()
        self.scope = scope
        self.outer: Entry | None = None
        #: The mode of the innermost ``math_mode``.
        self.mode: MathMode | None = None
        #: Whether one of the blocks is a guard.
        self.guarded = False
        #: None before the block is entered.
        self.is_open: bool | None = None
        #: The entry of which this is a copy, for a chain from which one further out was taken away.
        self.origin: Entry | None = None
        #: To what the ``with`` statement calls at its end; None once the block was left.
        self.statement: ref[Callable[..., None]] | None = None

    def begin(self, scope: PolicyScope, outer: Entry) -> None:
        """Become the innermost of the chain. Nothing of that is changed any more."""
        self.scope = scope
        self.outer = outer
        mode = scope._mode
        if mode is None:
            self.mode = outer.mode
            self.guarded = True
        else:
            self.mode = mode
            self.guarded = outer.guarded

    def dropped(self, _: object) -> None:
        """Leave the block, since its ``with`` statement has ended without it."""
        self.statement = None
        _close_after_all(self)

    def chain(self) -> list[Entry]:
        """Return the entries of the chain from the innermost outwards."""
        found = []
        entry: Entry | None = self
        while entry is not None:
            found.append(entry.origin or entry)
            entry = entry.outer
        return found

    def innermost(self, scope: PolicyScope) -> Entry | None:
        """Return the innermost entry of this scope."""
        found = [entry for entry in self.chain() if entry.scope is scope]
        return found[0] if found else None

    def without(self, left: Entry) -> Entry:
        """Return the chain without this entry: the chain itself where it has none."""
        above: list[Entry] = []
        entry = self
        while entry is not left and entry.origin is not left:
            above.append(entry)
            if entry.outer is None:
                return self
            entry = entry.outer
        rest = cast(Entry, entry.outer)
        for kept in reversed(above):
            copied = Entry(kept.scope)
            copied.begin(cast(PolicyScope, kept.scope), rest)
            copied.origin = kept.origin or kept
            rest = copied
        return rest


_scopes: ContextVar[Entry] = ContextVar("lowprec_scopes", default=Entry(None))  # noqa: B039 - it is never changed

#: Returns the innermost of the open blocks of this context.
open_scopes: Callable[[], Entry] = _scopes.get


def selection(frameworks: Frameworks, by_default: bool) -> frozenset[str] | None:
    """Return the names of the libraries that are meant; None for all.

    Raises
    ------
    TypeError
        If it is neither a flag nor a collection of names.
    UnsupportedError
        If there is no controller of one of these names.

    Examples
    --------
    >>> sorted(selection(["torch", "jax"], by_default=True))
    ['jax', 'torch']
    """
    if frameworks is None:
        frameworks = by_default
    if isinstance(frameworks, bool):
        return None if frameworks else _NO_LIBRARY
    if isinstance(frameworks, str) or not isinstance(frameworks, Iterable):
        raise TypeError(
            f'frameworks must be True, False or a list of names such as ["torch"], got {quoted(frameworks)}'
        )
    names = frozenset(frameworks)
    known = [controller.name for controller in controllers()]
    unknown = sorted(str(name) for name in names.difference(known))
    if unknown:
        raise UnsupportedError(
            f"frameworks: nothing is known of {', '.join(unknown)}; choose among {', '.join(known)}, or add a library "
            "with lowprec.register_controller"
        )
    return names


# -- leaving --------------------------------------------------------------------------------------


#: The entries of all threads that hold other libraries' switches, in the order in which they came.
_open: dict[Entry, None] = {}

#: Of the last ``__exit__`` that was looked up. A ``with`` statement does that right before it enters.
_prepared: Entry | None = None


class _Exit:
    """``__exit__``: each look-up makes an entry, which the thread's next ``__enter__`` takes.

    What is returned is a C object that a ``with`` statement keeps to itself until it has called it. An interrupt before
    the first line of :func:`_leave` ends the statement with the block still open; but then the statement drops that
    object, and by the weak reference the block is left. No traceback keeps the object, as it would keep the ``self`` of
    a method. (``ExitStack`` has it in a variable: there the block is left when the exception has been dealt with.)
    Where the block was left before, nothing is called: in a finalizer an interrupt would be lost.
    """

    def __get__(self, scope: PolicyScope | None, owner: object = None) -> Callable[..., None]:
        global _prepared
        entry = _prepared = Entry(scope)
        # Looked up in the class, as ExitStack does it, it gets the scope when it is called.
        leave = partial(_leave, entry) if scope is None else partial(_leave, entry, scope)
        entry.statement = ref(leave, entry.dropped)
        return leave


def _leave(entry: Entry, scope: PolicyScope, *exc_info: object) -> None:
    try:
        if _scopes.get() is entry and entry.layers is NOTHING:  # in short what _close does
            _scopes.set(cast(Entry, entry.outer))
            entry.is_open = False
            entry.statement = None
            return
        if not entry.is_open:  # looked up for its own sake: guard.__exit__()
            entry = _scopes.get().innermost(scope) or _entered_elsewhere(scope)
        told = _close(entry)
    except BaseException:
        _close_after_all(entry)
        raise
    for sentence in told:
        warnings.warn(f"{scope!r} {sentence}", LowprecWarning, stacklevel=2)


def _entered_elsewhere(scope: PolicyScope) -> Entry:
    """Return one of the scope's entries that this context does not know of: each is left once, so one is meant."""
    found = [entry for entry in list(_open) if entry.scope is scope]
    here = [entry for entry in found if entry.thread == get_ident()]
    return (here or found or [Entry(scope)])[-1]


def _close_after_all(entry: Entry) -> None:
    """Do what an interrupt has left undone; once more, should another one come meanwhile."""
    if entry.is_open:
        try:
            _close(entry)
        finally:
            _close(entry)


def _close(entry: Entry) -> list[str]:
    """Leave the block, and return what the user is to be told; done again, it does the rest."""
    told = []
    scopes = _scopes.get()
    rest = cast(Entry, entry.outer) if scopes is entry else scopes.without(entry)
    if rest is scopes:
        # A generator that another context has begun ends like this: the event loop closes an abandoned one in a task
        # of its own, and a finalizer may run anywhere. An error would hide the exception that is on its way.
        told.append(
            "was left in a thread or task in which it was not entered; other libraries' switches are given back, and "
            "lowprec's own scope stays open where it was entered"
        )
    else:
        _scopes.set(rest)
    if entry in _open:
        told += release(entry)
        _open.pop(entry, None)
    entry.is_open = False
    entry.statement = None
    return told


# -- the scopes -----------------------------------------------------------------------------------


class PolicyScope:
    """A change of policy that lasts as long as a ``with`` block or a decorated function.

    Each entry is noted in the context (thread and task) that made it. So one instance may be entered twice, and be
    shared by threads and tasks. A ``with`` statement takes away its own entry, and a call of ``__exit__`` the
    instance's innermost one, wherever that lies, which keeps scopes that close out of order from undoing each other.
    """

    __slots__ = ("_libraries", "_mode")
    _mode: MathMode | None
    _libraries: frozenset[str] | None

    __exit__ = _Exit()

    def __enter__(self: S) -> S:
        entry = _prepared
        if (
            entry is None
            or entry.is_open is not None
            or (entry.scope is not self and entry.scope is not None)
            or entry.thread != get_ident()
        ):
            entry = Entry(self)
        try:
            entry.begin(self, _scopes.get())
            entry.is_open = True
            _scopes.set(entry)
            if self._libraries is not _NO_LIBRARY:
                found = loaded_controllers(self._libraries)
                if found:
                    self._hold(entry, found)
            return self
        except BaseException:
            _close_after_all(entry)
            raise

    def __call__(self, function: F) -> F:
        """Return the function with this scope around each of its calls.

        The scope of an ``async def`` lasts until its coroutine ends. That of a generator is open while the body
        runs and closed while the consumer does. (A ``with`` block inside a generator's body, by contrast, stays open
        at a ``yield``: a generator shares the context of its consumer.)
        """
        return cast(F, decorated(self, function))

    def wrap(self, function: F) -> F:
        """Return the function with this scope around each of its calls, in whichever thread these happen.

        A thread starts without the scopes of the thread that started it, so a scope around ``pool.map`` would not
        reach the workers.

        Parameters
        ----------
        function : callable
            What the workers call.

        Returns
        -------
        callable
            With the same signature.

        Examples
        --------
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from lowprec.policy import fp32_guard, get_math_mode, math_mode, resolve
        >>> with ThreadPoolExecutor() as pool, fp32_guard() as guard:
        ...     pool.submit(guard.wrap(resolve), "bf16").result().mode
        <MathMode.FP32: 'fp32'>
        >>> with ThreadPoolExecutor() as pool, math_mode("tf32") as mode:
        ...     pool.submit(mode.wrap(get_math_mode)).result()
        <MathMode.TF32: 'tf32'>
        """
        return self(function)

    def _frameworks_in_words(self, everything: str = "", nothing: str = "") -> str:
        libraries = self._libraries
        told = everything if libraries is None else nothing
        if libraries:
            told = f"frameworks={sorted(libraries)}"
        return f", {told}" if told else ""

    def _hold(self, entry: Entry, found: list[Controller]) -> None:
        _open[entry] = None
        mode = self._mode
        if mode is None:
            hold(entry, found, MathMode.FP32, True)
        else:
            hold(entry, found, mode, False, guarded_libraries())
        if not entry.failures:
            return
        verb = "does not protect" if mode is None else "does not reach"
        told = [
            f"{name} ({why})" for name, why in sorted(entry.failures.items()) if why is not FLOOR
        ]
        if told:
            warnings.warn(f"{self!r} {verb} {'; '.join(told)}", LowprecWarning, stacklevel=3)

    # -- telling ----------------------------------------------------------------------------------

    def report(self) -> tuple[LibraryStatus, ...]:
        """Return what this block does for each library, as seen from here.

        Returns
        -------
        tuple of LibraryStatus
            One per library that has a controller, loaded or not, each with ``library``, ``status`` and ``reason``.

        Examples
        --------
        >>> from lowprec.policy import fp32_guard
        >>> with fp32_guard() as guard:
        ...     {status.library: status.status for status in guard.report()}["paddle"]
        'not loaded'
        """
        entry = _scopes.get().innermost(self)
        done = "protected" if self._mode is None else "set"
        rows = []
        for controller in controllers():
            reached, reason = self._state_of(controller, entry)
            status = done if reached else f"not {done}"
            if sys.modules.get(controller.module) is None:
                status, reason = "not loaded", f"{controller.module} has not been imported"
            rows.append(LibraryStatus(controller.name, status, reason))
        return tuple(rows)

    def _state_of(self, controller: Controller, entry: Entry | None) -> tuple[bool, str]:
        name = controller.name
        if self._libraries is not None and name not in self._libraries:
            return False, "left out by frameworks="
        if entry is None:
            return False, "the block is not entered in this thread or task"
        if name in entry.failures:
            return False, entry.failures[name]
        if name not in entry.layers:
            return False, "imported inside the block; the next entry finds it"
        if not entry.is_open:
            return False, "the block was left in another context"
        if controller.tier == Tier.THREAD and entry.thread != get_ident():
            return (
                False,
                "its switch belongs to the thread that entered the block; wrap what runs in this one",
            )
        return True, f"its switches belong to the {controller.tier}"


def guarded_libraries() -> Callable[[str], bool] | None:
    """Return what says of a library whether a guard here covers it, None where there is no guard."""
    if environment.snapshot().fp32_guard:
        return lambda name: True
    scopes = _scopes.get()
    return _covered_by(scopes) if scopes.guarded else None


def _covered_by(scopes: Entry) -> Callable[[str], bool]:
    """Return whether a guard among these blocks means a library, also one that was imported inside it."""
    open_ones = [entry.scope for entry in scopes.chain() if entry.scope is not None]
    guards = [scope._libraries for scope in open_ones if scope._mode is None]
    return lambda name: any(libraries is None or name in libraries for libraries in guards)
