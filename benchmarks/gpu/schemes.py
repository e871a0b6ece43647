"""Errors and speeds of the modes that recover FP32, by chunk of k, and of torch's products of float32 matrices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import lowprec
from gpu import clock
from gpu.parts import Options, Part, short
from gpu.speed import errors as errors_of
from gpu.speed import sets_of, torch_switches

MODES = ("fp16x3", "bf16x6", "bf16x3", "tf32x3")


def measure_splits(
    torch: Any, n: int, distribution: str, options: Options, ticks: clock.EventClock
) -> Iterator[dict[str, Any]]:
    """Yield one row per product, square operands: the error; for normal numbers the speed."""
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    draw, timed = (torch.randn, True) if distribution == "normal" else (torch.rand, False)
    sets = sets_of(8 * n * n) if timed and ticks.device == "cuda" else 1
    pairs = [
        [draw((n, n), generator=generator, device=ticks.device) for _ in range(2)]
        for _ in range(sets)
    ]
    ieee, tf32 = (partial(torch_switches, torch, precision) for precision in ("ieee", "tf32"))
    variants = {
        "torch float32": clock.Variant(lambda i: torch.matmul(*pairs[i]), ieee),
        "torch tf32": clock.Variant(lambda i: torch.matmul(*pairs[i]), tf32),
        "torch float64": clock.Variant(
            lambda i: torch.matmul(*(x.double() for x in pairs[i])), ieee
        ),
    }
    others = set(variants)
    words: dict[str, dict[str, Any]] = {name: {} for name in others}
    chunks = (
        {"256": 256}
        if options.quick
        else {"256": 256, "512": 512, "1024": 1024, "whole": n, "plan": None}
    )
    for mode, chunk in product(MODES, chunks):
        name, how = f"{mode}, chunks: {chunk}", {"math_mode": mode, "k_chunk": chunks[chunk]}
        variants[name] = clock.Variant(lambda i, how=how: lowprec.matmul(*pairs[i], **how))
        words[name] = {"mode": mode, "chunk": chunk}
    errors = {}
    for name, variant in variants.items():
        try:
            with variant.around():
                errors[name], _ = errors_of(torch, variant.call(0), *pairs[0])
        except Exception as error:  # noqa: BLE001 - a product that fails is one row
            yield {"name": name, **words[name], "error": short(error)}
    contest = clock.Contest()
    if timed:
        able = {name: variants[name] for name in errors}
        contest = clock.contest(able, ticks, sets=sets, rounds=3, budget_s=0.0, seed=options.seed)
    for name, error in errors.items():
        values = {
            "name": name,
            **words[name],
            "relative_error": error,
            "seconds": contest.seconds.get(name),
        }
        values["speed"] = {
            other: ratio for other, ratio in contest.speed(name).items() if other in others
        }
        yield values | ({"error": contest.errors[name]} if name in contest.errors else {})


def splits(part: Part, options: Options) -> None:
    import torch

    ticks, sizes = (
        clock.EventClock(torch),
        (1024,) if options.quick else (8192, 4096, 1024, 2048, 16384),
    )
    for n, distribution in part.in_time(product(sizes, ("normal", "uniform")), options):
        words = {"n": n, "distribution": distribution}
        with part.attempt(**words):
            for values in measure_splits(torch, n, distribution, options, ticks):
                part.row(**words, **values)
        torch.cuda.empty_cache()
