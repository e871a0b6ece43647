"""Sums over the products of a profile, and its table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from lowprec.errors import UnsupportedError, quoted
from lowprec.modes import ModeSource
from lowprec.profiling.records import ProductRecord
from lowprec.util.tables import Table, fill, plain_text


class _Group:
    """Products with equal keys; flops and rates are those of the products with a time."""

    def __init__(self, records: Sequence[ProductRecord]) -> None:
        self.records = records
        self.times = [r.elapsed_ms for r in records if r.elapsed_ms is not None]
        timed = [r for r in records if r.elapsed_ms is not None]
        self.elapsed_ms = sum(self.times, 0.0)
        self.flops = sum(r.flops for r in timed)
        self.tflops = self.flops / self.elapsed_ms * 1e-9 if self.elapsed_ms else None
        #: Time at the device's peak rate over the measured time; None if a peak is unknown.
        self.peak_share: float | None = None
        shares = [r.peak_share for r in timed if r.peak_share is not None]
        if self.elapsed_ms and len(shares) == len(timed):
            at_peak_ms = sum(share * ms for share, ms in zip(shares, self.times, strict=True))
            self.peak_share = at_peak_ms / self.elapsed_ms


def grouped(records: Iterable[ProductRecord], key: Callable[[ProductRecord], Any]) -> dict[Any, _Group]:
    """Return the groups of equal keys, the longest time first."""
    members: dict[Any, list[ProductRecord]] = {}
    for record in records:
        members.setdefault(key(record), []).append(record)
    groups = {name: _Group(group) for name, group in members.items()}
    return dict(sorted(groups.items(), key=lambda item: -item[1].elapsed_ms))


def extents(m: int, n: int, k: int, batch_count: int) -> str:
    batch = f"{batch_count} * " if batch_count != 1 else ""
    return f"{batch}{m}x{n}x{k}"


def totals(records: Sequence[ProductRecord], wall_ms: float) -> dict[str, Any]:
    everything = _Group(records)
    on_units = sum(r.flops for r in records if r.elapsed_ms is not None and r.units_used)
    return {
        "products": len(records),
        "failed": sum(r.error is not None for r in records),
        "untimed": sum(r.error is None and r.elapsed_ms is None for r in records),
        "elapsed_ms": everything.elapsed_ms,
        "wall_ms": wall_ms,
        "flops": everything.flops,
        "tflops": everything.tflops,
        "units": {
            "eligible": sum(r.units_eligible for r in records),
            "used": sum(r.units_used is True for r in records),
            "unknown": sum(r.units_used is None and r.error is None for r in records),
            "share_of_flops": on_units / everything.flops if everything.flops else None,
        },
        "by_mode": _sums(records, lambda r: r.mode),
        "by_kernel": _sums(records, lambda r: r.kernel),
    }


def _sums(records: Sequence[ProductRecord], key: Callable[[ProductRecord], str]) -> dict[str, dict[str, Any]]:
    return {
        name: {"products": len(group.records), "elapsed_ms": group.elapsed_ms, "flops": group.flops}
        for name, group in grouped(records, key).items()
    }


def _dtypes(r: ProductRecord) -> str:
    operands = r.a_dtype if r.a_dtype == r.b_dtype else f"{r.a_dtype} @ {r.b_dtype}"
    return operands if operands == r.out_dtype else f"{operands} -> {r.out_dtype}"


def _units(r: ProductRecord) -> str:
    if r.error is not None:
        return "failed"
    if r.units_used is None:
        return "unknown"
    return "used" if r.units_used else "not used" if r.units_eligible else "-"


#: Keys of the groups, for each value of ``by``.
_KEYS: dict[str, dict[str, Callable[[ProductRecord], str]]] = {
    "product": {
        "m x n x k": lambda r: extents(r.m, r.n, r.k, r.batch_count),
        "dtypes": _dtypes,
        "mode": lambda r: r.mode if r.mode_has_effect else "-",
        "chosen by": lambda r: ModeSource(r.source).name.lower() if r.mode_has_effect else "-",
        "device": lambda r: r.device,
        "kernel": lambda r: r.kernel if r.algorithm is None else f"{r.kernel} {r.algorithm}",
        "units": _units,
    },
    "range": {"range": lambda r: r.label or "(outside of ranges)"},
}

#: The other columns: times and rates.
_NUMBERS = (">calls", ">total ms", ">median ms", ">share", ">TFLOP/s", ">of peak")

#: Columns omitted from a table that is too wide, in this order.
_OPTIONAL = ("chosen by", "units", "of peak", "dtypes", "median ms", "TFLOP/s")


def to_text(label: str, records: Sequence[ProductRecord], wall_ms: float, by: str, width: int) -> str:
    """Return the table with its totals; ``wall_ms`` is the time the profile was open."""
    if by not in _KEYS:
        raise UnsupportedError(f"by={quoted(by)} is not supported; choose one of: {', '.join(map(repr, _KEYS))}")
    devices = ", ".join(dict.fromkeys(r.device for r in records))
    title = " ".join(filter(None, ("lowprec.profile", label, f"({devices})" if devices else "")))
    text = plain_text(_table(title, records, _KEYS[by]), width) if records else title
    return "\n".join([text, *(fill(sentence, width, hang=4) for sentence in _sentences(records, wall_ms))])


def _table(title: str, records: Sequence[ProductRecord], keys: dict[str, Callable[[ProductRecord], str]]) -> Table:
    groups = grouped(records, lambda r: tuple(cell(r) for cell in keys.values()))
    whole_ms = _Group(records).elapsed_ms
    rows = [[*key, *_numbers(group, whole_ms)] for key, group in groups.items()]
    columns = [
        (heading, *cells)
        for heading, *cells in zip((*keys, *_NUMBERS), *rows, strict=True)
        if not (heading == "device" and len(set(cells)) == 1) and not (heading == ">of peak" and set(cells) == {"-"})
    ]
    headings, *rows = map(list, zip(*columns, strict=True))
    return Table(title, headings, rows, _OPTIONAL)


def _numbers(group: _Group, whole_ms: float) -> list[str]:
    return [
        str(len(group.records)),
        f"{group.elapsed_ms:.3f}" if group.times else "-",
        f"{median(group.times):.3f}" if group.times else "-",
        f"{group.elapsed_ms / whole_ms:.1%}" if whole_ms and group.times else "-",
        "-" if group.tflops is None else f"{group.tflops:.3g}",
        "-" if group.peak_share is None else f"{group.peak_share:.0%}",
    ]


def _sentences(records: Sequence[ProductRecord], wall_ms: float) -> Iterator[str]:
    sums = totals(records, wall_ms)
    products = "1 product" if len(records) == 1 else f"{len(records)} products"
    rate = f", {sums['tflops']:.3g} TFLOP/s" if sums["tflops"] is not None else ""
    yield f"{products} in {sums['elapsed_ms']:.3f} ms of {wall_ms:.3f} ms{rate}"
    if not records:
        return
    units = sums["units"]
    share = units["share_of_flops"]
    on_units = f", {share:.1%} of the flops" if share is not None else ""
    unknown = f", {units['unknown']} unknown" if units["unknown"] else ""
    yield f"tensor, tile or vector units: {units['eligible']} eligible, {units['used']} used{unknown}{on_units}"
    missed = [r for r in records if r.units_eligible and r.units_used is False and r.error is None]
    for reason, group in grouped(missed, lambda r: r.units_reason).items():
        yield f"  not used by {len(group.records)}: {reason}"
    failed = [r for r in records if r.error is not None]
    for error, group in grouped(failed, lambda r: r.error).items():
        yield f"  failed, {len(group.records)}: {error}"
    if sums["untimed"]:
        yield f"  without a time, {sums['untimed']}: captured into a CUDA graph"
