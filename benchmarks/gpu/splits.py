"""The schemes that recover FP32 from 16-bit and TF32 parts: error and speed beside torch, by chunk of k.

A product is `lowprec.matmul` in a mode with `k_chunk`, splitting included. Torch's are float32, the same with TF32
allowed, and float64 of widened operands. What splitting takes is the difference to the products of the plan alone, on
parts that are there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import timing

import lowprec
from gpu import clock
from gpu.parts import Options, Part, short
from gpu.speed import relative_error, sets_of, torch_switches
from lowprec.modes import row
from lowprec.planning import GemmPlan

MODES = ("fp16x3", "bf16x6", "bf16x3", "tf32x3")
#: None: the whole of k in one piece. "plan": as the plan chooses.
CHUNKS: tuple[int | str | None, ...] = (256, 512, 1024, None, "plan")
#: The size of the goals first.
SIZES = (8192, 4096, 1024, 2048, 16384)
DISTRIBUTIONS = ("normal", "uniform")
ROUNDS = 3


class Way(NamedTuple):
    """A mode, and the length of its chunks."""

    mode: str
    chunk: int | str | None

    def __str__(self) -> str:
        return f"{self.mode}, chunks: {'whole' if self.chunk is None else self.chunk}"

    def asked(self, k: int) -> dict[str, Any]:
        """Return the arguments of `matmul`."""
        if self.chunk == "plan":
            return {"math_mode": self.mode}
        return {"math_mode": self.mode, "k_chunk": k if self.chunk is None else self.chunk}


def torch_products(torch: Any) -> dict[str, tuple[Callable[[Any, Any], Any], str]]:
    """Return torch's ways to multiply float32 matrices, by name, and its word for the precision of each."""

    def widened(a: Any, b: Any) -> Any:
        return torch.matmul(a.double(), b.double())

    return {
        "torch float32": (torch.matmul, "ieee"),
        "torch tf32": (torch.matmul, "tf32"),
        "torch float64": (widened, "ieee"),
    }


class Parts:
    """Numbers in the types of parts, any ones, shared by all that multiplies them; and where their products go."""

    def __init__(self, torch: Any, n: int, device: str) -> None:
        self._torch, self._n, self._device = torch, n, device
        self._held: dict[Any, tuple[Any, Any]] = {}
        self.out = torch.zeros((n, n), dtype=torch.float32, device=device)

    def of(self, plan: GemmPlan) -> tuple[Any, Any]:
        """Return matrices that are as long along k as the longest product of a plan, or longer."""
        data = row(plan.mode).data
        dtype = self._torch.float32 if data is None else getattr(self._torch, data.label)
        length = max(step.length for step in plan.schedule)
        if dtype not in self._held or self._held[dtype][0].shape[1] < length:
            shapes = (self._n, length), (length, self._n)
            x, y = (self._torch.ones(s, dtype=dtype, device=self._device) for s in shapes)
            self._held[dtype] = x, y
        return self._held[dtype]

    def multiply(self, plan: GemmPlan) -> Any:
        """Form the products of a plan from parts that are there already."""
        x, y = self.of(plan)
        mode = "tf32" if row(plan.mode).data is None else None
        for step in plan.schedule:
            lowprec.matmul(
                x[:, : step.length], y[: step.length], out=self.out, c=self.out, alpha=step.factor,
                beta=float(step.accumulates), math_mode=mode, k_chunk=step.length,
            )  # fmt: skip
        return self.out


def _variants(torch: Any, pairs: Any, plans: dict[Way, GemmPlan]) -> dict[str, clock.Variant]:
    """Return what is timed: torch's products, each way, and the products of its plan alone."""
    variants = {
        name: clock.Variant(
            lambda i, multiply=multiply: multiply(*pairs[i]), partial(torch_switches, torch, precision, True)
        )
        for name, (multiply, precision) in torch_products(torch).items()
    }
    n, device = pairs[0][0].shape[0], str(pairs[0][0].device)
    parts = Parts(torch, n, device)
    for way, plan in plans.items():
        asked = way.asked(n)
        variants[str(way)] = clock.Variant(lambda i, asked=asked: lowprec.matmul(*pairs[i], **asked))
        variants[f"{way}: products"] = clock.Variant(lambda _, plan=plan: parts.multiply(plan))
    return variants


def measure(torch: Any, n: int, distribution: str, options: Options, ticks: clock.Clock) -> Iterator[dict[str, Any]]:
    """Yield one row per product of torch's and per way, square operands: the error; for normal numbers the speed."""
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    draw = torch.randn if distribution == "normal" else torch.rand
    timed = distribution == "normal"
    sets = sets_of(n, 4) if ticks.device == "cuda" and timed else 1
    pairs = [[draw((n, n), generator=generator, device=ticks.device) for _ in range(2)] for _ in range(sets)]
    shared = {"n": n, "distribution": distribution}
    plans = {}
    for way in (Way(*x) for x in product(MODES, CHUNKS[:1] if options.quick else CHUNKS)):
        try:
            plans[way] = lowprec.plan(*pairs[0], **way.asked(n))
        except Exception as error:  # noqa: BLE001 - one way that fails is one row
            yield {**shared, "name": str(way), **way._asdict(), "error": short(error)}
    found = clock.Contest()
    if timed:
        variants = _variants(torch, pairs, plans)
        found = clock.contest(variants, ticks, sets=sets, rounds=ROUNDS, budget_s=0.0, seed=options.seed)
    seconds = {name: timing.summary(taken)["median"] for name, taken in found.device_s.items()}
    for name, (multiply, precision) in torch_products(torch).items():
        with torch_switches(torch, precision, True):
            error = relative_error(torch, multiply(*pairs[0]), *pairs[0])
        yield {**shared, "name": name, "relative_error": error, "seconds": seconds.get(name)}
    for way, plan in plans.items():
        values = {**shared, "name": str(way), **way._asdict(), "plan_k_chunk": plan.k_chunk}
        try:
            result = lowprec.matmul(*pairs[0], **way.asked(n))
            values["relative_error"] = relative_error(torch, result, *pairs[0])
        except Exception as error:  # noqa: BLE001 - one way that fails is one row
            yield {**values, "error": short(error)}
            continue
        yield values | _speed(str(way), found, seconds)


def _speed(name: str, found: clock.Contest, seconds: dict[str, float]) -> dict[str, Any]:
    """Return what is known of the speed of one way: nothing where it was not timed."""
    if name not in seconds:
        return {"error": found.errors[name]} if name in found.errors else {}
    alone = seconds.get(f"{name}: products")
    speed = found.speed(name)
    return {
        "seconds": seconds[name],
        "seconds_of_products": alone,
        "share_of_splitting": alone and 1 - alone / seconds[name],
        "speed": {other: speed[other] for other in speed if other.startswith("torch ")},
    }


def run(part: Part, options: Options) -> None:
    """Measure all ways, sizes and distributions."""
    import torch

    ticks = clock.EventClock(torch)
    sizes = SIZES[-3:-2] if options.quick else SIZES
    for n, distribution in part.in_time(product(sizes, DISTRIBUTIONS), options):
        with part.attempt(n=n, distribution=distribution):
            for values in measure(torch, n, distribution, options, ticks):
                part.row(**values)
        torch.cuda.empty_cache()
