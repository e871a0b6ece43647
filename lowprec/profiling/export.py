"""A profile as files: JSON, and a time line in the Trace Event Format.

Source of the format: *Trace Event Format*, Google (complete events ``X``, metadata events ``M``; times in
microseconds).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from lowprec.profiling.records import ProductRecord, RangeRecord
from lowprec.profiling.summary import extents
from lowprec.util.atomic import write_file
from lowprec.util.plain import finite

#: Rows of the time line that are streams: above the numbers of threads, and within the 31 bits that viewers read.
_FIRST_STREAM_ROW = 0x7FFF0000


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON file, so that no reader finds half of it."""
    text = json.dumps(finite(value), allow_nan=False)
    write_file(path, lambda file: file.write(text.encode()))


def trace(label: str, records: Sequence[ProductRecord], ranges: Sequence[RangeRecord]) -> dict[str, Any]:
    """Return a profile in the Trace Event Format."""
    rows = {r.thread_id: r.thread for r in records} | {r.thread_id: r.thread for r in ranges}
    events = [
        _event("M", 0, "process_name", {"name": f"lowprec {label}".rstrip()}),
        *(_row_name(row, name) for row, name in rows.items()),
        *map(_range, ranges),
        *(_product(r.thread_id, r.start_ms, r.host_ms, r) for r in records),
        *_on_streams(records),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(phase: str, row: int, name: str, args: Any, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": os.getpid(), "tid": row, "name": name, **fields, "args": args}


def _row_name(row: int, name: str) -> dict[str, Any]:
    return _event("M", row, "thread_name", {"name": name})


def _range(r: RangeRecord) -> dict[str, Any]:
    *_, name = r.name.rpartition("/")
    ts, dur = 1e3 * r.start_ms, 1e3 * r.elapsed_ms
    return _event("X", r.thread_id, name, {"name": r.name}, cat="range", ts=ts, dur=dur)


def _product(row: int, start_ms: float, elapsed_ms: float, r: ProductRecord) -> dict[str, Any]:
    numbers = r.mode if r.mode_has_effect else r.number_format
    name = f"{numbers} {extents(r.m, r.n, r.k, r.batch_count)}"
    ts, dur = 1e3 * start_ms, 1e3 * elapsed_ms
    return _event("X", row, name, r.to_dict(), cat="product", ts=ts, dur=dur)


def _on_streams(records: Sequence[ProductRecord]) -> Iterator[dict[str, Any]]:
    rows: dict[tuple[str, int], int] = {}
    ends: dict[int, float] = {}
    for r in sorted(records, key=lambda record: record.start_ms):
        if r.stream is None or r.elapsed_ms is None:
            continue
        row = rows.setdefault((r.device, r.stream), _FIRST_STREAM_ROW + len(rows))
        if row not in ends:
            yield _row_name(row, f"{r.device}, stream {r.stream:#x}")
        start_ms = max(r.start_ms, ends.get(row, 0.0))
        ends[row] = start_ms + r.elapsed_ms
        yield _product(row, start_ms, r.elapsed_ms, r)
