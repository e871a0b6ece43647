"""For how long a warm small product keeps the host busy."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import timing

import lowprec
from gpu import libraries
from gpu.parts import Options, Part, short
from gpu.raw import LtProduct

SIZE = 64
#: (element type, mode, torch's precision)
KINDS = (("float32", "fp32"), ("float32", "tf32"), ("bfloat16", None))

Call = Callable[[], Any]


def seconds_per_call(
    calls: Mapping[str, Call], wait: Callable[[], None], *, count: int, rounds: int, seed: int = 0
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time calls by turns; return seconds per call by round, and what does not run.

    The device is waited for before each sample and not inside: what is timed is the host.
    """
    errors, ready = {}, {}
    for name, call in calls.items():
        try:
            for _ in range(3):
                call()
            wait()
        except Exception as error:  # noqa: BLE001 - a library that cannot do it is not compared
            errors[name] = short(error)
        else:
            ready[name] = timeit.Timer("call()", globals={"call": call})

    found = timing.repeat(ready, calls=count, rounds=rounds, seed=seed, before=wait)
    return found, errors


def calls_of(torch: Any, dtype: str, mode: str | None, seed: int) -> dict[str, Call]:
    """Return the calls on equal operands, each library on its own arrays."""
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = (libraries.normal(torch, generator, (SIZE, SIZE), dtype) for _ in range(2))
    out = torch.empty_like(a)
    found: dict[str, Call] = {
        "lowprec": lambda: lowprec.matmul(a, b, math_mode=mode),
        "lowprec, out=": lambda: lowprec.matmul(a, b, out=out, math_mode=mode),
        "torch": lambda: torch.matmul(a, b),
        "torch, out=": lambda: torch.matmul(a, b, out=out),
    }
    advanced = libraries.optional("nvmath.linalg.advanced")
    if advanced is not None:
        found["nvmath"] = lambda: advanced.matmul(a, b)
    cupy = libraries.optional("cupy")
    if cupy is not None and dtype == "float32":
        x, y = cupy.from_dlpack(a), cupy.from_dlpack(b)
        found["cupy"] = lambda: cupy.matmul(x, y)
        found["lowprec on cupy"] = lambda: lowprec.matmul(x, y, math_mode=mode)
    jax = libraries.optional("jax")
    if jax is not None:
        p, q = (jax.numpy.ones((SIZE, SIZE), dtype) for _ in range(2))
        compiled = jax.jit(jax.numpy.matmul)
        found["jax, jitted"] = lambda: compiled(p, q)
        found["lowprec on jax"] = lambda: lowprec.matmul(p, q, math_mode=mode)
    numbers = np.random.default_rng(seed).standard_normal((2, SIZE, SIZE))
    compute = "COMPUTE_32F_FAST_TF32" if mode == "tf32" else "COMPUTE_32F"
    bare = LtProduct(
        *numbers.astype(libraries.numpy_dtype(dtype)), compute=compute, out_dtype=dtype
    )
    # Everything is prepared: the library's call alone.
    found["cublasLt.matmul"] = bare.bound(bare.algorithms(1)[0])
    return found


def run(part: Part, options: Options) -> None:
    """Measure all kinds."""
    import torch

    counts = {"count": 20, "rounds": 3} if options.quick else {"count": 400, "rounds": 15}
    for dtype, mode in KINDS:
        calls = calls_of(torch, dtype, mode, options.seed)
        wait = torch.cuda.synchronize
        found, errors = seconds_per_call(calls, wait, seed=options.seed, **counts)
        part.fact(f"errors, {dtype} {mode}", errors)
        for name, taken in found.items():
            over = None
            if "torch" in found:
                over = timing.speed_ratio(taken, found["torch"])["median"]
            seconds = timing.summary(taken)
            part.row(name=name, dtype=dtype, mode=mode, seconds=seconds, over_torch=over)
        if "lowprec" in errors:
            part.row(ok=False, name="lowprec", dtype=dtype, mode=mode, error=errors["lowprec"])
