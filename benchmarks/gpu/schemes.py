"""Errors and speeds of the modes that recover FP32, and of emulated, block-scaled and sparse products."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import lowprec
from gpu import clock
from gpu.parts import Options, Part, short
from gpu.speed import relative_error, sets_of, torch_switches

Row = dict[str, Any]


def _sets(ticks: clock.Clock, n: int, itemsize: int) -> int:
    return sets_of(n, itemsize) if ticks.device == "cuda" else 1


# -- modes that recover FP32, by chunk of k -------------------------------------------------------


class Way(NamedTuple):
    """A mode, and the length of its chunks: None is the whole of k, "plan" the plan's choice."""

    mode: str
    chunk: int | str | None

    def __str__(self) -> str:
        return f"{self.mode}, chunks: {'whole' if self.chunk is None else self.chunk}"

    def arguments(self, k: int) -> dict[str, Any]:
        chunk = {} if self.chunk == "plan" else {"k_chunk": k if self.chunk is None else self.chunk}
        return {"math_mode": self.mode, **chunk}


#: torch's products of float32 matrices, by name, and its word for the precision of each.
TORCH_PRODUCTS: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "torch float32": (lambda torch, a, b: torch.matmul(a, b), "ieee"),
    "torch tf32": (lambda torch, a, b: torch.matmul(a, b), "tf32"),
    "torch float64": (lambda torch, a, b: torch.matmul(a.double(), b.double()), "ieee"),
}


def measure_splits(torch: Any, n: int, distribution: str, options: Options, ticks: clock.Clock) -> Iterator[Row]:
    """Yield one row per product of torch's and per way, square operands: the error; for normal numbers the speed."""
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    draw, timed = (torch.randn, True) if distribution == "normal" else (torch.rand, False)
    sets = _sets(ticks, n, 4) if timed else 1
    pairs = [[draw((n, n), generator=generator, device=ticks.device) for _ in range(2)] for _ in range(sets)]
    chunks = (256,) if options.quick else (256, 512, 1024, None, "plan")
    plans, errors = {}, {}
    for way in (Way(*x) for x in product(("fp16x3", "bf16x6", "bf16x3", "tf32x3"), chunks)):
        try:
            plans[way] = lowprec.plan(*pairs[0], **way.arguments(n))
            errors[way] = relative_error(torch, lowprec.matmul(*pairs[0], **way.arguments(n)), *pairs[0])
        except Exception as error:  # noqa: BLE001 - a way that fails is one row
            yield {"name": str(way), **way._asdict(), "error": short(error)}
    contest = clock.Contest()
    if timed:
        variants: dict[str, Any] = {
            name: clock.Variant(
                lambda i, multiply=multiply: multiply(torch, *pairs[i]), partial(torch_switches, torch, precision, True)
            )
            for name, (multiply, precision) in TORCH_PRODUCTS.items()
        }
        for way in plans:
            variants[str(way)] = lambda i, way=way: lowprec.matmul(*pairs[i], **way.arguments(n))
        contest = clock.contest(variants, ticks, sets=sets, rounds=3, budget_s=0.0, seed=options.seed)
    seconds = contest.seconds
    for name, (multiply, precision) in TORCH_PRODUCTS.items():
        with torch_switches(torch, precision, True):
            error = relative_error(torch, multiply(torch, *pairs[0]), *pairs[0])
        yield {"name": name, "relative_error": error, "seconds": seconds.get(name)}
    for way in errors:
        name = str(way)
        values = {"name": name, **way._asdict(), "plan_k_chunk": plans[way].k_chunk, "relative_error": errors[way]}
        if name in seconds:
            speed = {other: ratio for other, ratio in contest.speed(name).items() if other in TORCH_PRODUCTS}
            values |= {"seconds": seconds[name], "speed": speed}
        elif name in contest.errors:
            values["error"] = contest.errors[name]
        yield values


def splits(part: Part, options: Options) -> None:
    import torch

    ticks, sizes = clock.EventClock(torch), (1024,) if options.quick else (8192, 4096, 1024, 2048, 16384)
    for n, distribution in part.in_time(product(sizes, ("normal", "uniform")), options):
        words = {"n": n, "distribution": distribution}
        with part.attempt(**words):
            for values in measure_splits(torch, n, distribution, options, ticks):
                part.row(**{**words, **values})
        torch.cuda.empty_cache()


# -- products of other formats --------------------------------------------------------------------


class Format(NamedTuple):
    """A kind of product, from float32 matrices.

    `operands` returns those of lowprec, those of `torch.matmul` for comparison, and both in float64; `arguments` are
    lowprec's; `shapes` are m, k, n.
    """

    operands: Callable[[Any, Any, Any], tuple[tuple[Any, Any], ...]]
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, int, int], ...]


def _typed(dtype: str) -> Callable[..., Any]:
    def operands(torch: Any, a: Any, b: Any) -> Any:
        x, y = (matrix.to(getattr(torch, dtype)) for matrix in (a, b))
        return (x, y), (x, y), (x.double(), y.double())

    return operands


def _quantised(name: str) -> Callable[..., Any]:
    def operands(torch: Any, a: Any, b: Any) -> Any:
        x, y = lowprec.quantize(a, name), lowprec.quantize(b, name, axis=0)
        return (x, y), (a.bfloat16(), b.bfloat16()), (x.dequantize().double(), y.dequantize().double())

    return operands


def _sparse(dtype: str) -> Callable[..., Any]:
    def operands(torch: Any, a: Any, b: Any) -> Any:
        (k, n), kind = b.shape, getattr(torch, dtype)
        # Two elements of each group along k, at random positions.
        mask = torch.rand((n, k // 4, 4), device=b.device).argsort(-1) < 2
        x, y = a.to(kind), (b.T * mask.reshape(n, k)).to(kind).T
        return (x, lowprec.prepare(y, sparsity="2:4")), (x, y), (x.double(), y.double())

    return operands


SQUARES = tuple((n, n, n) for n in (4096, 8192, 2048, 1024))
#: Rows of activations, and weights of transformers.
LAYERS = ((16, 4096, 4096), (512, 4096, 4096), (16, 4096, 14336), (4096, 4096, 14336), (8192, 8192, 8192))
FORMATS = {
    # cuBLAS's emulation by the compute type; with chunks of k the split is lowprec's.
    "bf16x9": Format(_typed("float32"), {"math_mode": "bf16x9"}, SQUARES),
    "bf16x9, split": Format(_typed("float32"), {"math_mode": "bf16x9", "k_chunk": 256}, SQUARES),
    "fp64_emulated": Format(_typed("float64"), {"math_mode": "fp64_emulated"}, SQUARES),
    **{name: Format(_quantised(name), {}, (*SQUARES, (16, 8192, 8192))) for name in ("mxfp8", "nvfp4", "mxfp4")},
    **{f"2:4 {dtype}": Format(_sparse(dtype), {}, LAYERS) for dtype in ("bfloat16", "float16")},
}


def measure_format(torch: Any, name: str, shape: tuple[int, int, int], seed: int, ticks: clock.Clock) -> Row:
    """Return the plan's kernel, the error over its bound, and the speed over `torch.matmul`."""
    (m, k, n), (operands, arguments, _) = shape, FORMATS[name]
    generator = torch.Generator(ticks.device).manual_seed(seed)
    sets = []
    for _ in range(_sets(ticks, min(k, n), 1)):
        a, b = (torch.randn(s, generator=generator, device=ticks.device) for s in ((m, k), (k, n)))
        sets.append(operands(torch, a, b))
    ours, _, (left, right) = sets[0]
    plan = lowprec.plan(*ours, **arguments)
    begin = time.perf_counter()
    result = lowprec.matmul(*ours, **arguments)
    ticks.wait()
    first_s = time.perf_counter() - begin
    error = float(torch.linalg.norm(result.double() - left @ right))
    limit = plan.bound.frobenius(*(float(torch.linalg.norm(x)) for x in (left, right)), m, n)
    variants = {
        "lowprec": lambda i: lowprec.matmul(*sets[i][0], **arguments),
        "torch": lambda i: torch.matmul(*sets[i][1]),
    }
    contest = clock.contest(variants, ticks, sets=len(sets), rounds=5, budget_s=0.0, seed=seed)
    return {
        "kernel": str(plan.kernel), "reason": plan.kernel_reason, "algorithm": [list(x) for x in plan.algorithm],
        "sparsity": str(plan.sparsity), "error_over_bound": error / limit, "first_s": first_s,
        "seconds": contest.seconds, "speed": contest.speed("lowprec"), "errors": contest.errors,
        # False for NaN, too.
        "ok": error <= limit and "lowprec" not in contest.errors,
    }  # fmt: skip


def formats(part: Part, options: Options) -> None:
    import torch

    # cuBLAS reads it once: it emulates wherever it can, and not only where it expects to be faster.
    os.environ["CUBLAS_EMULATION_STRATEGY"] = "eager"
    ticks = clock.EventClock(torch)
    cases = [(shape, name) for name, of in FORMATS.items() for shape in of.shapes]
    for shape, name in part.in_time([(SQUARES[-1], name) for name in FORMATS] if options.quick else cases, options):
        with part.attempt(name=name, shape=shape):
            part.row(name=name, shape=shape, **measure_format(torch, name, shape, options.seed, ticks))
        torch.cuda.empty_cache()
