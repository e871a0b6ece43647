"""The modes in force, where JAX sees them change: they are part of the key of everything that it compiles.

JAX's key has values of threads and of the process, and knows nothing of a ``ContextVar`` or of the environment. So each
change of a scope is noted here, in the thread that made it, and each ``set_math_mode``. What may change without a note
is a variable of the environment, and the task of a thread; a product that is traced compares.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from contextvars import Context
from typing import Any

import jax

from lowprec import policy
from lowprec.errors import EnvironmentVariableError, ModeError
from lowprec.modes import MathMode, ResolvedMode
from lowprec.policy import entries


def _modes() -> str:
    """Return what becomes of no argument and of each that there is: two policies with the same answers are one."""
    asked = policy.resolve()
    found = [asked.mode, *(policy.resolve(mode).mode for mode in MathMode)]
    return " ".join([*found, "" if asked.emulates is None else asked.emulates.name])


_context = jax.make_user_context(Context().run(_modes))


class _Thread(threading.local):
    """In each thread, what was entered for its scopes; None outside of all."""

    entered: Any = None


_thread = _Thread()


def _note(whole_process: bool = False) -> None:
    with suppress(EnvironmentVariableError):  # the product will raise it
        if whole_process:
            _context.set_global(Context().run(_modes))
        modes = _modes() if entries.innermost.get().outer is not None else None
        if _thread.entered is not None:
            if _context.value == modes:
                return
            _thread.entered.__exit__(None, None, None)
            _thread.entered = None
        if modes is not None:
            entered = _context(modes)
            entered.__enter__()
            _thread.entered = entered


entries.on_change(_note)
_note()


def resolve(argument: str | MathMode | None) -> ResolvedMode:
    """Return the mode in force for a product that is being traced.

    Raises
    ------
    ModeError
        If it is not the one by which JAX will look for what it compiles.
    """
    if _context.value != _modes():
        _note(whole_process=True)
        raise ModeError(
            "the math mode changed where JAX could not see it: a variable of the environment was set, or a scope was "
            "opened in another task or thread of this context; it is noted now, so call the function again (and keep "
            "no scope open across an await)"
        )
    return policy.resolve(argument)
