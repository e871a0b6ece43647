"""Errors and speeds of the modes that recover FP32, by chunk of k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import lowprec
from gpu import clock
from gpu.parts import Options, Part, short
from gpu.speed import errors as errors_of
from gpu.speed import sets_of, torch_switches

Row = dict[str, Any]


class Way(NamedTuple):
    """A mode, and the length of its chunks: None is the whole of k, "plan" the plan's choice."""

    mode: str
    chunk: int | str | None

    def __str__(self) -> str:
        return f"{self.mode}, chunks: {'whole' if self.chunk is None else self.chunk}"

    def arguments(self, k: int) -> dict[str, Any]:
        chunk = {} if self.chunk == "plan" else {"k_chunk": k if self.chunk is None else self.chunk}
        return {"math_mode": self.mode, **chunk}


#: torch's products of float32 matrices, by name, and its word for the precision of each.
TORCH_PRODUCTS: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "torch float32": (lambda torch, a, b: torch.matmul(a, b), "ieee"),
    "torch tf32": (lambda torch, a, b: torch.matmul(a, b), "tf32"),
    "torch float64": (lambda torch, a, b: torch.matmul(a.double(), b.double()), "ieee"),
}


def measure_splits(torch: Any, n: int, distribution: str, options: Options, ticks: clock.EventClock) -> Iterator[Row]:
    """Yield one row per product of torch's and per way, square operands: the error; for normal numbers the speed."""
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    draw, timed = (torch.randn, True) if distribution == "normal" else (torch.rand, False)
    sets = sets_of(8 * n * n) if timed and ticks.device == "cuda" else 1
    pairs = [[draw((n, n), generator=generator, device=ticks.device) for _ in range(2)] for _ in range(sets)]
    chunks = (256,) if options.quick else (256, 512, 1024, None, "plan")
    plans, errors = {}, {}
    for way in (Way(*x) for x in product(("fp16x3", "bf16x6", "bf16x3", "tf32x3"), chunks)):
        try:
            plans[way] = lowprec.plan(*pairs[0], **way.arguments(n))
            errors[way], _ = errors_of(torch, lowprec.matmul(*pairs[0], **way.arguments(n)), *pairs[0])
        except Exception as error:  # noqa: BLE001 - a way that fails is one row
            yield {"name": str(way), **way._asdict(), "error": short(error)}
    contest = clock.Contest()
    if timed:
        variants: dict[str, Any] = {
            name: clock.Variant(
                lambda i, multiply=multiply: multiply(torch, *pairs[i]), partial(torch_switches, torch, precision, True)
            )
            for name, (multiply, precision) in TORCH_PRODUCTS.items()
        }
        for way in plans:
            variants[str(way)] = lambda i, way=way: lowprec.matmul(*pairs[i], **way.arguments(n))
        contest = clock.contest(variants, ticks, sets=sets, rounds=3, budget_s=0.0, seed=options.seed)
    seconds = contest.seconds
    for name, (multiply, precision) in TORCH_PRODUCTS.items():
        with torch_switches(torch, precision, True):
            error, _ = errors_of(torch, multiply(torch, *pairs[0]), *pairs[0])
        yield {"name": name, "relative_error": error, "seconds": seconds.get(name)}
    for way in errors:
        name = str(way)
        values = {"name": name, **way._asdict(), "plan_k_chunk": plans[way].k_chunk, "relative_error": errors[way]}
        if name in seconds:
            speed = {other: ratio for other, ratio in contest.speed(name).items() if other in TORCH_PRODUCTS}
            values |= {"seconds": seconds[name], "speed": speed}
        elif name in contest.errors:
            values["error"] = contest.errors[name]
        yield values


def splits(part: Part, options: Options) -> None:
    import torch

    ticks, sizes = clock.EventClock(torch), (1024,) if options.quick else (8192, 4096, 1024, 2048, 16384)
    for n, distribution in part.in_time(product(sizes, ("normal", "uniform")), options):
        words = {"n": n, "distribution": distribution}
        with part.attempt(**words):
            for values in measure_splits(torch, n, distribution, options, ticks):
                part.row(**{**words, **values})
        torch.cuda.empty_cache()
