"""The current mode as a variable that PyTorch's compiler can read.

A graph is guarded by the variables that were read during its compilation. The compiler cannot read a ``ContextVar``, so
each change of a scope is stored here, for its thread, and each ``set_math_mode``. ``asyncio`` tasks share a thread, so
the stored mode may be another task's: the operator resolves the mode again when it runs.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import Context

from lowprec import policy
from lowprec.errors import EnvironmentVariableError
from lowprec.policy import entries
from lowprec.recipes import Recipe
from lowprec.util.per_thread import PerThread

thread = PerThread(mode="")
#: Outside of all scopes.
default: str = "fp32"


def current_mode() -> str:
    """Return the current mode; PyTorch's compiler reads this function."""
    mode: str = thread.mode
    return mode or default


def _mode() -> str:
    """Return the name of the mode, without the step of a recipe, which would need a graph for each step."""
    mode = policy.resolve().mode
    return str(mode.at(step=0) if isinstance(mode, Recipe) else mode)


def _update(whole_process: bool = False) -> None:
    global default
    with suppress(EnvironmentVariableError):  # the product will raise it
        if whole_process:
            default = Context().run(_mode)
        thread.mode = _mode() if entries.blocks() else ""


entries.on_change(_update)
_update(whole_process=True)
