"""Speed of a product by mode, element type and size, against numpy.matmul and torch.matmul.

usage: python benchmarks/bench_gemm.py [--parts {products,schemes,torch} ...] [--quick] [--output DIR] [--seed N]

The measured time includes rounding of the operands and allocation of the result. `schemes` are the modes that recover
FP32, next to `numpy.matmul` on float32 and `fp32`, also with a prepared weight for 256 rows. `torch` compares products
that PyTorch computes slowly, not exactly, or in an order that depends on the batch.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import common
import ml_dtypes
import numpy as np
import timing
import torch
from claims import square_speeds

import lowprec

SQUARE = ((1, 1024, 1024, 1024), (1, 2048, 2048, 2048), (1, 4096, 4096, 4096))
#: (batch, m, k, n): tall, wide, small k, batched; a matrix times one and four vectors; batches of small products.
MORE = (
    (1, 16384, 512, 512), (1, 512, 512, 16384), (1, 4096, 64, 4096), (64, 256, 256, 256),
    (1, 4096, 4096, 1), (1, 4096, 4096, 4), (512, 64, 64, 64), (4096, 16, 16, 16),
)  # fmt: skip
#: 256 rows times a weight.
WEIGHTS = tuple((1, 256, n, n) for _, n, _, _ in SQUARE)
#: The largest is large enough for every library to use its threads.
QUICK = ((1, 64, 64, 64), (1, 512, 512, 512), (3, 16, 16, 16))

SCHEMES = ("bf16x3", "bf16x6", "bf16x9", "tf32x3", "fp32_emulated")
PREPARED = "float32 prepared"

#: Baselines of the other modes, in addition to other libraries.
FP32, NUMPY = "lowprec float32 fp32", "numpy float32"

#: Largest relative error of a correct result (that of bfloat16 results is 2e-3).
WORST_ERROR = 0.02

#: A variant this many times slower than `numpy.matmul` on float32 is omitted, here and at larger sizes: a library
#: without a kernel for its type takes minutes.
TOO_SLOW = 20

Shape = tuple[int, int, int, int]
Pairs = dict[str, list[tuple[Any, Any]]]


@dataclass(frozen=True)
class Variant:
    """A variant of the product: library, kind of operands, and lowprec's mode."""

    name: str
    library: str
    operands: str
    multiply: Callable[[Any, Any], Any]
    mode: str | None = None
    small: bool = True  # whether it supports batches, and fewer than 17 rows or columns


def operand_sets(shape: Shape, kinds: Sequence[str], sets: int, seed: int) -> Pairs:
    """Return sets of operands of one shape, by number type, each made from the same float32 numbers."""
    rng = np.random.default_rng(seed)
    batch, m, k, n = shape
    lead = (batch,) if batch > 1 else ()
    pairs: Pairs = {kind: [] for kind in kinds}
    for _ in range(sets):
        a, b = (
            rng.standard_normal((*lead, *extents), dtype=np.float32) for extents in ((m, k), (k, n))
        )
        for kind in kinds:
            if kind == PREPARED:
                weight = lowprec.prepare(b, math_mode="bf16x3")
                lowprec.matmul(a, weight, math_mode="bf16x3")  # packs it
                pairs[kind].append((a, weight))
            else:
                # The base is shared: NumPy and torch read the same float32 memory.
                pairs[kind].append((_as_kind(a, kind), _as_kind(b, kind)))
    return pairs


def _as_kind(x: Any, kind: str) -> Any:
    dtype, _, library = kind.partition(" ")
    if dtype == "int8":
        x = np.clip(np.rint(x * 40), -128, 127).astype(np.int8)
    if library == "torch":
        return torch.from_numpy(x).to(getattr(torch, dtype))
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, copy=False)


def _lowprec(dtype: str, mode: str | None = None, library: str = "numpy") -> Variant:
    name = f"lowprec {dtype}" + (f" {mode}" if mode else "")
    multiply = functools.partial(lowprec.matmul, math_mode=mode)
    if library == "torch":
        return Variant(f"{name} (torch)", "lowprec", f"{dtype} torch", multiply, mode)
    return Variant(name, "lowprec", dtype, multiply, mode)


def _torch_variants() -> list[Variant]:
    def at(precision: str, a: Any, b: Any) -> Any:
        # A process-wide switch, set for this call only, in well under a microsecond.
        torch.set_float32_matmul_precision(precision)
        try:
            return torch.matmul(a, b)
        finally:
            torch.set_float32_matmul_precision("highest")

    products = {
        f"float32 {precision}": functools.partial(at, precision)
        for precision in ("highest", "medium")
    }
    products |= {"bfloat16": torch.matmul, "float16": torch.matmul}
    return [
        *(
            Variant(f"torch {x}", "torch", f"{x.split()[0]} torch", product)
            for x, product in products.items()
        ),
        Variant("torch int8", "torch", "int8 torch", torch._int_mm, small=False),
        _lowprec("float32", "bf16", "torch"),
        *(_lowprec(dtype, library="torch") for dtype in ("bfloat16", "float16")),
    ]


def variants(shape: Shape, schemes: bool) -> list[Variant]:
    """Return the variants that support this shape, or those of the modes that recover FP32."""
    if not schemes:
        is_small = shape[0] > 1 or min(shape[1:]) < 17
        ways = [
            *(
                Variant(f"numpy {dtype}", "numpy", dtype, np.matmul)
                for dtype in ("float32", "float64")
            ),
            *(_lowprec("float32", mode) for mode in ("fp32", "tf32", "bf16", "fp16")),
            *(_lowprec(dtype) for dtype in ("bfloat16", "float16", "int8", "float64")),
            *_torch_variants(),
        ]
        return [v for v in ways if v.small or not is_small]
    ways = [
        Variant(NUMPY, "numpy", "float32", np.matmul),
        *(_lowprec("float32", mode) for mode in ("fp32", *SCHEMES)),
    ]
    if shape[1] < shape[2]:
        multiply = functools.partial(lowprec.matmul, math_mode="bf16x3")
        ways.append(
            Variant("lowprec float32 bf16x3, prepared", "lowprec", PREPARED, multiply, "bf16x3")
        )
    return ways


# -- measuring ------------------------------------------------------------------------------------


def _float64(x: Any) -> Any:
    return (x.double().numpy() if hasattr(x, "double") else np.asarray(x)).astype(np.float64)


def relative_error(v: Variant, pairs: Pairs, rng: np.random.Generator) -> float:
    """Return the Frobenius-relative error of up to 64 sampled rows and columns; raise if the result is wrong."""
    result = v.multiply(*pairs[v.operands][0])
    a, b = pairs["float32" if v.operands == PREPARED else v.operands][0]
    rows = rng.choice(a.shape[-2], min(64, a.shape[-2]), replace=False)
    columns = rng.choice(b.shape[-1], min(64, b.shape[-1]), replace=False)
    first = (0,) * (a.ndim - 2)
    exact = _float64(a[first][rows]) @ _float64(b[first][:, columns])
    error = float(
        np.linalg.norm(_float64(result[first][rows][:, columns]) - exact) / np.linalg.norm(exact)
    )
    if not error <= WORST_ERROR:
        raise RuntimeError(
            f"{v.name} is wrong on {tuple(a.shape)} times {tuple(b.shape)}: relative error {error}"
        )
    return error


def number_of_sets(shape: Shape, kinds: Sequence[str], rounds: int) -> int:
    """Return the number of operand sets that exceed 256 MiB, more than the caches of two cores hold."""
    batch, m, k, n = shape
    width = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
    # float32 operands of NumPy and of torch are the same memory.
    distinct = {kind for kind in kinds if kind != "float32 torch"}
    size = sum(width[kind.split(" ")[0]] for kind in distinct) * batch * k * (m + n)
    return max(2, min(-(-(256 << 20) // size), rounds + 1))


def measure(
    shape: Shape, seed: int, quick: bool, left_out: set[str], schemes: bool
) -> Iterator[dict[str, Any]]:
    """Time every variant on one shape; yield one row per variant. Adds the names of too slow ones to `left_out`."""
    ways = [v for v in variants(shape, schemes) if v.name not in left_out]
    kinds = list(dict.fromkeys(v.operands for v in ways))
    # More samples of cheap products.
    rounds = 3 if quick else min(31, max(9, int(3e11 / (2 * math.prod(shape)))) | 1)
    sets = number_of_sets(shape, kinds, rounds)
    pairs = operand_sets(shape, kinds, sets, seed)
    rng = np.random.default_rng(seed)
    errors = {v.name: relative_error(v, pairs, rng) for v in ways}
    left_out |= _too_slow(ways, pairs)
    ways = [v for v in ways if v.name not in left_out]
    calls = {v.name: (lambda i, v=v: v.multiply(*pairs[v.operands][i])) for v in ways}
    seconds = timing.interleave(calls, rounds=rounds, sets=sets, seed=seed)
    others = [v.name for v in ways if v.library != "lowprec" or v.mode == "fp32"]
    print(f"{shape}: {rounds} rounds of {len(ways)} variants", flush=True)
    for v in ways:
        time_s = timing.summary(seconds[v.name])
        first = pairs[v.operands][0]
        yield {
            **dict(zip(("batch", "m", "k", "n"), shape, strict=True)),
            "variant": v.name,
            "library": v.library,
            "operands": v.operands,
            "mode": v.mode,
            "kernel": str(lowprec.plan(*first, math_mode=v.mode).kernel)
            if v.library == "lowprec"
            else None,
            "rounds": rounds,
            "sets": sets,
            "seconds": time_s,
            "gflops": 2e-9 * math.prod(shape) / time_s["median"],
            "relative_error": errors[v.name],
            "speed": {name: timing.speed_ratio(seconds[name], seconds[v.name]) for name in others},
        }


def _too_slow(ways: Sequence[Variant], pairs: Pairs) -> set[str]:
    """Return the names of the variants that are too slow, by one or two warm calls of each."""

    def seconds(v: Variant) -> float:
        begin = time.perf_counter()
        v.multiply(*pairs[v.operands][0])
        return time.perf_counter() - begin

    # Below a tenth of a second one call is too noisy, and the time is acceptable.
    limit = max(0.1, TOO_SLOW * next((seconds(v) for v in ways if v.name == NUMPY), math.inf))
    # One slow call may be due to other load.
    return {v.name for v in ways if seconds(v) > limit and seconds(v) > limit}


# -- claims ---------------------------------------------------------------------------------------

#: (variant, baseline, least speed in the geometric mean over the sizes), for two threads.
Limits = tuple[tuple[str, str, float], ...]

#: On a CPU with AVX512-BF16; of the modes that recover FP32 on every CPU.
LIMITS: Limits = (
    ("lowprec bfloat16 (torch)", "torch bfloat16", 0.9),
    ("lowprec float32 bf16", FP32, 1.4),
    ("lowprec float32 tf32", FP32, 0.92),
    ("lowprec float32 fp16", FP32, 0.92),
    ("lowprec float16", FP32, 0.92),
    ("lowprec int8", "torch int8", 0.9),
)
SCHEME_LIMITS: Limits = (("lowprec float32 fp32_emulated", FP32, 0.97),)


def speed_claims(rows: Sequence[dict[str, Any]], limits: Limits) -> Iterator[dict[str, Any]]:
    """Yield the claims about speed, over the square products in `rows`."""
    for variant, baseline, limit in limits:
        by_size = square_speeds(rows, variant, baseline)
        mean = statistics.geometric_mean(by_size.values()) if by_size else None
        yield common.claim(
            f"{variant} over {baseline}, geometric mean", mean, limit, by_size=by_size
        )


# -- products that PyTorch computes slowly, not exactly, or in an order that depends on the batch ---

#: Variables that leave only AVX2 to lowprec, oneDNN and PyTorch.
AVX2 = {"LOWPREC_MAX_CPU_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def products_beside_torch(units: str, n: int, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Return times of 16-bit products, wrong elements of an int8 one, and rows that differ in a batch; one thread."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    products = {"torch": torch.matmul, "lowprec": lowprec.matmul}
    rows: list[dict[str, Any]] = []
    for dtype in ("float16", "bfloat16"):
        x, y = torch.randn((2, n, n), generator=generator).to(getattr(torch, dtype))
        calls = {name: lambda _, f=f, x=x, y=y: f(x, y) for name, f in products.items()}
        # The thread computes alone: its CPU time does not depend on other load.
        seconds = timing.interleave(calls, rounds=rounds, seed=seed, clock=time.thread_time)
        times = {name: timing.summary(samples) for name, samples in seconds.items()}
        speed = timing.speed_ratio(seconds["torch"], seconds["lowprec"])
        rows.append({"case": f"{dtype}, n = {n}", "of": None, **times, "speed": speed})
    x, y = (
        torch.randint(-128, 128, s, generator=generator, dtype=torch.int8)
        for s in ((32, 64), (64, 32))
    )
    results = {"torch": torch._int_mm(x, y), "lowprec": lowprec.matmul(x, y)}
    wrong = {name: int((result != x.int() @ y.int()).sum()) for name, result in results.items()}
    rows.append(
        {"case": "int8, 32 x 64 x 32 (`torch._int_mm`): wrong elements", "of": 32 * 32, **wrong}
    )
    x, y = (
        torch.randn((64, 4096), generator=generator),
        torch.randn((4096, 1024), generator=generator),
    )
    for name, product in products.items():
        batch = product(x, y)
        wrong[name] = sum(
            not torch.equal(product(row[None], y)[0], batch[i]) for i, row in enumerate(x)
        )
    rows.append(
        {"case": "float32, 64 x 4096 x 1024: rows with other bits alone", "of": 64, **wrong}
    )
    return [{"units": units, **row} for row in rows]


def beside_torch(arguments: argparse.Namespace) -> None:
    """Measure with all instruction sets and with AVX2 alone, each in its process."""
    rows = []
    for units, variables in {"all": {}, "AVX2": AVX2}.items():
        spawn = multiprocessing.get_context("spawn")
        with (
            mock.patch.dict(os.environ, variables),
            ProcessPoolExecutor(1, mp_context=spawn) as pool,
        ):
            n, rounds = (64, 3) if arguments.quick else (512, 9)
            rows += pool.submit(products_beside_torch, units, n, rounds, arguments.seed).result()
    common.report("torch", arguments, rows, [])


def gemm(arguments: argparse.Namespace, schemes: bool = False) -> None:
    shapes = QUICK if arguments.quick else SQUARE + (WEIGHTS if schemes else MORE)
    if arguments.quick and schemes:
        shapes += ((1, 32, 512, 512),)
    left_out: set[str] = set()
    rows = [
        row
        for shape in shapes
        for row in measure(shape, arguments.seed, arguments.quick, left_out, schemes)
    ]
    limits = SCHEME_LIMITS if schemes else LIMITS if "avx512_bf16" in common.cpu_flags() else ()
    common.report(
        "gemm-schemes" if schemes else "gemm",
        arguments,
        rows,
        speed_claims(rows, limits),
        left_out=sorted(left_out),
    )


if __name__ == "__main__":
    schemes = functools.partial(gemm, schemes=True)
    common.run_parts(__doc__, {"products": gemm, "schemes": schemes, "torch": beside_torch})
