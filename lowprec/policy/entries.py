"""Entering and leaving a block, and the open blocks of each thread and task.

An exception inside a block, or one raised by a signal handler while the block is entered or left, undoes the block's
changes: :meth:`Entry.close`, called again, does the rest. A second exception during that is not handled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from lowprec.errors import warn
from lowprec.modes import MathMode
from lowprec.policy.switches import NOTHING, Block, release

if TYPE_CHECKING:
    from lowprec.architectures import Architecture
    from lowprec.policy.scopes import PolicyScope

S = TypeVar("S", bound="Scope")

#: A warning, not an error: the event loop closes an abandoned generator in another task, a finalizer may run in any
#: thread, and an error would hide the exception that is being raised.
_OTHER_CONTEXT = (
    "was left in a thread or task in which it was not entered; other libraries' switches are restored, and "
    "lowprec's own scope stays open where it was entered"
)


class Entry(Block):
    """One entry of a scope, and its changes."""

    __slots__ = ("is_open", "scope", "statement")

    def __init__(self, scope: Any) -> None:
        self.layers = self.failures = NOTHING  # as Block does; a block is entered often
        self.thread = get_ident()
        self.scope = scope
        self.is_open = False
        #: The function that a ``with`` statement calls at its end.
        self.statement: ref[Callable[..., None]] | None = None

    def open(self, scope: Any) -> None:
        """Enter the scope; ``is_open`` is set before the first change."""
        raise NotImplementedError

    def close(self) -> list[str]:
        """Undo all changes, and return warnings; called again after an exception, does the rest."""
        raise NotImplementedError

    def _dropped(self, _: object) -> None:
        self.statement = None
        if self.is_open:
            self.close()


#: Created by the last look-up of ``__exit__``, for the ``__enter__`` that follows in that thread.
_prepared: Entry | None = None


class _Exit:
    """``__exit__`` of a scope, which a ``with`` statement looks up right before it calls ``__enter__``.

    A signal handler may raise in :func:`_leave` or before its first line, outside of any ``try``, which ends the
    ``with`` statement with the block open. The statement then drops the ``partial`` that it has looked up, which closes
    the entry.
    """

    def __get__(self, scope: Scope | None, owner: type[Scope]) -> Callable[..., None]:
        # ExitStack looks it up in the class, and passes the scope when it calls.
        global _prepared
        entry = _prepared = owner._entry_type(owner if scope is None else scope)
        leave = partial(_leave, entry) if scope is None else partial(_leave, entry, scope)
        entry.statement = ref(leave, entry._dropped)
        return leave


def _leave(entry: Entry, scope: Scope, *exc_info: object) -> None:
    # If it is not open, it was not looked up by a ``with`` statement: guard.__exit__()
    found = entry if entry.is_open else scope._last_entry()
    for sentence in [_OTHER_CONTEXT] if found is None else found.close():
        warn(f"{scope!r} {sentence}")


class Scope:
    """A change that lasts as long as a ``with`` block."""

    __slots__ = ()
    _entry_type: type[Entry]

    __exit__ = _Exit()

    def __enter__(self: S) -> S:
        global _prepared
        entry, _prepared = _prepared, None
        if entry is None or entry.thread != get_ident() or (entry.scope is not self and entry.scope is not type(self)):
            entry = self._entry_type(self)
        try:
            entry.open(self)
            return self
        except BaseException:
            entry.close()
            raise

    def _last_entry(self) -> Entry | None:
        """Return the open entry that a bare call of ``__exit__`` means."""
        raise NotImplementedError


class PolicyEntry(Entry):
    """One entry of a policy scope; the innermost one of a context has the combined policy of all."""

    __slots__ = ("emulates", "guarded", "mode", "origin", "outer")

    outer: PolicyEntry | None  # None outside of all scopes; never changes, since contexts are copied
    mode: MathMode | None  # of the innermost ``math_mode``
    guarded: bool  # whether one of the blocks is a guard
    emulates: Architecture | None  # of the innermost ``emulate``
    origin: PolicyEntry | None  # the entry that this is a copy of, since one further out was left first

    def _place(self, outer: PolicyEntry, origin: PolicyEntry | None = None) -> None:
        scope = self.scope
        self.outer = outer
        self.mode = scope._mode or outer.mode
        self.guarded = scope._guards or outer.guarded
        self.emulates = scope._emulates or outer.emulates
        self.origin = origin

    def entries(self) -> list[PolicyEntry]:
        """Return the open entries from this one outwards."""
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

    def open(self, scope: PolicyScope) -> None:
        """Record the entry in this context, and set other libraries' switches."""
        self.scope = scope
        self._place(innermost.get())
        self.is_open = True
        innermost.set(self)
        if _listeners:
            notify()
        if scope._libraries is not NO_LIBRARY:
            scope._set_libraries(self)

    def close(self) -> list[str]:
        """Leave the scope here, also if a copy of this context has left it, and restore other libraries' switches."""
        remarks = []
        here = innermost.get()
        if here is self:
            innermost.set(self.outer or _no_scope)
        elif self in (entries := here.entries()):
            rest = _no_scope
            for entry in reversed(entries):
                if entry is not self:
                    copied = PolicyEntry(entry.scope)
                    copied._place(rest, entry)
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
        self.statement = None
        return remarks


_no_scope = PolicyEntry(None)
_no_scope.outer = _no_scope.mode = _no_scope.emulates = _no_scope.origin = None
_no_scope.guarded = False

#: The libraries of a scope that sets none.
NO_LIBRARY: frozenset[str] = frozenset()

#: The innermost entry of this context; one without a scope where no block is open.
innermost: ContextVar[PolicyEntry] = ContextVar("lowprec_entry", default=_no_scope)

#: The entries of all threads that hold other libraries' switches, in the order in which they came.
held: dict[PolicyEntry, None] = {}

_listeners: list[Callable[[bool], None]] = []
#: Add a function to call after every change of the scopes in a thread, or (with True) of the process's default, as
#: ``lowprec.torch`` and ``lowprec.jax`` do, whose compilers depend on the mode.
on_change = _listeners.append


def notify(whole_process: bool = False) -> None:
    """Call the listeners."""
    for listener in _listeners:
        listener(whole_process)
