"""Comparison of the math modes on the same operands: time, error, bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowprec.checking.accuracy import Array, Errors, Reference, Verdict
from lowprec.checking.measure import SMALL_SPREAD, Load, Timing, rotation, take_turns
from lowprec.core import dispatch, plan_call
from lowprec.core.arguments import ShapeDtype
from lowprec.errors import DTypeError
from lowprec.formats import DType
from lowprec.modes import MathMode, Mode, available_modes, row
from lowprec.planning import GemmPlan
from lowprec.util.plain import finite
from lowprec.util.tables import Table, html, plain_text

Pair = tuple[Array, Array]

#: Element types without a wider reference, and the types to cast them to.
_SINGLE = {"float64": "float32", "complex128": "complex64"}

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
        copies = range(rotation(a.nbytes + b.nbytes) - 1)
        sets = [(a, b), *((a.copy(order="K"), b.copy(order="K")) for _ in copies)]
        return cls(name, words, sets)


@dataclass(frozen=True)
class Variant:
    """The product of a case's operands in a mode; None where the element types alone decide."""

    name: str
    sets: list[Pair]
    mode: Mode | None

    def __call__(self, number: int) -> Array:
        a, b = self.sets[number % len(self.sets)]
        result: Array = dispatch.matmul(a, b, math_mode=self.mode)
        return result

    def plan(self) -> GemmPlan:
        return plan_call.plan(*self.sets[0], math_mode=self.mode)


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
    plan: GemmPlan
    timing: Timing
    speedup: float  #: Relative to the first row.
    errors: Errors
    is_noisy: bool  #: Whether the machine was busy or the times spread widely.

    @property
    def label(self) -> str:
        """The requested mode, and the one that ran if it differs."""
        requested = self.plan.resolved.requested if self.plan.resolved else None
        overruled = self.plan.mode_has_effect and requested is not None
        return f"{self.name}, ran {self.plan.mode}" if overruled else self.name

    def is_faster_than(self, other: Row) -> bool:
        """Whether this is another computation, and faster beyond the usual spread."""
        same = self.plan.kernel == other.plan.kernel and self.errors.relative == other.errors.relative
        return self.speedup > _FASTER * other.speedup and not same

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
            "error": finite(errors.relative),
            "scaled_error": finite(errors.normalised),
            "bound": finite(errors.bound),
            "verdict": errors.verdict.name.lower(),
        }


@dataclass(frozen=True, repr=False)
class Comparison:
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
        return all(row.errors.verdict is not Verdict.ABOVE for row in self.rows)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks below the table; a remark on a busy machine is above it."""
        plans = [row.plan for row in self.rows]
        reasons = [reason for p in plans if p.resolved for reason in p.resolved.reasons]
        notes = [p.note for p in plans if p.note]
        # After a fallback caused by the data, the kernel that ran is not the table's.
        fallbacks = [
            f"{row.name}: {text}"
            for row in self.rows
            if row.errors.verdict in (Verdict.OVERFLOW, Verdict.NO_NUMBERS)
            for text in row.plan.fallbacks
        ]
        above = [
            f"{row.name}: the error is above its bound" for row in self.rows if row.errors.verdict is Verdict.ABOVE
        ]
        spread = any(row.timing.is_noisy for row in self.rows)
        noise = [f"~: the times spread by more than {SMALL_SPREAD:.0%}; a larger budget takes more samples"] * spread
        return tuple(dict.fromkeys((*above, *noise, *reasons, *notes, *fallbacks)))

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
        above = [r for r in others if r.errors.verdict is Verdict.ABOVE]
        chosen = {r.name for r in (baseline, *above, *list(fastest.values())[: MOST_ROWS - 1])}
        return tuple(r for r in self.rows if r.name in chosen)

    @property
    def summary(self) -> str:
        """A sentence on the modes that no mode with a smaller error outruns."""
        baseline = self.rows[0]
        faster = [r for r in self.rows if r.is_faster_than(baseline) and r.errors.verdict is Verdict.WITHIN]
        best: list[Row] = []
        for r in sorted(faster, key=lambda r: (r.errors.relative, -r.speedup)):
            if not best or r.speedup > best[-1].speedup:
                best.append(r)
        if not best:
            return f"no mode is faster than {baseline.name} on this device"
        texts = [f"{r.name}: {'about ' * r.is_noisy}{r.speedup:.1f} times" for r in best]
        texts = [f"{text}, {_digit(r)}" for text, r in zip(texts, best, strict=True)]
        texts[0] = texts[0].replace(" times, ", f" times the speed of {baseline.name}, error ")
        others = "at an equal or smaller error" if len(faster) > len(best) else "on this device"
        return f"{'; '.join(texts)}; no other mode is faster {others}"

    @property
    def table(self) -> Table:
        """The table of ``selection``, as printed."""
        return self.table_of(self.selection)

    def table_of(self, rows: Sequence[Row]) -> Table:
        title = f"{self.name}: {_spec(self.a)} @ {_spec(self.b)}"
        columns = (
            "mode", "kernel", ">time", ">spread", ">speed-up", ">error", ">scaled", ">bound", "verdict",
        )  # fmt: skip
        cells = [
            (
                r.label,
                str(r.plan.kernel),
                seconds(r.timing.median),
                "-" if r.timing.spread is None else f"{r.timing.spread:.0%}",
                f"{'~' * r.is_noisy}{r.speedup:.2f}x",
                *map(_number, (r.errors.relative, r.errors.normalised, r.errors.bound)),
                str(r.errors.verdict),
            )
            for r in rows
        ]
        described = f"{title}, {self.description}" if self.description else title
        return Table(described, columns, cells, _OPTIONAL)

    def to_dict(self) -> dict[str, Any]:
        operands = {name: {"dtype": str(x.dtype), "shape": list(x.shape)} for name, x in (("a", self.a), ("b", self.b))}
        return {
            "name": self.name,
            "description": self.description,
            **operands,
            "rows": [row.to_dict() for row in self.rows],
            "summary": self.summary,
        }

    def __repr__(self) -> str:
        within = sum(row.errors.verdict is Verdict.WITHIN for row in self.rows)
        return f"<Comparison {self.table.title}: {within} of {len(self.rows)} rows within their bounds>"

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.load.remark, plain_text(self.table), *self._below)))

    def _repr_html_(self) -> str:
        return f"<div>{self.load.remark}</div>{html(self.table, self._below)}"

    @property
    def _below(self) -> tuple[str, ...]:
        shown, count = len(self.selection), len(self.rows)
        hidden = () if shown == count else (f"{shown} of {count} modes are shown; rows has all",)
        return (*self.remarks, *hidden, self.summary)


def seconds(value: float) -> str:
    """Return a time in the unit that suits it."""
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if value >= s), ("us", 1e-6))
    digits = value / scale
    decimals = 2 if digits < 10 else 1 if digits < 100 else 0
    return f"{digits:.{decimals}f} {unit}"


def _digit(row: Row) -> str:
    """Return the error with one significant digit."""
    error = row.errors.relative
    return f"{error:.0e}".replace("e-0", "e-") if error else "0"


def _number(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "-"


def _spec(x: ShapeDtype) -> str:
    return f"{x.dtype} {'x'.join(map(str, x.shape)) or 'scalar'}"


def variants_of(case: Case, modes: Sequence[Mode] | None = None) -> list[Variant]:
    """Return the variants to compare, the baseline (float32 in ``fp32``) first; raises for types without a mode."""
    a, b = case.sets[0]
    for name in (a.dtype.name, b.dtype.name):
        if name in _SINGLE:
            raise DTypeError(
                f"products of {name} have no wider reference to compare with; "
                f"check the operands rounded to {_SINGLE[name]}"
            )
    if plan_call.plan(a, b).mode_has_effect:
        acting = (mode for mode in available_modes() if row(mode).acts(DType.FLOAT32))
        chosen = dict.fromkeys((MathMode.FP32, *(acting if modes is None else modes)))
        return [Variant(str(mode), case.sets, mode) for mode in chosen]
    copies = [(x.astype(np.float32), y.astype(np.float32)) for x, y in case.sets]
    stored = a.dtype.name if a.dtype == b.dtype else f"{a.dtype.name}, {b.dtype.name}"
    quantizing = [mode for mode in available_modes() if row(mode).quantizes]
    others = [Variant(str(mode), case.sets, mode) for mode in modes or quantizing if _acts(mode, a, b)]
    return [Variant("float32 copies", copies, MathMode.FP32), Variant(stored, case.sets, None), *others]


def _acts(mode: Mode, a: Array, b: Array) -> bool:
    return plan_call.plan(a, b, math_mode=mode).mode_has_effect


def compare(
    case: Case,
    variants: Sequence[Variant],
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
    plans, errors = {}, {}
    # Before anything is timed: the first product of a kind loads libraries and compiles.
    for variant in variants:
        step(variant.name)
        plans[variant.name] = variant.plan()
        result = np.asarray(variant(0))
        errors[variant.name] = reference.compare(result, plans[variant.name])
    spinning = [name for name, plan in plans.items() if plan.kernel == "numpy"]
    timings = take_turns({v.name: v for v in variants}, rounds, budget=budget, step=step, spinning=spinning)
    baseline = timings[variants[0].name]
    rows = tuple(
        Row(
            name, plans[name], timing, timing.speedup_over(baseline), errors[name],
            bool(load.remark) or timing.is_noisy or baseline.is_noisy,
        )
        for name, timing in timings.items()
    )  # fmt: skip
    a, b = (ShapeDtype(x.shape, x.dtype.name) for x in case.sets[0])
    return Comparison(case.name, case.words, a, b, rows, load)
