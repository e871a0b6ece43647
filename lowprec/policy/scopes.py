"""``math_mode``, ``fp32_guard`` and ``emulate``.

A scope changes lowprec's own policy, which is recorded in the context (thread and task) that entered it, and other
libraries' switches, which ``policy.switches`` sets and restores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from threading import get_ident
from typing import Any, cast

from lowprec.architectures import Emulated, parse_architecture
from lowprec.errors import SettingError, quoted, warn
from lowprec.modes import ArchitectureName, MathMode, ModeLike, parse_mode
from lowprec.policy import entries, environment
from lowprec.policy.controllers import controllers, known_modules, loaded_controllers
from lowprec.policy.decorators import ContextScope, F, decorated, picklable
from lowprec.policy.entries import Entry, Frame, current
from lowprec.policy.protocol import Controller
from lowprec.policy.switches import FLOOR, acquire, release

#: The argument ``frameworks=``: all loaded libraries, none, or those of these names.
Frameworks = bool | Iterable[str]

_NO_LIBRARY: frozenset[str] = frozenset()

_verifiers: list[Callable[[], None]] = []
#: Register a function that measures the libraries' precision, for ``fp32_guard(verify=True)``.
on_verify = _verifiers.append


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
        raise SettingError(
            f"frameworks: no controller for {', '.join(unknown)}; choose among {', '.join(known)}, or add a library "
            "with lowprec.register_controller"
        )
    return names


class PolicyScope(ContextScope):
    """A change of policy."""

    _current = current
    _own: Frame = (None, True, None)  # of a guard
    _libraries: frozenset[str] | None = _NO_LIBRARY
    _verifies = False

    def _begin(self, entry: Entry) -> None:
        if entries.listeners:
            entries.notify()
        if self._libraries is not _NO_LIBRARY:
            self._set_libraries(entry)
        if self._verifies:
            for verify in _verifiers:
                verify()

    @staticmethod
    def _end(entry: Entry) -> list[str]:
        remarks = []
        if entry.thread is not None:
            remarks = release(entry)
        if entries.listeners:
            entries.notify()
        return remarks

    def __getstate__(self) -> dict[str, Any]:
        self._watch = None  # the copy is used
        return {**vars(self), "_open": {}}

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

    def _set_libraries(self, entry: Entry) -> None:
        """Set the switches of the selected libraries that are loaded; warn of those that could not be set."""
        if sys.modules.keys().isdisjoint(known_modules):
            return
        loaded = loaded_controllers(self._libraries)
        if not loaded:
            return
        mode, guards, _ = self._own
        floors = {c.name: FLOOR for c in loaded if not guards and is_guarded_library(c.name)}
        others = [c for c in loaded if c.name not in floors]
        acquire(entry, others, mode or MathMode.FP32, guards)
        failures = [
            f"{name} ({reason})"
            for name, reason in sorted(entry.failures.items())
            if reason != FLOOR
        ]
        entry.failures.update(floors)
        if failures:
            verb = "does not protect" if guards else "does not reach"
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
        entry = next((entry for entry in entries.blocks() if entry in self._open), None)
        done = "protected" if self._own[1] else "set"
        rows = []
        for controller in controllers():
            status = "not loaded"
            reason: str | None = f"{controller.module} has not been imported"
            if sys.modules.get(controller.module) is not None:
                status = f"not {done}"
                reason = self._reason_against(controller, entry)
            if reason is None:
                status = done
                reason = f"its switches belong to the {controller.tier}"
            rows.append(LibraryStatus(controller.name, status, reason))
        return tuple(rows)

    def _reason_against(self, controller: Controller, entry: Entry | None) -> str | None:
        """Return the reason why the switches of a loaded library are not set here."""
        name = controller.name
        if self._libraries is not None and name not in self._libraries:
            return "excluded by frameworks="
        if entry is None:
            return "the block is not entered in this thread or task"
        if entry.thread is not None and name in entry.failures:
            return entry.failures[name]
        if entry.thread is None or name not in entry.layers:
            return "imported inside the block; the next entry will set it"
        if controller.tier == "thread" and entry.thread != get_ident():
            return "its switch belongs to the thread that entered the block; use wrap() here"
        return None


def is_guarded_library(name: str) -> bool:
    """Whether a guard of this context, or ``LOWPREC_FP32_GUARD``, covers a library."""
    if environment.snapshot().fp32_guard:
        return True
    selections = [entry.libraries for entry in entries.blocks() if entry.own[1]]
    return bool([libraries for libraries in selections if libraries is None or name in libraries])


@lru_cache(maxsize=1024)  # bounded, because a name has many spellings
def _of_mode(name: ModeLike) -> Frame:
    if callable(name):
        raise TypeError('@math_mode needs a mode: write @math_mode("bf16")')
    return parse_mode(name), False, None


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
    SettingError
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

    def __init__(self, name: ModeLike, *, frameworks: Frameworks = False) -> None:
        try:
            self._own = _of_mode(name)
        except TypeError:
            if not callable(name):
                parse_mode(name)  # raises ModeError for an unhashable argument
            raise
        if frameworks is not False:
            self._libraries = _selection(frameworks)
        super().__init__()

    def __repr__(self) -> str:
        chosen = self._frameworks
        return f"math_mode({str(self._own[0])!r}{f', frameworks={chosen}' if chosen else ''})"


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
    SettingError
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

    def __init__(self, frameworks: Frameworks | None = None, *, verify: bool = False) -> None:
        if callable(frameworks):
            raise TypeError("@fp32_guard needs parentheses: write @fp32_guard()")
        self._libraries = _selection(True if frameworks is None else frameworks)
        self._verifies = verify
        super().__init__()

    def __repr__(self) -> str:
        chosen = self._frameworks
        return "fp32_guard()" if chosen is True else f"fp32_guard(frameworks={chosen})"


class emulate(PolicyScope):
    """Emulate a GPU's tensor cores on the CPU, bit by bit, in a ``with`` block.

    It affects products of float16, bfloat16 and TF32 numbers in host memory: 16-bit operands, and float32 or complex64
    operands in a mode that rounds to these formats (``tf32``, ``bf16``, ``fp16`` and their split schemes). Only the
    summation changes, not the mode; :func:`lowprec.plan` shows it. Formats with scales of blocks (``mxfp8``,
    ``nvfp4``) are multiplied with these on Blackwell, by a published model without recorded results of a library. Other
    products are unaffected: float32 in mode ``fp32``, float64, int8, formats that the tensor cores do not support
    (bfloat16 on Volta), and arrays on a GPU.

    Each element is one chain of instructions along the inner dimension. cuBLAS's tiles, order of instructions and
    split-K are not emulated.

    The block applies to this thread and task, and to tasks started inside; :meth:`wrap` applies it in other threads.
    The innermost block takes precedence.

    Parameters
    ----------
    architecture : {"volta", "ampere", "ada", "hopper", "blackwell"} or lowprec.emulation.TensorCore
        GPU generation, in any case; or the sums of a tensor core, for all formats, in one chain over k.

    Raises
    ------
    SettingError
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

    def __init__(self, architecture: ArchitectureName | Emulated) -> None:
        self._own = (None, False, parse_architecture(architecture))
        super().__init__()

    def __repr__(self) -> str:
        core = self._own[2]
        text = str(core) if isinstance(core, str) else core
        return f"emulate({text!r})"
