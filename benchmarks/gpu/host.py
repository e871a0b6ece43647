"""For how long a warm small product keeps the host busy."""

from __future__ import annotations

import importlib
import timeit
from collections.abc import Callable, Mapping
from itertools import product
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


Make = Callable[["Small"], dict[str, Call]]


class Small:
    """Equal small operands of one kind, as torch tensors."""

    def __init__(self, torch: Any, dtype: str, mode: str | None, seed: int, device: str) -> None:
        self.torch, self.dtype, self.mode, self.seed = torch, dtype, mode, seed
        generator = torch.Generator(device).manual_seed(seed)
        self.a, self.b = (libraries.normal(torch, generator, (SIZE, SIZE), dtype) for _ in range(2))


def _torch(given: Small) -> dict[str, Call]:
    a, b, mode, torch = given.a, given.b, given.mode, given.torch
    out = torch.empty_like(a)
    return {
        "lowprec": lambda: lowprec.matmul(a, b, math_mode=mode),
        "lowprec, out=": lambda: lowprec.matmul(a, b, out=out, math_mode=mode),
        "torch": lambda: torch.matmul(a, b),
        "torch, out=": lambda: torch.matmul(a, b, out=out),
    }


def _bare(given: Small) -> dict[str, Call]:
    """Everything is prepared: the library's call alone."""
    numbers = np.random.default_rng(given.seed).standard_normal((2, SIZE, SIZE))
    compute = "COMPUTE_32F_FAST_TF32" if given.mode == "tf32" else "COMPUTE_32F"
    operands = numbers.astype(libraries.numpy_dtype(given.dtype))
    bare = LtProduct(*operands, compute=compute, out_dtype=given.dtype)
    return {"cublasLt.matmul": bare.bound(bare.algorithms(1)[0])}


def _nvmath(given: Small) -> dict[str, Call]:
    advanced = importlib.import_module("nvmath.linalg.advanced")
    return {"nvmath": lambda: advanced.matmul(given.a, given.b)}


def _cupy(given: Small) -> dict[str, Call]:
    cupy = importlib.import_module("cupy")
    x, y = (cupy.from_dlpack(tensor) for tensor in (given.a, given.b))
    return {"cupy": lambda: cupy.matmul(x, y), "lowprec on cupy": lambda: lowprec.matmul(x, y, math_mode=given.mode)}


def _jax(given: Small) -> dict[str, Call]:
    jax = importlib.import_module("jax")
    p, q = (jax.numpy.ones((SIZE, SIZE), given.dtype) for _ in range(2))
    compiled = jax.jit(jax.numpy.matmul)
    return {"jax, jitted": lambda: compiled(p, q), "lowprec on jax": lambda: lowprec.matmul(p, q, math_mode=given.mode)}


#: What is claimed is measured first, before any other library is loaded.
GROUPS: tuple[tuple[Make, ...], ...] = ((_torch, _bare), (_torch, _nvmath, _cupy, _jax))


def measure(part: Part, given: Small, group: tuple[Make, ...], wait: Callable[[], None], **counts: int) -> None:
    """Time the calls of a group by turns, and keep a row for each that was not kept before."""
    calls: dict[str, Call] = {}
    errors = {}
    for make in group:
        try:
            calls |= make(given)
        except Exception as error:  # noqa: BLE001 - a library that is missing is not compared
            errors[make.__name__.strip("_")] = short(error)
    found, broken = seconds_per_call(calls, wait, seed=given.seed, **counts)
    kind = {"dtype": given.dtype, "mode": given.mode}
    kept = {(row["name"], row["dtype"], row["mode"]) for row in part.rows}
    for name, why in (errors | broken).items():
        # lowprec must run; of the others it is told.
        part.row(ok=False if name == "lowprec" else None, name=name, **kind, error=why)
    for name, taken in found.items():
        if (name, *kind.values()) not in kept:
            over = timing.speed_ratio(taken, found["torch"])["median"] if "torch" in found else None
            part.row(name=name, **kind, seconds=timing.summary(taken), over_torch=over)


def run(part: Part, options: Options) -> None:
    """Measure all kinds."""
    import torch

    counts = {"count": 20, "rounds": 3} if options.quick else {"count": 200, "rounds": 15}
    for group, (dtype, mode) in part.in_time(product(GROUPS, KINDS), options):
        with part.attempt(name="all", dtype=dtype, mode=mode):
            given = Small(torch, dtype, mode, options.seed, "cuda")
            measure(part, given, group, torch.cuda.synchronize, **counts)
