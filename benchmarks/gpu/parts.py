"""The parts of the report: their questions, their processes, and their results after any end."""

from __future__ import annotations

import contextlib
import importlib
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

#: Seconds for all parts together, and the share of its limit after which a part should end by itself.
TOTAL_S, GRACE = 450.0, 0.9
#: Set by a signal: the running part is stopped, and no other begins.
INTERRUPTED = threading.Event()

#: By part: seconds after which it is stopped, its module under `gpu`, and its question. A GPU may be available for
#: minutes, so that they are in the order of their value: first the questions that nothing else answers, then those of
#: numerics, the tests, and the claims.
MEASUREMENTS = {
    "device": (45, "device", "Which machine, which versions?"),
    "products": (60, "correctness", "Does one product per element type and mode run, and is it right?"),
    "streams": (30, "acceptance", "Do copies, kernels and products take the stream handles 1 and 2?"),
    "launch": (20, "acceptance", "Does cuLaunchKernel take a CUkernel as a CUfunction?"),
    "graphs": (40, "correctness", "Are replays of a captured product right between products outside the graph?"),
    "shapes": (60, "correctness", "Do FP8, scales, few rows, bias in batches, and int8 run, and are they right?"),
    "limits": (60, "correctness", "Are batches of 65,536, long leading dimensions and 2^31 elements right?"),
    "packing": (60, "packing", "How fast are packing relative to a copy, and fused relative to separate epilogues?"),
    "override": (15, "numerics", "What do compute types and handles round without NVIDIA_TF32_OVERRIDE?"),
    "override-0": (15, "numerics", "What with NVIDIA_TF32_OVERRIDE=0?"),
    "override-1": (15, "numerics", "What with NVIDIA_TF32_OVERRIDE=1?"),
    "rounding": (20, "numerics", "How does FAST_TF32 round its operands?"),
    "accumulation": (20, "numerics", "How are sums rounded: of tensor cores, with C, of a split inner dimension?"),
    "epilogues": (15, "acceptance", "Which epilogues does cuBLASLt take for which types?"),
    "extents": (15, "acceptance", "From which extents on does TF32 run on tensor cores, and int8 at all?"),
    "accuracy": (55, "correctness", "Is every error within the plan's bound?"),
    "host": (40, "host", "How long is the host busy with a small product?"),
    "speed": (60, "speed", "How fast compared with torch, CuPy and nvmath?"),
    "splits": (40, "schemes", "How exact and how fast are the schemes that recover FP32, by chunk of k?"),
    "heuristics": (30, "speed", "How far is the first choice from the best of 32?"),
    "ordering": (30, "ordering", "Does lowprec wait for JAX's pending work, and JAX for lowprec's?"),
    "emulation": (30, "schemes", "How exact and how fast is cuBLAS's own emulation of FP32 and FP64?"),
    "blocks": (25, "schemes", "How exact and how fast are block-scaled products compared with bfloat16?"),
    "quantizing": (30, "schemes", "How exact and how fast are the modes that quantise compared with bf16?"),
    "sparse": (30, "schemes", "How fast is a 2:4 sparse weight of 16 bits compared with the dense one?"),
}
#: The tests come before this measurement; seconds of one module of them, and of all.
TESTS_BEFORE, TESTS_S, ALL_TESTS_S = "accuracy", 50, 120
#: Tests of the kernels alone take longest and show least: they come last.
LAST_TESTS, LAST_TESTS_S = "test_kernels", 60
#: Set to the rest of a part's name behind "-"; unset in other parts.
OVERRIDE = "NVIDIA_TF32_OVERRIDE"

Case = TypeVar("Case")
Result = dict[str, Any]


def limits(tests: Iterable[str]) -> dict[str, float]:
    """Return the seconds of each part, those of these modules of tests included, in the order in which they run."""
    seconds_of: dict[str, float] = {}
    for name, (seconds, *_) in MEASUREMENTS.items():
        if name == TESTS_BEFORE:
            seconds_of |= {test: TESTS_S for test in tests if test != LAST_TESTS}
        seconds_of[name] = seconds
    return seconds_of | ({LAST_TESTS: LAST_TESTS_S} if LAST_TESTS in tests else {})


def question(name: str) -> str:
    return MEASUREMENTS[name][-1] if name in MEASUREMENTS else "Which features work, by the tests with the marker?"


def runner(name: str) -> Callable[[Part, Options], None]:
    """Return the function of a measurement, which adds its rows to a part."""
    function: Callable[[Part, Options], None]
    function = getattr(importlib.import_module(f"gpu.{MEASUREMENTS[name][1]}"), name.partition("-")[0])
    return function


@dataclass(frozen=True)
class Options:
    """Whether tiny sizes suffice, the seed, and the time of `time.monotonic` at which a part should be done."""

    quick: bool
    seed: int
    deadline: float = math.inf


@dataclass
class Part:
    """The results of a part, on disk after every addition: a crash loses no earlier result."""

    path: Path
    complete: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def fact(self, name: str, value: Any) -> None:
        """Keep one fact of the part as a whole."""
        self.facts[name] = value
        self.save()

    def row(self, *, ok: bool | None = None, **values: Any) -> None:
        """Keep one row; `ok` is whether the result is as it should be, None where that is unknown."""
        self.rows.append({**values, "ok": ok})
        self.save()

    @contextlib.contextmanager
    def attempt(self, *, ok: bool | None = False, **words: Any) -> Iterator[None]:
        """Keep an exception as a row with these words and the `error`, and go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a row that fails does not end the part
            self.row(ok=ok, **words, error=short(error))

    def in_time(self, cases: Iterable[Case], options: Options) -> Iterator[Case]:
        """Yield cases until the time is over; the fact `stopped_at` is the first omitted one."""
        for case in cases:
            if time.monotonic() > options.deadline:
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
        self.complete = True
        self.save()

    def save(self) -> None:
        content = {name: getattr(self, name) for name in ("complete", "facts", "rows")}
        common.write_json(self.path, common.plain(content))


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def opened(path: Path) -> Part:
    """Return a part with the results of an earlier process of it."""
    return Part(path, **(read(path) if path.exists() else {}))


def read(path: Path) -> Result:
    """Return the results in the file of a part; a ValueError if there are none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError("it wrote nothing") from None
    except ValueError:
        raise ValueError("its file is no JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ValueError("its file is no part of a report")
    return content


def not_run(why: str) -> Result:
    """Return the result of a part that was not started."""
    return {
        "not_run": why, "complete": False, "facts": {}, "rows": [], "exit": None, "error": "",
        "output": [], "elapsed_s": 0.0,
    }  # fmt: skip


def execute(
    command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str], reader: Callable[[], Result]
) -> Result:
    """Run a part in a process and return its result, whatever its end.

    After `limit_s`, or if this process is interrupted, it is killed, with all processes that it started. `reader`
    returns the results that the part wrote (`complete`, `facts`, `rows`), or raises. The result adds `elapsed_s`, the
    exit status (`exit`, None if it had to be stopped), `error` (empty without one), and with an error the end of the
    output.
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
            # Its children may outlive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            # A process in a call of the driver that does not return cannot be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
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
    except Exception as problem:  # noqa: BLE001 - an unreadable part does not end the report
        errors.append(f"its file cannot be read: {short(problem)}")
    if errors and status:
        errors.insert(0, f"exit status {status}")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:] if errors else []
    return {**result, "error": "; ".join(errors), "output": [line[:300] for line in lines]}


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return the exit status; None if the time is over before, or the report is to end."""
    while not INTERRUPTED.is_set() and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(0.2, deadline - time.monotonic()))
    return process.poll()


def state(result: Mapping[str, Any]) -> str:
    if result["not_run"]:
        return f"not run: {result['not_run']}"
    judged = [row["ok"] for row in result["rows"] if row["ok"] is not None]
    failed = judged.count(False)
    words = f"{len(result['rows'])} rows, {f'{failed} of {len(judged)} FAILED' if failed else 'all well'}"
    return f"{result['error']}; {words}" if result["error"] else words
