"""Threads in different modes, a storm of signals and forks, and memory over a million calls.

usage: python benchmarks/stress.py [--quick] [--seconds N] [--output DIR] [--seed N]

`--seconds` is the duration of the storm (`storm.py`), ten minutes by default. The exit status is 1 after any failure.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import numpy as np
import storm

import lowprec

#: One per thread. fp32_pedantic does not round either, so it must agree with fp32; all others differ.
THREAD_MODES = ("fp32", "tf32", "bf16", "fp16", "fp32_pedantic", "tf32", "bf16", "fp16")

#: Allowed growth of resident memory, since allocators keep pages. A leak of one float (24 bytes) per call is 24 MB in a
#: million calls.
RSS_TOLERANCE_MIB = 16
#: Growth of Python's blocks, per new shape, once the caches are full: a leak would keep one or more.
BLOCKS_TOLERANCE = 0.2


def run_threads(calls: int, seed: int, modes: Sequence[str] = THREAD_MODES) -> dict[str, Any]:
    """Multiply in one thread per mode concurrently; return the number of results not of the thread's mode."""
    jobs = [
        [storm.job(np.random.default_rng([seed, number, *shape]), shape, mode) for shape in storm.SHAPES[:3]]
        for number, mode in enumerate(modes)
    ]
    start = threading.Barrier(len(modes))

    def work(mode: str, of_thread: Sequence[storm.Job]) -> int:
        start.wait()
        wrong = 0
        for i in range(calls):
            job = of_thread[i % len(of_thread)]
            with lowprec.math_mode(mode):
                result = lowprec.matmul(job.a, job.b)
            wrong += not storm.same_bits(result, job.expected)
        return wrong

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(modes)) as pool:
        wrong = sum(pool.map(work, modes, jobs))
    seconds = time.perf_counter() - begin
    return {
        "test": "threads", "modes": list(modes), "calls_per_thread": calls, "wrong": wrong, "seconds": seconds,
    }  # fmt: skip


def _shapes(fresh_every: int) -> Iterator[tuple[int, int, int]]:
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


def run_memory(calls: int, warm_up: int, fresh_every: int, seed: int) -> dict[str, Any]:
    """Make many calls in several libraries, shapes and modes; return the growth of memory after the warm-up.

    The warm-up has to bring enough new shapes (one in ``fresh_every`` calls) to turn over every cache that lowprec
    bounds twice: the largest holds 4096 entries, and those before may be smaller than those that replace them.
    """
    store = np.random.default_rng(seed).standard_normal(2 * 256 * 256, dtype=np.float32)
    libraries: dict[str, Any] = {"numpy": np.asarray}
    if importlib.util.find_spec("torch"):
        import torch

        libraries["torch"] = torch.from_numpy
    kinds = itertools.cycle(itertools.product(("fp32", "tf32", "bf16", "fp16"), libraries.values()))
    shapes = _shapes(fresh_every)

    def multiply(count: int) -> tuple[int, int]:
        """Return the resident memory (Linux) and the number of Python's blocks after some calls."""
        for _ in range(count):
            (m, k, n), (mode, wrap) = next(shapes), next(kinds)
            lowprec.matmul(wrap(store[: m * k].reshape(m, k)), wrap(store[-k * n :].reshape(k, n)), math_mode=mode)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), sys.getallocatedblocks()

    series = [multiply(warm_up), *(multiply(calls // 10) for _ in range(10))]
    return {
        "test": "memory",
        "libraries": list(libraries),
        "calls": calls,
        "warm_up": warm_up,
        "new_shape_every": fresh_every,
        "rss_bytes": [rss for rss, _ in series],
        "rss_growth_bytes": series[-1][0] - series[0][0],
        "blocks_per_call": (series[-1][1] - series[0][1]) / calls,
    }


def stress_claims(
    threads: dict[str, Any], hostile: dict[str, Any] | None, memory: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the claims about the three runs; systems without signals and forks have no storm."""
    wrong = f"wrong results of {len(threads['modes'])} threads, {threads['calls_per_thread']} calls each"
    growth = f"growth of resident memory over {memory['calls']} calls, MiB"
    limits = (
        (wrong, threads["wrong"], 0),
        *((f"storm: {what}", hostile and hostile["failures"][kind], 0) for kind, what in storm.FAILURES.items()),
        (growth, memory["rss_growth_bytes"] / 2**20, RSS_TOLERANCE_MIB),
        (
            "growth of Python's memory blocks per call",
            memory["blocks_per_call"],
            BLOCKS_TOLERANCE / memory["new_shape_every"],
        ),
    )
    return [common.claim(what, value, limit, at_most=True) for what, value, limit in limits]


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, help="how long the storm lasts; 600 by default")
    arguments = parser.parse_args()
    quick, seed = arguments.quick, arguments.seed
    threads = run_threads(50 if quick else 10_000, seed)
    print(f"threads: {threads['wrong']} wrong results, {threads['seconds']:.1f} s", flush=True)
    seconds = arguments.seconds if arguments.seconds is not None else 5.0 if quick else 600.0
    hostile = storm.run(seconds, seed) if hasattr(os, "fork") else None
    if hostile is not None:
        print("\n".join([f"storm: {hostile['counts']}", *hostile["descriptions"]]), flush=True)
    memory = run_memory(4_000, 17_000, 2, seed) if quick else run_memory(1_000_000, 170_000, 20, seed)
    results = [threads, *([hostile] if hostile else []), memory]
    common.report("stress", arguments, results, stress_claims(threads, hostile, memory), seconds=seconds)
    return 1 if threads["wrong"] or (hostile is not None and any(hostile["failures"].values())) else 0


if __name__ == "__main__":
    sys.exit(main())
