"""Speed of a transformer's products in blocks of calls, of its attention, and of a training step.

A block is a sequence of calls of one library, as in a program; libraries take turns by block. Figures are the time of
the fastest other library over lowprec's: medians of the ratios by round.
"""

from __future__ import annotations

import functools
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import common  # isort: skip - sets a variable that must come before NumPy
import ml_dtypes
import numpy as np
import timing
import torch
import training_step

import lowprec
import lowprec.torch

SQUARES = (64, 96, 128, 256, 512, 768)
#: (m, k, n): tokens by features.
SKINNY = tuple(
    (m, k, n)
    for m in (8, 16, 32, 128, 197)
    for k, n in ((768, 768), (768, 3072), (1024, 4096), (4096, 4096))
)
SETS = 3  # of operands, which take turns

#: PyTorch alone, and with its products by lowprec in a mode.
WAYS: dict[str, Callable[[], Any]] = {
    "torch": nullcontext,
    **{m: functools.partial(lowprec.torch.intercept, m) for m in ("fp32", "bf16")},
}

Call = Callable[[int], Any]


def _block(calls: dict[str, Call], seconds: float, name: str, _: int) -> float:
    """Return the seconds of one call in a block of about this duration."""
    call = calls[name]
    time.sleep(timing.SPIN_SECONDS)
    call(0)
    start = time.perf_counter()
    call(1)
    count = min(60, max(12, int(seconds / (time.perf_counter() - start))))
    start = time.perf_counter()
    for i in range(count):
        call(i)
    return (time.perf_counter() - start) / count


# --- products ---------------------------------------------------------------------------------


def product_calls(m: int, k: int, n: int, seed: int) -> dict[str, dict[str, Call]]:
    """Return the calls of lowprec ("lowprec") and of others, by what is multiplied."""
    rng = np.random.default_rng(seed)
    a, b = (
        [rng.standard_normal(shape, np.float32) for _ in range(SETS)] for shape in ((m, k), (k, n))
    )
    low_a, low_b, turned = (
        [x.astype(ml_dtypes.bfloat16, order="C") for x in xs] for xs in (a, b, [x.T for x in b])
    )
    int_a, int_b = ([rng.integers(-99, 99, x.shape, np.int8) for x in xs] for xs in (a, b))
    of_a, of_b, of_int_a, of_int_b = (
        [torch.from_numpy(x) for x in xs] for xs in (a, b, int_a, int_b)
    )
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
        calls["int8"] = {
            "torch": call(torch._int_mm, of_int_a, of_int_b),
            **by_lowprec(int_a, int_b, None),
        }
    return calls


def products(quick: bool, seed: int) -> Iterator[dict[str, Any]]:
    rounds, block_s = (3, 0.001) if quick else (9, 0.05)
    shapes = [(n, n, n) for n in SQUARES] + list(SKINNY)
    for m, k, n in [(64, 64, 64), (8, 64, 64)] if quick else shapes:
        for what, calls in product_calls(m, k, n, seed).items():
            for call in calls.values():
                call(0)
            sample = functools.partial(_block, calls, block_s)
            seconds = timing.take_turns(list(calls), sample, rounds=rounds, seed=seed)
            ours = seconds.pop("lowprec")
            fastest = min(seconds.values(), key=statistics.median)
            row = {"kind": "product", "m": m, "k": k, "n": n, "what": what}
            yield row | {"speed": timing.speed_ratio(fastest, ours), "time": timing.summary(ours)}


# --- attention --------------------------------------------------------------------------------

#: Images, heads, heads of the keys, queries, keys and width.
ATTENTIONS = {
    "prefill, 1,024 tokens": (1, 32, 8, 1024, 1024, 64),
    "decoding, 1,024 keys": (1, 32, 8, 1, 1024, 64),
    "causal, 4,096 tokens": (1, 8, 8, 4096, 4096, 64),
    "8 sequences of 128": (8, 12, 12, 128, 128, 64),
    "16 sequences of 128, width 256": (16, 4, 4, 128, 128, 64),
}


def attention_calls(shape: tuple[int, ...], is_causal: bool, records: bool) -> dict[str, Call]:
    """Return PyTorch's fused attention, with its gradients if it records, alone and in the modes of blocks."""
    images, heads, few, queries, keys, width = shape
    q, k, v = (
        torch.randn(images, tokens, n, width).transpose(1, 2).requires_grad_(records)
        for n, tokens in ((heads, queries), (few, keys), (few, keys))
    )
    gradient = torch.randn_like(q)

    def call(way: Callable[[], Any], _: int) -> None:
        with way():
            found = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=True
            )
            if records:
                found.backward(gradient)

    return {name: functools.partial(call, way) for name, way in WAYS.items()}


def attentions(quick: bool, seed: int) -> Iterator[dict[str, Any]]:
    rounds, block_s = (3, 0.001) if quick else (9, 0.2)
    torch.manual_seed(seed)
    for what, shape in ATTENTIONS.items():
        for records in (False, True):
            *_, queries, _, _ = shape
            if queries == 1 and records:
                continue
            calls = attention_calls(shape, queries > 128, records)
            sample = functools.partial(_block, calls, block_s)
            seconds = timing.take_turns(list(calls), sample, rounds=rounds, seed=seed)
            for name, samples in seconds.items():
                row = {"kind": "attention", "what": what, "variant": name, "records": records}
                yield row | {
                    "time": timing.summary(samples),
                    "relative_time": timing.speed_ratio(samples, seconds["torch"]),
                }


# --- a training step --------------------------------------------------------------------------


def steps(quick: bool, seed: int) -> Iterator[dict[str, Any]]:
    """Measure training steps of `docs/examples/training_step.py`, in PyTorch alone and with its products by lowprec."""
    layers, features, batch = (1, 32, 2) if quick else (4, 384, 12)
    torch.manual_seed(seed)
    model = training_step.Characters(layers, features)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    (text,) = training_step.batches(1, batch)

    def step() -> None:
        training_step.step(model, optimizer, text)

    def sample(name: str, _: int) -> float:
        with WAYS[name]():
            step()
            return statistics.median(timeit.repeat(step, repeat=1 if quick else 4, number=1))

    seconds = timing.take_turns(list(WAYS), sample, rounds=3 if quick else 9, seed=seed)
    for name, samples in seconds.items():
        row = {"kind": "step", "variant": name, "time": timing.summary(samples)}
        yield row | {"relative_time": timing.speed_ratio(samples, seconds["torch"])}


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    speeds = [row["speed"]["median"] for row in rows if row["kind"] == "product"]
    step = {row["variant"]: row["relative_time"]["median"] for row in rows if row["kind"] == "step"}
    return [
        common.claim(
            "products, times as fast as the best other, geometric mean",
            statistics.geometric_mean(speeds),
            0.95,
        ),
        common.claim("products, the slowest", min(speeds), 0.85),
        common.claim("training step in fp32, relative time", step["fp32"], 1.1, at_most=True),
        common.claim("training step in bf16, relative time", step["bf16"], 0.65, at_most=True),
    ]


def measure(quick: bool, seed: int) -> Iterator[dict[str, Any]]:
    yield from products(quick, seed)
    yield from attentions(quick, seed)
    yield from steps(quick, seed)


if __name__ == "__main__":
    common.main(__doc__, "transformer", measure, claims)
