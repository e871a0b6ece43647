"""A profile as files: JSON, and a time line in the Trace Event Format.

Source of the format: *Trace Event Format*, Google (complete events ``X``, metadata events ``M``; times in
microseconds).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lowprec._version import __version__
from lowprec.atomic import write_file
from lowprec.plain import finite
from lowprec.profiling.records import ProductRecord, RangeRecord
from lowprec.profiling.summary import extents

__all__ = ["document", "trace", "write_json"]

#: Rows of the time line that are streams: above the numbers of threads, and within the 31 bits that viewers read.
_FIRST_STREAM_ROW = 0x7FFF0000


def document(
    label: str,
    records: Sequence[ProductRecord],
    ranges: Sequence[RangeRecord],
    totals: dict[str, Any],
) -> dict[str, Any]:
    """Return a profile as plain values."""
    return {
        "lowprec": __version__,
        "label": label,
        "totals": totals,
        "products": [record.to_dict() for record in records],
        "ranges": [record.to_dict() for record in ranges],
    }


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON file, so that no reader finds half of it."""
    text = json.dumps(finite(value), allow_nan=False)
    write_file(path, lambda file: file.write(text.encode()))


# -- time line ------------------------------------------------------------------------------------


def trace(
    label: str, records: Sequence[ProductRecord], ranges: Sequence[RangeRecord]
) -> dict[str, Any]:
    """Return a profile in the Trace Event Format."""
    process = os.getpid()
    events = [
        _metadata(process, 0, "process_name", f"lowprec {label}".rstrip()),
        *_thread_names(process, [*records, *ranges]),
        *(_range_event(process, r) for r in ranges),
        *(_product_event(process, r.thread_id, r.start_ms, r.host_ms, r) for r in records),
        *_stream_events(process, records),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(process: int, row: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": kind, "args": {"name": name}}


def _thread_names(
    process: int, records: Iterable[ProductRecord | RangeRecord]
) -> Iterator[dict[str, Any]]:
    for row, name in {r.thread_id: r.thread for r in records}.items():
        yield _metadata(process, row, "thread_name", name)


def _range_event(process: int, record: RangeRecord) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": record.thread_id,
        "cat": "range",
        "name": record.name.rpartition("/")[2],
        "ts": 1e3 * record.start_ms,
        "dur": 1e3 * record.elapsed_ms,
        "args": {"name": record.name},
    }


def _product_event(
    process: int, row: int, start_ms: float, elapsed_ms: float, r: ProductRecord
) -> dict[str, Any]:
    numbers = r.mode if r.mode_has_effect else r.number_format
    return {
        "ph": "X",
        "pid": process,
        "tid": row,
        "cat": "product",
        "name": f"{numbers} {extents(r.m, r.n, r.k, r.batch_count)}",
        "ts": 1e3 * start_ms,
        "dur": 1e3 * elapsed_ms,
        "args": r.to_dict(),
    }


def _stream_events(process: int, records: Sequence[ProductRecord]) -> Iterator[dict[str, Any]]:
    """Yield the products that ran on streams, each as early as its stream and its submission allow."""
    rows: dict[tuple[str, int], int] = {}
    ends: dict[int, float] = {}
    for r in sorted(records, key=lambda record: record.start_ms):
        if r.stream is None or r.elapsed_ms is None:
            continue
        row = rows.setdefault((r.device, r.stream), _FIRST_STREAM_ROW + len(rows))
        if row not in ends:
            yield _metadata(process, row, "thread_name", f"{r.device}, stream {r.stream:#x}")
        start_ms = max(r.start_ms, ends.get(row, 0.0))
        ends[row] = start_ms + r.elapsed_ms
        yield _product_event(process, row, start_ms, r.elapsed_ms, r)
