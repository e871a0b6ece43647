"""The speed of the packing kernels relative to a copy, and of fused epilogues relative to separate kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import lowprec
from gpu import clock, raw
from gpu.parts import Options, Part
from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.packing import prepare_packing
from lowprec.formats import DType as D
from lowprec.planning import MatrixStack
from lowprec.planning.cublaslt.calls import Packing

#: Name: element types of source and target, whether rows are contiguous in the source, and options.
PACKINGS: dict[str, tuple[D, D, bool, dict[str, Any]]] = {
    "float32 to bfloat16": (D.FLOAT32, D.BFLOAT16, False, {}),
    "float32 to bfloat16, transposed": (D.FLOAT32, D.BFLOAT16, True, {}),
    "float32 to float16, scaled rows": (D.FLOAT32, D.FLOAT16, False, {"scaled": True}),
    "float32 to float16, scaled rows, transposed": (D.FLOAT32, D.FLOAT16, True, {"scaled": True}),
    "float32 to three bfloat16": (D.FLOAT32, D.BFLOAT16, False, {"parts": 3}),
    "int8, transposed": (D.INT8, D.INT8, True, {}),
    "bfloat16, transposed": (D.BFLOAT16, D.BFLOAT16, True, {}),
}


def packed(ticks: clock.Clock, side: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row per packing: bytes read and written per second, and the share of a copy's."""
    source, target = (raw.upload(np.ones(side * side * 8, np.uint8)) for _ in range(2))
    exponents, copied = runtime.allocate(4 * side), 4 * side * side
    nbytes = {"copy": 2 * copied}
    variants: dict[str, clock.Call] = {"copy": lambda _: runtime.copy_async(target, source, copied, raw.STREAM)}
    for name, (first, second, is_transposed, more) in PACKINGS.items():
        strides = (1, side) if is_transposed else (side, 1)
        described = Packing(MatrixStack.of(first, side, side, *strides), second, side, side, **more)
        pack = prepare_packing(described, 0)
        variants[name] = lambda _, pack=pack: pack(source, target, exponents, raw.STREAM)
        nbytes[name] = side * side * (first.itemsize + second.itemsize * described.parts)
    contest = clock.contest(variants, ticks, rounds=7, budget_s=10.0, seed=seed)
    rates = {name: nbytes[name] / seconds for name, seconds in contest.seconds.items()}
    for name in variants:
        words = {"question": "packing", "name": name}
        if name in contest.errors:
            yield {**words, "ok": False, "error": contest.errors[name]}
        else:
            share = rates[name] / rates["copy"] if "copy" in rates else None
            yield {**words, "gigabytes_per_s": rates[name] / 1e9, "share_of_copy": share}


def fused(torch: Any, dtype: str, side: int, ticks: clock.Clock, seed: int) -> dict[str, Any]:
    """Return the speed of a product with bias and GELU relative to a product and PyTorch's kernels."""
    generator = torch.Generator(ticks.device).manual_seed(seed)
    a, b, bias = (
        torch.randn(shape, generator=generator, device=ticks.device).to(getattr(torch, dtype))
        for shape in ((side, side), (side, side), (side,))
    )
    gelu = torch.nn.functional.gelu
    variants: dict[str, clock.Call] = {
        "fused": lambda _: lowprec.matmul(a, b, bias=bias, activation="gelu"),
        "separate": lambda _: gelu(lowprec.matmul(a, b) + bias, approximate="tanh"),
        "torch": lambda _: gelu(torch.addmm(bias, a, b), approximate="tanh"),
    }
    contest = clock.contest(variants, ticks, rounds=7, budget_s=5.0, seed=seed)
    ok = False if "fused" in contest.errors else None
    words = {"question": "fused", "dtype": dtype, "side": side, "ok": ok}
    return {**words, "speed": contest.speed("fused"), "errors": contest.errors}


def packing(part: Part, options: Options) -> None:
    import torch

    ticks, side = clock.EventClock(torch), 512 if options.quick else 8192
    with part.attempt(question="packing"):
        for row in packed(ticks, side, options.seed):
            part.row(**row)
    for dtype in part.in_time(("bfloat16", "float16", "float32"), options):
        with part.attempt(question="fused", dtype=dtype):
            part.row(**fused(torch, dtype, side, ticks, options.seed))
