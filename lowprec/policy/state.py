"""``math_mode``, ``fp32_guard``, ``emulate``, the process default, and their precedence (:func:`resolve`)."""

from __future__ import annotations

import functools

from lowprec.architectures import Architecture, parse_architecture
from lowprec.modes import ArchitectureName, MathMode, ModeName, ModeSource, ResolvedMode, parse_mode, row
from lowprec.policy import entries, environment
from lowprec.policy.entries import NO_LIBRARY, innermost
from lowprec.policy.environment import EnvironmentSnapshot
from lowprec.policy.scopes import Frameworks, PolicyScope, selection

#: Modes that the guard does not change. Emulated ones are not among them: they have the error bound of FP32 or FP64,
#: but the guard promises their arithmetic.
FULL_FP32 = frozenset({MathMode.FP32, MathMode.FP32_PEDANTIC, MathMode.FP64})

_process_mode: MathMode | None = None


class math_mode(PolicyScope):
    """Set the math mode for a ``with`` block or a decorated function.

    The mode applies to ``lowprec`` in this thread and task, and in tasks started inside, but not in other threads. It
    affects float32 and complex64 operands only, ``fp64_emulated`` float64 and complex128 ones. A ``math_mode=``
    argument, an inner block, ``fp32_guard`` and ``LOWPREC_FORCE_MATH_MODE`` take precedence.

    With ``frameworks`` the switches of other loaded libraries are set for the block and restored after it. Most of them
    are process-wide and so affect all threads. Inside an ``fp32_guard`` they stay at full FP32. A library without a
    switch for the mode keeps its setting, with a :class:`LowprecWarning`; see :meth:`report`.

    Parameters
    ----------
    name : str or MathMode
        A mode or an alias.
    frameworks : bool or list of str
        Whether to set other libraries' switches, or the libraries to set, such as ``["torch", "jax"]``.

    Raises
    ------
    ModeError
        The mode is unknown.
    UnsupportedError
        ``frameworks`` contains a library without a controller.

    Examples
    --------
    >>> with math_mode("bf16"):
    ...     get_math_mode()
    <MathMode.BF16: 'bf16'>

    It decorates functions, coroutine functions, generators and async generators:

    >>> @math_mode("tf32")
    ... def step():
    ...     return get_math_mode()
    >>> step()
    <MathMode.TF32: 'tf32'>
    """

    __slots__ = ()

    def __init__(self, name: ModeName | MathMode, *, frameworks: Frameworks = False) -> None:
        if callable(name):
            raise TypeError('@math_mode needs a mode: write @math_mode("bf16")')
        self._mode = parse_mode(name)
        self._libraries = selection(frameworks)

    def __repr__(self) -> str:
        chosen = self._frameworks
        return f"math_mode({str(self._mode)!r}{f', frameworks={chosen}' if chosen else ''})"


class fp32_guard(PolicyScope):
    """Keep float32 products at full FP32 or above in a block or a function.

    In lowprec the guard has precedence over every ``math_mode=`` or ``rtol=`` argument, scope, process default and
    environment variable that would lower the precision. More precise modes (``fp32_pedantic``, ``fp64``) are unchanged.
    ``fp64_emulated`` is replaced: float64 products run in native FP64.

    Other libraries that are loaded at the entry are set to full FP32 by their own switches, and the old values are
    restored at the exit: PyTorch, JAX, TensorFlow, CuPy, Paddle, and those added with ``register_controller``. If a
    library's switches cannot be set, a :class:`LowprecWarning` reports it and the others are still set. A switch that
    is changed inside the block keeps the new value, with a warning.

    lowprec's own guard applies to this thread and task, and to tasks started inside; :meth:`wrap` applies it in other
    threads. JAX's switch is thread-scoped. The other libraries' switches are process-wide: while any guard is open, all
    threads compute in full FP32 with them. A guard is re-entrant and may be shared by threads and tasks. Work deferred
    until after the block (a callback, a backward pass) is not guarded.

    Parameters
    ----------
    frameworks : bool or list of str, optional
        The other libraries to set, such as ``["torch", "jax"]``; all loaded ones by default or if True, none if False.
    verify : bool
        Whether to measure the libraries' precision at each entry, as :func:`lowprec.audit` does, which takes some
        tenths of a second.

    Raises
    ------
    BackendError
        With ``verify``: an operation of a library is below full FP32 inside the guard.
    TypeError
        ``frameworks`` has another type.
    UnsupportedError
        ``frameworks`` contains a library without a controller.

    Examples
    --------
    >>> with math_mode("bf16"), fp32_guard():
    ...     get_math_mode()
    <MathMode.FP32: 'fp32'>

    It decorates functions, coroutine functions, generators and async generators:

    >>> @fp32_guard()
    ... def solve():
    ...     return get_math_mode()
    >>> with math_mode("bf16"):
    ...     solve()
    <MathMode.FP32: 'fp32'>
    """

    __slots__ = ("_verifies",)
    _guards = True

    def __init__(self, frameworks: Frameworks | None = None, *, verify: bool = False) -> None:
        if callable(frameworks):
            raise TypeError("@fp32_guard needs parentheses: write @fp32_guard()")
        self._mode = None
        self._libraries = selection(True if frameworks is None else frameworks)
        self._verifies = verify

    def __repr__(self) -> str:
        chosen = self._frameworks
        return "fp32_guard()" if chosen is True else f"fp32_guard(frameworks={chosen})"


class emulate(PolicyScope):
    """Emulate a GPU's tensor cores on the CPU, bit by bit, in a ``with`` block.

    It affects products of float16, bfloat16 and TF32 numbers in host memory: 16-bit operands, and float32 or complex64
    operands in a mode that rounds to these formats (``tf32``, ``bf16``, ``fp16`` and their split schemes). Only the
    summation changes, not the mode; :func:`lowprec.plan` shows it. Other products are unaffected: float32 in mode
    ``fp32``, float64, int8, formats that the tensor cores do not support (bfloat16 on Volta), and arrays on a GPU.

    Each element is one chain of instructions along the inner dimension. cuBLAS's tiles, order of instructions and
    split-K are not emulated.

    The block applies to this thread and task, and to tasks started inside; :meth:`wrap` applies it in other threads.
    The innermost block takes precedence.

    Parameters
    ----------
    architecture : {"volta", "ampere", "ada", "hopper", "blackwell"}
        GPU generation, in any case.

    Raises
    ------
    UnsupportedError
        The architecture is unknown.

    References
    ----------
    F. A. Khattak and M. Mikaitis, "Accurate models of NVIDIA tensor cores", arXiv 2512.07004.

    Examples
    --------
    Hopper truncates 17 terms to 25 fraction bits below the largest one, Volta 5 terms to 23 bits:

    >>> import numpy as np
    >>> import lowprec
    >>> a = np.array([[1.0, 2.0**-12, 2.0**-12]], np.float16)
    >>> b = np.array([[1.0], [2.0**-12], [2.0**-12]], np.float16)
    >>> for architecture in ("volta", "hopper"):
    ...     with lowprec.emulate(architecture):
    ...         print(float(lowprec.matmul(a, b, out_dtype="float32")[0, 0] - 1) / 2**-23)
    0.0
    1.0
    """

    __slots__ = ("_emulates",)

    def __init__(self, architecture: ArchitectureName | Architecture) -> None:
        self._mode = None
        self._libraries = NO_LIBRARY
        self._emulates = parse_architecture(architecture)

    def __repr__(self) -> str:
        return f"emulate({str(self._emulates)!r})"


def emulated() -> Architecture | None:
    """Return the architecture that the CPU emulates in this thread and task."""
    return innermost.get().emulates


def set_math_mode(name: ModeName | MathMode | None) -> None:
    """Set the default math mode of the process, for all threads.

    It takes precedence over ``LOWPREC_MATH_MODE``; ``with math_mode(...)`` and arguments take precedence over it.

    Parameters
    ----------
    name : str, MathMode or None
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


def get_math_mode() -> MathMode:
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


def resolve(argument: str | MathMode | None = None) -> ResolvedMode:
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
    here = innermost.get()
    taken = environment.snapshot()
    try:
        return _resolve(argument, here.guarded, here.mode, _process_mode, taken, here.emulates)
    except TypeError:
        if argument is not None:
            parse_mode(argument)  # raises ModeError for an unhashable argument
        raise


def overriding_mode() -> ResolvedMode | None:
    """Return the mode set by the guard or ``LOWPREC_FORCE_MATH_MODE``, None if neither is active."""
    here, taken = innermost.get(), environment.snapshot()
    if not here.guarded and not taken.fp32_guard and taken.force_math_mode is None:
        return None
    return _impose(None, ModeSource.DEFAULT, here.guarded, taken, here.emulates)


def is_guarded() -> bool:
    """Whether ``fp32_guard`` or ``LOWPREC_FP32_GUARD`` acts in this thread and task."""
    return innermost.get().guarded or environment.snapshot().fp32_guard


def restrict(mode: MathMode, source: ModeSource) -> ResolvedMode:
    """Apply ``LOWPREC_FORCE_MATH_MODE``, the guard and ``NVIDIA_TF32_OVERRIDE`` to a mode chosen by the caller."""
    here = innermost.get()
    return _impose(mode, source, here.guarded, environment.snapshot(), here.emulates)


# Bounded, because a name has many spellings ("TF32", " tf32").
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
    for source, asked in requests:
        if asked is not None:
            return _impose(asked, source, guarded, taken, emulates)
    return _impose(None, ModeSource.DEFAULT, guarded, taken, emulates)


@functools.lru_cache(maxsize=1024)
def _impose(
    asked: MathMode | None, source: ModeSource, guarded: bool, taken: EnvironmentSnapshot, emulates: Architecture | None
) -> ResolvedMode:
    """Apply the forced mode, the guard and NVIDIA's variable to a requested mode (None for no request)."""
    mode, reasons = asked or MathMode.FP32, []
    if taken.force_math_mode is not None:
        if asked not in (None, taken.force_math_mode):
            reasons.append(f"{ModeSource.FORCED}={taken.force_math_mode} overrules {asked} ({source}).")
        mode, source = taken.force_math_mode, ModeSource.FORCED
    decided = mode
    if guarded or taken.fp32_guard:
        guard = ModeSource.GUARD if guarded else ModeSource.GUARD_VARIABLE
        if mode not in FULL_FP32:
            reasons.append(f"{guard} raises {mode} ({source}) to {MathMode.FP32}.")
            mode, source = MathMode.FP32, guard
        elif mode is MathMode.FP32:
            reasons.append(f"{guard} keeps the precision at {mode} or above.")
            source = guard
        else:
            reasons.append(f"{guard} is active, and {mode} is no less precise than {MathMode.FP32}.")
    if taken.tf32_off and row(mode).uses_tf32:
        reasons.append(f"NVIDIA_TF32_OVERRIDE=0 turns {mode} into {MathMode.FP32}.")
        mode = MathMode.FP32
    others = [m for m in (asked, decided) if m not in (None, mode)]
    return ResolvedMode(mode, source, others[0] if others else None, tuple(reasons), emulates)
