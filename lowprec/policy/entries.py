"""The open blocks of each thread and task, and the policy that they give together."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from lowprec.modes import MathMode
from lowprec.policy.switches import Block

if TYPE_CHECKING:
    from lowprec.architectures import Architecture
    from lowprec.policy.scopes import PolicyScope


class Entry(Block):
    """One entry of a scope."""

    __slots__ = ("scope",)

    def __init__(self, scope: PolicyScope) -> None:
        super().__init__()
        self.scope = scope


class Policy(NamedTuple):
    """The open blocks of a context and their combined effect; immutable, because copies of a context share it."""

    entries: tuple[Entry, ...] = ()  # in order of entry
    mode: MathMode | None = None  # of the innermost ``math_mode``
    guarded: bool = False  # whether one of the blocks is a guard
    emulates: Architecture | None = None  # of the innermost ``emulate``

    def entered(self, entry: Entry) -> Policy:
        """Return the policy inside a further block."""
        scope = entry.scope
        return Policy(
            (*self.entries, entry),
            scope._mode or self.mode,
            scope._guards or self.guarded,
            scope._emulates or self.emulates,
        )

    def left(self, entry: Entry) -> Policy:
        """Return the policy without one of the blocks."""
        policy = _OUTSIDE
        for other in self.entries:
            if other is not entry:
                policy = policy.entered(other)
        return policy


_OUTSIDE = Policy()
#: The policy of this thread or task.
current: ContextVar[Policy] = ContextVar("lowprec_policy", default=_OUTSIDE)

#: Entries of all threads that have set other libraries' switches, in order of entry.
held: dict[Entry, None] = {}

_listeners: list[Callable[[bool], None]] = []
#: Register a function to be called after every change of a thread's scopes (argument False) or of the process default
#: (True). ``lowprec.torch`` and ``lowprec.jax`` register one, because compiled code depends on the mode.
on_change = _listeners.append


def notify(whole_process: bool = False) -> None:
    """Call the listeners."""
    for listener in _listeners:
        listener(whole_process)
