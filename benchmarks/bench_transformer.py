"""Speed of a transformer's products in blocks of calls, inside PyTorch programs, and in a training step.

usage: python benchmarks/bench_transformer.py [--quick] [--output DIR] [--seed N]

A block is a sequence of calls of one library, as in a program; libraries take turns by block. Figures are the time of
the fastest other library over lowprec's: medians of the ratios by round.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import common  # isort: skip - sets a variable that must come before NumPy
import ml_dtypes
import numpy as np
import timing
import torch
from torch import nn

import lowprec
import lowprec.torch

SQUARES = (64, 96, 128, 256, 512, 768)
#: (m, k, n): tokens by features.
SKINNY = tuple(
    (m, k, n) for m in (8, 16, 32, 128, 197) for k, n in ((768, 768), (768, 3072), (1024, 4096), (4096, 4096))
)
SETS = 3  # of operands, which take turns

Call = Callable[[int], Any]


def _block(call: Call, seconds: float, most: int) -> float:
    """Return the seconds of one call in a block of about this duration."""
    call(0)
    start = time.perf_counter()
    call(1)
    count = min(most, max(12, int(seconds / (time.perf_counter() - start))))
    start = time.perf_counter()
    for i in range(count):
        call(i)
    return (time.perf_counter() - start) / count


def _compete(calls: dict[str, Call], arguments: Any, most: int = 60) -> dict[str, list[float]]:
    rounds, seconds = (3, 0.001) if arguments.quick else (9, 0.05)
    for call in calls.values():
        call(0)
    return timing.take_turns(
        list(calls), lambda name, _: _block(calls[name], seconds, most), rounds=rounds, seed=arguments.seed
    )


def _ratio(others: list[list[float]], ours: list[float]) -> dict[str, float]:
    """Return the time of the fastest other library over lowprec's."""
    return timing.speed_ratio(min(others, key=statistics.median), ours)


# --- products ---------------------------------------------------------------------------------


def product_calls(m: int, k: int, n: int, seed: int) -> dict[str, dict[str, Call]]:
    """Return the calls of lowprec ("lowprec") and of others, by what is multiplied."""
    rng = np.random.default_rng(seed)
    a, b = ([rng.standard_normal(shape, np.float32) for _ in range(SETS)] for shape in ((m, k), (k, n)))
    low_a, low_b, turned = ([x.astype(ml_dtypes.bfloat16, order="C") for x in xs] for xs in (a, b, [x.T for x in b]))
    int_a, int_b = ([rng.integers(-99, 99, x.shape, np.int8) for x in xs] for xs in (a, b))
    of_a, of_b, of_int_a, of_int_b = ([torch.from_numpy(x) for x in xs] for xs in (a, b, int_a, int_b))
    half_a, half_b = ([x.to(torch.bfloat16) for x in xs] for xs in (of_a, of_b))
    half_turned = [x.T.contiguous().T for x in half_b]
    prepared = [lowprec.prepare(x, math_mode="bf16") for x in low_b]

    def call(function: Callable[..., Any], xs: list[Any], ys: list[Any], **options: Any) -> Call:
        return lambda i: function(xs[i % SETS], ys[i % SETS], **options)

    def by_lowprec(xs: list[Any], ys: list[Any], mode: str | None) -> dict[str, Call]:
        return {"lowprec": call(lowprec.matmul, xs, ys, math_mode=mode)}

    fp32 = {"numpy": call(np.matmul, a, b), "torch": call(torch.matmul, of_a, of_b)}
    half = {"torch": call(torch.matmul, half_a, half_b)}
    calls = {
        "fp32": fp32 | by_lowprec(a, b, "fp32"),
        "tf32": fp32 | by_lowprec(a, b, "tf32"),
        "bf16 storage": half | by_lowprec(low_a, low_b, "bf16"),
        "bf16 storage, b transposed": {
            "torch": call(torch.matmul, half_a, half_turned),
            **by_lowprec(low_a, [x.T for x in turned], "bf16"),
        },
        "prepared weight": half | by_lowprec(low_a, prepared, "bf16"),
    }
    if m > 16:
        calls["int8"] = {"torch": call(torch._int_mm, of_int_a, of_int_b), **by_lowprec(int_a, int_b, None)}
    return calls


def products(arguments: Any) -> Iterator[dict[str, Any]]:
    shapes = [(n, n, n) for n in SQUARES] + list(SKINNY)
    for m, k, n in [(64, 64, 64), (8, 64, 64)] if arguments.quick else shapes:
        for what, calls in product_calls(m, k, n, arguments.seed).items():
            seconds = _compete(calls, arguments)
            ours = seconds.pop("lowprec")
            row = {"kind": "product", "m": m, "k": k, "n": n, "what": what}
            yield row | {"speed": _ratio(list(seconds.values()), ours), "time": timing.summary(ours)}


# --- inside programs of PyTorch ---------------------------------------------------------------


def _median(call: Callable[[], Any], count: int, before: Callable[[], Any]) -> float:
    """Return the median time of so many calls, each after an untimed action."""
    samples = []
    for _ in range(count):
        before()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _transposed(rows: int, cols: int, batch: tuple[int, ...] = ()) -> Any:
    return torch.randn(*batch, cols, rows).transpose(-1, -2)


def program_operands(scale: int) -> dict[str, tuple[Any, Any]]:
    """Return products of a small GPT's training step, by notation; ``scale`` divides their extents."""
    t, c, d, h = 1536 // scale, 384 // scale, 1152 // scale, 48 // scale
    heads, s = 96 // scale, 128 // scale
    return {
        f"{t} x {c} @ ({d} x {c})^T": (torch.randn(t, c), _transposed(c, d)),
        f"({t} x {d})^T @ {t} x {c}": (_transposed(d, t), torch.randn(t, c)),
        f"{t} x {d} @ {d} x {c}": (torch.randn(t, d), torch.randn(d, c)),
        f"{heads} of {s} x {h} @ ({s} x {h})^T": (torch.randn(heads, s, h), _transposed(h, s, (heads,))),
        f"{heads} of {s} x {s} @ {s} x {h}": (torch.randn(heads, s, s), torch.randn(heads, s, h)),
    }


def programs(arguments: Any) -> Iterator[dict[str, Any]]:
    """Measure products on tensors alone, and each after an element-wise operation of PyTorch."""
    scale = 16 if arguments.quick else 1
    other = torch.randn(1 << 18)  # small enough to leave the operands in the cache
    for what, (a, b) in program_operands(scale).items():
        calls: dict[str, Callable[[], Any]] = {
            "torch": lambda a=a, b=b: torch.matmul(a, b),
            "fp32": lambda a=a, b=b: lowprec.matmul(a, b),
            "bf16": lambda a=a, b=b: lowprec.matmul(a, b, math_mode="bf16"),
        }

        def sample(name: str, _: int, calls: Any = calls) -> float:
            """Return seconds of a call, after one of the same or after an operation of PyTorch."""
            call, after = calls[name.split()[0]], name.endswith("after")

            def before() -> None:
                call()
                if after:
                    torch.add(other, 1.0, out=other)

            return _median(call, 4 if arguments.quick else 12, before)

        names = [f"{name}{then}" for name in calls for then in ("", " after")]
        rounds = 3 if arguments.quick else 9
        seconds = timing.take_turns(names, sample, rounds=rounds, seed=arguments.seed)
        for name, samples in seconds.items():
            row = {"kind": "program", "what": what, "variant": name, "time": timing.summary(samples)}
            row["slower_after"] = timing.speed_ratio(samples, seconds[name.split()[0]])
            yield row


# --- a training step --------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of a decoder, with attention written as products."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(features) for _ in range(2)])
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Any) -> Any:
        batch, tokens, features = x.shape
        split = (batch, tokens, 3, self.heads, features // self.heads)
        q, k, v = self.qkv(self.norms[0](x)).view(split).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, tokens, features))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A character model of the shape of nanoGPT's CPU example, with more layers and features."""

    def __init__(self, layers: int, features: int, tokens: int, heads: int, words: int = 65) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(words, features), nn.Embedding(tokens, features)
        self.layers = nn.Sequential(*[Block(features, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(features), nn.Linear(features, words, bias=False)

    def forward(self, text: Any) -> Any:
        x = self.word(text) + self.place(torch.arange(text.shape[1]))
        return self.head(self.norm(self.layers(x)))


def steps(arguments: Any) -> Iterator[dict[str, Any]]:
    """Measure training steps of a GPT in PyTorch alone and with its products by lowprec."""
    layers, features, tokens, batch = (1, 32, 16, 2) if arguments.quick else (4, 384, 128, 12)
    torch.manual_seed(arguments.seed)
    model = GPT(layers, features, tokens, heads=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    text = torch.randint(65, (batch, tokens + 1))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    ways: dict[str, Callable[[], Any]] = {
        "torch": nullcontext,
        "fp32": functools.partial(lowprec.torch.intercept, "fp32"),
        "bf16": functools.partial(lowprec.torch.intercept, "bf16"),
    }

    def sample(name: str, _: int) -> float:
        with ways[name]():
            step()
            return _median(step, 1 if arguments.quick else 4, lambda: None)

    seconds = timing.take_turns(list(ways), sample, rounds=3 if arguments.quick else 9, seed=arguments.seed)
    for name, samples in seconds.items():
        row = {"kind": "step", "variant": name, "time": timing.summary(samples)}
        yield row | {"relative_time": timing.speed_ratio(samples, seconds["torch"])}


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    speeds = [row["speed"]["median"] for row in rows if row["kind"] == "product"]
    after = [row["slower_after"]["median"] for row in rows if row.get("variant") in ("fp32 after", "bf16 after")]
    step = {row["variant"]: row["relative_time"]["median"] for row in rows if row["kind"] == "step"}
    return [
        common.claim(
            "products, times as fast as the best other, geometric mean", statistics.geometric_mean(speeds), 0.95
        ),
        common.claim("products, the slowest", min(speeds), 0.85),
        common.claim("a product after an operation of PyTorch, relative time", max(after), 1.1, at_most=True),
        common.claim("training step in fp32, relative time", step["fp32"], 1.1, at_most=True),
        common.claim("training step in bf16, relative time", step["bf16"], 0.65, at_most=True),
    ]


def main() -> None:
    arguments = common.parser(__doc__).parse_args()
    rows = [row for part in (products, programs, steps) for row in part(arguments)]
    common.report("transformer", arguments, rows, claims(rows))


if __name__ == "__main__":
    main()
