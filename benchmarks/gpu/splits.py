"""Float32 products as several products of 16 bits: error and speed, by chunk of the inner dimension.

An operand is split into a sum of float16 (two terms, the second times 2^11) or bfloat16 (three terms) matrices.
Products of terms are summed in float32, either by a call each that adds to C, or by one call whose inner dimension is
all of them one after the other, the smallest first. A chunk is a part of the inner dimension that is summed by itself.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import timing

import lowprec
from gpu import clock
from gpu.parts import Options, Part, short
from gpu.speed import relative_error, sets_of

#: By scheme: element type, bits that each further term is shifted by, and which terms are multiplied, smallest first.
SCHEMES: dict[str, tuple[str, int, tuple[tuple[int, int], ...]]] = {
    "fp16x3": ("float16", 11, ((1, 0), (0, 1), (0, 0))),
    "bf16x3": ("bfloat16", 0, ((1, 0), (0, 1), (0, 0))),
    "bf16x6": ("bfloat16", 0, ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))),
}
CHUNKS = (256, 512, 1024, None)
SIZES = (1024, 4096, 16384)
DISTRIBUTIONS = ("normal", "uniform")


class Way(NamedTuple):
    """How one product is computed."""

    scheme: str
    chunk: int | None
    joined: bool

    def __str__(self) -> str:
        how = "one call" if self.joined else "a call each"
        return f"{self.scheme}, chunks of {self.chunk or 'all'}, {how}"


def split(torch: Any, x: Any, scheme: str) -> list[Any]:
    """Return the terms of a float32 matrix: their sum is it, but for what the last one rounds away."""
    name, shift, pairs = SCHEMES[scheme]
    rest, terms = x, []
    for _ in range(1 + max(max(pair) for pair in pairs)):
        terms.append(rest.to(getattr(torch, name)))
        rest = (rest - terms[-1].float()) * 2.0**shift
    return terms


def multiply(torch: Any, way: Way, first: list[Any], second: list[Any]) -> Any:
    """Return the product of split operands.

    A call that joins terms cannot scale them apart: the second terms of float16 are then scaled back, exactly unless
    they become subnormal.
    """
    _, shift, pairs = SCHEMES[way.scheme]
    k = first[0].shape[1]
    chunk = way.chunk or k
    if way.joined and shift:
        first, second = ([x[0], x[1] * 2.0**-shift] for x in (first, second))
    shape = first[0].shape[0], second[0].shape[1]
    out = torch.zeros(shape, dtype=torch.float32, device=first[0].device)
    for begin in range(0, k, chunk):
        part = slice(begin, begin + chunk)
        if way.joined:
            x = torch.cat([first[i][:, part] for i, _ in pairs], dim=1)
            y = torch.cat([second[j][part] for _, j in pairs], dim=0)
            lowprec.matmul(x, y, c=out, beta=1.0, out=out)
            continue
        for i, j in pairs:
            x, y, alpha = first[i][:, part], second[j][part], 2.0 ** (-shift * (i + j))
            lowprec.matmul(x, y, alpha=alpha, c=out, beta=1.0, out=out)
    return out


def measure(
    torch: Any, scheme: str, n: int, distribution: str, options: Options, ticks: clock.Clock
) -> list[dict[str, Any]]:
    """Return one row per way of a scheme for square operands: the error; for normal numbers the speed, too."""
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    draw = torch.randn if distribution == "normal" else torch.rand
    sets = sets_of(n, 4) if ticks.device == "cuda" and distribution == "normal" else 1
    pairs = [
        [draw((n, n), generator=generator, device=ticks.device) for _ in range(2)]
        for _ in range(sets)
    ]

    def terms(scheme: str, number: int = 0) -> list[list[Any]]:
        return [split(torch, x, scheme) for x in pairs[number]]

    def whole(way: Way, number: int = 0) -> Any:
        return multiply(torch, way, *terms(way.scheme, number))

    def fp32(number: int = 0) -> Any:
        return lowprec.matmul(*pairs[number], math_mode="fp32")

    chunks = CHUNKS[:1] if options.quick else CHUNKS
    ways = [Way(scheme, *x) for x in product(chunks, (False, True))]
    found = clock.Contest()
    if distribution == "normal":
        calls = {str(way): lambda number, way=way: whole(way, number) for way in ways}
        calls |= {"splitting": lambda number: terms(scheme, number), "fp32": fp32}
        variants = {name: clock.Variant(call) for name, call in calls.items()}
        found = clock.contest(variants, ticks, sets=sets, rounds=3, budget_s=0.0, seed=options.seed)
    seconds = {name: timing.summary(taken)["median"] for name, taken in found.device_s.items()}
    fp32_error = relative_error(torch, fp32(), *pairs[0])
    rows = []
    for way in ways:
        row = {**way._asdict(), "n": n, "distribution": distribution, "fp32_error": fp32_error}
        if str(way) in seconds:
            row["seconds"] = seconds[str(way)]
            splitting = seconds.get("splitting")
            row["share_of_splitting"] = splitting and splitting / seconds[str(way)]
            row["speed_over_fp32"] = found.speed(str(way)).get("fp32")
        if why := found.errors.get(str(way)):
            rows.append({**row, "error": why})
            continue
        try:
            rows.append({**row, "relative_error": relative_error(torch, whole(way), *pairs[0])})
        except Exception as error:  # noqa: BLE001 - one way that fails is one row
            rows.append({**row, "error": short(error)})
    return rows


def run(part: Part, options: Options) -> None:
    """Measure all ways, sizes and distributions."""
    import torch

    ticks = clock.EventClock(torch)
    sizes = SIZES[:1] if options.quick else SIZES
    for n, distribution, scheme in part.in_time(product(sizes, DISTRIBUTIONS, SCHEMES), options):
        with part.attempt(scheme=scheme, n=n, distribution=distribution):
            for row in measure(torch, scheme, n, distribution, options, ticks):
                part.row(**row)
        torch.cuda.empty_cache()
