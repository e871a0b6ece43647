"""The open ``with`` blocks of each thread and task, as one ``ContextVar``.

A block holds two things: lowprec's own policy, noted in the context that entered it, and other libraries' switches,
which ``policy.switches`` looks after.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TypeVar, cast

from lowprec.errors import LowprecWarning, UnsupportedError, quoted
from lowprec.modes import MathMode
from lowprec.policy import environment
from lowprec.policy.controllers import controllers
from lowprec.policy.decorators import decorated
from lowprec.policy.protocol import Controller, Tier
from lowprec.policy.switches import FLOOR, Held, hold, release

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


class Scopes:
    """The open blocks of one context, as a chain from the innermost outwards. Never changed once it is made."""

    __slots__ = ("guarded", "held", "mode", "outer", "scope")

    def __init__(self, scope: PolicyScope | None, held: Held | None, outer: Scopes | None) -> None:
        self.scope = scope
        self.held = held
        self.outer = outer
        mode = None if scope is None else scope._mode
        #: The mode of the innermost ``math_mode``.
        self.mode: MathMode | None = mode
        #: Whether one of the blocks is a guard.
        self.guarded = scope is not None and mode is None
        if outer is not None:
            if mode is None:
                self.mode = outer.mode
            elif outer.guarded:
                self.guarded = True


_NO_SCOPES = Scopes(None, None, None)
_scopes: ContextVar[Scopes] = ContextVar("lowprec_scopes", default=_NO_SCOPES)

#: Returns the open blocks of this context.
open_scopes: Callable[[], Scopes] = _scopes.get


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


class PolicyScope:
    """A change of policy that lasts as long as a ``with`` block or a decorated function.

    Each entry is noted in the context (thread and task) that made it. So one instance may be entered twice, and be
    shared by threads and tasks. An exit takes away the instance's own innermost entry, wherever that lies, which
    keeps scopes that close out of order from undoing each other.
    """

    __slots__ = ("_libraries", "_mode", "_open")
    _mode: MathMode | None
    _libraries: frozenset[str] | None
    #: What the open entries hold of other libraries, for an exit in a place that knows of no entry.
    _open: list[Held]

    def __enter__(self: S) -> S:
        held = None
        if self._libraries is not _NO_LIBRARY:
            held = self._hold()
        outer = _scopes.get()
        _scopes.set(Scopes(self, held, outer))
        if held is not None:
            self._open.append(held)
            if held.failures:
                self._tell_failures(held)
        return self

    def __exit__(self, *exc_info: object) -> None:
        top = _scopes.get()
        if top.scope is self:
            _scopes.set(cast(Scopes, top.outer))
            held = top.held
        else:
            held = self._leave_out_of_order(top)
        if held is not None:
            self._give_back(held)

    def __call__(self, function: F) -> F:
        """Return the function with this scope around each of its calls.

        The scope of an ``async def`` lasts until its coroutine ends. That of a generator is open while the body
        runs and closed while the consumer does. (A ``with`` block inside a generator's body, by contrast, stays open
        at a ``yield``: a generator shares the context of its consumer.)
        """
        return cast(F, decorated(self, function))

    def _frameworks_in_words(self, everything: str = "", nothing: str = "") -> str:
        libraries = self._libraries
        told = everything if libraries is None else nothing
        if libraries:
            told = f"frameworks={sorted(libraries)}"
        return f", {told}" if told else ""

    # -- entering ---------------------------------------------------------------------------------

    def _hold(self) -> Held | None:
        mode = self._mode
        if mode is None:
            return hold(self._libraries, MathMode.FP32, True)
        return hold(self._libraries, mode, False, guarded_libraries())

    def _tell_failures(self, held: Held) -> None:
        verb = "does not protect" if self._mode is None else "does not reach"
        told = [
            f"{name} ({why})" for name, why in sorted(held.failures.items()) if why is not FLOOR
        ]
        if not told:
            return
        try:
            warnings.warn(f"{self!r} {verb} {'; '.join(told)}", LowprecWarning, stacklevel=3)
        except Warning:
            # A filter makes errors of warnings: then the block is not entered, and must leave nothing behind.
            self.__exit__()
            raise

    # -- leaving ----------------------------------------------------------------------------------

    def _leave_out_of_order(self, top: Scopes) -> Held | None:
        above: list[Scopes] = []
        entry: Scopes | None = top
        while entry is not None and entry.scope is not self:
            above.append(entry)
            entry = entry.outer
        if entry is None:
            return self._left_elsewhere()
        rest = cast(Scopes, entry.outer)
        for kept in reversed(above):
            rest = Scopes(kept.scope, kept.held, rest)
        _scopes.set(rest)
        return entry.held

    def _left_elsewhere(self) -> Held | None:
        """Find what to give back where this context has no entry of this scope.

        That is where a generator ends which another context has begun: the event loop closes an abandoned one in a
        task of its own, and a finalizer may run anywhere. Each entry is left once, so one of the open ones is meant.
        """
        # Not an error: it would hide the exception that is on its way through a generator closed elsewhere.
        warnings.warn(
            f"{self!r} was left in a thread or task in which it was not entered; other libraries' switches are given "
            "back, and lowprec's own scope stays open where it was entered",
            LowprecWarning,
            stacklevel=4,
        )
        mine = get_ident()
        candidates = self._open.copy()
        here = [held for held in candidates if held.thread == mine]
        found = here or candidates
        return found[-1] if found else None

    def _give_back(self, held: Held) -> None:
        said = release(held)
        # It is missing where the block was left before, in a copy of its context.
        with suppress(ValueError):
            self._open.remove(held)
        for sentence in said:
            warnings.warn(f"{self!r}: {sentence}", LowprecWarning, stacklevel=3)

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
        entry: Scopes | None = _scopes.get()
        while entry is not None and entry.scope is not self:
            entry = entry.outer
        done = "protected" if self._mode is None else "set"
        rows = []
        for controller in controllers():
            reached, reason = self._state_of(controller, entry)
            status = done if reached else f"not {done}"
            if sys.modules.get(controller.module) is None:
                status, reason = "not loaded", f"{controller.module} has not been imported"
            rows.append(LibraryStatus(controller.name, status, reason))
        return tuple(rows)

    def _state_of(self, controller: Controller, entry: Scopes | None) -> tuple[bool, str]:
        name = controller.name
        if self._libraries is not None and name not in self._libraries:
            return False, "left out by frameworks="
        if entry is None:
            return False, "the block is not entered in this thread or task"
        held = entry.held
        if held is not None and name in held.failures:
            return False, held.failures[name]
        if held is None or name not in held.names:
            return False, "imported inside the block; the next entry finds it"
        if not held.is_open:
            return False, "the block was left in another context"
        if controller.tier == Tier.THREAD and held.thread != get_ident():
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


def _covered_by(scopes: Scopes) -> Callable[[str], bool]:
    """Return whether a guard among these blocks means a library, also one that was imported inside it."""
    guards = []
    entry: Scopes | None = scopes
    while entry is not None:
        if entry.scope is not None and entry.scope._mode is None:
            guards.append(entry.scope._libraries)
        entry = entry.outer
    return lambda name: any(libraries is None or name in libraries for libraries in guards)
