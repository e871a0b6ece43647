"""One process of the stress test: products, guards and forks in eight threads, under signals whose handlers raise.

usage: python benchmarks/turmoil.py SECONDS SEED   (a child of stress.py; prints one line of JSON)

Every product has one right bit pattern. The main thread is struck by exceptions at random moments; after each of them
every switch of PyTorch must be as it was, nobody may write into the operands any more, and the exception must have
arrived. The process ends with its threads still multiplying.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import stress

import lowprec

THREADS = 8
MODES = ("fp32", "tf32", "bf16", "fp16")
#: A sentinel that no product gives.
SENTINEL = np.float32(-77.5)
POLICY = str(Path(lowprec.__file__).parent / "policy")


class Struck(Exception):
    """What a signal handler raises."""


class StruckTimeout(TimeoutError):
    """The same, as a time limit has it: an OSError, which careless code takes for one of its own."""


KINDS = (Struck, StruckTimeout, KeyboardInterrupt)


class Turmoil:
    """The state of one process: what was counted, what went wrong."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.raised = 0
        self.armed: type[BaseException] | None = None
        self.jobs = [self.job(*shape) for shape in ((8, 16, 8), (33, 17, 20), (160, 96, 80))]
        self.jobs += [self.job(512, 512, 512), self.job(700, 300, 500)]
        self.torch: Any = None
        with contextlib.suppress(ImportError):
            import torch

            self.torch = torch
        self.switches = self.read_switches()

    def job(self, m: int, k: int, n: int) -> tuple[Any, Any, dict[str, Any]]:
        a, b = stress.exact_operands(self.numpy, m, k, n)
        return a, b, {mode: stress.reference(a, b, mode) for mode in MODES}

    def read_switches(self) -> Any:
        if self.torch is None:
            return None
        backends = self.torch.backends
        return (
            self.torch.get_float32_matmul_precision(),
            backends.cuda.matmul.allow_tf32,
            getattr(backends.mkldnn.matmul, "fp32_precision", None),
        )

    # -- actions ------------------------------------------------------------------------------

    def product(self, rng: random.Random, guarded: bool = False) -> None:
        a, b, expected = rng.choice(self.jobs)
        mode = rng.choice(MODES)
        right = expected["fp32" if guarded else mode]
        how = rng.randrange(3)
        if how == 0:
            found = lowprec.matmul(a, b, math_mode=mode)
        elif how == 1:
            with lowprec.math_mode(mode):
                found = lowprec.matmul(a, b)
        else:
            found = np.full(right.shape, SENTINEL)
            try:
                lowprec.matmul(a, b, out=found, math_mode=mode)
            except BaseException:
                self.check_untouched(found)
                raise
        self.counts["products"] += 1
        if found.tobytes() != right.tobytes():
            self.wrong.append(f"a product in {mode} of shape {found.shape} has other bits")

    def check_untouched(self, out: Any) -> None:
        """After the raise nobody writes any more; a second strike while this looks only ends the look."""
        out[...] = SENTINEL
        time.sleep(0.001)
        if not (out == SENTINEL).all():
            self.wrong.append("out was written after matmul had raised")

    def new_shape(self, rng: random.Random) -> None:
        m, k, n = (rng.randrange(1, 60) for _ in range(3))
        a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        if not (lowprec.matmul(a, b, math_mode=rng.choice(MODES)) == k).all():
            self.wrong.append(f"a product of ones of shape {(m, k, n)} is wrong")
        self.counts["new shapes"] += 1

    def guard(self, rng: random.Random) -> None:
        how = rng.randrange(4)
        if how == 0:
            with lowprec.fp32_guard():
                pass
        elif how == 1:
            with lowprec.fp32_guard() as guard, lowprec.fp32_guard():
                guard.report()
        elif how == 2:
            with lowprec.math_mode("tf32", frameworks=True), lowprec.fp32_guard():
                self.product(rng, guarded=True)
        else:
            lowprec.fp32_guard()(lambda: None)()
        self.counts["guards"] += 1

    def fork(self, rng: random.Random) -> None:
        seed = rng.random()
        child = os.fork()
        if child == 0:
            self.in_child(random.Random(seed))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                if status:
                    self.wrong.append(f"a forked child ended with status {status}")
                self.counts["forks"] += 1
                return
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self.wrong.append("a forked child hung")

    def in_child(self, rng: random.Random) -> None:
        status = 1
        try:
            self.armed, self.wrong = None, []
            for _ in range(5):
                self.product(rng)
                self.guard(rng)
            status = min(len(self.wrong), 1)
        finally:
            os._exit(status)

    # -- strikes ------------------------------------------------------------------------------

    def handler(self, number: int, frame: FrameType | None) -> None:
        kind, self.armed = self.armed, None
        if kind is not None:
            self.raised += 1
            raise kind

    def strike_after(
        self, action: Callable[[random.Random], None], kind: Any, delay: float
    ) -> None:
        """Let a signal's handler raise after a while, once."""
        self.armed = kind
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            action(self.random)
        finally:
            self.armed = None
            signal.setitimer(signal.ITIMER_REAL, 0)

    def strike_at_line(self, action: Callable[[random.Random], None], kind: Any, at: int) -> None:
        """Raise at a line of the policy's code, as a handler there would."""
        left = at

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.startswith(POLICY):
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    self.raised += 1
                    raise kind
            return trace

        sys.settrace(trace)
        try:
            action(self.random)
        finally:
            sys.settrace(None)

    def turn(self) -> None:
        """One action of the main thread, struck or not."""
        rng = self.random
        action = rng.choices(
            (self.product, self.guard, self.new_shape, self.fork), (50, 40, 9.5, 0.5)
        )[0]
        kind, raised, arrived = rng.choice(KINDS), self.raised, 0
        try:
            if action == self.fork:
                action(rng)
            elif action == self.guard and rng.random() < 0.5:
                self.strike_at_line(action, kind, rng.randrange(1, 120))
            else:
                self.strike_after(action, kind, 10 ** rng.uniform(-5, -2))
        except KINDS:
            arrived = 1
        self.counts["strikes"] += self.raised - raised
        if arrived != self.raised - raised:
            self.counts["not seen"] += 1
        if self.read_switches() != self.switches:
            self.wrong.append(
                f"PyTorch's switches are {self.read_switches()} after {action.__name__}"
            )
            self.switches = self.read_switches()

    def run(self, seconds: float) -> dict[str, Any]:
        # Python's imports do not survive exceptions of signal handlers: what is imported at first use is imported now.
        for rng in (random.Random(seed) for seed in range(20)):
            self.product(rng)
            self.guard(rng)
        signal.signal(signal.SIGALRM, self.handler)
        seeds = [self.random.random() for _ in range(THREADS - 1)]
        for seed in seeds:
            threading.Thread(target=self.work, args=(seed,), daemon=True).start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn()
        with lowprec.math_mode("fp32", frameworks=True):
            pass
        return {
            "counts": dict(self.counts),
            "wrong": self.wrong[:20],
            "wrong_count": len(self.wrong),
        }

    def work(self, seed: float) -> None:
        """Multiply without end: the process ends while this runs."""
        rng = random.Random(seed)
        while True:
            try:
                self.product(rng)
                self.new_shape(rng)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
                self.wrong.append(f"{type(error).__name__} in a thread: {error}")
                return


def main() -> None:
    """Run for so many seconds and print what was found."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    unraisable: list[str] = []
    sys.unraisablehook = lambda what: unraisable.append(type(what.exc_value).__name__)
    seconds, seed = float(sys.argv[1]), int(sys.argv[2])
    faulthandler.dump_traceback_later(seconds + 120, exit=True)
    found = Turmoil(seed).run(seconds)
    # The interpreter itself swallows what is raised while it destroys an object.
    found["lost"] = max(0, found["counts"].pop("not seen", 0) - len(unraisable))
    found["swallowed_by_the_interpreter"] = len(unraisable)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
