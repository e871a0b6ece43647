"""Report of two runs of a program, one in a reference mode: the change of its result, and the layers behind it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from lowprec import plotting
from lowprec.core.interception_report import InterceptedProduct
from lowprec.core.printed import PrintedLine
from lowprec.core.recording import ANY_PASS, NO_LAYER, Observed, Run, Step
from lowprec.report import Report
from lowprec.util.atomic import write_file
from lowprec.util.page import page
from lowprec.util.tables import Table

#: Layers that the verdict names.
_MOST_NAMED = 3
_HALF = 0.5
#: Printed lines that the report shows.
_MOST_LINES = 10


class LayerError(NamedTuple):
    """The products of one pass of a layer in one mode.

    Errors are relative, in Frobenius norms over all products; None where there is none to compare.
    """

    #: Name of the layer, with the library's name of the operator where no product is observed.
    layer: str
    #: ``"forward"``, ``"grad_input"``, ``"grad_weight"``, ``"backward"`` for other gradients, or ``"any"``.
    phase: str
    mode: str  #: The mode; empty where the library computed the products.
    calls: int
    share: float  #: Of the multiplications of the run.
    #: Relative to the same products, of the same operands, in the reference.
    own_error: float | None
    drift: float | None  #: Relative to the results of the run in the reference.
    #: Largest share of numbers of an operand that the mode rounds to zero, as in OperandStatistics.
    underflow: float
    clipped: float  #: Largest share of numbers of an operand beyond the largest one of their block.
    #: Squared change with this layer alone in its mode, relative to the squared change.
    blame: float | None = None

    @property
    def place(self) -> str:
        """The layer and its pass."""
        return self.layer if self.phase == ANY_PASS else f"{self.layer} ({self.phase})"


@dataclass(frozen=True, slots=True)
class RunComparison(Report):
    """A run in a mode, compared with one in a reference mode; ``print`` begins with the verdict.

    >>> import numpy as np
    >>> import lowprec
    >>> x = np.ones((4, 4), np.float32)
    >>> lowprec.compare(lambda: x @ x, "bf16").change
    0.0
    """

    mode: str  #: The mode or the rules.
    against: str  #: The reference mode.
    #: Relative change of the result, by its Euclidean norm; None without a result.
    change: float | None
    #: Part of the multiplications by mode; ``""`` for those of the libraries.
    shares: Mapping[str, float]
    layers: tuple[LayerError, ...]  #: The largest error first.
    #: The first product in which the runs differ by order or shape; later ones are not compared.
    parting: str = ""
    fault: str = ""  #: The first product with a NaN or Inf, and its origin.
    notes: tuple[str, ...] = ()
    lines: tuple[
        PrintedLine, ...
    ] = ()  #: Printed lines with numbers that changed, of programs; the largest change first.

    _width = 120

    @property
    def remarks(self) -> Sequence[str]:
        return tuple(filter(None, (self.parting, self.fault, *self.notes, self._columns())))

    def _columns(self) -> str:
        """Return the explanation of the errors in the table."""
        if all(x.own_error is None and x.drift is None for x in self.layers):
            return ""
        return (
            f"Errors are relative: own error to the same product of the same operands in {self.against}, drift to the "
            f"result in the run in {self.against}."
        )

    @property
    def verdict(self) -> str:
        """The shares of the modes, the change of the result, and the layers behind it, in one sentence."""
        shares = [f"{mode} {percent(part)}" for mode, part in self.shares.items() if mode] or [
            "lowprec nothing"
        ]
        sentence = [f"{_listed(shares).replace(' ', ' computed ', 1)} of the multiplications"]
        if self.change is not None:
            sentence.append(self._changed())
        sentence.append(self._blamed() or self._erring())
        return "; ".join(filter(None, sentence))

    def _changed(self) -> str:
        if self.lines:
            first = self.lines[0]
            size = (
                f"by up to {percent(first.change)}"
                if math.isfinite(first.change)
                else "beyond comparison"
            )
            return f"the printed numbers changed {size} (line {first.number})"
        return _change(self.change or 0.0)

    def _blamed(self) -> str:
        blame = {x.layer: x.blame for x in self.layers if x.blame}
        total = math.fsum(blame.values())
        if not 0 < total < math.inf:
            return ""
        named: list[str] = []
        part = 0.0
        for name in blame:
            named.append(name)
            part += blame[name]
            if part >= _HALF * total or len(named) == _MOST_NAMED:
                break
        return f"{percent(part)} of that comes from {_listed(named)}"

    def _erring(self) -> str:
        largest = [x for x in self.layers if x.own_error and math.isfinite(x.own_error)][:1]
        return "".join(
            f"the largest own error is {percent(x.own_error)}, of layer {x.place}" for x in largest
        )

    def tables(self) -> list[Table]:
        columns = dict(_COLUMNS)
        if any(x.blame is not None for x in self.layers):
            first = {x.layer: x for x in reversed(self.layers)}
            columns[">blame"] = lambda x: _part(x.blame if first[x.layer] is x else None)
        columns = {name: show for name, show in columns.items() if any(map(show, self.layers))}
        rows = [[show(x) for show in columns.values()] for x in self.layers]
        tables = [Table(self.verdict, ())]
        if rows:
            title = f"{self.mode} against {self.against}"
            dropped = ("clipped", "underflow", "calls", "share")
            tables.append(Table(title, list(columns), rows, dropped))
        if self.lines:
            printed = [
                [str(x.number), _number(x.change), x.found, x.expected]
                for x in self.lines[:_MOST_LINES]
            ]
            title = f"printed lines with the largest changes, of {len(self.lines)} that changed"
            tables.append(Table(title, [">line", ">change", "text", f"in {self.against}"], printed))
        return tables

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to an HTML file, atomically: tables that sort by a click, and bars of the errors."""
        bars = {
            x.place: [y if y and math.isfinite(y) else 0.0 for y in (x.own_error, x.drift)]
            for x in self.layers
            if x.own_error is not None or x.drift is not None
        }
        title = f"{self.mode} against {self.against}"
        text = page(
            title, self.verdict, bars, ("own error", "drift"), self.tables()[1:], self.remarks
        )
        write_file(path, text.encode())

    def figure(self) -> Any:
        found = [x for x in self.layers if x.own_error or x.drift]
        names, note = plotting.first([x.place for x in found])
        figure, ((panel,),) = plotting.figure(1.6 + 0.22 * len(names))
        errors = {"own error": "own_error", "drift": "drift"}
        plotting.dots(
            panel,
            names,
            {
                label: [getattr(x, key) or 0.0 for x in found[: len(names)]]
                for label, key in errors.items()
            },
        )
        panel.set(xlabel="relative error", title=f"{self.mode} against {self.against}{note}")
        plotting.legend(figure, panel)
        return figure


#: Records of the products of a row, each with that of the reference if these are the same products.
_Pairs = list[tuple[Observed, "Observed | None"]]


def compared(
    mode: str, against: str, run: Run, reference: Run, change: float | None = None,
    blame: Mapping[str, float] | None = None, notes: Iterable[str] = (), lines: tuple[PrintedLine, ...] = (),
) -> RunComparison:  # fmt: skip
    """Return the report of a run and of that in the reference; ``blame`` is by layer."""
    total = _total(run) or 1
    rows: dict[tuple[str, str, str], _Pairs] = {}
    end, parting = _parting(run, reference)
    again = {(x.kind[:3], x.sums[2:4]): x for x in reference.observed}
    for x in run.observed:
        same = again.get((x.kind[:3], x.sums[2:4])) if x.sums.end <= end else None
        rows.setdefault((x.kind.name, x.kind.phase, x.kind.mode), []).append((x, same))
    layers = [_observed(*key, pairs, total, blame or {}) for key, pairs in rows.items()]
    layers += [_unobserved(x, total) for x in run.others]
    if blame:
        layers.sort(key=lambda x: (-_size(x.blame), x.layer, -_size(x.own_error)))
    else:
        layers.sort(key=lambda x: (-_size(x.own_error), -_size(x.drift)))
    shares: dict[str, float] = {}
    for layer in layers:
        shares[layer.mode] = shares.get(layer.mode, 0) + layer.share
    ranked = dict(sorted(shares.items(), key=lambda item: -item[1]))
    fault = _first_fault(run)
    return RunComparison(
        mode, against, change, ranked, tuple(layers), parting, fault, tuple(notes), lines
    )


@np.errstate(all="ignore")
def _observed(
    name: str, phase: str, mode: str, pairs: _Pairs, total: int, blame: Mapping[str, float]
) -> LayerError:
    records = [x for x, _ in pairs]
    own = None
    errors = [(x.error, x.sums.reference) for x in records if x.error is not None]
    if errors:
        own = _ratio(sum(error**2 for error, _ in errors), sum(square for _, square in errors))
    drift = None
    sums = [(x.sums, same.sums) for x, same in pairs if same is not None]
    compared = sum(same.square for _, same in sums)
    if compared:
        changes = [float(np.square(x.sketch - same.sketch).sum()) for x, same in sums]
        drift = _ratio(sum(changes), compared)
    operands = [operand for x in records for operand in (x.a, x.b)]
    return LayerError(
        name,
        phase,
        mode,
        calls=sum(x.sums.calls for x in records),
        share=sum(x.sums.multiplications for x in records) / total,
        own_error=own,
        drift=drift,
        underflow=max(operand.underflow for operand in operands),
        clipped=max(operand.clipped for operand in operands),
        blame=blame.get(name),
    )


def _parting(run: Run, reference: Run) -> tuple[float, str]:
    """Return the number of the first product in which two runs differ, and its description."""
    known = {step: number for number, step in enumerate(run.steps)}
    numbers = np.array([*(known.get(step, -1) for step in reference.steps), -1])
    found, wanted = run.order, numbers[np.asarray(reference.order, int)]
    common = min(len(found), len(wanted))
    differing = np.flatnonzero(found[:common] != wanted[:common])
    if differing.size:
        at = int(differing[0])
        other = _described(reference.steps[reference.order[at]])
        return at, f"The runs part at {_numbered(run, at)}: in the reference it is {other}."
    if len(found) != len(wanted):
        return common, f"The runs part after {common} products: one has more of them."
    return math.inf, ""


def _numbered(run: Run, at: int) -> str:
    """Return the description of a product, with its number among those of its layer and pass."""
    step = run.steps[run.order[at]]
    same = [number for number, each in enumerate(run.steps) if each[:2] == step[:2]]
    count = int(np.isin(run.order[: at + 1], same).sum())
    return f"product {count} of {_described(step)}"


def _described(step: Step) -> str:
    layer, phase, operator, extents = step
    shape = "x".join(map(str, extents)) or "a number"
    name = layer or NO_LAYER
    if phase == ANY_PASS:
        return f"{name} ({shape})"
    return f"{name} ({phase}, {operator}, {shape})"


def _first_fault(run: Run) -> str:
    if run.fault_at < 0:
        return ""
    kind, _, origin = run.fault.partition(": ")
    where = "a later product"
    if run.fault_at < len(run.order):
        where = _numbered(run, run.fault_at)
    return f"The first {kind} is in {where}: {origin}."


def _unobserved(x: InterceptedProduct, total: int) -> LayerError:
    name = f"{x.layer} ({x.operator})".strip()
    phase = "backward" if x.backward else "forward"
    return LayerError(name, phase, x.mode, x.count, x.multiplications / total, None, None, 0.0, 0.0)


def _total(run: Run) -> int:
    observed = sum(x.sums.multiplications for x in run.observed)
    return observed + sum(x.multiplications for x in run.others)


def _ratio(part: float, whole: float) -> float:
    if not whole:
        return math.inf if part else 0.0
    return math.sqrt(part / whole)


def _size(x: float | None) -> float:
    """Return a number to sort by: None is the smallest one, NaN the largest one."""
    if x is None:
        return -1.0
    return math.inf if math.isnan(x) else x


def _part(x: float | None) -> str:
    return "" if x is None else f"{x:.1%}"


#: Columns of a layer and pass; numbers are on the right.
_COLUMNS: dict[str, Callable[[LayerError], str]] = {
    "layer": attrgetter("layer"),
    "pass": attrgetter("phase"),
    "mode": lambda x: x.mode or "(library)",
    ">calls": lambda x: str(x.calls),
    ">share": lambda x: _part(x.share),
    ">own error": lambda x: _number(x.own_error),
    ">drift": lambda x: _number(x.drift),
    ">underflow": lambda x: _part(x.underflow or None),
    ">clipped": lambda x: _part(x.clipped or None),
}


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}" if x else "0"


def percent(x: float | None) -> str:
    """Return a share in words: two digits, and all digits before the point.

    Changes of 10 times or more are no percentages.

    >>> percent(0.934), percent(0.0214), percent(1.0), percent(3e-7), percent(16532.3)
    ('93 %', '2.1 %', '100 %', '3e-05 %', '16,532 times')
    """
    value = 100 * (x or 0.0)
    if 1000 <= value < 1e8:
        return f"{value / 100:,.0f} times"
    if value >= 1e8:
        return f"{value / 100:.0e} times"
    return f"{value:.0f} %" if value >= 99.5 else f"{value:.2g} %"


def _change(x: float) -> str:
    if not math.isfinite(x):
        return "the result is not finite"
    return f"the result changed by {percent(x)}" if x else "the result did not change"


def _listed(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
