"""The parts of the report: what each asks, how its process is run, and what it leaves behind in any case."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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

Case = TypeVar("Case")


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

    @contextlib.contextmanager
    def attempt(self, *, ok: bool | None = False, **words: Any) -> Iterator[None]:
        """Keep what goes wrong inside as a row with these words and the `error`, and go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one row that fails does not end the part
            self.row(ok=ok, **words, error=short(error))

    def in_time(self, cases: Iterable[Case], options: Options) -> Iterator[Case]:
        """Yield cases until the time is over; the fact `stopped_at` is the first one that is left out."""
        for case in cases:
            if options.left() < 0:
                self.fact("stopped_at", case)
                return
            yield case

    def finish(self) -> None:
        """Say that nothing is left to do."""
        self.complete = True
        self.save()

    def save(self) -> None:
        """Write the file."""
        found = {name: getattr(self, name) for name in ("complete", "facts", "rows")}
        common.write_json(self.path, common.plain(found))


def short(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


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
            # What it started may outlive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
    result = {**not_run(""), "exit": status, "elapsed_s": round(time.monotonic() - begin, 2)}
    errors = [f"stopped after {limit_s:.0f} s"] if status is None else []
    try:
        result |= reader()
        if not result["complete"] and status is not None:
            errors.append("it ended before it was done")
    except ValueError as problem:
        errors.append(str(problem))
    if errors and status:
        errors.insert(0, f"exit status {status}")
    text = log.read_text(encoding="utf-8", errors="replace")
    output = [line[:300] for line in text.splitlines()[-_KEPT_LINES:]] if errors else []
    return {**result, "error": "; ".join(errors), "output": output}


def state(result: Mapping[str, Any]) -> str:
    """Return in a few words what became of a part."""
    if result["not_run"]:
        return f"not run: {result['not_run']}"
    judged = [row["ok"] for row in result["rows"] if row["ok"] is not None]
    failed = judged.count(False)
    verdict = f"{failed} of {len(judged)} FAILED" if failed else "all well"
    words = f"{len(result['rows'])} rows, {verdict}"
    return f"{result['error']}; {words}" if result["error"] else words
