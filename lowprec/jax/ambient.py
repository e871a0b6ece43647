"""The modes in force, where JAX sees them change: they are part of the key of everything that it compiles.

JAX's key has values of threads and of the process, and knows nothing of a ``ContextVar``. So each change of a scope is
noted here, in the thread that made it, and each ``set_math_mode``. What changes without a note is the task of a thread;
a product that is traced compares.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import Context

import jax

from lowprec import policy
from lowprec.errors import EnvironmentVariableError, ModeError, UnsupportedError
from lowprec.modes import MathMode, ResolvedMode
from lowprec.policy import entries

_OLDEST = (0, 10, 1)  # whose contexts have a value for the whole process
if jax.__version_info__ < _OLDEST:
    raise UnsupportedError(
        f"JAX {jax.__version__} is too old for lowprec's product inside of it; install "
        f"{'.'.join(map(str, _OLDEST))} or newer, or call lowprec outside of jit, grad, vmap and other transforms"
    )

#: The answers for these tell those for all others: without an argument, of a forced mode (then all are that one), of a
#: guard (only those of full FP32 stay), of NVIDIA_TF32_OVERRIDE.
_ASKED = (None, MathMode.FP64, MathMode.FP32_PEDANTIC, MathMode.BF16, MathMode.TF32)


def _modes() -> str:
    """Return what arguments become here: two policies that answer alike are one to JAX."""
    found = [policy.resolve(mode) for mode in _ASKED]
    emulates = found[0].emulates
    return " ".join([*(x.mode for x in found), "" if emulates is None else emulates.name])


_context = jax.make_user_context(Context().run(_modes))

#: What it puts back on leaving is that the thread has no value of its own, whichever thread that is.
_outside = _context("")
_outside.__enter__()
_outside.__exit__(None, None, None)


def _note(whole_process: bool = False) -> None:
    with suppress(EnvironmentVariableError):  # the product will raise it
        if whole_process:
            _context.set_global(Context().run(_modes))
        if entries.innermost.get().outer is None:
            _outside.__exit__(None, None, None)
            return
        modes = _modes()
        if _context.value != modes:
            _context(modes).__enter__()


entries.on_change(_note)
_note()


def resolve(argument: str | MathMode | None) -> ResolvedMode:
    """Return the mode in force for a product that is being traced.

    Raises ModeError if it is not the one by which JAX will look for what it compiles.
    """
    if _context.value != _modes():
        _note(whole_process=True)
        raise ModeError(
            "the math mode in force is not the one that JAX knows of: its scope was opened in another task or thread, "
            "or before lowprec.jax was imported there; it is noted now, so call the function again (and keep no scope "
            "open across an await)"
        )
    return policy.resolve(argument)
