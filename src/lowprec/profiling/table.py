"""A profile as a text table for people."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lowprec.errors import UnsupportedError, quoted
from lowprec.modes import ModeSource
from lowprec.profiling.records import ProductRecord
from lowprec.profiling.summary import Group, extents, grouped, totals
from lowprec.tables import Table, plain_text

__all__ = ["to_text"]

WIDTH = 120

#: Columns of words give way down to this where the table would be too wide.
_LEAST_WORDS = 8


class Column(NamedTuple):
    """Heading, entry of a group, whether numbers stand to the right."""

    heading: str
    cell: Callable[[Group], str]
    right: bool = False


def _first(field: Callable[[ProductRecord], str]) -> Callable[[Group], str]:
    """Return what all products of a group have in common, which is what the first one has."""
    return lambda group: field(group.records[0])


def _extents(r: ProductRecord) -> str:
    return extents(r.m, r.n, r.k, r.batch_count)


def _dtypes(r: ProductRecord) -> str:
    """Return the element types in short: one where all are the same."""
    operands = r.a_dtype if r.a_dtype == r.b_dtype else f"{r.a_dtype} @ {r.b_dtype}"
    return operands if operands == r.out_dtype else f"{operands} -> {r.out_dtype}"


def _mode(r: ProductRecord) -> str:
    return r.mode if r.mode_has_effect else "-"


def _source(r: ProductRecord) -> str:
    return ModeSource(r.source).name.lower() if r.mode_has_effect else "-"


def _kernel(r: ProductRecord) -> str:
    return f"{r.kernel} {r.algorithm}" if r.algorithm else r.kernel


def _units(r: ProductRecord) -> str:
    if r.error is not None:
        return "failed"
    if r.units_used is None:
        return "unknown"
    return "used" if r.units_used else "not used" if r.units_eligible else "-"


def _label(r: ProductRecord) -> str:
    return r.label or "(outside of ranges)"


#: What makes products count as one, by ``by``.
_KEYS: dict[str, tuple[Column, ...]] = {
    "product": (
        Column("m x n x k", _first(_extents)),
        Column("dtypes", _first(_dtypes)),
        Column("mode", _first(_mode)),
        Column("chosen by", _first(_source)),
        Column("device", _first(lambda r: r.device)),
        Column("kernel", _first(_kernel)),
        Column("units", _first(_units)),
    ),
    "range": (Column("range", _first(_label)),),
}

_NUMBERS = (
    Column("calls", lambda g: str(len(g.records)), right=True),
    Column("total ms", lambda g: f"{g.elapsed_ms:.3f}" if g.timed else "-", right=True),
    Column("median ms", lambda g: f"{g.median_ms:.3f}" if g.timed else "-", right=True),
)
_RATES = (
    Column("TFLOP/s", lambda g: "-" if g.tflops is None else f"{g.tflops:.3g}", right=True),
    Column("of peak", lambda g: "-" if g.peak_share is None else f"{g.peak_share:.0%}", right=True),
)

#: Columns that are left out where they would say the same, or nothing, in every row.
_OPTIONAL = frozenset({"device", "of peak"})


def to_text(label: str, records: Sequence[ProductRecord], wall_ms: float, by: str) -> str:
    """Return the table with its totals.

    Parameters
    ----------
    label : str
    records : sequence of ProductRecord
    wall_ms : float
        How long the profile was open.
    by : {"product", "range"}

    Raises
    ------
    UnsupportedError
        If there is no such table.
    """
    if by not in _KEYS:
        raise UnsupportedError(
            f"by={quoted(by)} is not supported; choose one of: {', '.join(map(repr, _KEYS))}"
        )
    lines = [" ".join(filter(None, ("lowprec.profile", label, _devices(records))))]
    if records:
        lines += _grid(records, _KEYS[by])
    lines += _sums(records, wall_ms)
    return "\n".join(lines)


def _grid(records: Sequence[ProductRecord], keys: tuple[Column, ...]) -> list[str]:
    groups = list(
        grouped(records, lambda r: tuple(column.cell(Group([r])) for column in keys)).values()
    )
    whole = Group(list(records)).elapsed_ms
    share = Column(
        "share", lambda g: f"{g.elapsed_ms / whole:.1%}" if whole and g.timed else "-", right=True
    )
    columns = [
        column
        for column in (*keys, *_NUMBERS, share, *_RATES)
        if column.heading not in _OPTIONAL or len({column.cell(g) for g in groups}) > 1
        or (column.heading == "of peak" and column.cell(groups[0]) != "-")
    ]  # fmt: skip
    cells = [[c.heading for c in columns], *([c.cell(g) for c in columns] for g in groups)]
    widths = _fitted([max(map(len, column)) for column in zip(*cells, strict=True)], columns)
    headings, *rows = (
        [
            f">{cell}" if c.right and row is cells[0] else cell if c.right else _cut(cell, width)
            for cell, width, c in zip(row, widths, columns, strict=True)
        ]
        for row in cells
    )
    return plain_text(Table("", headings, rows)).splitlines()[1:]


def _devices(records: Sequence[ProductRecord]) -> str:
    devices = ", ".join(dict.fromkeys(r.device for r in records))
    return f"({devices})" if devices else ""


def _fitted(widths: list[int], columns: Sequence[Column]) -> list[int]:
    """Return widths that fit on a line: the widest columns of words give way."""
    words = [i for i, column in enumerate(columns) if not column.right]
    fitted = list(widths)
    while sum(fitted) + 2 * len(fitted) > WIDTH:
        widest = max(words, key=fitted.__getitem__)
        if fitted[widest] <= _LEAST_WORDS:
            break
        fitted[widest] -= 1
    return fitted


def _cut(text: str, width: int) -> str:
    """Return the beginning of a text.

    Examples
    --------
    >>> _cut("amx_bf16_pair", 13), _cut("amx_bf16_pair", 9)
    ('amx_bf16_pair', 'amx_bf...')
    """
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _sums(records: Sequence[ProductRecord], wall_ms: float) -> Iterator[str]:
    """Yield the sentences below the table."""
    found = totals(records, wall_ms)
    rate = f", {found['tflops']:.3g} TFLOP/s" if found["tflops"] is not None else ""
    yield f"{_count(found['products'], 'product')} in {found['elapsed_ms']:.3f} ms of {wall_ms:.3f} ms{rate}"
    if not records:
        return
    units = found["units"]
    share = units["share_of_flops"]
    on_units = f", {share:.1%} of the flops" if share is not None else ""
    unknown = f", {units['unknown']} unknown" if units["unknown"] else ""
    yield f"tensor (tile) units: {units['eligible']} eligible, {units['used']} used{unknown}{on_units}"
    missed = grouped(
        [r for r in records if r.units_eligible and r.units_used is False and r.error is None],
        lambda r: r.units_reason,
    )
    for reason, group in missed.items():
        yield from _sentence(f"not used by {len(group.records)}: {reason}")
    for error, group in grouped([r for r in records if r.error], lambda r: r.error).items():
        yield from _sentence(f"failed, {len(group.records)}: {error}")
    if found["untimed"]:
        yield from _sentence(f"without a time, {found['untimed']}: captured into a CUDA graph")


def _sentence(text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
