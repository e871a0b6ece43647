"""How far the heuristics' first choice is from the best of 32, by shape."""

from __future__ import annotations

from itertools import product
from typing import Any

import lowprec
from gpu import libraries
from gpu.parts import Options, Part

#: Name: batch, m, k, n. Batch 0 is none.
SHAPES = {
    "square 1024": (0, 1024, 1024, 1024),
    "square 2048": (0, 2048, 2048, 2048),
    "square 4096": (0, 4096, 4096, 4096),
    "tall": (0, 16384, 1024, 256),
    "wide": (0, 256, 1024, 16384),
    "small k": (0, 4096, 64, 4096),
    "large k": (0, 256, 16384, 256),
    "few rows": (0, 16, 4096, 4096),
    "odd": (0, 1000, 1001, 999),
    "batched 256": (64, 256, 256, 256),
}
#: dtype, mode.
KINDS = (("bfloat16", None), ("float16", None), ("float32", "tf32"), ("float32", "fp32"))
CANDIDATES = 32


def compare(timed: Any) -> dict[str, Any]:
    """Return first choice and best of what was measured."""
    first = min(timed, key=lambda x: x.rank)
    best = min(timed, key=lambda x: x.median_ms)
    return {
        "candidates": len(timed),
        "first_ms": first.median_ms,
        "best_ms": best.median_ms,
        "first_over_best": first.median_ms / best.median_ms,
        "best_rank": best.rank,
        "taken_rank": timed[0].rank,
        "first": first.algorithm,
        "best": best.algorithm,
    }


def run(part: Part, options: Options) -> None:
    """Measure all shapes and kinds."""
    import torch

    generator = torch.Generator("cuda").manual_seed(options.seed)
    names = list(SHAPES)[:1] if options.quick else SHAPES
    for name, (dtype, mode) in part.in_time(product(names, KINDS), options):
        batch, m, k, n = SHAPES[name]
        stack = (batch,) if batch else ()
        words = {"shape": name, "extents": SHAPES[name], "kind": mode or dtype}
        with part.attempt(**words):
            extents = ((*stack, m, k), (*stack, k, n))
            a, b = (libraries.normal(torch, generator, e, dtype) for e in extents)
            timed = lowprec.autotune(a, b, math_mode=mode, candidates=CANDIDATES).timed
            part.row(ok=bool(timed), **words, **compare(timed))
