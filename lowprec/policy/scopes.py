"""``math_mode``, ``fp32_guard`` and ``emulate``.

A scope changes lowprec's own policy, which is recorded in the context (thread and task) that entered it, and other
libraries' switches, which ``policy.switches`` sets and restores.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TypeVar, cast

from lowprec.architectures import Architecture, parse_architecture
from lowprec.errors import UnsupportedError, quoted, warn
from lowprec.modes import ArchitectureName, MathMode, Mode, ModeName, Recipe, parse_mode
from lowprec.policy import entries, environment
from lowprec.policy.controllers import controllers, known_modules, loaded_controllers
from lowprec.policy.decorators import decorated, picklable
from lowprec.policy.entries import Policy, current
from lowprec.policy.protocol import Controller, Tier
from lowprec.policy.switches import FLOOR, Hold, acquire, release

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound="PolicyScope")

#: The argument ``frameworks=``: all loaded libraries, none, or those of these names.
Frameworks = bool | Iterable[str]

_NO_LIBRARY: frozenset[str] = frozenset()

#: Text of a warning; an error would hide an exception of the block. A block is left in another context if the event
#: loop closes an abandoned generator in another task, or a finalizer runs in another thread.
_OTHER_CONTEXT = (
    "was left in another thread or task than it was entered in; other libraries' switches are restored, but "
    "lowprec's own scope stays open where it was entered"
)


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """The effect of a block on one library."""

    library: str  # name, as in ``frameworks=[...]``
    #: ``"protected"`` (by a guard), ``"set"`` (by a math mode), ``"not protected"``, ``"not set"`` or ``"not loaded"``.
    status: str
    reason: str  # reason of the status, or scope of the switches

    def __str__(self) -> str:
        return f"{self.library}: {self.status} ({self.reason})"


def _selection(frameworks: Frameworks) -> frozenset[str] | None:
    """Return the names of the selected libraries, None for all."""
    if isinstance(frameworks, bool):
        return None if frameworks else _NO_LIBRARY
    if isinstance(frameworks, str) or not isinstance(frameworks, Iterable):
        raise TypeError(
            f'frameworks must be True, False or a list of names such as ["torch"], got {quoted(frameworks)}'
        )
    names = frozenset(frameworks)
    known = [controller.name for controller in controllers()]
    unknown = sorted(str(name) for name in names.difference(known))
    if unknown:
        raise UnsupportedError(
            f"frameworks: no controller for {', '.join(unknown)}; choose among {', '.join(known)}, or add a library "
            "with lowprec.register_controller"
        )
    return names


class PolicyScope:
    """A change of policy for a ``with`` block or a decorated function; threads and tasks may share an instance.

    ``__exit__`` closes the instance's innermost entry in this context, or else its last one in another context.
    """

    __slots__ = ("_libraries", "_mode")
    _mode: Mode | None
    _libraries: frozenset[str] | None
    _guards: bool = False
    _verifies: bool = False
    _emulates: Architecture | None = None

    def __enter__(self: S) -> S:
        policy = Policy(self, current.get())
        current.set(policy)
        try:
            if entries.listeners:
                entries.notify()
            if self._libraries is not _NO_LIBRARY:
                self._set_libraries(policy)
            if self._verifies:
                importlib.import_module("lowprec.auditing").verify()
        except BaseException:
            self._leave(policy)
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        policy = current.get().of(self)
        if policy is not None:
            try:
                remarks = self._leave(policy)
            except BaseException:  # of a signal handler, which may raise between any two steps
                self._leave(policy)
                raise
        else:
            holds = [hold for hold, scope in list(entries.holds.items()) if scope is self]
            remarks = [_OTHER_CONTEXT, *_restore(holds[-1] if holds else None)]
        for sentence in remarks:
            warn(f"{self!r} {sentence}")

    def _leave(self, policy: Policy) -> list[str]:
        """Remove an entry from this context, and restore other libraries' switches; return warnings."""
        current.set(current.get().without(policy))
        remarks = _restore(policy.hold)
        if entries.listeners:
            entries.notify()
        return remarks

    def __call__(self, function: F) -> F:
        """Return a function that enters this scope in each call.

        For an ``async def`` the scope lasts until the coroutine ends. A generator function raises TypeError: write the
        block in its body, around the statements between two yields.
        """
        return cast(F, decorated(self, function))

    def wrap(self, function: F) -> F:
        """Return a function that enters this scope in each call, for use in other threads.

        A thread starts without any scope. So a scope around ``pool.map`` does not apply to the workers.

        Parameters
        ----------
        function : callable
            The function that the workers call.

        Returns
        -------
        callable
            Function with the same signature; it can be pickled, for process pools, if ``function`` can.

        Examples
        --------
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from lowprec.policy import fp32_guard, get_math_mode, math_mode, resolve
        >>> with ThreadPoolExecutor() as pool, fp32_guard() as guard:
        ...     pool.submit(guard.wrap(resolve), "bf16").result().mode
        <MathMode.FP32: 'fp32'>
        >>> with ThreadPoolExecutor() as pool, math_mode("tf32") as mode:
        ...     pool.submit(mode.wrap(get_math_mode)).result()
        <MathMode.TF32: 'tf32'>
        """
        return cast(F, decorated(self, function, picklable))

    @property
    def _frameworks(self) -> bool | list[str]:
        return self._libraries is None or sorted(self._libraries) or False

    def _set_libraries(self, policy: Policy) -> None:
        """Set the switches of the selected libraries that are loaded; warn of those that could not be set."""
        if sys.modules.keys().isdisjoint(known_modules):
            return
        loaded = loaded_controllers(self._libraries)
        if not loaded:
            return
        floors = {} if self._guards else {c.name: FLOOR for c in loaded if is_guarded_library(c.name)}
        hold = policy.hold = Hold()
        entries.holds[hold] = self
        acquire(hold, [c for c in loaded if c.name not in floors], self._mode or MathMode.FP32, self._guards)
        failures = [f"{name} ({reason})" for name, reason in sorted(hold.failures.items()) if reason != FLOOR]
        hold.failures = {**hold.failures, **floors}
        if failures:
            verb = "does not protect" if self._guards else "does not reach"
            warn(f"{self!r} {verb} {'; '.join(failures)}")

    def report(self) -> tuple[LibraryStatus, ...]:
        """Return the effect of this block on each library in this thread and task.

        Returns
        -------
        tuple of LibraryStatus
            One per library with a controller, loaded or not.

        Examples
        --------
        >>> from lowprec.policy import fp32_guard
        >>> with fp32_guard() as guard:
        ...     {status.library: status.status for status in guard.report()}["paddle"]
        'not loaded'
        """
        policy = current.get().of(self)
        done = "protected" if self._guards else "set"
        rows = []
        for controller in controllers():
            if sys.modules.get(controller.module) is None:
                status, reason = "not loaded", f"{controller.module} has not been imported"
            elif (against := self._reason_against(controller, policy)) is not None:
                status, reason = f"not {done}", against
            else:
                status, reason = done, f"its switches belong to the {controller.tier}"
            rows.append(LibraryStatus(controller.name, status, reason))
        return tuple(rows)

    def _reason_against(self, controller: Controller, policy: Policy | None) -> str | None:
        """Return the reason why the switches of a loaded library are not set here."""
        name = controller.name
        if self._libraries is not None and name not in self._libraries:
            return "excluded by frameworks="
        if policy is None:
            return "the block is not entered in this thread or task"
        hold = policy.hold or Hold()
        if name in hold.failures:
            return hold.failures[name]
        if name not in hold.layers:
            return "imported inside the block; the next entry will set it"
        if hold not in entries.holds:
            return "the block was left in another context"
        if controller.tier == Tier.THREAD and hold.thread != get_ident():
            return "its switch belongs to the thread that entered the block; use wrap() here"
        return None


def _restore(hold: Hold | None) -> list[str]:
    """Restore other libraries' switches; return warnings."""
    if hold is None or hold not in entries.holds:
        return []
    remarks = release(hold)
    entries.holds.pop(hold, None)
    return remarks


def is_guarded_library(name: str) -> bool:
    """Whether a guard of this context, or ``LOWPREC_FP32_GUARD``, covers a library."""
    if environment.snapshot().fp32_guard:
        return True
    selections = [scope._libraries for scope in current.get().guards()]
    return bool([libraries for libraries in selections if libraries is None or name in libraries])


class math_mode(PolicyScope):
    """Set the math mode for a ``with`` block or a decorated function.

    The mode applies to ``lowprec`` in this thread and task, and in tasks started inside, but not in other threads. It
    affects float32 and complex64 operands only, ``fp64_emulated`` float64 and complex128 ones, modes that quantise
    float32, float16 and bfloat16 ones. A ``math_mode=``
    argument, an inner block, ``fp32_guard`` and ``LOWPREC_FORCE_MATH_MODE`` take precedence.

    With ``frameworks`` the switches of other loaded libraries are set for the block and restored after it. Most of them
    are process-wide and so affect all threads. Inside an ``fp32_guard`` they stay at full FP32. A library without a
    switch for the mode keeps its setting, with a :class:`LowprecWarning`; see :meth:`report`.

    Parameters
    ----------
    name : str, MathMode or Recipe
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
    >>> import lowprec
    >>> with lowprec.math_mode("bf16"):
    ...     lowprec.get_math_mode()
    <MathMode.BF16: 'bf16'>

    It decorates functions and coroutine functions:

    >>> @lowprec.math_mode("tf32")
    ... def step():
    ...     return lowprec.get_math_mode()
    >>> step()
    <MathMode.TF32: 'tf32'>
    """

    __slots__ = ()

    def __init__(self, name: ModeName | MathMode | Recipe, *, frameworks: Frameworks = False) -> None:
        if callable(name):
            raise TypeError('@math_mode needs a mode: write @math_mode("bf16")')
        self._mode = parse_mode(name)
        self._libraries = _selection(frameworks)

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
    >>> import lowprec
    >>> with lowprec.math_mode("bf16"), lowprec.fp32_guard():
    ...     lowprec.get_math_mode()
    <MathMode.FP32: 'fp32'>

    It decorates functions and coroutine functions:

    >>> @lowprec.fp32_guard()
    ... def solve():
    ...     return lowprec.get_math_mode()
    >>> with lowprec.math_mode("bf16"):
    ...     solve()
    <MathMode.FP32: 'fp32'>
    """

    __slots__ = ("_verifies",)
    _guards = True

    def __init__(self, frameworks: Frameworks | None = None, *, verify: bool = False) -> None:
        if callable(frameworks):
            raise TypeError("@fp32_guard needs parentheses: write @fp32_guard()")
        self._mode = None
        self._libraries = _selection(True if frameworks is None else frameworks)
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
        self._libraries = _NO_LIBRARY
        self._emulates = parse_architecture(architecture)

    def __repr__(self) -> str:
        return f"emulate({str(self._emulates)!r})"
