"""``intercept``: the products of every loaded library in a mode, by the interceptions of the single libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from lowprec.core.interception import Interception
from lowprec.core.interception_report import InterceptionReport
from lowprec.core.rules import ALL, Rules, RulesLike
from lowprec.errors import SettingError, UnsupportedError, quoted
from lowprec.policy.entries import Entry

LIBRARIES = ("torch", "jax", "numpy")


class intercept(Interception):
    """Compute the products of PyTorch, JAX and NumPy programs by lowprec, in a block.

    The pages of :class:`lowprec.torch.intercept`, :class:`lowprec.jax.intercept` and :class:`lowprec.numpy.intercept`,
    which are the same for one library, name the products and the reach of the block.

    Parameters
    ----------
    math_mode : str, MathMode, Recipe, mapping, list of pairs, or path
        Mode of the products, or rules as in :class:`lowprec.torch.intercept`. Of these, NumPy uses those of its
        routines and that of ``"*"``.
    libraries : list of str, optional
        The libraries, such as ``["torch"]``; by default those that are loaded at the entry and that lowprec can
        intercept on this system; the report names the others.
    statistics, step
        As in :class:`lowprec.torch.intercept`.
    cast : bool
        As in :class:`lowprec.numpy.intercept`.

    Raises
    ------
    ModeError
        A mode or a pattern is illegal.
    SettingError
        A name in ``libraries`` is unknown.
    UnsupportedError
        At the entry: a library of these cannot be intercepted.

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> x = np.full((4, 4), 1 + 2.0**-12, np.float32)
    >>> with lowprec.intercept("bf16") as seen:
    ...     float((x @ x.copy())[0, 0])
    4.0
    >>> {p.mode for p in seen.report().taken}
    {'bf16'}
    """

    def __init__(
        self,
        math_mode: RulesLike,
        libraries: Iterable[str] | None = None,
        *,
        statistics: bool = False,
        step: int = 0,
        cast: bool = False,
    ) -> None:
        self._names = _checked(libraries)
        super().__init__(math_mode, statistics)
        self._options: dict[str, Any] = {"statistics": statistics, "step": step, "cast": cast}
        self._parts: dict[str, Interception] = {}

    @property
    def parts(self) -> Iterable[Interception]:
        """The interceptions of the single libraries."""
        return self._parts.values()

    def settle(self) -> None:
        for part in self.parts:
            part.settle()

    def step(self) -> None:
        """Begin the next training step, as :meth:`lowprec.torch.intercept.step` does."""
        self._options["step"] += 1
        torch: Any = self._parts.get("torch")
        if torch is not None:
            torch.step()

    def _begin(self, entry: Entry) -> None:
        self._watch = None
        entry.key = []
        for name in self._names or [name for name in LIBRARIES if name in sys.modules]:
            try:
                part = self._parts.get(name) or of_library(
                    name, self._rules_of(name), **self._options
                )
                part.recorder = self.recorder or part.recorder
                part.alone = self.alone
                self._parts[name] = part
                part.__enter__()
            except UnsupportedError as error:
                if self._names is not None:
                    raise
                self.ledger.notes[f"{name}'s products are its own: {error}"] = None
            else:
                entry.key.append((part, part._current.get()))

    def _rules_of(self, name: str) -> Rules:
        """Return the rules, for PyTorch those of the reference if a layer of another library is alone."""
        if name == "torch" and self.alone is not None:
            _, reference = self.alone
            return ((ALL, reference),)
        return self.rules

    @staticmethod
    def _end(entry: Entry) -> list[str]:
        for part, inner in reversed(entry.key or ()):
            part._leave(inner, part._open)
        return []

    def report(self) -> InterceptionReport:
        """Return the products so far, with the reason for each that its library computed."""
        reports = [part.report() for part in self._parts.values()]
        seen = [report for report in reports if report.products] or reports
        products = [product for report in seen for product in report.products]
        products.sort(key=lambda product: -product.multiplications)
        remarks = [remark for report in seen for remark in report.remarks]
        return InterceptionReport(
            repr(self), tuple(products), (*self.ledger.notes, *remarks), 1, self.statistics
        )

    def __repr__(self) -> str:
        chosen = "" if self._names is None else f", {list(self._names)}"
        return f"lowprec.intercept({self._text}{chosen})"


def _checked(libraries: Iterable[str] | None) -> tuple[str, ...] | None:
    if libraries is None:
        return None
    names = tuple(libraries)
    for name in names:
        if name not in LIBRARIES:
            raise SettingError(
                f"libraries: choose among {', '.join(LIBRARIES)}, got {quoted(name)}"
            )
    return names


def of_library(
    name: str, rules: Rules, *, cast: bool = False, statistics: bool = False, **of_torch: Any
) -> Interception:
    """Return the interception of one library, by those of the rules that may match its products."""
    if name == "torch":
        from lowprec.torch.interception import intercept as torch

        return torch(rules, statistics=statistics, **of_torch)
    if name == "jax":
        from lowprec.jax.interception import intercept as jax

        return jax(rules, statistics=statistics)
    from lowprec.numpy import blas
    from lowprec.numpy import intercept as numpy

    rules = tuple(rule for rule in rules if blas.applies(rule[0]))
    if not rules:
        raise UnsupportedError('no rule for a routine of the BLAS; add "*" to the rules')
    return numpy(rules, cast=cast, statistics=statistics)
