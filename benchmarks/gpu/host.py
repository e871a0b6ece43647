"""The time for which a warm small product keeps the host busy."""

from __future__ import annotations

import importlib
import timeit
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import timing

import lowprec
from gpu.arrays import normal, numpy_dtype
from gpu.parts import Options, Part, short
from gpu.raw import LtProduct

SIZE = 64

Calls = dict[str, Callable[[], Any]]


class Small(NamedTuple):
    """Equal small operands of one kind, as torch tensors."""

    torch: Any
    a: Any
    b: Any
    dtype: str
    mode: str | None


def _torch(given: Small) -> Calls:
    torch, a, b, _, mode = given
    out = torch.empty_like(a)
    return {
        "lowprec": lambda: lowprec.matmul(a, b, math_mode=mode),
        "lowprec, out=": lambda: lowprec.matmul(a, b, out=out, math_mode=mode),
        "torch": lambda: torch.matmul(a, b),
        "torch, out=": lambda: torch.matmul(a, b, out=out),
    }


def _bare(given: Small) -> Calls:
    """Return the library's call alone, everything else done before."""
    compute = "COMPUTE_32F_FAST_TF32" if given.mode == "tf32" else "COMPUTE_32F"
    operands = np.random.default_rng(0).standard_normal((2, SIZE, SIZE)).astype(numpy_dtype(given.dtype))
    bare = LtProduct(*operands, compute=compute, out_dtype=given.dtype)
    return {"cublasLt.matmul": bare.bound(bare.algorithms(1)[0])}


def _nvmath(given: Small) -> Calls:
    advanced = importlib.import_module("nvmath.linalg.advanced")
    return {"nvmath": lambda: advanced.matmul(given.a, given.b)}


def _cupy(given: Small) -> Calls:
    cupy = importlib.import_module("cupy")
    x, y = (cupy.from_dlpack(tensor) for tensor in (given.a, given.b))
    return {"cupy": lambda: cupy.matmul(x, y), "lowprec on cupy": lambda: lowprec.matmul(x, y, math_mode=given.mode)}


def _jax(given: Small) -> Calls:
    jax = importlib.import_module("jax")
    x, y = (jax.numpy.ones((SIZE, SIZE), given.dtype) for _ in range(2))
    compiled = jax.jit(jax.numpy.matmul)
    return {"jax, jitted": lambda: compiled(x, y), "lowprec on jax": lambda: lowprec.matmul(x, y, math_mode=given.mode)}


#: The products of the claims are measured first, before any other library is loaded.
GROUPS: tuple[tuple[Callable[[Small], Calls], ...], ...] = ((_torch, _bare), (_torch, _nvmath, _cupy, _jax))


def _measure(part: Part, given: Small, group: tuple[Callable[[Small], Calls], ...], options: Options) -> None:
    """Time the calls of a group by turns, and keep a row for each that was not kept before."""
    wait = given.torch.cuda.synchronize
    timers, errors = {}, {}
    for make in group:
        try:
            for name, call in make(given).items():
                try:
                    for _ in range(3):
                        call()
                    wait()
                    timers[name] = timeit.Timer("call()", globals={"call": call})
                except Exception as error:  # noqa: BLE001 - a library that fails is not compared
                    errors[name] = short(error)
        except Exception as error:  # noqa: BLE001 - a missing library is not compared
            errors[make.__name__.strip("_")] = short(error)
    counts = {"calls": 20, "rounds": 3} if options.quick else {"calls": 200, "rounds": 15}
    # The device is waited for before each sample and not inside: the host is timed.
    seconds = timing.repeat(timers, seed=options.seed, before=wait, **counts)
    words = {"dtype": given.dtype, "mode": given.mode}
    known = {(row["name"], row["dtype"], row["mode"]) for row in part.rows}
    for name, why in errors.items():
        part.row(ok=False if name == "lowprec" else None, name=name, **words, error=why)
    for name, samples in seconds.items():
        if (name, *words.values()) not in known:
            over = timing.speed_ratio(samples, seconds["torch"])["median"] if "torch" in seconds else None
            part.row(name=name, **words, seconds=timing.summary(samples), over_torch=over)


def host(part: Part, options: Options) -> None:
    import torch

    kinds = (("float32", "fp32"), ("float32", "tf32"), ("bfloat16", None))
    for group, (dtype, mode) in part.in_time(product(GROUPS, kinds), options):
        with part.attempt(name="all", dtype=dtype, mode=mode):
            generator = torch.Generator("cuda").manual_seed(options.seed)
            a, b = (normal(torch, generator, (SIZE, SIZE), dtype) for _ in range(2))
            _measure(part, Small(torch, a, b, dtype, mode), group, options)
