"""Block-scaled operands: error and speed of products of codes beside those of the same numbers in bfloat16."""

from __future__ import annotations

from typing import Any

import timing

import lowprec
from gpu import clock
from gpu.parts import Options, Part
from gpu.speed import sets_of

FORMATS = ("mxfp8", "nvfp4", "mxfp4")
#: m, n, k: square products, and a weight times few rows.
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (16, 8192, 8192), (1024, 1024, 1024))
ROUNDS = 5


def measure(torch: Any, name: str, shape: tuple[int, int, int], options: Options, ticks: clock.Clock) -> dict[str, Any]:
    """Return a row: what the plan says, the error over the plan's bound, and the speed over bfloat16."""
    m, n, k = shape
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    sets = sets_of(min(n, k), 1) if ticks.device == "cuda" else 1
    wide, quantised = [], []
    for _ in range(sets):
        a, b = (torch.randn(s, generator=generator, device=ticks.device) for s in ((m, k), (k, n)))
        quantised.append((lowprec.quantize(a, name), lowprec.quantize(b, name, axis=0)))
        wide.append((a.bfloat16(), b.bfloat16()))
    x, y = quantised[0]
    plan = lowprec.plan(x, y)
    left, right = x.dequantize().double(), y.dequantize().double()
    norms = [float(torch.linalg.norm(z)) for z in (left, right)]
    error = float(torch.linalg.norm(lowprec.matmul(x, y).double() - left @ right))
    limit = plan.bound.frobenius(*norms, m, n)
    variants = {
        name: clock.Variant(lambda i: lowprec.matmul(*quantised[i])),
        "bfloat16": clock.Variant(lambda i: lowprec.matmul(*wide[i])),
    }
    found = clock.contest(variants, ticks, sets=sets, rounds=ROUNDS, budget_s=0.0, seed=options.seed)
    return {
        "format": name, "shape": shape, "compute_type": plan.compute_type, "kernel": plan.kernel_reason,
        "algorithm": dict(plan.algorithm), "error_over_bound": error / limit,
        "seconds": {x: timing.summary(taken)["median"] for x, taken in found.device_s.items()},
        "speed_over_bfloat16": found.speed(name).get("bfloat16"), "errors": found.errors,
        "ok": error <= limit,
    }  # fmt: skip


def run(part: Part, options: Options) -> None:
    """Measure all formats and shapes."""
    import torch

    ticks = clock.EventClock(torch)
    shapes = SHAPES[-1:] if options.quick else SHAPES
    for shape, name in part.in_time([(s, f) for s in shapes for f in FORMATS], options):
        with part.attempt(format=name, shape=shape):
            part.row(**measure(torch, name, shape, options, ticks))
        torch.cuda.empty_cache()
