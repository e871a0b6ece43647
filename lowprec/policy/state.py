"""Which math mode is in force: the process default, the scopes, and the order of precedence.

The order is written in :func:`resolve` and nowhere else. The state is two things: one process default, and the open
``with`` blocks of this thread and task, which are in ``policy.scopes``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from lowprec.errors import ModeError
from lowprec.modes import MathMode, ModeSource, ResolvedMode, parse_mode, row
from lowprec.policy import entries, environment
from lowprec.policy.entries import innermost
from lowprec.policy.environment import EnvironmentSnapshot
from lowprec.policy.scopes import Frameworks, PolicyScope, selection

if TYPE_CHECKING:
    from lowprec.architectures import Architecture

#: What the guard lets pass. ``fp32_emulated`` is not among them: a bound as good as fp32's is a promise about the
#: error, while the guard promises the arithmetic.
FULL_FP32 = frozenset({MathMode.FP32, MathMode.FP32_PEDANTIC, MathMode.FP64})

_process_mode: MathMode | None = None


# -- the three ways to choose ---------------------------------------------------------------------


class math_mode(PolicyScope):
    """Multiply in this mode inside a ``with`` block or a decorated function.

    The mode holds for ``lowprec`` in this thread and task, and in tasks that are started inside; other threads do
    not see it. It acts on float32 and complex64 operands only. A ``math_mode=`` argument and an inner block stand
    above it, and so do ``fp32_guard`` and ``LOWPREC_FORCE_MATH_MODE``.

    Other libraries do not see it either, unless ``frameworks`` says so: then the switches of those that are loaded
    are set for the block and put back after it. Most of these switches belong to the process, so that every thread
    sees them. An open ``fp32_guard`` is a floor for them too. A library that has no switch for the mode is left as it
    is, with a :class:`LowprecWarning`; :meth:`report` tells.

    Parameters
    ----------
    name : str or MathMode
        A mode or an alias, checked here; it takes effect where the block is entered.
    frameworks : bool or list of str
        Whether to set other libraries' switches, or those of which, such as ``["torch", "jax"]``.

    Raises
    ------
    ModeError
        If there is no such mode, or this version cannot run it.
    UnsupportedError
        If ``frameworks`` names a library of which nothing is known.

    Examples
    --------
    >>> with math_mode("bf16"):
    ...     get_math_mode()
    <MathMode.BF16: 'bf16'>

    As a decorator it serves functions, coroutine functions and both kinds of generator:

    >>> @math_mode("tf32")
    ... def step():
    ...     return get_math_mode()
    >>> step()
    <MathMode.TF32: 'tf32'>
    """

    __slots__ = ()

    def __init__(self, name: str | MathMode, *, frameworks: Frameworks = False) -> None:
        self._mode = parse_mode(name)
        self._libraries = selection(frameworks)

    def __repr__(self) -> str:
        chosen = self._frameworks
        return f"math_mode({str(self._mode)!r}{f', frameworks={chosen}' if chosen else ''})"


def set_math_mode(name: str | MathMode | None) -> None:
    """Set the default mode of this process, for all its threads.

    It stands below ``with math_mode(...)`` and every argument, and above ``LOWPREC_MATH_MODE``.

    Parameters
    ----------
    name : str, MathMode or None
        A mode or an alias; None returns to ``LOWPREC_MATH_MODE``, or to ``fp32`` where that is not set.

    Raises
    ------
    ModeError
        If there is no such mode, or this version cannot run it.

    Examples
    --------
    >>> set_math_mode("tf32")
    >>> get_math_mode()
    <MathMode.TF32: 'tf32'>
    >>> set_math_mode(None)
    """
    global _process_mode
    _process_mode = None if name is None else parse_mode(name)
    entries.notify(True)


def get_math_mode() -> MathMode:
    """Return the mode in force here: in this thread, in this task, without an argument.

    Raises
    ------
    EnvironmentVariableError
        If one of lowprec's environment variables holds a value that it may not hold.

    Examples
    --------
    >>> get_math_mode()
    <MathMode.FP32: 'fp32'>
    """
    return resolve().mode


# -- the order of precedence ----------------------------------------------------------------------


def resolve(argument: str | MathMode | None = None) -> ResolvedMode:
    """Return the mode in force for a call with this ``math_mode=`` argument, and why.

    The first match wins:

    1. ``fp32_guard`` or ``LOWPREC_FP32_GUARD``, a floor: a mode of :data:`FULL_FP32` stays, any other becomes
       ``fp32``;
    2. ``LOWPREC_FORCE_MATH_MODE``;
    3. the ``math_mode=`` argument;
    4. the innermost ``with math_mode(...)``;
    5. ``set_math_mode(...)``;
    6. ``LOWPREC_MATH_MODE``;
    7. ``fp32``.

    Then ``NVIDIA_TF32_OVERRIDE=0`` turns a mode that is based on TF32 into ``fp32``.

    Raises ModeError if the argument is not a mode that this version runs, whether or not it is overruled, and
    EnvironmentVariableError for an illegal value of a variable.

    Examples
    --------
    >>> resolve("bf16").source
    <ModeSource.ARGUMENT: 'math_mode= argument'>
    """
    here = innermost.get()
    taken = environment.snapshot()
    try:
        return _resolve(argument, here.guarded, here.mode, _process_mode, taken, here.emulates)
    except TypeError:
        if argument is None or isinstance(argument, str):
            raise
        # The cache hashes the argument before it is checked.
        raise ModeError(
            f"math_mode must be a name or a MathMode, got {type(argument).__name__}"
        ) from None


def overriding_mode() -> ResolvedMode | None:
    """Return the mode that the guard or ``LOWPREC_FORCE_MATH_MODE`` decides, None if neither acts.

    For a caller that chooses the mode itself, as ``rtol=`` does; its choice goes through :func:`finish`.
    """
    here, taken = innermost.get(), environment.snapshot()
    if not here.guarded and not taken.fp32_guard and taken.force_math_mode is None:
        return None
    return _impose(None, ModeSource.DEFAULT, here.guarded, taken, here.emulates)


def finish(mode: MathMode, source: ModeSource) -> ResolvedMode:
    """Return a mode that was chosen already after what stands above it: overruled, raised or without TF32."""
    here = innermost.get()
    return _impose(mode, source, here.guarded, environment.snapshot(), here.emulates)


# All that the result depends on is an argument. Bounded, since a name has many spellings ("TF32", " tf32").
@functools.lru_cache(maxsize=1024)
def _resolve(
    argument: str | MathMode | None,
    guarded: bool,
    context: MathMode | None,
    process: MathMode | None,
    taken: EnvironmentSnapshot,
    emulates: Architecture | None,
) -> ResolvedMode:
    requests = (
        (ModeSource.ARGUMENT, None if argument is None else parse_mode(argument)),
        (ModeSource.CONTEXT, context),
        (ModeSource.PROCESS, process),
        (ModeSource.ENVIRONMENT, taken.math_mode),
    )
    made = [request for request in requests if request[1] is not None]
    source, asked = made[0] if made else (ModeSource.DEFAULT, None)
    return _impose(asked, source, guarded, taken, emulates)


@functools.lru_cache(maxsize=1024)
def _impose(
    asked: MathMode | None,
    source: ModeSource,
    guarded: bool,
    taken: EnvironmentSnapshot,
    emulates: Architecture | None,
) -> ResolvedMode:
    """Apply what stands above a request (None: nothing was asked for), lowest first."""
    mode, reasons = asked or MathMode.FP32, []
    if taken.force_math_mode is not None:
        if asked not in (None, taken.force_math_mode):
            reasons.append(
                f"{ModeSource.FORCED}={taken.force_math_mode} overrules {asked} ({source})."
            )
        mode, source = taken.force_math_mode, ModeSource.FORCED
    decided = mode
    if guarded or taken.fp32_guard:
        guard = ModeSource.GUARD if guarded else ModeSource.GUARD_VARIABLE
        mode, source, reason = _floor(mode, source, guard)
        reasons.append(reason)
    if taken.tf32_off and row(mode).uses_tf32:
        reasons.append(f"NVIDIA_TF32_OVERRIDE=0 turns {mode} into {MathMode.FP32}.")
        mode = MathMode.FP32
    others = [m for m in (asked, decided) if m not in (None, mode)]
    return ResolvedMode(mode, source, others[0] if others else None, tuple(reasons), emulates)


def _floor(
    mode: MathMode, source: ModeSource, guard: ModeSource
) -> tuple[MathMode, ModeSource, str]:
    if mode not in FULL_FP32:
        return MathMode.FP32, guard, f"{guard} raises {mode} ({source}) to {MathMode.FP32}."
    if mode is MathMode.FP32:
        return mode, guard, f"{guard} keeps the precision at {MathMode.FP32} or above."
    return mode, source, f"{guard} is active, and {mode} is no less precise than {MathMode.FP32}."
