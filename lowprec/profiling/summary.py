"""Sums over the products of a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowprec.profiling.records import ProductRecord


@dataclass
class Group:
    """Products that count as one."""

    records: list[ProductRecord] = field(default_factory=list)

    @property
    def timed(self) -> list[ProductRecord]:
        """Those with a time."""
        return [r for r in self.records if r.elapsed_ms is not None]

    @property
    def elapsed_ms(self) -> float:
        """Their time together."""
        return sum(r.elapsed_ms or 0.0 for r in self.records)

    @property
    def flops(self) -> int:
        """Of those with a time."""
        return sum(r.flops for r in self.timed)

    @property
    def tflops(self) -> float | None:
        """Rate of those with a time."""
        return self.flops / self.elapsed_ms * 1e-9 if self.elapsed_ms else None

    @property
    def peak_share(self) -> float | None:
        """Time that the device needs at its highest rate, over the time that it took; None unless known of all."""
        if not self.elapsed_ms or any(r.peak_share is None for r in self.timed):
            return None
        return sum((r.peak_share or 0.0) * (r.elapsed_ms or 0.0) for r in self.timed) / self.elapsed_ms


def grouped(records: Iterable[ProductRecord], key: Callable[[ProductRecord], Any]) -> dict[Any, Group]:
    """Return the groups of equal keys, the longest time first."""
    groups: dict[Any, Group] = {}
    for record in records:
        groups.setdefault(key(record), Group()).records.append(record)
    return dict(sorted(groups.items(), key=lambda item: -item[1].elapsed_ms))


def extents(m: int, n: int, k: int, batch_count: int) -> str:
    """Return the extents of a product in short."""
    batch = f"{batch_count} * " if batch_count != 1 else ""
    return f"{batch}{m}x{n}x{k}"


def totals(records: Sequence[ProductRecord], wall_ms: float) -> dict[str, Any]:
    """Return the sums that ``profile.totals`` documents."""
    everything = Group(list(records))
    on_units = sum(r.flops for r in everything.timed if r.units_used)
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
