"""The parts of the report: what each asks, how its process is run, and what it leaves behind in any case."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common

#: Seconds for all parts together, and the share of its own limit after which a part should end by itself.
TOTAL_S, GRACE = 470.0, 0.9
#: Lines of a failing part's output that the report keeps; the log has all.
_KEPT_LINES = 15

#: By part: seconds after which it is stopped, and what it asks. What matters most comes first, as time may run out; the
#: tests come after the first part.
MEASUREMENTS = {
    "device": (40, "Which machine, which versions?"),
    "accuracy": (60, "Is every error within the plan's bound?"),
    "host": (25, "How long is the host busy with a small product?"),
    "speed": (120, "How fast beside torch, CuPy and nvmath?"),
    "override": (15, "What do compute types and handles round, NVIDIA_TF32_OVERRIDE not being set?"),
    "override-0": (15, "What with NVIDIA_TF32_OVERRIDE=0?"),
    "override-1": (15, "What with NVIDIA_TF32_OVERRIDE=1?"),
    "rounding": (15, "How does FAST_TF32 round its operands?"),
    "accumulation": (25, "How are sums rounded: of tensor cores, with C, of a split inner dimension?"),
    "epilogues": (20, "Which epilogues does cuBLASLt take for which types?"),
    "splits": (40, "How exact and how fast are three products of 16 bits, six of bfloat16?"),
    "heuristics": (30, "How far is the first choice from the best of 32?"),
}  # fmt: skip
TESTS_S = 100
#: Set to what stands behind a part's name, and to nothing elsewhere.
OVERRIDE = "NVIDIA_TF32_OVERRIDE"


@dataclass(frozen=True)
class Options:
    """What a part is told: whether tiny sizes do, and when, on the clock of `time.monotonic`, it had better be done."""

    quick: bool
    seed: int
    deadline: float = math.inf

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.deadline - time.monotonic()


@dataclass
class Part:
    """What a part has found, on disk after every addition: a crash loses nothing that was found before."""

    path: Path
    complete: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def fact(self, name: str, value: Any) -> None:
        """Keep one fact of the part as a whole."""
        self.facts[name] = value
        self.save()

    def row(self, *, ok: bool | None = None, **values: Any) -> None:
        """Keep one row; `ok` says whether what was looked at is as it should be, None where nothing says how."""
        self.rows.append({**values, "ok": ok})
        self.save()

    def finish(self) -> None:
        """Say that nothing is left to do."""
        self.complete = True
        self.save()

    def save(self) -> None:
        """Write the file."""
        found = {name: getattr(self, name) for name in ("complete", "facts", "rows")}
        common.write_json(self.path, common.plain(found))


def read(path: Path) -> dict[str, Any]:
    """Return what a part wrote; a ValueError if that is not the file of a part."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError("it wrote nothing") from None
    except ValueError:
        raise ValueError("what it wrote is no JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise ValueError("what it wrote is no part of a report")
    return found


def not_run(why: str) -> dict[str, Any]:
    """Return the result of a part that was not started."""
    return {
        "not_run": why, "complete": False, "facts": {}, "rows": [], "exit": None, "error": "",
        "output": [], "elapsed_s": 0.0,
    }  # fmt: skip


def execute(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str],
    reader: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Run a part in a process and return its result, whatever becomes of it.

    After `limit_s` the process is killed, with all that it started. `reader` returns what the part left behind
    (`complete`, `facts`, `rows`), or raises ValueError if that is nothing. The result adds `elapsed_s`, the exit status
    (`exit`, None if it had to be stopped), `error` (empty if all is well), and the end of the output where it is not.
    """
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=dict(environment), start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill(process)
    result = {**not_run(""), "exit": status, "elapsed_s": round(time.monotonic() - begin, 2)}
    errors = [f"stopped after {limit_s:.0f} s"] if status is None else []
    try:
        result |= reader()
    except ValueError as problem:
        errors.append(str(problem))
    else:
        if not result["complete"] and status is not None:
            errors.append("it ended before it was done")
    if errors and status:
        errors.insert(0, f"exit status {status}")
    return {**result, "error": "; ".join(errors), "output": tail(log) if errors else []}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group: what it started may outlive it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line[:300] for line in text.splitlines()[-_KEPT_LINES:]]


def state(result: Mapping[str, Any]) -> str:
    """Return in a few words what became of a part."""
    if result["not_run"]:
        return f"not run: {result['not_run']}"
    judged = [row["ok"] for row in result["rows"] if row["ok"] is not None]
    failed = judged.count(False)
    words = f"{len(result['rows'])} rows, " + (
        f"{failed} of {len(judged)} FAILED" if failed else "all well"
    )
    return f"{result['error']}; {words}" if result["error"] else words
