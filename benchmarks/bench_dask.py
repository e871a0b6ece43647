"""A product of two large Dask arrays in two processes: `dask.array.matmul` against lowprec's sum over the chunks of k.

Each run has new workers, warmed up by a small product. Time and resident memory of the workers are those of the product
alone: the operands are computed before. The two products alternate in order. The error is that of a few rows, against
float64. Both also run with workers of so little memory that they spill to disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common  # isort: skip - sets a variable that must come before NumPy
import dask
import dask.array as da
import distributed
import numpy as np

import lowprec

VARIANTS = {"dask.array.matmul": da.matmul, "lowprec.matmul": lowprec.matmul}
#: Number of rows of the result that are compared with float64.
ROWS = 3
#: Memory of a worker, and in the runs that spill.
FREE, TIGHT = "6GB", "1.5GB"


@contextlib.contextmanager
def peak_memory(client: Any) -> Iterator[list[int]]:
    """Sample the memory of all workers together, in bytes, every 50 ms."""
    files = [Path(f"/proc/{pid}/statm") for pid in client.run(os.getpid).values()]
    samples, end = [0], threading.Event()

    def sample() -> None:
        while not end.wait(0.05):
            samples.append(sum(int(file.read_text().split()[1]) * 4096 for file in files))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield samples
    end.set()
    thread.join()


def run(variant: str, n: int, chunk: int, seed: int, limit: str) -> dict[str, Any]:
    workers = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "memory_limit": limit,
        "dashboard_address": None,
    }
    with distributed.LocalCluster(**workers) as cluster, distributed.Client(cluster) as client:
        rng = da.random.default_rng(seed)
        x, y = (
            rng.standard_normal((n, n), chunks=chunk, dtype=np.float32).persist() for _ in range(2)
        )
        distributed.wait([x, y])
        small = da.ones((16, 16), chunks=(8, 8), dtype=np.float32)
        for _ in range(4):  # on each worker at least once
            VARIANTS[variant](small, small).compute()
        with peak_memory(client) as samples:
            start = time.perf_counter()
            product = VARIANTS[variant](x, y).persist()
            distributed.wait(product)
            seconds = time.perf_counter() - start
        rows = np.linspace(0, n - 1, ROWS).astype(int)
        sampled, a = dask.compute(product[rows], x[rows])
        exact = np.zeros((ROWS, n))
        for k in range(0, n, chunk):
            exact += a[:, k : k + chunk].astype(np.float64) @ y[k : k + chunk].compute().astype(
                np.float64
            )
        metrics = client.scheduler_info()["workers"].values()
        return {
            "variant": variant,
            "n": n,
            "chunk": chunk,
            "memory_limit": limit,
            "seconds": seconds,
            "peak_bytes": max(samples),
            "spilled_bytes": sum(w["metrics"]["spilled_bytes"]["disk"] for w in metrics),
            "error": float(np.linalg.norm(sampled - exact) / np.linalg.norm(exact)),
        }


def dask_claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lowprec's ratios, from runs without a tight limit."""
    dask_s, lowprec_s = (
        [r for r in rows if r["memory_limit"] == FREE and r["variant"] == name] for name in VARIANTS
    )

    def ratio(what: str) -> float:
        return statistics.median(
            ours[what] / theirs[what] for ours, theirs in zip(lowprec_s, dask_s, strict=True)
        )

    return [
        common.claim(f"{words}, over dask.array.matmul's", ratio(what), 1.0, at_most=True)
        for words, what in (("time", "seconds"), ("peak memory", "peak_bytes"), ("error", "error"))
    ]


def measure(quick: bool, seed: int) -> Iterator[dict[str, Any]]:
    warnings.simplefilter("ignore")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # of workers that are closed
    n, chunk, rounds = (400, 100, 1) if quick else (12_000, 3_000, 7)
    for number in range(rounds):
        for variant in list(VARIANTS)[:: 1 - 2 * (number % 2)]:
            yield run(variant, n, chunk, seed + number, FREE)
    for variant in VARIANTS:
        yield run(variant, n, chunk, seed, TIGHT)


if __name__ == "__main__":
    common.main(__doc__, "dask", measure, dask_claims)
