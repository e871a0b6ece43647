"""Products, guards and modes in eight threads, under signals that raise, forks and exits: a part of `stress.py`.

It runs in rounds, one process each, so that a crash or a hang is detected and ends only its round:

    python benchmarks/storm.py SEED SECONDS
"""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import importlib
import importlib.util
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import common
import numpy as np
from exact import Job, exact_operands, reference, same_bits

import lowprec
import lowprec.backends.cpu
from lowprec.policy import entries, scopes

#: Modes of the seven threads other than the main one, which alone receives signals.
MODES = ("fp32", "tf32", "bf16", "fp16", "fp32_pedantic", "tf32", "bf16")
#: (m, k, n): the last one is distributed over threads in every mode.
SHAPES = ((8, 16, 8), (33, 17, 20), (160, 96, 80), (700, 512, 300))

ROUND_SECONDS = 10.0
#: Extra seconds for the start of a round, and for the calls still running at its end.
GRACE_SECONDS = 90.0
CHILD_SECONDS = 30
#: Largest number of failures that a result describes in words.
_TOLD = 20

PACKAGE = os.path.dirname(lowprec.__file__)

#: Failures, and the claim about each.
FAILURES = {
    "crash": "rounds that crashed",
    "hang": "rounds or forked children that hung",
    "wrong": "wrong results",
    "late": "results written after an exception",
    "lost": "exceptions of handlers that did not arrive",
    "switch": "switches or modes that did not come back",
    "error": "errors of calls that should succeed",
}


class Limit(BaseException):
    """Raised by a signal handler, as KeyboardInterrupt by Ctrl-C."""


#: Exceptions of handlers: time limits of programs may be of any class.
KINDS: tuple[type[BaseException], ...] = (Limit, TimeoutError, RuntimeError, ValueError)


class Round:
    """One process of the storm."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.deadline = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.failures: list[tuple[str, str]] = []
        self.jobs = {mode: [job(self.rng, shape, mode) for shape in SHAPES] for mode in set(MODES)}
        #: The exception of the next signal; None while none is allowed.
        self.armed: type[BaseException] | None = None
        self.unraisable = 0
        self.left_alone: list[Any] = []

    def fail(self, kind: str, text: str) -> None:
        """Record a failure by its key in `FAILURES`."""
        self.failures.append((kind, f"round {self.seed}: {text}"))

    # -- all threads -----------------------------------------------------------------------------

    def multiply(self, rng: np.random.Generator, mode: str, *, out: bool = False, guarded: bool = False) -> None:
        """Multiply in a mode, set in one of several ways, maybe inside a guard, and check the result."""
        if rng.random() < 0.2:
            m, k, n = (int(x) for x in rng.integers(1, 60, 3))
            made = job(rng, (m, k, n), mode)
            self.counts["new shapes"] += 1
        else:
            made = self.jobs[mode][int(rng.choice(len(SHAPES), p=(0.4, 0.3, 0.2, 0.1)))]
        target = np.zeros_like(made.expected) if out else None
        if target is not None:
            self.left_alone.append(target)
        way = rng.integers(3)
        if way == 0:
            found = lowprec.matmul(made.a, made.b, out=target, math_mode=mode)
        elif way == 1:
            with lowprec.math_mode(mode):
                found = lowprec.matmul(made.a, made.b, out=target)
        else:
            with lowprec.math_mode("bf16"), lowprec.math_mode(mode):
                found = lowprec.matmul(made.a, made.b, out=target)
        self.counts["products"] += 1
        right = [made.expected, *([reference(made.a, made.b, "fp32")] if guarded else [])]
        if not any(same_bits(found, one) for one in right):
            self.fail("wrong", f"{made.a.shape} @ {made.b.shape} in {mode}")

    def guarded(self, rng: np.random.Generator, frameworks: bool) -> None:
        """Multiply under a guard, which disables all modes."""
        made = self.jobs["fp32"][int(rng.integers(len(SHAPES) - 1))]
        with lowprec.fp32_guard(frameworks=frameworks):
            found = lowprec.matmul(made.a, made.b, math_mode="bf16")
        self.counts["guards"] += 1
        if not same_bits(found, made.expected):
            self.fail("wrong", f"{made.a.shape} @ {made.b.shape} under a guard")

    def background(self, number: int, mode: str, start: threading.Barrier) -> None:
        """Multiply in one mode until the round or the interpreter ends."""
        rng = np.random.default_rng([self.seed, number])
        start.wait()
        try:
            while time.monotonic() < self.deadline:
                if rng.random() < 0.2:
                    self.guarded(rng, frameworks=False)
                else:
                    self.multiply(rng, mode)
        except Exception as error:  # noqa: BLE001 - whatever it is, it should not have come
            self.fail("error", f"in a thread, {mode}: {error!r}")

    # -- the main thread --------------------------------------------------------------------------

    def on_signal(self, *_: object) -> None:
        """Raise once, or multiply inside the handler."""
        kind, self.armed = self.armed, None
        if kind is None:
            return
        if self.rng.random() < 0.25:
            self.counts["products in handlers"] += 1
            self.multiply(self.rng, str(self.rng.choice(MODES)), guarded=True)
            return
        self.counts["exceptions of handlers"] += 1
        raise kind("of a handler")

    def interrupted(self, act: Callable[[], None], what: str) -> None:
        """Run an action with a signal pending; only a handler's exception may be raised by it."""
        raised, unraisable = self.counts["exceptions of handlers"], self.unraisable
        came = None
        kind = KINDS[int(self.rng.integers(len(KINDS)))]
        delay = float(10 ** self.rng.uniform(-5, -2.3))
        try:
            self.armed = kind
            signal.setitimer(signal.ITIMER_REAL, delay)
            contextvars.copy_context().run(act)
            self.armed = None
        except BaseException as error:  # noqa: BLE001 - looked at below
            self.armed = None
            came = error
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._settle(came, kind, raised, unraisable, what)

    def _settle(self, came: Any, kind: type[BaseException], raised: int, unraisable: int, what: str) -> None:
        was_raised = self.counts["exceptions of handlers"] > raised
        if was_raised and came is None and self.unraisable == unraisable:
            self.fail("lost", f"{kind.__name__} {what}")
        elif came is not None and not (was_raised and type(came) is kind):
            self.fail("error", f"{what}: {came!r}")
        self.counts[f"interrupted {what}"] += was_raised
        for hold in list(entries.holds):  # of a signal before the end of ``__exit__``
            self.counts["blocks left open"] += 1
            scopes._restore(hold)
        # The caller may write again to the results of interrupted calls.
        for array in self.left_alone:
            array.fill(7)
        self.multiply(self.rng, str(self.rng.choice(MODES)))
        if not all((array == 7).all() for array in self.left_alone):
            self.fail("late", what)
        self.left_alone.clear()

    def struck_guard(self, at: int, frameworks: bool) -> bool:
        """Raise at the given signal check while scopes are entered and left; return False if there are fewer checks."""

        def act() -> None:
            with lowprec.math_mode("tf32", frameworks=frameworks), lowprec.fp32_guard(frameworks=frameworks):
                pass

        kind = KINDS[at % len(KINDS)]
        passed = 0

        def look(frame: Any, event: str, _: object) -> None:
            nonlocal passed
            if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
                passed += 1
                if passed > at:
                    sys.setprofile(None)
                    self.counts["exceptions of handlers"] += 1
                    raise kind("of a handler")

        raised, unraisable = self.counts["exceptions of handlers"], self.unraisable
        came = None
        sys.setprofile(look)
        try:
            contextvars.copy_context().run(act)
        except BaseException as error:  # noqa: BLE001 - looked at below
            came = error
        sys.setprofile(None)
        self._settle(came, kind, raised, unraisable, "a guard")
        return passed > at

    def fork(self) -> None:
        """Fork a child that multiplies and enters a guard, while the other threads continue."""
        self.counts["forks"] += 1
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_SECONDS)
            before = len(self.failures)
            with contextlib.suppress(BaseException):
                for mode in MODES[:4]:
                    self.multiply(self.rng, mode)
                self.guarded(self.rng, frameworks=True)
                os._exit(10 if len(self.failures) > before else 0)
            os._exit(11)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            kinds = {-signal.SIGALRM: "hang", 10: "wrong", 11: "error"}
            self.fail(kinds.get(status, "crash"), f"a forked child ended with {status}")

    def main(self, switches: Callable[[], Any], frameworks: bool) -> None:
        """Run the main thread, which receives the signals."""
        before, at, struck = switches(), 0, True
        while time.monotonic() < self.deadline:
            choice = self.rng.random()
            if choice < 0.5:
                multiply = partial(self.multiply, self.rng, str(self.rng.choice(MODES)), out=True)
                self.interrupted(multiply, "in matmul")
            elif choice < 0.7:
                self.interrupted(partial(self.guarded, self.rng, frameworks), "around a guard")
            elif choice < 0.95:
                at = at + 1 if struck else 0
                struck = self.struck_guard(at, frameworks)
            else:
                self.fork()
            now = switches()
            if now != before:
                self.fail("switch", f"{before} became {now}")
                before = now


def job(rng: np.random.Generator, shape: Sequence[int], mode: str) -> Job:
    """Return a product of this shape with its result in a mode."""
    a, b = exact_operands(rng, *shape)
    return Job(a, b, reference(a, b, mode))


def switches_of(libraries: Sequence[str]) -> Callable[[], Any]:
    """Load libraries, and return a function that reads their switches and lowprec's mode."""
    readers: list[Callable[[], Any]] = [lowprec.get_math_mode]
    if "torch" in libraries:
        import torch

        torch.set_float32_matmul_precision("high")
        readers += [torch.get_float32_matmul_precision, lambda: torch.backends.cuda.matmul.allow_tf32]
    return lambda: [str(reader()) for reader in readers]


def run_round(seed: int, seconds: float) -> int:
    """Run one round: print the events, then end in one of several ways."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(seed)
    libraries = ["torch"] if seed % 2 and importlib.util.find_spec("torch") else []
    switches = switches_of(libraries)
    this = Round(seed, seconds)
    signal.signal(signal.SIGALRM, this.on_signal)

    def unraisable(_: object) -> None:
        this.unraisable += 1

    sys.unraisablehook = unraisable
    start = threading.Barrier(len(MODES) + 1)
    others = [
        threading.Thread(target=this.background, args=(i, mode, start), daemon=True) for i, mode in enumerate(MODES)
    ]
    for other in others:
        other.start()
    # The first products of the process, concurrently.
    start.wait()
    for mode in dict.fromkeys(MODES):
        this.multiply(this.rng, mode)
    # Python's import is not safe against handlers that raise, so lazy imports are done first.
    for module in pkgutil.walk_packages(lowprec.backends.cpu.__path__, "lowprec.backends.cpu."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    for mode in dict.fromkeys(MODES):
        for made in this.jobs[mode]:
            lowprec.matmul(made.a, made.b, math_mode=mode)
    this.main(switches, frameworks=bool(libraries))
    runs_on = bool(rng.integers(2))
    if runs_on:
        this.counts["exits with running threads"] += 1
        this.deadline = float("inf")  # for threads that still read it
    else:
        for other in others:
            other.join()
    this.counts["exceptions in finalisers"] = this.unraisable
    print(json.dumps({"counts": this.counts, "failures": this.failures}), flush=True)
    return 0


# -- the parent -----------------------------------------------------------------------------------


def run(seconds: float, seed: int = 0) -> dict[str, Any]:
    """Run rounds for this many seconds; return the numbers of events and of failures, by kind."""
    counts: Counter[str] = Counter()
    failures: list[tuple[str, str]] = []
    begin, rounds = time.monotonic(), 0
    while (left := seconds - (time.monotonic() - begin)) > 0:
        for found in _round(seed * 100_000 + rounds, min(left, ROUND_SECONDS)):
            counts.update(found.get("counts", {}))
            failures += found["failures"]
        rounds += 1
    by_kind = Counter(kind for kind, _ in failures)
    return {
        "test": "storm",
        "seconds": time.monotonic() - begin,
        "rounds": rounds,
        "threads": len(MODES) + 1,
        "counts": dict(sorted(counts.items())),
        "failures": {kind: by_kind[kind] for kind in FAILURES},
        "told": [text for _, text in failures[:_TOLD]],
    }


def _round(seed: int, seconds: float) -> Iterator[dict[str, Any]]:
    command = [sys.executable, __file__, str(seed), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler prints the stack of every thread
            _, err = process.communicate()
            yield {"failures": [("hang", f"round {seed}: {err[-4000:]}")]}
            return
    if out:
        yield json.loads(out.splitlines()[-1])
    if process.returncode or not out or err:
        why = f"round {seed} ended with {process.returncode}: {err[-4000:]}"
        yield {"failures": [("crash", why)]}


def claims(result: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the claims about a storm (None: it did not run)."""
    failures = {} if result is None else result["failures"]
    return [common.claim(f"storm: {what}", failures.get(kind), 0, at_most=True) for kind, what in FAILURES.items()]


if __name__ == "__main__":
    sys.exit(run_round(int(sys.argv[1]), float(sys.argv[2])))
