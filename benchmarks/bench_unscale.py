"""Speed of dividing gradients by the loss scale and checking them for Inf and NaN, against PyTorch's own pass.

All variants work in place on float32 in host memory, in one array and in a thousand, in the same number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import common  # isort: skip - sets a variable that must come before NumPy
import numpy as np
import timing
import torch

from lowprec.amp import LossScaler

#: Its reciprocal is not a power of two, but near 1: passes can be repeated without overflow.
SCALE = 1 + 2.0**-20

OURS, TORCH = "lowprec", "torch._amp_foreach_non_finite_check_and_unscale_"


def unscale(scaler: LossScaler, grads: Any) -> bool:
    """Divide in place; return whether Inf or NaN was found."""
    scaler.unscale(grads, out=grads)
    found_inf = scaler.found_inf
    scaler.update()
    return found_inf


def variants(arrays: int, n: int, seed: int) -> dict[str, Callable[[int], Any]]:
    """Return the passes, each over arrays of its own but for the two on PyTorch's tensors."""
    rng = np.random.default_rng(seed)
    ours, shared = (
        list(rng.standard_normal(arrays * n, dtype=np.float32).reshape(arrays, n)) for _ in range(2)
    )
    scaler = LossScaler(SCALE, dynamic=False)

    tensors = [torch.from_numpy(x) for x in shared]
    inverse = torch.full((), 1 / SCALE, dtype=torch.float32)

    def by_torch(_: int) -> bool:
        flag = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, inverse)
        return bool(flag)

    ways = {OURS: lambda _: unscale(scaler, ours), TORCH: by_torch}
    return {**ways, "lowprec on torch tensors": lambda _: unscale(scaler, tensors)}


def measure(quick: bool, seed: int) -> Iterator[dict[str, Any]]:
    sizes = (
        [(1, 10_000), (10, 1000)] if quick else [(1, 1_000_000), (1, 100_000_000), (1000, 100_000)]
    )
    for arrays, n in sizes:
        seconds = timing.interleave(variants(arrays, n, seed), rounds=3 if quick else 15, seed=seed)
        for name, samples in seconds.items():
            time = timing.summary(samples)
            speed = timing.speed_ratio(seconds[TORCH], samples)
            # Each number is read and written once.
            rate = 8e-9 * arrays * n / time["median"]
            yield {
                "variant": name,
                "arrays": arrays,
                "n": n,
                "time": time,
                "speed": speed,
                "gb_per_s": rate,
            }


def claims(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for r in rows:
        if r["variant"] == OURS and (r["arrays"] > 1 or r["n"] > 1_000_000):
            spread = f"{r['arrays']:,} arrays" if r["arrays"] > 1 else "one array"
            what = f"unscale and check {r['arrays'] * r['n']:,} float32 in {spread}, times as fast as PyTorch"
            yield common.claim(what, r["speed"]["median"], 1.0)


if __name__ == "__main__":
    common.main(__doc__, "unscale", measure, claims)
