"""Entering and leaving a ``with`` block so that an interrupt leaves nothing half done: one entry a block.

An interrupt (``policy.interrupts``) may come at every call and at every turn of a loop. Entering undoes what it has
done, and leaving is done again to its end, before the exception goes on. One before the first line of ``__exit__``,
where no ``try`` covers it, is what :class:`Exit` is about.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Protocol, cast
from weakref import ref

from lowprec.errors import LowprecWarning
from lowprec.modes import MathMode
from lowprec.policy.switches import NOTHING, Block, release

if TYPE_CHECKING:
    from lowprec.architectures import Architecture


class Scope(Protocol):
    """What an entry belongs to."""

    _mode: MathMode | None
    _guards: bool
    _emulates: Architecture | None
    #: None for all.
    _libraries: frozenset[str] | None


class Entry(Block):
    """One entry of a block; in a context, the innermost of a chain of open ones, which is never changed."""

    __slots__ = ("emulates", "guarded", "is_open", "mode", "origin", "outer", "scope", "statement")

    def __init__(self, scope: Scope | None) -> None:
        self.layers = self.failures = NOTHING  # as Block has it; a block is entered often
        self.thread = get_ident()
        self.scope = scope
        self.outer: Entry | None = None
        #: The mode of the innermost ``math_mode``.
        self.mode: MathMode | None = None
        #: Whether one of the blocks is a guard.
        self.guarded = False
        #: Of the innermost ``emulate``.
        self.emulates: Architecture | None = None
        #: None before the block is entered.
        self.is_open: bool | None = None
        #: The entry of which this is a copy, for a chain from which one further out was taken away.
        self.origin: Entry | None = None
        #: To what the ``with`` statement calls at its end; None once the block was left.
        self.statement: ref[Callable[..., None]] | None = None

    def dropped(self, _: object) -> None:
        """Leave the block, since its ``with`` statement has ended without it."""
        self.statement = None
        close_after_all(self)

    def chain(self) -> list[Entry]:
        """Return the entries of the chain from the innermost outwards."""
        found = []
        entry: Entry | None = self
        while entry is not None:
            found.append(entry.origin or entry)
            entry = entry.outer
        return found

    def of(self, scope: Scope) -> Entry | None:
        """Return the innermost entry of this scope."""
        found = [entry for entry in self.chain() if entry.scope is scope]
        return found[0] if found else None

    def without(self, left: Entry) -> Entry:
        """Return the chain without this entry: the chain itself where it has none."""
        above: list[Entry] = []
        entry = self
        while entry.outer is not None:
            if entry is left or entry.origin is left:
                break
            above.append(entry)
            entry = entry.outer
        else:
            return self
        rest = entry.outer
        for kept in reversed(above):
            scope = cast(Scope, kept.scope)
            copied = Entry(kept.scope)
            copied.origin = kept.origin or kept
            copied.outer = rest
            copied.mode = scope._mode or rest.mode
            copied.guarded = scope._guards or rest.guarded
            copied.emulates = scope._emulates or rest.emulates
            rest = copied
        return rest


#: Of the open blocks of this context; one without a scope where there is none.
innermost: ContextVar[Entry] = ContextVar("lowprec_entry", default=Entry(None))  # noqa: B039 - it is never changed


# -- leaving --------------------------------------------------------------------------------------


#: How often leaving is done again when it is interrupted again.
_ATTEMPTS = 9

#: The entries of all threads that hold other libraries' switches, in the order in which they came.
held: dict[Entry, None] = {}

#: Told of every change of the scopes in a thread, and with ``True`` of one of the process's default.
changed: Callable[..., None] | None = None
_lock = Lock()


def on_change(listener: Callable[..., None]) -> None:
    """Have a listener told, too: ``lowprec.torch`` and ``lowprec.jax``, where a library compiles by the mode."""
    global changed
    with _lock:
        before = changed

        def tell(whole_process: bool = False) -> None:
            if before is not None:
                before(whole_process)
            listener(whole_process)

        changed = listener if before is None else tell


#: Of the last ``__exit__`` that was looked up. A ``with`` statement does that right before it enters.
prepared: Entry | None = None


class Exit:
    """``__exit__``: each look-up makes an entry, which the thread's next ``__enter__`` takes.

    What is returned is a C object that a ``with`` statement keeps to itself until it has called it. An interrupt before
    the first line of :func:`_leave` ends the statement with the block still open; but then the statement drops that
    object, and by the weak reference the block is left. No traceback keeps the object, as it would keep the ``self`` of
    a method. (``ExitStack`` has it in a variable: there the block is left when the exception has been dealt with.)
    Where the block was left before, nothing is called: in a finalizer an interrupt would be lost.
    """

    def __get__(self, scope: Scope | None, owner: object = None) -> Callable[..., None]:
        global prepared
        entry = prepared = Entry(scope)
        # Looked up in the class, as ExitStack does it, it gets the scope when it is called.
        leave = partial(_leave, entry) if scope is None else partial(_leave, entry, scope)
        entry.statement = ref(leave, entry.dropped)
        return leave


def _leave(entry: Entry, scope: Scope, *exc_info: object) -> None:
    try:
        outer = entry.outer
        if outer is not None and innermost.get() is entry and entry.layers is NOTHING:
            innermost.set(outer)  # in short what _close does
            if changed is not None:
                changed()  # before the entry is closed: an interrupt in here has it told again
            entry.is_open = False
            entry.statement = None
            return
        if not entry.is_open:  # looked up for its own sake: guard.__exit__()
            entry = innermost.get().of(scope) or _entered_elsewhere(scope)
        told = _close(entry)
    except BaseException:
        close_after_all(entry)
        raise
    for sentence in told:
        warnings.warn(f"{scope!r} {sentence}", LowprecWarning, stacklevel=2)


def _entered_elsewhere(scope: Scope) -> Entry:
    """Return one of the scope's entries that this context does not know of: each is left once, so one is meant."""
    found = [entry for entry in list(held) if entry.scope is scope]
    here = [entry for entry in found if entry.thread == get_ident()]
    return (here or found or [Entry(scope)])[-1]


def close_after_all(entry: Entry) -> None:
    """Do what an interrupt has left undone, also if more of them come meanwhile."""
    late: BaseException | None = None
    try:
        for _ in range(_ATTEMPTS):
            if not entry.is_open:
                break
            try:
                _close(entry)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                late = error
    finally:
        if entry.is_open:  # one came at the turn of the loop
            _close(entry)
    if late is not None:
        raise late


def _close(entry: Entry) -> list[str]:
    """Leave the block, and return what the user is to be told; done again, it does the rest."""
    told = []
    chain = innermost.get()
    rest = chain.without(entry)
    if rest is chain:
        # A generator that another context has begun ends like this: the event loop closes an abandoned one in a task
        # of its own, and a finalizer may run anywhere. An error would hide the exception that is on its way.
        told.append(
            "was left in a thread or task in which it was not entered; other libraries' switches are given back, and "
            "lowprec's own scope stays open where it was entered"
        )
    else:
        innermost.set(rest)
    if entry in held:
        told += release(entry)
        held.pop(entry, None)
    if changed is not None:
        changed()
    entry.is_open = False
    entry.statement = None
    return told
