"""Entering and leaving ``with`` blocks, and the open blocks of each thread and task.

If a signal handler raises while a block is entered or left, its changes are undone by a second call of
:meth:`Entry.close`. They remain if it raises before ``__exit__`` has found the entry, or again during that call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextvars import ContextVar
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from lowprec.errors import warn
from lowprec.modes import MathMode
from lowprec.policy.switches import NOTHING, Block, release

if TYPE_CHECKING:
    from lowprec.architectures import Architecture
    from lowprec.policy.scopes import PolicyScope

S = TypeVar("S", bound="Scope")

#: Text of a warning; an error would hide an exception of the block. A block is left in another context if the event
#: loop closes an abandoned generator in another task, or a finalizer runs in another thread.
_OTHER_CONTEXT = (
    "was left in another thread or task than it was entered in; other libraries' switches are restored, but "
    "lowprec's own scope stays open where it was entered"
)


class Entry(Block):
    """One entry of a scope, and its changes."""

    __slots__ = ("is_open", "scope")

    def __init__(self, scope: Any) -> None:
        self.layers = self.failures = NOTHING  # without super().__init__(), for speed
        self.thread = get_ident()
        self.scope = scope
        self.is_open = False

    def open(self) -> None:
        """Enter the scope; ``is_open`` is set before the first change."""
        raise NotImplementedError

    def close(self) -> list[str]:
        """Undo all changes, and return warnings. After an exception, call it again to complete the rest."""
        raise NotImplementedError


class Scope:
    """A context manager that may be entered several times, in several threads."""

    __slots__ = ()
    _entry_type: type[Entry]

    def __enter__(self: S) -> S:
        entry = self._entry_type(self)
        try:
            entry.open()
            return self
        except BaseException:
            entry.close()
            raise

    def __exit__(self, *exc_info: object) -> None:
        entry = self._last_entry()
        try:
            remarks = entry.close() if entry else [_OTHER_CONTEXT]
        except BaseException:
            if entry:
                entry.close()
            raise
        for sentence in remarks:
            warn(f"{self!r} {sentence}")

    def _last_entry(self) -> Entry | None:
        """Return the open entry that ``__exit__`` closes."""
        raise NotImplementedError


class PolicyEntry(Entry):
    """One entry of a policy scope; the innermost entry of a context has the combined policy of all."""

    __slots__ = ("emulates", "guarded", "mode", "origin", "outer")

    outer: PolicyEntry | None  # the enclosing entry; immutable, because copies of a context share entries
    mode: MathMode | None  # of the innermost ``math_mode``
    guarded: bool  # whether one of the blocks is a guard
    emulates: Architecture | None  # of the innermost ``emulate``
    origin: PolicyEntry | None  # the entry that this one replaces, because an enclosing entry was left before it

    def _inherit(self, outer: PolicyEntry, origin: PolicyEntry | None = None) -> None:
        scope = self.scope
        self.outer = outer
        self.mode = scope._mode or outer.mode
        self.guarded = scope._guards or outer.guarded
        self.emulates = scope._emulates or outer.emulates
        self.origin = origin

    def entries(self) -> list[PolicyEntry]:
        """Return the open entries, the innermost first."""
        found = []
        entry = self
        while entry.outer is not None:
            found.append(entry.origin or entry)
            entry = entry.outer
        return found

    def of(self, scope: PolicyScope) -> PolicyEntry | None:
        """Return the innermost entry of this scope."""
        found = [entry for entry in self.entries() if entry.scope is scope]
        return found[0] if found else None

    def open(self) -> None:
        """Record the entry in this context, and set other libraries' switches."""
        scope = self.scope
        self._inherit(innermost.get())
        self.is_open = True
        innermost.set(self)
        if _listeners:
            notify()
        if scope._libraries is not NO_LIBRARY:
            scope._set_libraries(self)
        if scope._verifies:
            importlib.import_module("lowprec.auditing").verify()

    def close(self) -> list[str]:
        """Remove the entry from this context, if it is still there, and restore other libraries' switches."""
        remarks = []
        here = innermost.get()
        if here is self:
            innermost.set(self.outer or _no_scope)
        elif self in (entries := here.entries()):
            rest = _no_scope
            for entry in reversed(entries):
                if entry is not self:
                    copied = PolicyEntry(entry.scope)
                    copied._inherit(rest, entry)
                    rest = copied
            innermost.set(rest)
        else:
            remarks.append(_OTHER_CONTEXT)
        if self in held:
            remarks += release(self)
            held.pop(self, None)
        if _listeners:
            notify()
        self.is_open = False
        return remarks


_no_scope = PolicyEntry(None)
_no_scope.outer = _no_scope.mode = _no_scope.emulates = _no_scope.origin = None
_no_scope.guarded = False

#: Selection of no libraries.
NO_LIBRARY: frozenset[str] = frozenset()

#: The innermost entry of this context; outside of all blocks, an entry without a scope.
innermost: ContextVar[PolicyEntry] = ContextVar("lowprec_entry", default=_no_scope)

#: Entries of all threads that have set other libraries' switches, in order of entry.
held: dict[PolicyEntry, None] = {}

_listeners: list[Callable[[bool], None]] = []
#: Register a function to be called after every change of a thread's scopes (argument False) or of the process default
#: (True). ``lowprec.torch`` and ``lowprec.jax`` register one, because compiled code depends on the mode.
on_change = _listeners.append


def notify(whole_process: bool = False) -> None:
    """Call the listeners."""
    for listener in _listeners:
        listener(whole_process)
