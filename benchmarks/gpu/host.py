"""The time for which a warm small product keeps the host busy."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import timing

import lowprec
from gpu.arrays import numpy_dtype
from gpu.parts import Options, Part
from gpu.raw import LtProduct

SIZE = 64


def calls(torch: Any, a: Any, b: Any, dtype: str, mode: str | None) -> dict[str, Callable[[], Any]]:
    """Return calls of lowprec and of PyTorch, and cuBLASLt's alone, everything else done before."""
    out = torch.empty_like(a)
    operands = np.random.default_rng(0).standard_normal((2, SIZE, SIZE)).astype(numpy_dtype(dtype))
    compute = "COMPUTE_32F_FAST_TF32" if mode == "tf32" else "COMPUTE_32F"
    bare = LtProduct(*operands, compute=compute, out_dtype=dtype)
    return {
        "lowprec": lambda: lowprec.matmul(a, b, math_mode=mode),
        "lowprec, out=": lambda: lowprec.matmul(a, b, out=out, math_mode=mode),
        "torch": lambda: torch.matmul(a, b),
        "torch, out=": lambda: torch.matmul(a, b, out=out),
        "cublasLt.matmul": bare.bound(bare.first()[0]),
    }


def host(part: Part, options: Options) -> None:
    import torch

    counts = {"calls": 20, "rounds": 3} if options.quick else {"calls": 200, "rounds": 15}
    for dtype, mode in part.in_time(
        (("float32", "fp32"), ("float32", "tf32"), ("bfloat16", None)), options
    ):
        words = {"dtype": dtype, "mode": mode}
        with part.attempt(name="all", **words):
            generator = torch.Generator("cuda").manual_seed(options.seed)
            a, b = torch.randn((2, SIZE, SIZE), generator=generator, device="cuda").to(
                getattr(torch, dtype)
            )
            timers = {}
            for name, call in calls(torch, a, b, dtype, mode).items():
                with part.attempt(name=name, **words):
                    call()
                    timers[name] = timeit.Timer("call()", globals={"call": call})
            # The device is waited for before each sample and not inside: the host is timed.
            seconds = timing.repeat(
                timers, seed=options.seed, before=torch.cuda.synchronize, **counts
            )
            for name, samples in seconds.items():
                over = timing.speed_ratio(samples, seconds["torch"])["median"]
                part.row(name=name, **words, seconds=timing.summary(samples), over_torch=over)
