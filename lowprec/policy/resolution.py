"""The math mode of a call: the order of precedence (:func:`resolve`), and the process default."""

from __future__ import annotations

import functools
from dataclasses import replace

from lowprec.architectures import Emulated
from lowprec.modes import (
    MathMode,
    Mode,
    ModeLike,
    ModeSource,
    Recipe,
    ResolvedMode,
    parse_mode,
    row,
)
from lowprec.policy import entries, environment
from lowprec.policy.environment import EnvironmentSnapshot
from lowprec.rounding_rules import Format

#: Modes that the guard does not change. Emulated ones are not among them: they have the error bound of FP32 or FP64,
#: but the guard promises their arithmetic.
FULL_FP32 = frozenset({MathMode.FP32, MathMode.FP32_PEDANTIC, MathMode.FP64})

_process_mode: Mode | None = None


def emulated_architecture() -> Emulated | None:
    """Return the architecture that the CPU emulates in this thread and task."""
    return entries.policy()[2]


def set_math_mode(name: ModeLike | None) -> None:
    """Set the default math mode of the process, for all threads.

    It takes precedence over ``LOWPREC_MATH_MODE``; ``with math_mode(...)`` and arguments take precedence over it.

    Parameters
    ----------
    name : str, MathMode, Recipe or None
        A mode or an alias; None restores ``LOWPREC_MATH_MODE``, or ``fp32`` if that is unset.

    Raises
    ------
    ModeError
        The mode is unknown.

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


def get_math_mode() -> Mode:
    """Return the current math mode of this thread and task.

    Returns
    -------
    MathMode
        The mode of a product without a ``math_mode=`` or ``rtol=`` argument.

    Raises
    ------
    EnvironmentVariableError
        An environment variable of lowprec has an illegal value.

    Examples
    --------
    >>> get_math_mode()
    <MathMode.FP32: 'fp32'>
    """
    return resolve().mode


def resolve(argument: str | Mode | Format | None = None) -> ResolvedMode:
    """Return the mode of a call with this ``math_mode=`` argument, with its source.

    The first match wins:

    1. ``fp32_guard`` or ``LOWPREC_FP32_GUARD``: ``fp32``, unless the steps below give a mode of :data:`FULL_FP32`;
    2. ``LOWPREC_FORCE_MATH_MODE``;
    3. the ``math_mode=`` argument;
    4. the innermost ``with math_mode(...)``;
    5. ``set_math_mode(...)``;
    6. ``LOWPREC_MATH_MODE``;
    7. ``fp32``.

    Then ``NVIDIA_TF32_OVERRIDE=0`` turns a mode that is based on TF32 into ``fp32``.

    Raises ModeError for an unknown argument, even if another step takes precedence, and EnvironmentVariableError for an
    illegal value of a variable.
    """
    context, guarded, emulates = entries.OUTSIDE
    if entries.current.get() is not None:
        context, guarded, emulates = entries.policy()
    variables = environment.snapshot()
    try:
        found = _resolve(argument, guarded, context, _process_mode, variables, emulates)
        if type(context) is Recipe:
            found = _at_step(found, context.step)
        return found
    except TypeError:
        if argument is not None:
            parse_mode(argument)  # raises ModeError for an unhashable argument
        raise


def overriding_mode() -> ResolvedMode | None:
    """Return the mode set by the guard or ``LOWPREC_FORCE_MATH_MODE``, None if neither is active."""
    _, guarded, emulates = entries.policy()
    variables = environment.snapshot()
    if not guarded and not variables.fp32_guard and variables.force_math_mode is None:
        return None
    return _impose(None, ModeSource.DEFAULT, guarded, variables, emulates)


def is_guarded() -> bool:
    """Whether ``fp32_guard`` or ``LOWPREC_FP32_GUARD`` acts in this thread and task."""
    return entries.policy()[1] or environment.snapshot().fp32_guard


def restrict(mode: Mode, source: ModeSource) -> ResolvedMode:
    """Apply ``LOWPREC_FORCE_MATH_MODE``, the guard and ``NVIDIA_TF32_OVERRIDE`` to a mode chosen by the caller."""
    context, guarded, emulates = entries.policy()
    found = _impose(mode, source, guarded, environment.snapshot(), emulates)
    if type(context) is Recipe:
        found = _at_step(found, context.step)
    return found


def _at_step(resolved: ResolvedMode, step: int) -> ResolvedMode:
    """Give the step of the current scope's recipe to one without: those of layers, and of compiled graphs."""
    mode = resolved.mode
    if not step or not isinstance(mode, Recipe) or mode.step:
        return resolved
    if all(each.seed is None for each in mode.settings):
        return resolved
    return replace(resolved, mode=mode.at(step))


# Bounded, because a name has many spellings ("TF32", " tf32").
@functools.lru_cache(maxsize=1024)
def _resolve(
    argument: str | Mode | Format | None,
    guarded: bool,
    context: Mode | None,
    process: Mode | None,
    variables: EnvironmentSnapshot,
    emulates: Emulated | None,
) -> ResolvedMode:
    requests = (
        (ModeSource.ARGUMENT, None if argument is None else parse_mode(argument)),
        (ModeSource.CONTEXT, context),
        (ModeSource.PROCESS, process),
        (ModeSource.ENVIRONMENT, variables.math_mode),
    )
    for source, requested in requests:
        if requested is not None:
            return _impose(requested, source, guarded, variables, emulates)
    return _impose(None, ModeSource.DEFAULT, guarded, variables, emulates)


@functools.lru_cache(maxsize=1024)
def _impose(
    requested: Mode | None,
    source: ModeSource,
    guarded: bool,
    variables: EnvironmentSnapshot,
    emulates: Emulated | None,
) -> ResolvedMode:
    """Apply the forced mode, the guard and NVIDIA's variable to a requested mode (None for no request)."""
    mode = requested or MathMode.FP32
    reasons = []
    if variables.force_math_mode is not None:
        if requested not in (None, variables.force_math_mode):
            reasons.append(
                f"{ModeSource.FORCED}={variables.force_math_mode} overrules {requested} ({source})."
            )
        mode = variables.force_math_mode
        source = ModeSource.FORCED
    chosen = mode
    if guarded or variables.fp32_guard:
        guard = ModeSource.GUARD if guarded else ModeSource.GUARD_VARIABLE
        if mode not in FULL_FP32:
            reasons.append(f"{guard} raises {mode} ({source}) to {MathMode.FP32}.")
            mode = MathMode.FP32
            source = guard
        elif mode is MathMode.FP32:
            reasons.append(f"{guard} keeps the precision at {mode} or above.")
            source = guard
        else:
            reasons.append(
                f"{guard} is active, and {mode} is no less precise than {MathMode.FP32}."
            )
    if variables.tf32_off and row(mode).uses_tf32:
        reasons.append(f"NVIDIA_TF32_OVERRIDE=0 turns {mode} into {MathMode.FP32}.")
        mode = MathMode.FP32
    replaced = None
    for other in (chosen, requested):
        if other not in (None, mode):
            replaced = other
    return ResolvedMode(mode, source, replaced, tuple(reasons), emulates)
