"""Speed of dividing gradients by the loss scale and checking them for Inf and NaN, against PyTorch's own pass.

usage: python benchmarks/bench_unscale.py [--quick] [--output DIR] [--seed N]

All variants work in place on float32 in host memory, in one array and in a thousand, in the same number of threads.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

import common  # isort: skip - sets a variable that must come before NumPy
import numpy as np
import timing

from lowprec.amp import LossScaler
from lowprec.backends.cpu import library

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
    ours, plain, shared = (list(rng.standard_normal(arrays * n, dtype=np.float32).reshape(arrays, n)) for _ in range(3))
    scaler = LossScaler(SCALE, dynamic=False)

    def without_kernels(_: int) -> bool:
        with mock.patch.object(library, "library", return_value=None):
            return unscale(scaler, plain)

    passes = {OURS: lambda _: unscale(scaler, ours), "lowprec without kernels": without_kernels}
    if importlib.util.find_spec("torch"):
        import torch

        tensors = [torch.from_numpy(x) for x in shared]
        inverse = torch.full((), 1 / SCALE, dtype=torch.float32)

        def by_torch(_: int) -> bool:
            flag = torch.zeros(())
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, inverse)
            return bool(flag)

        passes |= {TORCH: by_torch, "lowprec on torch tensors": lambda _: unscale(scaler, tensors)}
    return passes


def main() -> None:
    arguments = common.parser(__doc__).parse_args()
    rounds, sizes = 15, [(1, 1_000_000), (1, 100_000_000), (1000, 100_000)]
    if arguments.quick:
        rounds, sizes = 3, [(1, 10_000), (10, 1000)]
    rows, claims = [], []
    for arrays, n in sizes:
        seconds = timing.interleave(variants(arrays, n, arguments.seed), rounds=rounds, seed=arguments.seed)
        for name, samples in seconds.items():
            time = timing.summary(samples)
            speed = timing.speed_ratio(seconds[TORCH], samples) if TORCH in seconds else None
            row = {"variant": name, "arrays": arrays, "n": n, "time": time, "speed": speed}
            # Each number is read and written once.
            rows.append(row | {"gb_per_s": 8e-9 * arrays * n / time["median"]})
            if name == OURS and (arrays, n) in sizes[1:]:
                spread = f"{arrays:,} arrays" if arrays > 1 else "one array"
                what = f"unscale and check {arrays * n:,} float32 in {spread}, times as fast as PyTorch"
                claims.append(common.claim(what, speed and speed["median"], 1.0))
    common.report("unscale", arguments, rows, claims, rounds=rounds)


if __name__ == "__main__":
    main()
