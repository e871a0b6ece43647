"""The open ``with`` blocks of each thread and task, as one ``ContextVar``.

A block holds two things: lowprec's own policy, noted in the context that entered it, and other libraries' switches,
which ``policy.switches`` looks after.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lowprec.errors import LowprecWarning, UnsupportedError, quoted
from lowprec.modes import MathMode
from lowprec.policy import environment
from lowprec.policy.controllers import controllers, known_modules, loaded_controllers
from lowprec.policy.decorators import Wrapped, decorated
from lowprec.policy.entries import NO_LIBRARY, PolicyEntry, Scope, held, innermost
from lowprec.policy.protocol import Controller, Tier
from lowprec.policy.switches import FLOOR, hold

if TYPE_CHECKING:
    from lowprec.architectures import Architecture

F = TypeVar("F", bound=Callable[..., Any])

#: What ``frameworks=`` takes: every loaded library, none, or those of these names.
Frameworks = bool | Iterable[str]


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """What a block does for one library."""

    library: str  # its name, as in ``frameworks=[...]``
    #: ``"protected"`` (the guard), ``"set"`` (a math mode), ``"not protected"``, ``"not set"`` or ``"not loaded"``.
    status: str
    reason: str  # why, or how far the switches reach

    def __str__(self) -> str:
        return f"{self.library}: {self.status} ({self.reason})"


def selection(frameworks: Frameworks) -> frozenset[str] | None:
    """Return the names of the libraries that are meant; None for all.

    Raises TypeError if it is neither a flag nor a collection of names, UnsupportedError if there is no controller of
    one of these names.

    Examples
    --------
    >>> sorted(selection(["torch", "jax"]))
    ['jax', 'torch']
    """
    if isinstance(frameworks, bool):
        return None if frameworks else NO_LIBRARY
    if isinstance(frameworks, str) or not isinstance(frameworks, Iterable):
        raise TypeError(
            f'frameworks must be True, False or a list of names such as ["torch"], got {quoted(frameworks)}'
        )
    names = frozenset(frameworks)
    known = [controller.name for controller in controllers()]
    unknown = sorted(str(name) for name in names.difference(known))
    if unknown:
        raise UnsupportedError(
            f"frameworks: nothing is known of {', '.join(unknown)}; choose among {', '.join(known)}, or add a library "
            "with lowprec.register_controller"
        )
    return names


class PolicyScope(Scope):
    """A change of policy that lasts as long as a ``with`` block or a decorated function.

    Each entry is noted in the context (thread and task) that made it. So one instance may be entered twice, and be
    shared by threads and tasks. A ``with`` statement leaves its own entry, and a bare call of ``__exit__`` the
    innermost one of the instance, in whichever order.
    """

    __slots__ = ("_libraries", "_mode")
    _mode: MathMode | None
    _libraries: frozenset[str] | None
    _guards: bool = False
    _emulates: Architecture | None = None

    _entry_type = PolicyEntry

    def __call__(self, function: F) -> F:
        """Return the function with this scope around each of its calls.

        The scope of an ``async def`` lasts until its coroutine ends. That of a generator is open while the body
        runs and closed while the consumer does. (A ``with`` block inside a generator's body, by contrast, stays open
        at a ``yield``: a generator shares the context of its consumer.)
        """
        return cast(F, decorated(self, function))

    def wrap(self, function: F) -> F:
        """Return the function with this scope around each of its calls, in whichever thread these happen.

        A thread starts without the scopes of the thread that started it, so a scope around ``pool.map`` would not
        reach the workers.

        Parameters
        ----------
        function : callable
            What the workers call.

        Returns
        -------
        callable
            With the same signature. It can be pickled where the function can, for a pool of processes.

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
        return cast(F, decorated(self, function, Wrapped))

    @property
    def _frameworks(self) -> bool | list[str]:
        return self._libraries is None or sorted(self._libraries) or False

    def _last_entry(self) -> PolicyEntry | None:
        # Called in a context that does not know of it, __exit__ means one that another context has entered.
        elsewhere = [entry for entry in list(held) if entry.scope is self]
        return innermost.get().of(self) or (elsewhere[-1] if elsewhere else None)

    def _set_libraries(self, entry: PolicyEntry) -> None:
        if sys.modules.keys().isdisjoint(known_modules):
            return
        found = loaded_controllers(self._libraries)
        if not found:
            return
        held[entry] = None
        mode = self._mode
        if mode is None:
            hold(entry, found, MathMode.FP32, True)
        else:
            hold(entry, found, mode, False, guarded_libraries())
            from lowprec.policy import effects

            layers = entry.layers
            set_here = [(c, layers[c.name].inside) for c in found if c.name in layers]
            self._warn("changes nothing in", effects.news(set_here, mode))
        self._warn(
            "does not protect" if mode is None else "does not reach",
            [f"{name} ({why})" for name, why in sorted(entry.failures.items()) if why != FLOOR],
        )

    def _warn(self, verb: str, libraries: list[str]) -> None:
        if libraries:
            warnings.warn(f"{self!r} {verb} {'; '.join(libraries)}", LowprecWarning, stacklevel=5)

    # -- telling ----------------------------------------------------------------------------------

    def report(self) -> tuple[LibraryStatus, ...]:
        """Return what this block does for each library, as seen from here.

        Returns
        -------
        tuple of LibraryStatus
            One per library that has a controller, loaded or not, each with ``library``, ``status`` and ``reason``.

        Examples
        --------
        >>> from lowprec.policy import fp32_guard
        >>> with fp32_guard() as guard:
        ...     {status.library: status.status for status in guard.report()}["paddle"]
        'not loaded'
        """
        entry = innermost.get().of(self)
        done = "protected" if self._guards else "set"
        rows = []
        for controller in controllers():
            reached, reason = self._state_of(controller, entry)
            status = done if reached else f"not {done}"
            if sys.modules.get(controller.module) is None:
                status, reason = "not loaded", f"{controller.module} has not been imported"
            rows.append(LibraryStatus(controller.name, status, reason))
        return tuple(rows)

    def _state_of(self, controller: Controller, entry: PolicyEntry | None) -> tuple[bool, str]:
        name = controller.name
        if self._libraries is not None and name not in self._libraries:
            return False, "left out by frameworks="
        if entry is None:
            return False, "the block is not entered in this thread or task"
        if name in entry.failures:
            return False, entry.failures[name]
        if name not in entry.layers:
            return False, "imported inside the block; the next entry finds it"
        if not entry.is_open:
            return False, "the block was left in another context"
        if controller.tier == Tier.THREAD and entry.thread != get_ident():
            return False, "its switch belongs to the thread that entered the block; use wrap() here"
        reason = f"its switches belong to the {controller.tier}"
        if self._mode is not None:
            from lowprec.policy import effects

            left = effects.known(name, self._mode)
            reason += f"; {left}" if left else ""
        return True, reason


def guarded_libraries() -> Callable[[str], bool] | None:
    """Return what says of a library whether a guard here covers it, None where there is no guard."""
    if environment.snapshot().fp32_guard:
        return lambda name: True
    here = innermost.get()
    if not here.guarded:
        return None
    guards = [entry.scope._libraries for entry in here.entries() if entry.scope._guards]
    return lambda name: any(libraries is None or name in libraries for libraries in guards)
