"""Threads with different modes, a storm of signals and forks, and memory over a million calls.

usage: python benchmarks/stress.py [--quick] [--seconds N] [--output DIR] [--seed N]

`--seconds` is the duration of the storm (`storm.py`), ten minutes by default. The exit status is 1 after any failure.

The threads' operands have exact sums in FP32, and every mode rounds them differently. A mode's correct result is
therefore one bit pattern, for every library and order of summation, and any mix-up of modes, threads or buffers
changes it.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import numpy as np
import storm
from exact import Job, exact_operands, reference, same_bits

import lowprec

NAME = "stress"

#: One per thread. fp32_pedantic does not round either, so it must agree with fp32; all others differ.
THREAD_MODES = ("fp32", "tf32", "bf16", "fp16", "fp32_pedantic", "tf32", "bf16", "fp16")
#: (m, k, n): the last is large enough for threads and tile units of its own.
THREAD_SHAPES = ((8, 16, 8), (33, 17, 20), (160, 96, 80))

#: Allowed growth of resident memory, since allocators keep pages. A leak of one float (24 bytes) per call is 24 MB in a
#: million calls.
RSS_TOLERANCE_BYTES = 16 << 20
#: Growth of Python's own blocks, per new shape, once the caches are full: a leak would keep one or more.
BLOCKS_TOLERANCE = 0.2


# -- threads --------------------------------------------------------------------------------------


def thread_jobs(mode: str, seed: Sequence[int]) -> list[Job]:
    """Return a thread's products; raise if two modes have the same result."""
    rng = np.random.default_rng(seed)
    jobs = []
    for shape in THREAD_SHAPES:
        a, b = exact_operands(rng, *shape)
        results = {m: reference(a, b, m) for m in ("fp32", "tf32", "bf16", "fp16")}
        for one, other in itertools.combinations(results, 2):
            if same_bits(results[one], results[other]):
                raise RuntimeError(f"operands of shape {shape} do not tell {one} from {other}")
        jobs.append(Job(a, b, reference(a, b, mode)))
    return jobs


def run_threads(calls: int, seed: int = 0, modes: Sequence[str] = THREAD_MODES) -> dict[str, Any]:
    """Multiply in one thread per mode concurrently; return the number of results not of the thread's mode."""
    jobs = [thread_jobs(mode, [seed, number]) for number, mode in enumerate(modes)]
    start = threading.Barrier(len(modes))

    def work(mode: str, own: Sequence[Job]) -> int:
        start.wait()
        wrong = 0
        for i in range(calls):
            job = own[i % len(own)]
            with lowprec.math_mode(mode):
                result = lowprec.matmul(job.a, job.b)
            wrong += not same_bits(result, job.expected)
        return wrong

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(modes)) as pool:
        wrong = sum(pool.map(work, modes, jobs))
    return {
        "test": "threads",
        "modes": list(modes),
        "calls_per_thread": calls,
        "wrong": wrong,
        "seconds": time.perf_counter() - begin,
    }


# -- memory ---------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Return the resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _libraries() -> dict[str, Callable[[Any], Any]]:
    found: dict[str, Callable[[Any], Any]] = {"numpy": lambda x: x}
    if importlib.util.find_spec("torch"):
        import torch

        found["torch"] = torch.from_numpy
    return found


def shapes(fresh_every: int) -> Iterator[tuple[int, int, int]]:
    """Yield shapes endlessly: a few repeatedly, sometimes a new one, rarely a large one."""
    hot = list(itertools.product((1, 3, 8, 13), (4, 7), (2, 8)))
    fresh = itertools.product(range(2, 66), repeat=3)
    for i in itertools.count():
        if i % 5000 == 4999:
            yield 256, 256, 256
        elif i % fresh_every == fresh_every - 1:
            yield next(fresh)
        else:
            yield hot[i % len(hot)]


def run_memory(calls: int, warm_up: int, fresh_every: int = 20, seed: int = 0) -> dict[str, Any]:
    """Make many calls in several libraries, shapes and modes; return the growth of memory after the warm-up.

    The warm-up has to bring enough new shapes (one in ``fresh_every`` calls) to turn over every cache that lowprec
    bounds twice: the largest holds 4096 entries, and what was in it before may be smaller than what replaces it.
    """
    rng = np.random.default_rng(seed)
    store = rng.standard_normal(2 * 256 * 256, dtype=np.float32)
    libraries = list(_libraries().items())
    modes = ("fp32", "tf32", "bf16", "fp16")
    stream = shapes(fresh_every)

    def make(count: int, offset: int) -> None:
        for i in range(offset, offset + count):
            m, k, n = next(stream)
            _, wrap = libraries[i % len(libraries)]
            a, b = wrap(store[: m * k].reshape(m, k)), wrap(store[-k * n :].reshape(k, n))
            lowprec.matmul(a, b, math_mode=modes[i // len(libraries) % len(modes)])

    make(warm_up, 0)
    parts, series = 10, [_memory()]
    for part in range(parts):
        make(calls // parts, warm_up + part * (calls // parts))
        series.append(_memory())
    return {
        "test": "memory",
        "libraries": [name for name, _ in libraries],
        "calls": calls // parts * parts,
        "warm_up": warm_up,
        "new_shape_every": fresh_every,
        "rss_bytes": [rss for rss, _ in series],
        "rss_growth_bytes": series[-1][0] - series[0][0],
        "blocks_per_call": (series[-1][1] - series[0][1]) / calls,
    }


def _memory() -> tuple[int, int]:
    gc.collect()
    return resident_bytes(), sys.getallocatedblocks()


# -- command line ---------------------------------------------------------------------------------


def stress_claims(
    threads: dict[str, Any], hostile: dict[str, Any] | None, memory: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the claims about the three runs; systems without signals and forks have no storm."""
    calls = memory["calls"]
    return [
        common.claim(
            f"wrong results of {len(threads['modes'])} threads, {threads['calls_per_thread']} calls each",
            threads["wrong"],
            0,
            at_most=True,
        ),
        *storm.claims(hostile),
        common.claim(
            f"growth of resident memory over {calls} calls, MiB",
            memory["rss_growth_bytes"] / 2**20,
            RSS_TOLERANCE_BYTES / 2**20,
            at_most=True,
        ),
        common.claim(
            "growth of Python's memory blocks per call",
            memory["blocks_per_call"],
            BLOCKS_TOLERANCE / memory["new_shape_every"],
            at_most=True,
        ),
    ]


def main() -> int:
    """Run all, print and write."""
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, help="how long the storm lasts; 600 by default")
    arguments = parser.parse_args()
    quick, seed = arguments.quick, arguments.seed
    threads = run_threads(50 if quick else 10_000, seed)
    print(f"threads: {threads['wrong']} wrong results, {threads['seconds']:.1f} s", flush=True)
    seconds = arguments.seconds if arguments.seconds is not None else 5.0 if quick else 600.0
    hostile = storm.run(seconds, seed) if hasattr(os, "fork") else None
    if hostile is not None:
        print(f"storm: {hostile['counts']}", flush=True)
        print("\n".join(hostile["told"]), flush=True)
    memory = (
        run_memory(4_000, warm_up=17_000, fresh_every=2, seed=seed)
        if quick
        else run_memory(1_000_000, warm_up=170_000, seed=seed)
    )
    results = [threads, *([hostile] if hostile else []), memory]
    claims = stress_claims(threads, hostile, memory)
    common.report(NAME, arguments, results, claims, seconds=seconds)
    failed = threads["wrong"] or (hostile is not None and any(hostile["failures"].values()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
