"""The parts of the report: their questions, their processes, and their results after any end."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import common

#: Seconds for all parts of a run together, less than the ten minutes for which a machine may be lent, and the share of
#: its limit after which a part should end by itself.
TOTAL_S, GRACE = 580.0, 0.9
#: Set by a signal: the running part is stopped, and no other begins.
INTERRUPTED = threading.Event()

#: By part: seconds after which it is stopped, its module under `gpu`, and its question.
MEASUREMENTS = {
    "device": (40, "device", "Which machine, which versions?"),
    "smoke": (60, "smoke", "Does each feature work at all?"),
    "compiling": (50, "compiling", "Are all kernels compiled, into the cache of the other parts?"),
    "accuracy": (55, "correctness", "Is every error within the plan's bound?"),
    "override": (
        12,
        "numerics",
        "What do compute types and handles round without NVIDIA_TF32_OVERRIDE?",
    ),
    "override-0": (12, "numerics", "What with NVIDIA_TF32_OVERRIDE=0?"),
    "override-1": (12, "numerics", "What with NVIDIA_TF32_OVERRIDE=1?"),
    "rounding": (15, "numerics", "How does FAST_TF32 round its operands?"),
    "accumulation": (
        30,
        "numerics",
        "How are sums rounded: of tensor cores, of a split inner dimension?",
    ),
    "quantizing": (
        40,
        "speed",
        "How exact and how fast are the modes that quantise, compared with bf16?",
    ),
    "host": (30, "host", "How long is the host busy with a small product?"),
    "speed": (150, "speed", "How fast compared with PyTorch?"),
    "splits": (
        55,
        "schemes",
        "How exact and how fast are the schemes that recover FP32, by chunk of k?",
    ),
    "formats": (
        80,
        "speed",
        "How exact and how fast are emulated, block-scaled and 2:4 sparse products?",
    ),
    "ordering": (
        30,
        "ordering",
        "Does lowprec wait for JAX's pending work, and JAX for lowprec's?",
    ),
    "limits": (60, "correctness", "Are long leading dimensions and 2^31 elements right?"),
}
#: Seconds of a module of tests, of some by name, and of those of the first run together.
TESTS_S, TESTS_BY_NAME_S, ALL_TESTS_S = (
    50,
    {"test_programs": 90, "test_products": 80, "test_kernels": 90},
    220,
)
#: All other modules of tests.
OTHER_TESTS = "test_*"
#: The parts of two runs, in the order of their value: a GPU may be available for minutes. The second run has the time
#: of the claims about speed; tests of the kernels alone show least.
RUNS = {
    "first": (
        "device", "smoke", "compiling", "accuracy", "test_programs", "override", "override-0", "override-1", "rounding",
        "accumulation", "test_cublas_handle", "test_products", OTHER_TESTS, "test_quantizing", "quantizing", "host",
    ),
    "second": ("device", "compiling", "speed", "splits", "formats", "ordering", "limits", "test_kernels"),
}  # fmt: skip
#: Measurements that run on the software CUDA, too, if the tests' variable asks for it.
IN_SOFTWARE = (
    "smoke",
    "accuracy",
    "override",
    "override-0",
    "override-1",
    "rounding",
    "accumulation",
)
#: Set to the rest of a part's name behind "-"; unset in other parts.
OVERRIDE = "NVIDIA_TF32_OVERRIDE"

Case = TypeVar("Case")
Result = dict[str, Any]


def run_order(run: str, tests: Iterable[str]) -> list[str]:
    """Return the parts of a run, these modules of tests included, in the order in which they run."""
    named = [name for names in RUNS.values() for name in names]
    others = [test for test in tests if test not in named]
    order: list[str] = []
    for name in RUNS[run]:
        order += others if name == OTHER_TESTS else [name]
    return order


def limits(tests: Iterable[str]) -> dict[str, float]:
    """Return the seconds of each part, in the order of both runs."""
    order = dict.fromkeys(name for run in RUNS for name in run_order(run, tests))
    return {
        n: MEASUREMENTS[n][0] if n in MEASUREMENTS else TESTS_BY_NAME_S.get(n, TESTS_S)
        for n in order
    }


def question(name: str) -> str:
    return (
        MEASUREMENTS[name][-1]
        if name in MEASUREMENTS
        else "Which features work, by the tests with the marker?"
    )


def runner(name: str) -> Callable[[Part, Options], None]:
    """Return the function of a measurement, which adds its rows to a part."""
    return getattr(importlib.import_module(f"gpu.{MEASUREMENTS[name][1]}"), name.partition("-")[0])


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

    def save(self) -> None:
        content = {name: getattr(self, name) for name in ("complete", "facts", "rows")}
        common.write_json(self.path, common.plain(content))


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


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
    command: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str],
    reader: Callable[[], Result],
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
    rows = result["rows"]
    judged = [row["ok"] for row in rows if row["ok"] is not None]
    failed = judged.count(False)
    refused = sum(row["ok"] is None and bool(row.get("error")) for row in rows)
    verdicts = [f"{failed} of {len(judged)} FAILED"] * bool(failed) + [
        f"{refused} with an ERROR"
    ] * bool(refused)
    words = ", ".join(
        [f"{len(rows)} rows", *(verdicts or ["all well" if judged else "none of them judged"])]
    )
    return f"{result['error']}; {words}" if result["error"] else words
