"""The open blocks of each thread and task, and the policy that they give together."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowprec.architectures import Emulated
    from lowprec.modes import Mode

#: A policy: the mode, whether it is a guard, and the emulated architecture.
Frame = tuple["Mode | None", bool, "Emulated | None"]
OUTSIDE: Frame = (None, False, None)


class Entry:
    """A block of a scope, with the enclosing one; copies of a context share the object.

    That of a policy does not refer to its scope, which is collected if an interrupt has prevented ``__exit__``.
    """

    outer: Entry | None = None
    is_open = True

    own: Frame = OUTSIDE
    libraries: frozenset[str] | None  # that it selects, None for all

    #: Once it has set other libraries' switches: the thread that entered it; by library, the layers that it uses, and
    #: the reasons why switches were not set.
    thread: int | None = None
    layers: dict[str, Any]
    failures: dict[str, str]

    scope: Any = None  # the interception, once it has begun
    key: Any = None  # of compiled functions inside the interception


def innermost(entry: Entry | None) -> Entry | None:
    """Return the innermost open block of those that contain this one, and itself."""
    while entry is not None and not entry.is_open:
        entry = entry.outer
    return entry


#: The innermost block of this thread or task; it may have ended.
current: ContextVar[Entry | None] = ContextVar("lowprec_policy", default=None)


def blocks() -> list[Entry]:
    """Return the open blocks of this thread or task, the innermost one first."""
    found = []
    entry = innermost(current.get())
    while entry is not None:
        found.append(entry)
        entry = innermost(entry.outer)
    return found


def policy() -> Frame:
    """Return the combined policy of the open blocks of this thread or task."""
    entry = current.get()
    if entry is not None and entry.outer is None and entry.is_open:
        return entry.own
    mode = emulates = None
    guarded = False
    while entry is not None:
        if entry.is_open:
            own = entry.own
            mode = mode or own[0]
            guarded = guarded or own[1]
            emulates = emulates or own[2]
        entry = entry.outer
    return mode, guarded, emulates


listeners: list[Callable[[bool], None]] = []
#: Register a function to be called after every change of a thread's scopes (argument False) or of the process default
#: (True). ``lowprec.torch`` and ``lowprec.jax`` register one, because compiled code depends on the mode.
on_change = listeners.append


def notify(whole_process: bool = False) -> None:
    for listener in listeners:
        listener(whole_process)
