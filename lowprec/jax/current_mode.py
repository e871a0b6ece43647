"""The current modes as part of JAX's key for compiled functions.

JAX's key holds values of the thread and of the process, but no ``ContextVar``: each change of a scope is stored in it
for the thread, each ``set_math_mode`` for the process. :func:`check_key` detects a switch between ``asyncio`` tasks.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import Context

import jax

from lowprec import policy
from lowprec.errors import EnvironmentVariableError, ModeError, UnsupportedError
from lowprec.modes import MathMode
from lowprec.policy import entries

_OLDEST = (0, 10, 1)  # whose contexts have a value for the whole process
if jax.__version_info__ < _OLDEST:
    raise UnsupportedError(
        f"JAX {jax.__version__} is too old for lowprec's product inside of it; install "
        f"{'.'.join(map(str, _OLDEST))} or newer, or call lowprec outside of jit, grad, vmap and other transforms"
    )

#: The resolutions of these five arguments determine those of all others. A forced mode makes them equal, a guard
#: changes those below FP32, and NVIDIA_TF32_OVERRIDE changes those based on TF32.
_ARGUMENTS = (None, MathMode.FP64, MathMode.FP32_PEDANTIC, MathMode.BF16, MathMode.TF32)


def _modes() -> str:
    """Return the resolutions of the arguments as text, which is equal for equivalent policies."""
    resolved = [policy.resolve(mode) for mode in _ARGUMENTS]
    emulates = resolved[0].emulates
    return " ".join([*(str(x.mode) for x in resolved), "" if emulates is None else repr(emulates)])


_context = jax.make_user_context(Context().run(_modes))

#: Its exit clears the value of the current thread, in any thread.
_outside = _context("")
_outside.__enter__()
_outside.__exit__(None, None, None)


def _update(whole_process: bool = False) -> None:
    with suppress(EnvironmentVariableError):  # the product will raise it
        if whole_process:
            _context.set_global(Context().run(_modes))
        if not entries.blocks():
            _outside.__exit__(None, None, None)
            return
        modes = _modes()
        if _context.value != modes:
            _context(modes).__enter__()


entries.on_change(_update)
_update()


def check_key() -> None:
    """Raise ModeError if the current mode differs from the one in JAX's key for compiled functions."""
    if _context.value != _modes():
        _update(whole_process=True)
        raise ModeError(
            "the current math mode differs from the one in JAX's key for compiled functions: its scope was opened in "
            "another task or thread, or before lowprec.jax was imported there; it is updated now, so call the function "
            "again (and keep no scope open across an await)"
        )
