"""Comparison of the math modes on the same operands: time, error, bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from lowprec.checking.accuracy import Array, Errors, Reference, Verdict
from lowprec.checking.figures import errors_by_speed
from lowprec.checking.measure import SMALL_SPREAD, Load, Timing, rotation, take_turns
from lowprec.core import dispatch, plan_call
from lowprec.core.arguments import ShapeDtype
from lowprec.errors import DTypeError
from lowprec.formats import DType
from lowprec.modes import MathMode, Mode, available_modes, row
from lowprec.planning import PlanReport
from lowprec.report import Report
from lowprec.util.plain import plain
from lowprec.util.tables import Table

Pair = tuple[Array, Array]

#: Element types without a wider reference, and the types to cast them to.
_SINGLE = {"float64": "float32", "complex128": "complex64"}

_COLUMNS = (
    "mode",
    "kernel",
    ">time",
    ">spread",
    ">speed-up",
    ">error",
    ">scaled",
    ">bound",
    "verdict",
)

#: Columns omitted from a table that is too wide, in this order; ``plan`` and the plots show them.
_OPTIONAL = ("kernel", "error", "spread", "time", "verdict", "bound")

#: Largest number of rows that are printed by default.
MOST_ROWS = 12

#: A smaller speed-up is within the spread of the times.
_FASTER = 1.05


@dataclass(frozen=True)
class Case:
    """Pairs of operands, used in rotation; errors are measured on the first pair."""

    name: str
    words: str
    sets: list[Pair]

    @classmethod
    def of(cls, name: str, words: str, a: Array, b: Array) -> Case:
        """Return a case of one pair of arrays, with enough copies to keep them out of the caches."""
        sets = [(a, b)]
        while len(sets) < rotation(a.nbytes + b.nbytes):
            copies = (a.copy(order="K"), b.copy(order="K"))
            sets.append(copies)
        return cls(name, words, sets)


#: Operands and mode of each product by its name; None where the element types alone decide.
Variants: TypeAlias = dict[str, tuple[list[Pair], "Mode | None"]]


@dataclass(frozen=True)
class Row:
    """Time and errors of one variant.

    >>> import numpy as np
    >>> import lowprec
    >>> row = lowprec.check(np.eye(8, dtype="float32"), np.eye(8, dtype="float32"), modes=["bf16"], rounds=1).rows[1]
    >>> row.label, row.errors.relative
    ('bf16', 0.0)
    """

    name: str  #: The requested mode; where no mode acts, the element types.
    plan: PlanReport
    timing: Timing
    speedup: float  #: Relative to the first row.
    errors: Errors
    is_noisy: bool  #: Whether the machine was busy or the times spread widely.

    @property
    def label(self) -> str:
        """The requested mode, and the one that ran if it differs."""
        plan = self.plan
        if plan.resolved.requested is not None and plan.mode_has_effect:
            return f"{self.name}, ran {plan.mode}"
        return self.name

    def is_faster_than(self, other: Row) -> bool:
        """Whether this is another computation, and faster beyond the usual spread."""
        same = (
            self.plan.kernel == other.plan.kernel and self.errors.relative == other.errors.relative
        )
        return self.speedup > _FASTER * other.speedup and not same

    def cells(self) -> list[str]:
        """Return the cells of the row in a table."""
        errors = self.errors
        spread = self.timing.spread
        return [
            self.label,
            str(self.plan.kernel),
            seconds(self.timing.median),
            f"{spread:.0%}" if spread is not None else "-",
            f"{'~' * self.is_noisy}{self.speedup:.2f}x",
            *map(_number, (errors.relative, errors.normalised, errors.bound)),
            str(errors.verdict),
        ]

    def to_dict(self) -> dict[str, Any]:
        errors = self.errors
        return {
            "mode": self.name,
            "mode_in_force": str(self.plan.mode),
            "mode_has_effect": self.plan.mode_has_effect,
            "kernel": str(self.plan.kernel),
            "median_ms": self.timing.median * 1e3,
            "spread": self.timing.spread,
            "samples": len(self.timing.samples),
            "speedup": self.speedup,
            "noisy": self.is_noisy,
            "error": plain(errors.relative),
            "scaled_error": plain(errors.normalised),
            "bound": plain(errors.bound),
            "verdict": errors.verdict.name.lower(),
        }


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """The math modes on one pair of operands; ``print`` shows table and summary.

    >>> import numpy as np
    >>> import lowprec
    >>> lowprec.check(np.eye(8, dtype="float32"), np.eye(8, dtype="float32"), modes=["bf16"], rounds=1).within
    True
    """

    name: str
    description: str
    a: ShapeDtype
    b: ShapeDtype
    rows: tuple[Row, ...]  #: One per mode, the baseline first.
    load: Load  #: Load of the machine before the measurement.

    @property
    def within(self) -> bool:
        """Whether no error is above its bound."""
        return not any(row.errors.is_above for row in self.rows)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences below the table; one on a busy machine is above it."""
        remarks = [*self.notes]
        shown = len(self.selection)
        if shown < len(self.rows):
            remarks.append(f"{shown} of {len(self.rows)} modes are shown; rows has all")
        return (*remarks, self.summary)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on errors above their bounds, noise, modes and kernels."""
        found = [
            f"{row.name}: the error is above its bound" for row in self.rows if row.errors.is_above
        ]
        if any(row.timing.is_noisy for row in self.rows):
            found.append(
                f"~: the times spread by more than {SMALL_SPREAD:.0%}; a larger budget takes more samples"
            )
        for r in self.rows:
            found += r.plan.resolved.reasons
        found += [r.plan.note for r in self.rows if r.plan.note]
        for r in self.rows:
            # After a fallback caused by the data, the kernel that ran is not the table's.
            if r.errors.verdict in (Verdict.OVERFLOW, Verdict.NO_NUMBERS):
                found += [f"{r.name}: {text}" for text in r.plan.fallbacks]
        return tuple(dict.fromkeys(found))

    @property
    def selection(self) -> tuple[Row, ...]:
        """All rows; of more than 12 the baseline and the fastest for each error."""
        if len(self.rows) <= MOST_ROWS:
            return self.rows
        baseline, *others = self.rows
        fastest: dict[str, Row] = {}
        for r in sorted(others, key=lambda r: -r.speedup):
            # A row with the baseline's error is of use if it is faster.
            if r.is_faster_than(baseline) or _digit(r) != _digit(baseline):
                fastest.setdefault(_digit(r), r)
        chosen = [baseline, *fastest.values()][:MOST_ROWS]
        names = {r.name for r in chosen}
        return tuple(r for r in self.rows if r.name in names or r.errors.is_above)

    @property
    def summary(self) -> str:
        """A sentence on the modes that no mode with a smaller error outruns."""
        baseline = self.rows[0]
        within = [r for r in self.rows if r.errors.verdict is Verdict.WITHIN]
        faster = [r for r in within if r.is_faster_than(baseline)]
        faster.sort(key=lambda r: (r.errors.relative, -r.speedup))
        best: list[Row] = []
        for r in faster:
            if not best or r.speedup > best[-1].speedup:
                best.append(r)
        if not best:
            return f"no mode is faster than {baseline.name} on this device"
        texts = [
            f"{r.name}: {'about ' * r.is_noisy}{r.speedup:.1f} times, {_digit(r)}" for r in best
        ]
        texts[0] = texts[0].replace(" times, ", f" times the speed of {baseline.name}, error ")
        others = "on this device"
        if len(faster) > len(best):
            others = "at an equal or smaller error"
        return f"{'; '.join(texts)}; no other mode is faster {others}"

    @property
    def table(self) -> Table:
        """The table of ``selection``, as printed."""
        return self.table_of(self.selection)

    def table_of(self, rows: Sequence[Row]) -> Table:
        title = f"{self.name}: {_spec(self.a)} @ {_spec(self.b)}"
        if self.description:
            title = f"{title}, {self.description}"
        cells = [r.cells() for r in rows]
        return Table(title, _COLUMNS, cells, _OPTIONAL)

    def tables(self) -> list[Table]:
        busy = [Table(self.load.remark, ())] if self.load.remark else []
        return [*busy, self.table]

    def figure(self) -> Any:
        return errors_by_speed([self])

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "description": self.description,
            "a": _described(self.a),
            "b": _described(self.b),
            "rows": [row.to_dict() for row in self.rows],
            "summary": self.summary,
        }

    def __repr__(self) -> str:
        within = sum(row.errors.verdict is Verdict.WITHIN for row in self.rows)
        return f"<Comparison {self.table.title}: {within} of {len(self.rows)} rows within their bounds>"


def seconds(value: float) -> str:
    """Return a time in the unit that suits it."""
    scale = 1e-6
    unit = "us"
    if value >= 1:
        scale = 1.0
        unit = "s"
    elif value >= 1e-3:
        scale = 1e-3
        unit = "ms"
    number = value / scale
    decimals = (number < 10) + (number < 100)
    return f"{number:.{decimals}f} {unit}"


def _digit(row: Row) -> str:
    """Return the error with one significant digit."""
    error = row.errors.relative
    if not error:
        return "0"
    return f"{error:.0e}".replace("e-0", "e-")


def _number(error: float) -> str:
    if not math.isfinite(error):
        return "-"
    return f"{error:.1e}"


def _described(x: ShapeDtype) -> dict[str, Any]:
    return {"dtype": str(x.dtype), "shape": list(x.shape)}


def _spec(x: ShapeDtype) -> str:
    return f"{x.dtype} {'x'.join(map(str, x.shape)) or 'scalar'}"


def variants_of(case: Case, modes: Sequence[Mode] | None = None) -> Variants:
    """Return the variants to compare, the baseline (float32 in ``fp32``) first; raises for types without a mode."""
    a, b = case.sets[0]
    for name in (a.dtype.name, b.dtype.name):
        if name in _SINGLE:
            raise DTypeError(
                f"products of {name} have no wider reference to compare with; "
                f"check the operands rounded to {_SINGLE[name]}"
            )
    if plan_call.plan(a, b).mode_has_effect:
        if modes is None:
            modes = [mode for mode in available_modes() if row(mode).acts(DType.FLOAT32)]
        return {str(mode): (case.sets, mode) for mode in (MathMode.FP32, *modes)}
    copies = []
    for x, y in case.sets:
        copies.append((x.astype(np.float32), y.astype(np.float32)))
    stored = ", ".join(dict.fromkeys((a.dtype.name, b.dtype.name)))
    variants: Variants = {"float32 copies": (copies, MathMode.FP32), stored: (case.sets, None)}
    if not modes:
        modes = [mode for mode in available_modes() if row(mode).quantizes]
    for mode in modes:
        if _acts(mode, a, b):
            variants[str(mode)] = (case.sets, mode)
    return variants


def _acts(mode: Mode, a: Array, b: Array) -> bool:
    return plan_call.plan(a, b, math_mode=mode).mode_has_effect


def _product(sets: list[Pair], mode: Mode | None, number: int) -> Array:
    a, b = sets[number % len(sets)]
    result: Array = dispatch.matmul(a, b, math_mode=mode)
    return result


def compare(
    case: Case,
    variants: Variants,
    *,
    rounds: int | None,
    budget: float,
    load: Load,
    step: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Return the comparison of the variants, the first of which is the baseline; ``load`` was measured before.

    ``step`` receives a description of each step: the first product of each variant, and the rounds.
    """
    reference = Reference(*case.sets[0])
    plans = {}
    products = {}
    errors = {}
    # Before anything is timed: the first product of a kind loads libraries and compiles.
    for name, (sets, mode) in variants.items():
        step(name)
        plans[name] = plan_call.plan(*sets[0], math_mode=mode)
        products[name] = partial(_product, sets, mode)
        errors[name] = reference.compare(np.asarray(products[name](0)), plans[name])
    spinning = [name for name, plan in plans.items() if plan.kernel == "numpy"]
    timings = take_turns(products, rounds, budget=budget, step=step, spinning=spinning)
    baseline, *_ = timings.values()
    rows = []
    for name, timing in timings.items():
        is_noisy = bool(load.remark) or timing.is_noisy or baseline.is_noisy
        speedup = timing.speedup_over(baseline)
        rows.append(Row(name, plans[name], timing, speedup, errors[name], is_noisy))
    a, b = (ShapeDtype(x.shape, x.dtype.name) for x in case.sets[0])
    return Comparison(case.name, case.words, a, b, tuple(rows), load)
