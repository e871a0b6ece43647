"""Speed of a 2:4 sparse weight of 16 bits over the same numbers as a dense one, and the time to compress it."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import timing

import lowprec
from gpu import clock, libraries
from gpu.parts import Options, Part

#: (m, k, n): rows of activations, and weights of transformers.
SHAPES = (
    (16, 4096, 4096), (64, 4096, 4096), (512, 4096, 4096), (4096, 4096, 4096), (16, 4096, 14336), (4096, 4096, 14336),
    (8192, 8192, 8192),
)  # fmt: skip
DTYPES = ("bfloat16", "float16")


def measure(torch: Any, extents: tuple[int, int, int], dtype: str, options: Options, ticks: Any) -> dict[str, Any]:
    """Return times and ratios of one shape; `algorithm` and `sparsity` show whether cuSPARSELt ran."""
    m, k, n = extents
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    a, b = (libraries.normal(torch, generator, shape, dtype) for shape in ((m, k), (n, k)))
    # Two elements of each group along k, at random positions.
    kept = torch.rand((n, k // 4, 4), generator=generator, device=ticks.device).argsort(-1) < 2
    dense = (b * kept.reshape(n, k)).T
    sparse = lowprec.prepare(dense, sparsity="2:4")
    begin = time.perf_counter()
    lowprec.matmul(a, sparse)
    ticks.wait()
    first_s = time.perf_counter() - begin
    variants = {
        "sparse": clock.Variant(lambda _: lowprec.matmul(a, sparse)),
        "dense": clock.Variant(lambda _: lowprec.matmul(a, dense)),
        "torch": clock.Variant(lambda _: torch.matmul(a, dense)),
    }
    found = clock.contest(variants, ticks, sets=1, rounds=3 if options.quick else 15, seed=options.seed)
    error = (lowprec.matmul(a, sparse).double() - lowprec.matmul(a, dense).double()).norm()
    plan = lowprec.plan(a, sparse)
    relative = float(error / (a.double().norm() * dense.double().norm()))
    return {
        # Both products are within the bound of the plan.
        "ok": not found.errors and relative <= 2 * plan.bound.relative,
        "seconds": {name: timing.summary(taken)["median"] for name, taken in found.device_s.items()},
        "speed": found.speed("sparse"),
        "first_s": first_s,
        "relative_difference": relative,
        "sparsity": str(plan.sparsity),
        "algorithm": [list(row) for row in plan.algorithm],
        "bytes": {"dense": b.numel() * b.element_size(), "compressed": sparse.packed_bytes},
        "errors": found.errors,
    }


def run(part: Part, options: Options) -> None:
    """Measure all shapes and types."""
    import torch

    ticks = clock.EventClock(torch)
    shapes = SHAPES[:1] if options.quick else SHAPES
    for extents, dtype in part.in_time(product(shapes, DTYPES), options):
        words = {"extents": extents, "dtype": dtype}
        with part.attempt(**words):
            part.row(**words, **measure(torch, extents, dtype, options, ticks))
        torch.cuda.empty_cache()
