"""Products, guards and modes in eight threads, under signals that raise, forks and exits; and memory over many calls.

usage: python benchmarks/stress.py [--quick] [--seconds N] [--output DIR] [--seed N]

Operands have exact sums in FP32, and every mode rounds them differently. A mode's correct result is therefore one bit
pattern for every order of summation, and any mix-up of modes, threads or buffers changes it.

The storm lasts ten minutes or `--seconds`, in rounds of one process each, so that a crash or a hang is detected and
ends only its round. The exit status is 1 after any failure.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib.util
import itertools
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
from pathlib import Path
from typing import Any, NamedTuple

import common
import ml_dtypes
import numpy as np

import lowprec
import lowprec.backends.cpu

#: Modes of the seven threads other than the main one, which alone receives signals.
MODES = ("fp32", "tf32", "bf16", "fp16", "fp32_pedantic", "tf32", "bf16")
#: (m, k, n): the last one is distributed over threads in every mode.
SHAPES = ((8, 16, 8), (33, 17, 20), (160, 96, 80), (700, 512, 300))

ROUND_SECONDS = 10.0
#: Extra seconds for the start of a round, and for the calls still running at its end.
GRACE_SECONDS = 90.0
CHILD_SECONDS = 30

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

#: Exceptions of handlers: KeyboardInterrupt, and time limits of programs, which may be of any class.
KINDS: tuple[type[BaseException], ...] = (KeyboardInterrupt, TimeoutError, RuntimeError, ValueError)


# -- operands with one correct result in each mode ------------------------------------------------


def exact_operands(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Any, Any]:
    """Return float32 operands whose product has one correct bit pattern in each mode.

    ``a`` has 13 significant bits, an odd multiple of 2^-12 times a power of two per row; ``b`` is 1 or 2 with a sign.
    A sum of k products spans 14 + log2(k) bits, and so do the sums of the rounded numbers: within FP32's 24 for k up to
    1024. TF32 keeps 11 of the 13 bits, bfloat16 8; float16 keeps 11 in the even rows and 5 in the odd ones: these begin
    with a number, which meets a zero, that is so large that the others become subnormal when the row is scaled.
    """
    mantissas = 1 + (2 * rng.integers(0, 2048, (m, k)) + 1) / 4096
    scales = np.where(np.arange(m) % 2, 2.0**-20, 1.0)[:, np.newaxis]
    a = (mantissas * rng.choice([-1, 1], (m, k)) * scales).astype(np.float32)
    b = rng.choice(np.array([-2, -1, 1, 2], np.float32), (k, n))
    if k > 1:
        a[1::2, 0], b[0] = 2.0**13, 0
    return a, b


def _tf32(x: Any) -> Any:
    # No ties: two bits are dropped, and the last of them is 1.
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _fp16(x: Any) -> Any:
    # the largest number of a row becomes 2^14 or more
    _, exponents = np.frexp(np.abs(x).max(-1, keepdims=True))
    return np.ldexp(
        np.ldexp(x, 15 - exponents).astype(np.float16).astype(np.float64), exponents - 15
    )


ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "fp32": lambda x: x,
    "fp32_pedantic": lambda x: x,
    "tf32": _tf32,
    "bf16": lambda x: x.astype(ml_dtypes.bfloat16),
    "fp16": _fp16,
}


class Job(NamedTuple):
    """A product and its only correct result."""

    a: Any
    b: Any
    expected: Any


def job(rng: np.random.Generator, shape: Sequence[int], mode: str) -> Job:
    """Return a product of this shape with its result in a mode, computed without lowprec."""
    a, b = exact_operands(rng, *shape)
    return Job(
        a, b, (ROUNDINGS[mode](a).astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    )


def same_bits(x: Any, y: Any) -> bool:
    """Whether two arrays are equal, including NaN and the sign of zero."""
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


# -- a round --------------------------------------------------------------------------------------


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

    def multiply(self, rng: np.random.Generator, mode: str, *, out: bool = False) -> None:
        """Multiply in a mode, which an argument or scopes set, and check the result."""
        chosen = self.jobs[mode][int(rng.choice(len(SHAPES), p=(0.4, 0.3, 0.2, 0.1)))]
        if rng.random() < 0.2:
            chosen = job(rng, [int(x) for x in rng.integers(1, 60, 3)], mode)
        if out:
            target = np.zeros_like(chosen.expected)
            self.left_alone.append(target)
            result = lowprec.matmul(chosen.a, chosen.b, out=target, math_mode=mode)
        else:
            with lowprec.math_mode("bf16"), lowprec.math_mode(mode):
                result = lowprec.matmul(chosen.a, chosen.b)
        self.counts["products"] += 1
        if not same_bits(result, chosen.expected):
            self.fail("wrong", f"{chosen.a.shape} @ {chosen.b.shape} in {mode}")

    def guarded(self, rng: np.random.Generator, frameworks: bool) -> None:
        """Multiply under a guard, which disables all modes."""
        chosen = self.jobs["fp32"][int(rng.integers(len(SHAPES) - 1))]
        with lowprec.fp32_guard(frameworks=frameworks):
            result = lowprec.matmul(chosen.a, chosen.b, math_mode="bf16")
        self.counts["guards"] += 1
        if not same_bits(result, chosen.expected):
            self.fail("wrong", f"{chosen.a.shape} @ {chosen.b.shape} under a guard")

    def background(self, number: int, mode: str, start: threading.Barrier) -> None:
        """Multiply in one mode until the round or the interpreter ends."""
        rng = np.random.default_rng([self.seed, number])
        start.wait()
        try:
            while time.monotonic() < self.deadline:
                self.guarded(rng, frameworks=False) if rng.random() < 0.2 else self.multiply(
                    rng, mode
                )
        except Exception as error:  # noqa: BLE001 - any error is a failure
            self.fail("error", f"in a thread, {mode}: {error!r}")

    def on_signal(self, *_: object) -> None:
        """Raise once, or multiply inside the handler."""
        kind, self.armed = self.armed, None
        if kind is None:
            return
        if self.rng.random() < 0.25:
            self.counts["products in handlers"] += 1
            self.multiply(self.rng, str(self.rng.choice(MODES)))
            return
        self.counts["exceptions of handlers"] += 1
        raise kind("of a handler")

    def interrupted(self) -> None:
        """Multiply with a signal pending; only a handler's exception may be raised by it."""
        raised, unraisable = self.counts["exceptions of handlers"], self.unraisable
        caught: BaseException | None = None
        kind, mode = KINDS[int(self.rng.integers(len(KINDS)))], str(self.rng.choice(MODES))
        delay = float(10 ** self.rng.uniform(-5, -2.3))
        try:
            self.armed = kind
            signal.setitimer(signal.ITIMER_REAL, delay)
            self.multiply(self.rng, mode, out=True)
            self.armed = None
        except BaseException as error:  # noqa: BLE001 - judged below
            self.armed = None
            caught = error
        signal.setitimer(signal.ITIMER_REAL, 0)
        was_raised = self.counts["exceptions of handlers"] > raised
        if was_raised and caught is None and self.unraisable == unraisable:
            self.fail("lost", kind.__name__)
        elif caught is not None and not (was_raised and type(caught) is kind):
            self.fail("error", repr(caught))
        # The caller may write again to the results of interrupted calls.
        for array in self.left_alone:
            array.fill(7)
        self.multiply(self.rng, str(self.rng.choice(MODES)))
        if not all((array == 7).all() for array in self.left_alone):
            self.fail("late", kind.__name__)
        self.left_alone.clear()

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
        before = switches()
        while time.monotonic() < self.deadline:
            choice = self.rng.random()
            if choice < 0.7:
                self.interrupted()
            elif choice < 0.95:
                self.guarded(self.rng, frameworks)
            else:
                self.fork()
            if (now := switches()) != before:
                self.fail("switch", f"{before} became {now}")
                before = now


def run_round(seed: int, seconds: float) -> None:
    """Run one round: print the events, then end with joined or with running threads."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    readers: list[Callable[[], Any]] = [lowprec.get_math_mode]
    if with_torch := bool(seed % 2 and importlib.util.find_spec("torch")):
        import torch

        torch.set_float32_matmul_precision("high")
        readers += [
            torch.get_float32_matmul_precision,
            lambda: torch.backends.cuda.matmul.allow_tf32,
        ]
    this = Round(seed, seconds)
    signal.signal(signal.SIGALRM, this.on_signal)

    def unraisable(_: object) -> None:
        this.unraisable += 1

    sys.unraisablehook = unraisable
    start = threading.Barrier(len(MODES) + 1)
    others = [
        threading.Thread(target=this.background, args=(i, mode, start), daemon=True)
        for i, mode in enumerate(MODES)
    ]
    for other in others:
        other.start()
    # The first products of the process, concurrently.
    start.wait()
    for mode in dict.fromkeys(MODES):
        this.multiply(this.rng, mode)
    # Python's import is not safe against handlers that raise: lazy imports are done first.
    for module in pkgutil.walk_packages(lowprec.backends.cpu.__path__, "lowprec.backends.cpu."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    this.main(lambda: [str(reader()) for reader in readers], frameworks=with_torch)
    if seed % 4 < 2:
        this.counts["exits with running threads"] += 1
        this.deadline = float("inf")  # for threads that still read it
    else:
        for other in others:
            other.join()
    this.counts["exceptions in finalisers"] = this.unraisable
    print(json.dumps({"counts": this.counts, "failures": this.failures}), flush=True)


# -- the parent -----------------------------------------------------------------------------------


def run(seconds: float, seed: int = 0) -> dict[str, Any]:
    """Run rounds for this many seconds; return the numbers of events and of failures, by kind."""
    counts: Counter[str] = Counter()
    failures: list[tuple[str, str]] = []
    begin, rounds = time.monotonic(), 0
    while (left := seconds - (time.monotonic() - begin)) > 0:
        for result in _round(seed * 100_000 + rounds, min(left, ROUND_SECONDS)):
            counts.update(result.get("counts", {}))
            failures += result["failures"]
        rounds += 1
    by_kind = Counter(kind for kind, _ in failures)
    return {
        "test": "storm", "seconds": time.monotonic() - begin, "rounds": rounds, "threads": len(MODES) + 1,
        "counts": dict(sorted(counts.items())), "failures": {kind: by_kind[kind] for kind in FAILURES},
        "descriptions": [text for _, text in failures[:20]],
    }  # fmt: skip


def _round(seed: int, seconds: float) -> Iterator[dict[str, Any]]:
    command = [sys.executable, __file__, "--round", str(seed), "--seconds", str(seconds)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
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
        yield {
            "failures": [("crash", f"round {seed} ended with {process.returncode}: {err[-4000:]}")]
        }


# -- memory ---------------------------------------------------------------------------------------

#: Allowed growth of resident memory, since allocators keep pages. A leak of one float (24 bytes) per call is 24 MB in a
#: million calls.
RSS_TOLERANCE_MIB = 16
#: Growth of Python's blocks, per new shape, once the caches are full: a leak would keep one or more.
BLOCKS_TOLERANCE = 0.2


def run_memory(calls: int, warm_up: int, fresh_every: int, seed: int) -> dict[str, Any]:
    """Make many calls in several libraries, shapes and modes; return the growth of memory after the warm-up.

    The warm-up has to bring enough new shapes (one in ``fresh_every`` calls) to turn over every cache that lowprec
    bounds twice: the largest holds 4096 entries, and those before may be smaller than those that replace them.
    """
    import torch

    store = np.random.default_rng(seed).standard_normal(66 * 66, dtype=np.float32)
    libraries: dict[str, Any] = {"numpy": np.asarray, "torch": torch.from_numpy}
    kinds = itertools.cycle(itertools.product(("fp32", "tf32", "bf16", "fp16"), libraries.values()))
    hot = itertools.cycle(itertools.product((1, 3, 8, 13), (4, 7), (2, 8)))
    fresh = itertools.product(range(2, 66), repeat=3)

    def multiply(count: int) -> tuple[int, int]:
        """Return the resident memory (Linux) and the number of Python's blocks after some calls."""
        for i in range(count):
            (m, k, n), (mode, wrap) = next(hot if i % fresh_every else fresh), next(kinds)
            lowprec.matmul(
                wrap(store[: m * k].reshape(m, k)),
                wrap(store[-k * n :].reshape(k, n)),
                math_mode=mode,
            )
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), sys.getallocatedblocks()

    series = [multiply(warm_up), *(multiply(calls // 10) for _ in range(10))]
    return {
        "test": "memory", "libraries": list(libraries), "calls": calls, "warm_up": warm_up,
        "new_shape_every": fresh_every, "rss_bytes": [rss for rss, _ in series],
        "rss_growth_bytes": series[-1][0] - series[0][0],
        "blocks_per_call": (series[-1][1] - series[0][1]) / calls,
    }  # fmt: skip


def claims(hostile: dict[str, Any] | None, memory: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the claims about both runs; systems without signals and forks have no storm."""
    limits = {
        f"storm: {what}": (hostile and hostile["failures"][kind], 0)
        for kind, what in FAILURES.items()
    }
    growth = f"growth of resident memory over {memory['calls']} calls, MiB"
    limits[growth] = memory["rss_growth_bytes"] / 2**20, RSS_TOLERANCE_MIB
    blocks = BLOCKS_TOLERANCE / memory["new_shape_every"]
    limits["growth of Python's memory blocks per call"] = memory["blocks_per_call"], blocks
    return [
        common.claim(what, value, limit, at_most=True) for what, (value, limit) in limits.items()
    ]


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, help="how long the storm lasts; 600 by default")
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quick, seed = arguments.quick, arguments.seed
    seconds = arguments.seconds if arguments.seconds is not None else 5.0 if quick else 600.0
    if arguments.round is not None:
        run_round(arguments.round, seconds)
        return 0
    hostile = run(seconds, seed) if hasattr(os, "fork") else None
    if hostile is not None:
        print("\n".join([f"storm: {hostile['counts']}", *hostile["descriptions"]]), flush=True)
    memory = (
        run_memory(4_000, 17_000, 2, seed) if quick else run_memory(1_000_000, 170_000, 20, seed)
    )
    results = [*([hostile] if hostile else []), memory]
    common.report("stress", arguments, results, claims(hostile, memory), seconds=seconds)
    return int(hostile is not None and any(hostile["failures"].values()))


if __name__ == "__main__":
    sys.exit(main())
