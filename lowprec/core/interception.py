"""Scopes of interceptions, and modes by layer.

The scopes of a library are in a ``ContextVar``, so they apply to a thread and task; one that ``lowprec run`` opens
applies to the process.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowprec.core.interception_report import InterceptedProduct, InterceptionReport, Statistics
from lowprec.core.ledger import Ledger
from lowprec.core.recording import Kind, Recorder
from lowprec.core.rules import Layer, RulesLike, first_match, parse_rules, shown
from lowprec.modes import Mode
from lowprec.policy.decorators import ContextScope
from lowprec.policy.entries import Entry, innermost
from lowprec.util.lock import lock


class Interception(ContextScope):
    """An interception of one library; it may be entered several times, in several threads."""

    _module: str  # the library
    _library: type[Interception]  # its class, which may have subclasses
    #: Open blocks of all threads; changed by one assignment, so that a signal handler's exception leaves no half of it.
    _holders: frozenset[Entry] = frozenset()
    _depth = 3  # of the frame that makes a block

    def __init__(self, rules: RulesLike, statistics: bool = False) -> None:
        self.rules = parse_rules(rules)
        self._text = shown(self.rules)
        self.statistics = statistics
        self.ledger = Ledger()
        self.recorder: Recorder | None = None  # of a comparison of two runs
        #: The only layer, by its name in a comparison, that is not computed in the reference mode; and that mode.
        self.alone: tuple[str, Mode] | None = None
        self._modes: dict[tuple[Layer, str], Mode | None] = {}
        super().__init__(self._depth)

    def __init_subclass__(cls) -> None:
        if Interception in cls.__bases__:
            cls._library = cls
            cls._module = cls.__module__.split(".")[1]
            cls._current = ContextVar(f"lowprec_{cls._module}", default=None)

    def _install(self) -> None:
        """Put lowprec's functions in place of the library's, if they are not."""
        raise NotImplementedError

    def _uninstall(self) -> None:
        """Undo :meth:`_install`, with the last block."""

    def _begin(self, entry: Entry) -> None:
        self._watch = None
        entry.key = self._key()
        entry.scope = self
        with lock:
            self._hold(entry)
        self._opened()

    @staticmethod
    def _end(entry: Entry) -> list[str]:
        scope: Interception | None = entry.scope
        if scope is not None:
            scope._opened()
            with lock:
                scope._release(entry)
        return []

    def _hold(self, entry: Entry) -> None:
        self._library._holders |= {entry}
        self._install()

    def _release(self, entry: Entry) -> None:
        self._library._holders -= {entry}
        if not self._holders:
            self._uninstall()

    @classmethod
    def _innermost(cls, context: Context | None = None) -> Entry | None:
        """Return the innermost open block of this context or another one."""
        if context is not None:
            return innermost(context.get(cls._current))
        return innermost(cls._current.get()) or cls._of_process

    def _key(self) -> Any:
        """Return what a block adds to the library's key for compiled functions."""

    def _opened(self) -> None:
        """Called after a block opens or closes."""

    def _remarks(self) -> list[str]:
        """Return notes for the report."""
        return []

    def mode_of(self, layer: Layer, routine: str = "") -> Mode | None:
        """Return the mode of a product by the rules."""
        key = layer, routine
        try:
            return self._modes[key]
        except KeyError:
            mode = self._modes[key] = first_match(self.rules, layer, routine)
            return mode

    def settle(self) -> None:
        """Wait for products that are still being recorded."""

    def unobserved(self) -> list[InterceptedProduct]:
        """Return the products that were counted, and not recorded."""
        return []

    def complete_records(self) -> None:
        """Add to the recorder the products that are still being recorded, and those that are not recorded."""
        self.settle()
        if self.recorder is not None:
            self.recorder.others += self.unobserved()

    def report(self) -> InterceptionReport:
        """Return the products so far, with the reason for each that the library computed."""
        report = self.ledger.report(repr(self), self._remarks(), self.statistics)
        if self.recorder is None or not self.statistics:
            return report
        self.settle()
        found = self.recorder.statistics(self._place_of)
        products = tuple(_measured(p, found) for p in report.products)
        return replace(report, products=products)

    def _place_of(self, kind: Kind) -> str:
        """Return the layer in the report of a place in the records."""
        return kind.layer

    def __str__(self) -> str:
        return str(self.report())

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def __repr__(self) -> str:
        return f"lowprec.{self._module}.intercept({self._text})"

    def apply_to_process(
        self, folder: str | None, is_first: bool, show: Callable[[InterceptionReport], None]
    ) -> None:
        """Open the scope for all threads until the process ends, and then show the report.

        ``folder`` has the sums of all processes of a run; only the first process shows the report.
        """
        entry = Entry()
        self._library._of_process = entry
        self._begin(entry)
        if folder:
            self.ledger.share(Path(folder))
        process = os.getpid() if is_first else 0

        def end() -> None:
            if os.getpid() == process:
                show(self.report())
            else:
                self.ledger.write()

        atexit.register(end)

    #: The block of ``lowprec run``.
    _of_process: Entry | None = None


def _measured(
    p: InterceptedProduct, found: Mapping[tuple[str, str, str], Statistics]
) -> InterceptedProduct:
    """Return a row of the report with the statistics of its products; NumPy's may be those of several functions."""
    total = Statistics()
    for (layer, *kind), each in found.items():
        if kind == [p.operator, p.mode] and (p.layer == layer or p.layer.endswith("...")):
            total = total.largest(each)
    return replace(p, a=total.a, b=total.b, error=total.error)
