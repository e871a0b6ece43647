"""How fast gradients are divided by the loss scale and looked at for Inf and NaN, beside PyTorch's own pass.

usage: python benchmarks/bench_unscale.py [--quick] [--output DIR] [--seed N]

All variants work in place on float32 in host memory.
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
from lowprec.backends.cpu import casting

#: Its reciprocal is no power of two and changes a number by its last digit alone, so that passes may be repeated.
SCALE = 1 + 2.0**-20

OURS, WITHOUT_NUMBA, TORCH, ON_TENSORS = (
    "lowprec",
    "lowprec without numba",
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "lowprec on torch tensors",
)


def unscale(grads: Any) -> bool:
    """Divide in place; return whether Inf or NaN was found, which the pass is done for."""
    scaler = LossScaler(SCALE, dynamic=False)
    scaler.unscale(grads, out=grads)
    return scaler.found_inf


def variants(n: int, seed: int) -> dict[str, Callable[[int], Any]]:
    """Return what is timed, each on numbers of its own."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.standard_normal(n, dtype=np.float32) for name in (OURS, WITHOUT_NUMBA, TORCH)
    }

    def without_numba(_: int) -> bool:
        with mock.patch.object(casting, "has_kernels", return_value=False):
            return unscale([arrays[WITHOUT_NUMBA]])

    found: dict[str, Callable[[int], Any]] = {
        OURS: lambda _: unscale([arrays[OURS]]),
        WITHOUT_NUMBA: without_numba,
    }
    if importlib.util.find_spec("torch"):
        import torch

        tensor = torch.from_numpy(arrays[TORCH])
        inverse = torch.full((), 1 / SCALE, dtype=torch.float32)

        def by_torch(_: int) -> bool:
            flag = torch.zeros(())
            torch._amp_foreach_non_finite_check_and_unscale_([tensor], flag, inverse)
            return bool(flag)

        found |= {TORCH: by_torch, ON_TENSORS: lambda _: unscale([tensor])}
    return found


def main() -> None:
    """Measure, print and write."""
    arguments = common.parser(__doc__).parse_args()
    rounds, sizes = (3, [10_000]) if arguments.quick else (15, [1_000_000, 100_000_000])
    rows: list[dict[str, Any]] = []
    claims = []
    for n in sizes:
        seconds = timing.interleave(variants(n, arguments.seed), rounds=rounds, seed=arguments.seed)
        rows += [
            {
                "variant": name,
                "n": n,
                "time": timing.summary(taken),
                # Each number is read and written once.
                "gb_per_s": 8e-9 * n / timing.summary(taken)["median"],
                "speed": timing.speed_ratio(seconds[TORCH], taken) if TORCH in seconds else None,
            }
            for name, taken in seconds.items()
        ]
    speeds = {r["n"]: r["speed"]["median"] for r in rows if r["variant"] == OURS and r["speed"]}
    what = f"unscale and check {sizes[-1]:,} float32, times as fast as PyTorch"
    claims.append(common.claim(what, speeds.get(sizes[-1]), 1.0))
    common.report("unscale", arguments, rows, claims, rounds=rounds)


if __name__ == "__main__":
    main()
