"""cuBLAS's own emulation: of FP32 beside lowprec's split and native FP32, of FP64 beside native FP64.

cuBLAS reads `CUBLAS_EMULATION_STRATEGY` once per process. Here it is `eager`: cuBLAS emulates wherever it can, and not
only where it expects to be faster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import timing

import lowprec
from gpu import clock, libraries
from gpu.parts import Options, Part, short
from gpu.speed import relative_error, sets_of

SIZES = (4096, 8192, 2048, 1024)
ROUNDS = 5
#: By element type: the arguments of `matmul` by name, and the largest relative error of a right result.
KINDS: dict[str, tuple[dict[str, dict[str, Any]], float]] = {
    "float32": (
        {
            "bf16x9": {"math_mode": "bf16x9"},
            # Chunks of k are those of lowprec's split.
            "bf16x9, split": {"math_mode": "bf16x9", "k_chunk": 256},
            "fp32": {"math_mode": "fp32"},
        },
        1e-5,
    ),
    "float64": ({"fp64_emulated": {"math_mode": "fp64_emulated"}, "float64": {"math_mode": "fp32"}}, 1e-12),
}


def measure(torch: Any, dtype: str, n: int, options: Options, ticks: clock.Clock) -> Iterator[dict[str, Any]]:
    """Yield one row per way to multiply square matrices: what ran, the error and the speed."""
    ways, tolerance = KINDS[dtype]
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    sets = sets_of(n, 8 if dtype == "float64" else 4) if ticks.device == "cuda" else 1
    pairs = [[libraries.normal(torch, generator, (n, n), dtype) for _ in range(2)] for _ in range(sets)]
    variants = {
        name: clock.Variant(lambda i, asked=asked: lowprec.matmul(*pairs[i], **asked)) for name, asked in ways.items()
    }
    found = clock.contest(variants, ticks, sets=sets, rounds=ROUNDS, budget_s=0.0, seed=options.seed)
    for name, asked in ways.items():
        values: dict[str, Any] = {"dtype": dtype, "n": n, "name": name}
        try:
            plan = lowprec.plan(*pairs[0], **asked)
            error = relative_error(torch, lowprec.matmul(*pairs[0], **asked), *pairs[0])
        except Exception as problem:  # noqa: BLE001 - one way that fails is one row
            yield {**values, "ok": False, "error": short(problem)}
            continue
        values |= {"kernel": plan.kernel, "units": dict(plan.algorithm).get("units", "")}
        values |= {"relative_error": error, "ok": error <= tolerance}
        if name in found.device_s:
            seconds = timing.summary(found.device_s[name])["median"]
            values |= {"seconds": seconds, "tflops": 2 * n**3 / seconds / 1e12, "speed": found.speed(name)}
        yield values


def run(part: Part, options: Options) -> None:
    """Measure all element types and sizes."""
    os.environ["CUBLAS_EMULATION_STRATEGY"] = "eager"
    import torch

    ticks = clock.EventClock(torch)
    sizes = SIZES[-1:] if options.quick else SIZES
    for n, dtype in part.in_time(product(sizes, KINDS), options):
        with part.attempt(n=n, dtype=dtype):
            for values in measure(torch, dtype, n, options, ticks):
                part.row(**values)
        torch.cuda.empty_cache()
