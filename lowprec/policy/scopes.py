"""``PolicyScope``, the base of ``math_mode``, ``fp32_guard`` and ``emulate``.

A scope changes lowprec's own policy, which is recorded in the context (thread and task) that entered it, and other
libraries' switches, which ``policy.switches`` sets and restores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lowprec.errors import UnsupportedError, quoted, warn
from lowprec.modes import MathMode
from lowprec.policy import effects, environment
from lowprec.policy.controllers import controllers, known_modules, loaded_controllers
from lowprec.policy.decorators import Wrapped, decorated
from lowprec.policy.entries import NO_LIBRARY, PolicyEntry, Scope, held, innermost
from lowprec.policy.protocol import Controller, Tier
from lowprec.policy.switches import FLOOR, hold

if TYPE_CHECKING:
    from lowprec.architectures import Architecture

F = TypeVar("F", bound=Callable[..., Any])

#: The argument ``frameworks=``: all loaded libraries, none, or those of these names.
Frameworks = bool | Iterable[str]


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """The effect of a block on one library."""

    library: str  # name, as in ``frameworks=[...]``
    #: ``"protected"`` (by a guard), ``"set"`` (by a math mode), ``"not protected"``, ``"not set"`` or ``"not loaded"``.
    status: str
    reason: str  # reason of the status, or scope of the switches

    def __str__(self) -> str:
        return f"{self.library}: {self.status} ({self.reason})"


def selection(frameworks: Frameworks) -> frozenset[str] | None:
    """Return the names of the selected libraries, None for all."""
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
            f"frameworks: no controller for {', '.join(unknown)}; choose among {', '.join(known)}, or add a library "
            "with lowprec.register_controller"
        )
    return names


class PolicyScope(Scope):
    """A change of policy for a ``with`` block or a decorated function; threads and tasks may share an instance.

    ``__exit__`` closes the instance's innermost entry in this context, or else its last one in another context.
    """

    __slots__ = ("_libraries", "_mode")
    _mode: MathMode | None
    _libraries: frozenset[str] | None
    _guards: bool = False
    _verifies: bool = False
    _emulates: Architecture | None = None

    _entry_type = PolicyEntry

    def __call__(self, function: F) -> F:
        """Return a function that enters this scope in each call.

        For an ``async def`` the scope lasts until the coroutine ends. For a generator it is open only while the body
        runs, unlike a ``with`` block in the body, which stays open at a ``yield``.
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
        return cast(F, decorated(self, function, Wrapped))

    @property
    def _frameworks(self) -> bool | list[str]:
        return self._libraries is None or sorted(self._libraries) or False

    def _last_entry(self) -> PolicyEntry | None:
        here = innermost.get()
        if here.scope is self and here.origin is None:
            return here
        others = [entry for entry in list(held) if entry.scope is self]
        return here.of(self) or (others[-1] if others else None)

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
            layers = entry.layers
            set_here = [(c, layers[c.name].inside) for c in found if c.name in layers]
            self._warn("changes nothing in", effects.unreported(set_here, mode))
        self._warn(
            "does not protect" if mode is None else "does not reach",
            [f"{name} ({why})" for name, why in sorted(entry.failures.items()) if why != FLOOR],
        )

    def _warn(self, verb: str, libraries: list[str]) -> None:
        if libraries:
            warn(f"{self!r} {verb} {'; '.join(libraries)}")

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
        entry = innermost.get().of(self)
        done = "protected" if self._guards else "set"
        rows = []
        for controller in controllers():
            if sys.modules.get(controller.module) is None:
                status, reason = "not loaded", f"{controller.module} has not been imported"
            elif (unset := self._why_not(controller, entry)) is not None:
                status, reason = f"not {done}", unset
            else:
                left = self._mode and effects.known.get((controller.name, self._mode))
                reach = f"its switches belong to the {controller.tier}"
                status, reason = done, f"{reach}; {left}" if left else reach
            rows.append(LibraryStatus(controller.name, status, reason))
        return tuple(rows)

    def _why_not(self, controller: Controller, entry: PolicyEntry | None) -> str | None:
        """Return the reason why the switches of a loaded library are not set here."""
        name = controller.name
        if self._libraries is not None and name not in self._libraries:
            return "excluded by frameworks="
        if entry is None:
            return "the block is not entered in this thread or task"
        if name in entry.failures:
            return entry.failures[name]
        if name not in entry.layers:
            return "imported inside the block; the next entry will set it"
        if not entry.is_open:
            return "the block was left in another context"
        if controller.tier == Tier.THREAD and entry.thread != get_ident():
            return "its switch belongs to the thread that entered the block; use wrap() here"
        return None


def guarded_libraries() -> Callable[[str], bool] | None:
    """Return a function that returns whether a guard of this context covers a library; None without a guard."""
    if environment.snapshot().fp32_guard:
        return lambda name: True
    here = innermost.get()
    if not here.guarded:
        return None
    guards = [entry.scope._libraries for entry in here.entries() if entry.scope._guards]
    return lambda name: any(libraries is None or name in libraries for libraries in guards)
