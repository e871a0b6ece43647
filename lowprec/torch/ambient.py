"""The mode in force, where PyTorch's compiler sees it change.

A graph is guarded by what was read while it was made. The compiler cannot read a ``ContextVar``, so each change of a
scope is noted here, in the thread that made it, and each ``set_math_mode``. Under ``asyncio`` tasks share a thread and
the note may be another task's: the operator asks the scopes again when it runs.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from contextvars import Context

from lowprec import policy
from lowprec.errors import EnvironmentVariableError
from lowprec.policy import entries


class _Thread(threading.local):
    """In each thread: the mode inside its scopes, empty outside of all."""

    mode: str = ""


thread = _Thread()
#: Outside of all scopes.
default: str = "fp32"


def mode() -> str:
    """Return the mode in force; the compiler follows this function."""
    return thread.mode or default


def _note(whole_process: bool = False) -> None:
    global default
    with suppress(EnvironmentVariableError):  # the product will raise it
        if whole_process:
            default = Context().run(policy.resolve).mode.value
        inside = entries.innermost.get().outer is not None
        thread.mode = policy.resolve().mode.value if inside else ""


entries.on_change(_note)
_note(whole_process=True)
