"""A jitted product in JAX by its mode, compared with `jax.numpy.matmul` in float32.

usage: python benchmarks/bench_jax.py [--quick] [--seed N]

It prints medians and ratios, and writes no file.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import common  # isort: skip - sets a variable that must come before NumPy
import jax
import jax.numpy as jnp
import numpy as np
import timing

import lowprec.jax

assert common  # imported for its side effect

SIZES = (8, 1024, 2048)
MODES = ("fp32", "bf16")


def variants(a: Any, b: Any, mode: str) -> dict[str, Callable[[], Any]]:
    """Return the products by name."""
    made = {
        "jnp.matmul": jax.jit(jnp.matmul),
        "lowprec": jax.jit(functools.partial(lowprec.jax.matmul, math_mode=mode)),
    }
    return {name: functools.partial(lambda f: f(a, b).block_until_ready(), f) for name, f in made.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    for size in SIZES[:1] if given.quick else SIZES:
        a, b = (jnp.asarray(rng.standard_normal((size, size), dtype=np.float32)) for _ in "ab")
        for mode in MODES:
            calls = variants(a, b, mode)
            for call in calls.values():
                call()
            repeats = 200 if size == 8 else 1
            samples = timing.take_turns(
                tuple(calls),
                lambda name, _, calls=calls, n=repeats: (
                    timing.timeit.timeit(calls[name], number=n) / n  # type: ignore[misc]
                ),
                rounds=3 if given.quick else 15,
                seed=given.seed,
            )
            medians = {name: float(np.median(found)) for name, found in samples.items()}
            ratio = float(np.median(np.divide(samples["lowprec"], samples["jnp.matmul"])))
            row = " | ".join(f"{name} {seconds * 1e6:,.1f} us" for name, seconds in medians.items())
            print(f"{size:5} {mode:5} | {row} | lowprec / jnp.matmul {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
