"""Times of NumPy's and SciPy's programs under `lowprec.numpy.intercept`, of one thread, relative to the plain program.

usage: python benchmarks/numpy_programs.py [NAME...]

Variants take turns, and the median of the ratios by round is shown. The time is that of the thread, which other
processes of the machine do not change much. Without names: all programs, in float32 and float64 (`cast=True`).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import threadpoolctl
import timing
from scipy.sparse.linalg import cg

import lowprec.numpy

MODES = ("fp32", "tf32", "bf16")

Program = Callable[[], None]


def multiply(a: Any, b: Any, count: int) -> None:
    for _ in range(count):
        a @ b


def solve(n: int, dtype: Any, steps: int) -> Program:
    """Return conjugate gradients of SciPy on a dense matrix."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((n, n))
    a = (q @ q.T / n + np.eye(n)).astype(dtype)
    b = rng.standard_normal(n).astype(dtype)
    return lambda: cg(a, b, rtol=0, atol=0, maxiter=steps)


def kalman(dtype: Any, steps: int = 60) -> Program:
    """Return a Kalman filter of four states and two measurements."""
    rng = np.random.default_rng(0)
    f = (np.eye(4) + 0.01 * rng.standard_normal((4, 4))).astype(dtype)
    h = rng.standard_normal((2, 4)).astype(dtype)
    one = np.eye(4, dtype=dtype)
    noise = one * dtype(0.01)
    measured = rng.standard_normal((steps, 2)).astype(dtype)

    def run() -> None:
        x = np.zeros(4, dtype)
        p = one
        for z in measured:
            x = f @ x
            p = f @ p @ f.T + noise
            gain = p @ h.T @ np.linalg.inv(h @ p @ h.T + one[:2, :2])
            x = x + gain @ (z - h @ x)
            p = (one - gain @ h) @ p

    return run


def programs() -> Iterator[tuple[str, Program]]:
    for dtype in (np.float32, np.float64):
        rng = np.random.default_rng(0)
        for m, n, count in ((8, 8, 200), (300, 1, 50), (1000, 1, 10), (1000, 1000, 1)):
            a, b = (rng.standard_normal(x).astype(dtype) for x in ((m, m), (m, n)))
            name = f"{m}x{m} @ {m}x{n}, {dtype.__name__}"
            yield name, partial(multiply, a, b[:, 0] if n == 1 else b, count)
        yield f"Kalman filter, {dtype.__name__}", kalman(dtype)
        yield f"cg, n = 300, {dtype.__name__}", solve(300, dtype, 30)
        yield f"cg, n = 1000, {dtype.__name__}", solve(1000, dtype, 15)


def sample(run: Program, mode: str, _: int) -> float:
    """Return the time of a program, after an untimed run."""
    with nullcontext() if mode == "plain" else lowprec.numpy.intercept(mode, cast=True):
        run()
        start = time.thread_time()
        run()
        return time.thread_time() - start


def main(names: list[str]) -> None:
    for name, run in programs():
        if names and not any(x in name for x in names):
            continue
        with threadpoolctl.threadpool_limits(1):
            seconds = timing.take_turns(("plain", *MODES), partial(sample, run), rounds=25)
        plain = seconds["plain"]
        ratios = [f"{x} {timing.speed_ratio(seconds[x], plain)['median']:.2f}" for x in MODES]
        print(f"{name:28} plain {1e6 * statistics.median(plain):9.0f} us; {', '.join(ratios)}")


if __name__ == "__main__":
    main(sys.argv[1:])
