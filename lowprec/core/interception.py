"""Scopes of interceptions, and modes by layer.

The scopes of a library are in a ``ContextVar``, so they apply to a thread and task; one that ``lowprec run`` opens
applies to the process.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakSet

from lowprec.core.interception_report import InterceptionReport, Ledger
from lowprec.errors import ModeError, warn
from lowprec.modes import MathMode, Mode, ModeName, Recipe, parse_mode
from lowprec.policy.decorators import decorated
from lowprec.util.lock import locked

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound="Interception")

#: A mode for all layers, or modes by patterns of layer names, by class names, or by classes.
Modes = ModeName | MathMode | Recipe | Mapping[Any, ModeName | MathMode | Recipe]


class Block:
    """One entry of an interception."""

    __slots__ = ("scope",)

    def __init__(self, scope: Interception) -> None:
        self.scope = scope


class Interception:
    """An interception of one library; it may be entered several times, in several threads."""

    _module: str  # the library
    _stack: ContextVar[tuple[Block, ...]]
    #: Open blocks of all threads; changed by one assignment, so that a signal handler's exception leaves no half of it.
    _holders: frozenset[object] = frozenset()

    def __init__(self, modes: Modes, statistics: bool = False) -> None:
        given = modes if isinstance(modes, Mapping) else {"*": modes}
        if not given:
            raise ModeError("the mapping of layers to modes is empty")
        self._patterns = tuple((_pattern(key), parse_mode(mode)) for key, mode in given.items())
        self._text = repr(modes if isinstance(modes, Mapping) else str(self._patterns[0][1]))
        self.statistics = statistics
        self.ledger = Ledger()
        self._modes: dict[tuple[tuple[str, str], ...], Mode | None] = {}

    def __init_subclass__(cls) -> None:
        cls._module = cls.__module__.split(".")[1]
        cls._stack = ContextVar(f"lowprec_{cls._module}", default=())

    def _install(self) -> None:
        """Put lowprec's functions in place of the library's, if they are not."""
        raise NotImplementedError

    def _uninstall(self) -> None:
        """Undo :meth:`_install`, with the last block."""

    def _hold(self, holder: object) -> None:
        _entered.add(self)
        type(self)._holders |= {holder}
        self._install()

    def _release(self, holder: object) -> None:
        type(self)._holders -= {holder}
        if not self._holders:
            self._uninstall()

    def _opened(self) -> None:
        """Follow a change of the blocks that are open in this context, or in the process."""

    def _remarks(self) -> list[str]:
        """Return notes for the report."""
        return []

    def __enter__(self: S) -> S:
        block = Block(self)
        try:
            locked(self._hold, block)
            self._stack.set((*self._stack.get(), block))
            self._opened()
        except BaseException:
            self._close(block)
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        blocks = [block for block in self._stack.get() if block.scope is self]
        if not blocks:
            warn(f"{self!r} was left in another thread or task than it was entered in, where it stays open")
            return
        try:
            self._close(blocks[-1])
        except BaseException:  # of a signal handler, which may raise between any two steps
            self._close(blocks[-1])
            raise

    def _close(self, block: Block) -> None:
        self._stack.set(tuple(other for other in self._stack.get() if other is not block))
        self._opened()
        locked(self._release, block)

    def __call__(self, function: F) -> F:
        """Return the function with this block around each of its calls, which share one report."""
        return cast(F, decorated(self, function))

    def mode_of(self, layer: tuple[tuple[str, str], ...]) -> Mode | None:
        """Return the mode of a layer: of the first pattern that its name, or else its class, matches.

        ``layer`` has a (name, class) for each layer that the product may belong to.
        """
        try:
            return self._modes[layer]
        except KeyError:
            names = layer or (("", ""),)
            found = [mode for key, mode in self._patterns for each in names if _matches(key, *each)]
            mode: Mode | None = found[0] if found else None
            self._modes[layer] = mode
            return mode

    def report(self) -> InterceptionReport:
        """Return the products so far, with the reason for each that the library computed."""
        return self.ledger.report(repr(self), self._remarks(), self.statistics)

    def __str__(self) -> str:
        return str(self.report())

    def __repr__(self) -> str:
        return f"lowprec.{self._module}.intercept({self._text})"

    def apply_to_process(self, folder: str | None, is_first: bool, show: Callable[[InterceptionReport], None]) -> None:
        """Open the scope for all threads until the process ends, and then show the report.

        ``folder`` has the sums of all processes of a run; only the first process shows the report.
        """
        locked(self._hold, self)
        type(self)._of_process = self
        self._opened()
        if folder:
            self.ledger.folder, self.ledger.name = Path(folder), "run"
            self.ledger.folder.mkdir(exist_ok=True)
        process = os.getpid() if is_first else 0
        atexit.register(lambda: show(self.report()) if os.getpid() == process else self.ledger.write())

    #: The scope of ``lowprec run``.
    _of_process: Interception | None = None


def _pattern(key: Any) -> str:
    if isinstance(key, type):
        return key.__name__
    if isinstance(key, str):
        return key
    raise ModeError(f"a layer is given by a pattern of names or by a class, got {type(key).__name__}")


def _matches(pattern: str, name: str, kind: str) -> bool:
    return fnmatchcase(name, pattern) or pattern == kind


#: Scopes that were entered.
_entered: WeakSet[Interception] = WeakSet()


def _each(call: Callable[[Ledger], None]) -> None:
    entered: list[Interception] = locked(list, _entered)
    for scope in entered:
        call(scope.ledger)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=partial(_each, Ledger.prepare_fork), after_in_child=partial(_each, Ledger.start_child))
