"""Sums over the products of a profile, and its table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import mul
from statistics import median
from typing import Any

from lowprec import plotting
from lowprec.errors import SettingError, quoted
from lowprec.modes import ModeSource
from lowprec.profiling.records import ProductRecord
from lowprec.util.tables import Table


class _Group:
    """Products with equal keys; flops and rates are those of the products with a time."""

    def __init__(self, records: Sequence[ProductRecord]) -> None:
        timed = [r for r in records if r.elapsed_ms is not None]
        self.records = records
        self.times = [r.elapsed_ms or 0.0 for r in timed]
        self.elapsed_ms = sum(self.times, 0.0)
        self.flops = sum(r.flops for r in timed)
        self.tflops: float | None = None
        #: Time at the device's peak rate over the measured time; None if a peak is unknown.
        self.peak_share: float | None = None
        if not self.elapsed_ms:
            return
        self.tflops = self.flops / self.elapsed_ms * 1e-9
        shares = [r.peak_share for r in timed if r.peak_share is not None]
        if len(shares) == len(timed):
            self.peak_share = sum(map(mul, shares, self.times)) / self.elapsed_ms


def grouped(
    records: Iterable[ProductRecord], key: Callable[[ProductRecord], Any]
) -> dict[Any, _Group]:
    """Return the groups of equal keys, the longest time first."""
    members: dict[Any, list[ProductRecord]] = {}
    for record in records:
        members.setdefault(key(record), []).append(record)
    groups = {name: _Group(group) for name, group in members.items()}
    return dict(sorted(groups.items(), key=lambda item: -item[1].elapsed_ms))


def extents(m: int, n: int, k: int, batch_count: int) -> str:
    if batch_count == 1:
        return f"{m}x{n}x{k}"
    return f"{batch_count} * {m}x{n}x{k}"


def totals(records: Sequence[ProductRecord], wall_ms: float) -> dict[str, Any]:
    everything = _Group(records)
    share = None
    if everything.flops:
        on_units = [r.flops for r in records if r.elapsed_ms is not None and r.units_used]
        share = sum(on_units) / everything.flops
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
            "share_of_flops": share,
        },
        "by_mode": _sums(records, lambda r: r.mode),
        "by_kernel": _sums(records, lambda r: r.kernel),
    }


def _sums(
    records: Sequence[ProductRecord], key: Callable[[ProductRecord], str]
) -> dict[str, dict[str, Any]]:
    sums = {}
    for name, group in grouped(records, key).items():
        sums[name] = {
            "products": len(group.records),
            "elapsed_ms": group.elapsed_ms,
            "flops": group.flops,
        }
    return sums


def _dtypes(r: ProductRecord) -> str:
    operands = " @ ".join(dict.fromkeys((r.a_dtype, r.b_dtype)))
    if operands == r.out_dtype:
        return operands
    return f"{operands} -> {r.out_dtype}"


def _units(r: ProductRecord) -> str:
    if r.error is not None:
        return "failed"
    if r.units_used is None:
        return "unknown"
    if r.units_used:
        return "used"
    return "not used" if r.units_eligible else "-"


def _chosen_by(r: ProductRecord) -> str:
    return ModeSource(r.source).name.lower() if r.mode_has_effect else "-"


def _kernel(r: ProductRecord) -> str:
    return " ".join(filter(None, (r.kernel, r.algorithm)))


#: Keys of the groups, for each value of ``by``.
_KEYS: dict[str, dict[str, Callable[[ProductRecord], str]]] = {
    "product": {
        "m x n x k": lambda r: extents(r.m, r.n, r.k, r.batch_count),
        "dtypes": _dtypes,
        "mode": lambda r: r.mode if r.mode_has_effect else "-",
        "chosen by": _chosen_by,
        "device": lambda r: r.device,
        "kernel": _kernel,
        "units": _units,
    },
    "range": {"range": lambda r: r.label or "(outside of ranges)"},
}

#: The other columns: times and rates.
_NUMBERS = (">calls", ">total ms", ">median ms", ">share", ">TFLOP/s", ">of peak")

#: Columns omitted from a table that is too wide, in this order.
_OPTIONAL = ("chosen by", "units", "of peak", "dtypes", "median ms", "TFLOP/s")


def tables(label: str, records: Sequence[ProductRecord], by: str) -> list[Table]:
    """Return the table of a profile."""
    if by not in _KEYS:
        raise SettingError(
            f"by={quoted(by)} is not supported; choose one of: {', '.join(map(repr, _KEYS))}"
        )
    title = f"lowprec.profile {label}".rstrip()
    if not records:
        return [Table(title, ())]
    devices = dict.fromkeys(r.device for r in records)
    title = f"{title} ({', '.join(devices)})"
    keys = _KEYS[by]
    cells = keys.values()
    groups = grouped(records, lambda r: tuple(cell(r) for cell in cells))
    whole_ms = _Group(records).elapsed_ms
    rows = [[*key, *_numbers(group, whole_ms)] for key, group in groups.items()]
    table = Table(title, [*keys, *_NUMBERS], rows, _OPTIONAL)
    if len(devices) == 1:
        table = table.without("device")
    if all(group.peak_share is None for group in groups.values()):
        table = table.without("of peak")
    return [table]


def _numbers(group: _Group, whole_ms: float) -> list[str]:
    times = group.times
    share = group.elapsed_ms / whole_ms if times and whole_ms else None
    return [
        str(len(group.records)),
        _number(group.elapsed_ms if times else None, ".3f"),
        _number(median(times) if times else None, ".3f"),
        _number(share, ".1%"),
        _number(group.tflops, ".3g"),
        _number(group.peak_share, ".0%"),
    ]


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def sentences(records: Sequence[ProductRecord], wall_ms: float) -> Iterator[str]:
    """Yield the totals; ``wall_ms`` is the time the profile was open."""
    sums = totals(records, wall_ms)
    text = f"{len(records)} products in {sums['elapsed_ms']:.3f} ms of {wall_ms:.3f} ms"
    if len(records) == 1:
        text = text.replace("products", "product")
    if sums["tflops"] is not None:
        text += f", {sums['tflops']:.3g} TFLOP/s"
    yield text
    if not records:
        return
    units = sums["units"]
    text = f"tensor, tile or vector units: {units['eligible']} eligible, {units['used']} used"
    if units["unknown"]:
        text += f", {units['unknown']} unknown"
    if units["share_of_flops"] is not None:
        text += f", {units['share_of_flops']:.1%} of the flops"
    yield text
    missed = [r for r in records if r.units_eligible and r.units_used is False and r.error is None]
    for reason, group in grouped(missed, lambda r: r.units_reason).items():
        yield f"  not used by {len(group.records)}: {reason}"
    failed = [r for r in records if r.error is not None]
    for error, group in grouped(failed, lambda r: r.error).items():
        yield f"  failed, {len(group.records)}: {error}"
    if sums["untimed"]:
        yield f"  without a time, {sums['untimed']}: captured into a CUDA graph"


def figure(label: str, records: Sequence[ProductRecord]) -> Any:
    """Return a figure of the total time of each kind of product."""
    groups = grouped(
        records, lambda r: f"{extents(r.m, r.n, r.k, r.batch_count)} {r.a_dtype} {r.mode}"
    )
    total_ms = {"total": [group.elapsed_ms for group in groups.values()]}
    return plotting.bar_figure(f"lowprec.profile {label}", list(groups), total_ms, "ms")
