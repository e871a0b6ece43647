"""The parts of the report: what each asks, how its process is run, and what it leaves behind in any case."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import common

#: Seconds for all parts together, and the share of its own limit after which a part should end by itself.
TOTAL_S, GRACE = 450.0, 0.9
#: Set where the report itself was told to end: the part that runs is stopped, and no other begins.
INTERRUPTED = threading.Event()
#: Seconds between two looks at it.
_PATIENCE_S = 0.2
#: Seconds for a killed process to end.
_KILLED_S = 5.0
#: Lines of a failing part's output that the report keeps; the log has all.
_KEPT_LINES = 15

#: By part: seconds after which it is stopped, and what it asks. A GPU may be there for minutes, so that they are in the
#: order of their value: what nothing else can answer first, then the questions of numerics, the tests, and the claims.
MEASUREMENTS = {
    "device": (45, "Which machine, which versions?"),
    "products": (60, "Does one product per element type and mode run, and is it right?"),
    "streams": (30, "Do copies, kernels and products take the stream handles 1 and 2?"),
    "launch": (20, "Does cuLaunchKernel take a CUkernel as a CUfunction?"),
    "graphs": (40, "Are replays of a captured product right between products outside the graph?"),
    "shapes": (60, "Do FP8 with and without scales, few rows, bias in batches, and int8 run, and are they right?"),
    "limits": (60, "Are batches of 65,536, long leading dimensions and 2^31 elements right?"),
    "packing": (60, "How fast do operands pack beside a copy, and fused epilogues beside separate kernels?"),
    "override": (15, "What do compute types and handles round, NVIDIA_TF32_OVERRIDE not being set?"),
    "override-0": (15, "What with NVIDIA_TF32_OVERRIDE=0?"),
    "override-1": (15, "What with NVIDIA_TF32_OVERRIDE=1?"),
    "rounding": (20, "How does FAST_TF32 round its operands?"),
    "accumulation": (20, "How are sums rounded: of tensor cores, with C, of a split inner dimension?"),
    "epilogues": (15, "Which epilogues does cuBLASLt take for which types?"),
    "extents": (15, "From which extents on does TF32 run on tensor cores, does int8 run at all? May C and D differ?"),
    "accuracy": (55, "Is every error within the plan's bound?"),
    "host": (40, "How long is the host busy with a small product?"),
    "speed": (60, "How fast beside torch, CuPy and nvmath?"),
    "splits": (40, "How exact and how fast are the schemes that recover FP32, by chunk of k?"),
    "heuristics": (30, "How far is the first choice from the best of 32?"),
    "ordering": (30, "Does lowprec wait for JAX's pending work, and JAX for lowprec's?"),
    "emulation": (30, "How exact and how fast is cuBLAS's own emulation of FP32 and FP64?"),
    "blocks": (25, "How exact and how fast are block-scaled products beside bfloat16?"),
    "sparse": (30, "How fast is a 2:4 sparse weight of 16 bits beside the dense one?"),
}  # fmt: skip
#: The tests come before this measurement; seconds of one module of them, and of all.
TESTS_BEFORE, TESTS_S, ALL_TESTS_S = "accuracy", 50, 120
#: Tests of the kernels alone take longest and say least: they come last.
LAST_TESTS, LAST_TESTS_S = "test_kernels", 60
TESTS_QUESTION = "Which features work, by the tests that bear the marker?"
#: Set to what stands behind a part's name, and to nothing elsewhere.
OVERRIDE = "NVIDIA_TF32_OVERRIDE"

Case = TypeVar("Case")


def limits(tests: Iterable[str]) -> dict[str, float]:
    """Return the seconds of each part, those of these modules of tests included, in the order in which they run."""
    found: dict[str, float] = {}
    first = [name for name in tests if name != LAST_TESTS]
    for name, (seconds, _) in MEASUREMENTS.items():
        if name == TESTS_BEFORE:
            found |= dict.fromkeys(first, TESTS_S)
        found[name] = seconds
    return found | ({LAST_TESTS: LAST_TESTS_S} if LAST_TESTS in tests else {})


def question(name: str) -> str:
    """Return what a part asks."""
    return MEASUREMENTS[name][1] if name in MEASUREMENTS else TESTS_QUESTION


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

    def one_by_one(self, cases: Iterable[Case], options: Options, is_broken: Callable[[], bool]) -> Iterator[Case]:
        """Yield cases that add one row each; after a row of a broken context, the process starts again behind it."""
        for case in self.in_time(itertools.islice(cases, len(self.rows), None), options):
            yield case
            if self.rows[-1]["ok"] is False and is_broken():
                sys.stdout.flush()
                os.execv(sys.executable, sys.orig_argv)

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


def opened(path: Path) -> Part:
    """Return a part with what an earlier process of it has found."""
    found = read(path) if path.exists() else {}
    return Part(path, **found)


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

    After `limit_s`, or if this process is interrupted, it is killed, with all that it started. `reader` returns what
    the part left behind (`complete`, `facts`, `rows`), or raises if that is nothing. The result adds `elapsed_s`, the
    exit status (`exit`, None if it had to be stopped), `error` (empty if all is well), and the end of the output where
    it is not.
    """
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=dict(environment), start_new_session=True,
        )  # fmt: skip
        try:
            status = _wait(process, begin + limit_s)
        finally:
            # What it started may outlive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            # A process in a call of the driver that does not return cannot be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
    result = {**not_run(""), "exit": status, "elapsed_s": round(time.monotonic() - begin, 2)}
    errors = []
    if status is None:
        errors.append("interrupted" if INTERRUPTED.is_set() else f"stopped after {limit_s:.0f} s")
    try:
        result |= reader()
        if not result["complete"] and status is not None:
            errors.append("it ended before it was done")
    except ValueError as problem:
        errors.append(str(problem))
    except Exception as problem:  # noqa: BLE001 - whatever a part leaves behind, the report goes on
        errors.append(f"what it wrote cannot be read: {short(problem)}")
    if errors and status:
        errors.insert(0, f"exit status {status}")
    text = log.read_text(encoding="utf-8", errors="replace")
    output = [line[:300] for line in text.splitlines()[-_KEPT_LINES:]] if errors else []
    return {**result, "error": "; ".join(errors), "output": output}


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return the exit status; None if the time is over before, or the report is to end."""
    while not INTERRUPTED.is_set() and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(_PATIENCE_S, deadline - time.monotonic()))
    return process.poll()


def state(result: Mapping[str, Any]) -> str:
    """Return in a few words what became of a part."""
    if result["not_run"]:
        return f"not run: {result['not_run']}"
    judged = [row["ok"] for row in result["rows"] if row["ok"] is not None]
    failed = judged.count(False)
    verdict = f"{failed} of {len(judged)} FAILED" if failed else "all well"
    words = f"{len(result['rows'])} rows, {verdict}"
    return f"{result['error']}; {words}" if result["error"] else words
