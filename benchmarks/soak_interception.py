"""Threads that open and close interceptions in any order, next to threads that multiply, differentiate and fork.

usage: python benchmarks/soak_interception.py [SECONDS]

Each thread checks its numbers: products in a block have the mode's error, others PyTorch's and NumPy's. At the end, or
after the first wrong number, it prints the number of scopes and products and the growth of memory.
"""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import lowprec.numpy
import lowprec.torch

ABOVE = 1 + 2.0**-9
FULL = float((torch.full((4, 4), ABOVE) @ torch.full((4, 4), ABOVE))[0, 0])
VALUES = {"bf16": 4.0, "tf32": FULL, "fp32": FULL}
LIBRARIES: tuple[Callable[[str], Any], ...] = (lowprec.torch.intercept, lowprec.numpy.intercept)

counts: Counter[str] = Counter()
failures: list[str] = []


def products(x: Any) -> set[float]:
    """Return elements of products that are equal in one mode."""
    a, n = torch.full((4, 4), ABOVE), np.full((4, 4), ABOVE, np.float32)
    found = [a @ a, torch.addmm(torch.zeros(4), a, a)] if x is lowprec.torch.intercept else [n @ n, np.dot(n, n)]
    counts["products"] += len(found)
    return {float(y[0, 0]) for y in found}


def open_and_close(rng: random.Random) -> None:
    """Open up to four blocks, and close them in another order; check a product after each step."""
    kind = rng.choice(LIBRARIES)
    stack = []
    for _ in range(rng.randint(1, 4)):
        stack.append(kind(rng.choice(list(VALUES))))
        stack[-1].__enter__()
        counts["scopes"] += 1
    while stack:
        check(products(kind), {VALUES[stack[-1]._text.strip("'")]}, "inside")
        stack.pop(rng.randrange(len(stack))).__exit__(None, None, None)
    check(products(kind), {FULL}, "after")


def multiply(rng: random.Random) -> None:
    check(products(rng.choice(LIBRARIES)), {FULL}, "outside")


def differentiate(rng: random.Random) -> None:
    x = torch.full((4, 4), ABOVE, requires_grad=True)
    for mode in ("bf16", ""):
        if mode:
            with lowprec.torch.intercept(mode):
                (x @ x.detach()).sum().backward()
        else:
            (x @ x.detach()).sum().backward()
        value, x.grad = float(x.grad[0, 0]), None
        check({value}, {4.0 if mode else 4 * ABOVE}, f"gradient {mode}")


def fork(rng: random.Random) -> None:
    time.sleep(0.05)
    with lowprec.torch.intercept("bf16"):
        child = os.fork()
        if child == 0:
            x = torch.full((4, 4), ABOVE)
            os._exit(0 if float((x @ x)[0, 0]) == 4 else 1)
    counts["forks"] += 1
    _, status = os.waitpid(child, 0)
    check({float(status)}, {0.0}, "fork")


def check(found: set[float], expected: set[float], where: str) -> None:
    if found != expected:
        failures.append(f"{where}: {found}, expected {expected}")


def main(seconds: float) -> int:
    faulthandler.enable()
    torch.set_num_threads(1)
    end = time.monotonic() + seconds
    open_and_close(random.Random(0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run(work: Callable[[random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end and not failures:
            try:
                work(rng)
            except Exception as error:  # noqa: BLE001 - shown at the end
                failures.append(f"{work.__name__}: {type(error).__name__}: {error}")

    works = [open_and_close, open_and_close, multiply, multiply, differentiate, fork]
    threads = [threading.Thread(target=run, args=(work, seed)) for seed, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(dict(counts), f"memory grew by {grown / 1024:.0f} MiB", *failures[:5], sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60))
