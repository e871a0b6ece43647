"""Errors and speeds of schemes, emulation, narrow formats, block-scaled and sparse operands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import lowprec
from gpu import arrays, clock
from gpu.parts import Options, Part, short
from gpu.speed import relative_error, sets_of, torch_switches
from lowprec.modes import row
from lowprec.planning import GemmPlan
from lowprec.recipes import MODES

Row = dict[str, Any]


def _sets(ticks: clock.Clock, n: int, itemsize: int) -> int:
    return sets_of(n, itemsize) if ticks.device == "cuda" else 1


def _each(part: Part, options: Options, measure: Callable[..., Any], **choices: Any) -> None:
    """Measure all combinations of choices, by name; each gives a row or several."""
    import torch

    ticks = clock.EventClock(torch)
    for case in part.in_time(product(*choices.values()), options):
        words = dict(zip(choices, case, strict=True))
        with part.attempt(**words):
            rows = measure(torch, *case, options, ticks)
            for values in [rows] if isinstance(rows, dict) else rows:
                part.row(**{**words, **values})
        torch.cuda.empty_cache()


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


class _Parts:
    """Arbitrary numbers in the types of a plan's parts, shared by all plans, and a result."""

    def __init__(self, torch: Any, like: Any) -> None:
        self._torch, self._like = torch, like
        self._pairs: dict[Any, tuple[Any, Any]] = {}
        self._out = torch.zeros_like(like)

    def multiply(self, plan: GemmPlan) -> Any:
        """Compute the products of a plan, without splitting."""
        data, n = row(plan.mode).data, self._like.shape[0]
        dtype = self._torch.float32 if data is None else getattr(self._torch, data.label)
        length = max(step.length for step in plan.schedule)
        if dtype not in self._pairs or self._pairs[dtype][0].shape[1] < length:
            x, y = (self._torch.ones(s, dtype=dtype, device=self._like.device) for s in ((n, length), (length, n)))
            self._pairs[dtype] = x, y
        x, y = self._pairs[dtype]
        for step in plan.schedule:
            lowprec.matmul(
                x[:, : step.length], y[: step.length], out=self._out, c=self._out, alpha=step.factor,
                beta=float(step.accumulates), math_mode="tf32" if data is None else None, k_chunk=step.length,
            )  # fmt: skip
        return self._out


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
    contest, parts = clock.Contest(), _Parts(torch, pairs[0][0])
    if timed:
        variants: dict[str, Any] = {
            name: clock.Variant(
                lambda i, multiply=multiply: multiply(torch, *pairs[i]), partial(torch_switches, torch, precision, True)
            )
            for name, (multiply, precision) in TORCH_PRODUCTS.items()
        }
        for way, plan in plans.items():
            variants[str(way)] = lambda i, way=way: lowprec.matmul(*pairs[i], **way.arguments(n))
            variants[f"{way}: products"] = lambda _, plan=plan: parts.multiply(plan)
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
            alone = seconds.get(f"{name}: products")
            values |= {
                "seconds": seconds[name],
                "seconds_of_products": alone,
                "share_of_splitting": alone and 1 - alone / seconds[name],
                "speed": {other: ratio for other, ratio in contest.speed(name).items() if other in TORCH_PRODUCTS},
            }
        elif name in contest.errors:
            values["error"] = contest.errors[name]
        yield values


def splits(part: Part, options: Options) -> None:
    sizes = (1024,) if options.quick else (8192, 4096, 1024, 2048, 16384)
    _each(part, options, measure_splits, n=sizes, distribution=("normal", "uniform"))


# -- cuBLAS's emulation of FP32 and FP64 ----------------------------------------------------------

#: By element type: the arguments of `matmul` by name, and the largest relative error of a correct result.
KINDS: dict[str, tuple[dict[str, dict[str, Any]], float]] = {
    "float32": (
        {
            "bf16x9": {"math_mode": "bf16x9"},
            # Chunks of k are those of lowprec's split.
            "bf16x9, split": {"math_mode": "bf16x9", "k_chunk": 256},
            "fp32": {"math_mode": "fp32"},
        },
        1e-5,
    ),
    "float64": ({"fp64_emulated": {"math_mode": "fp64_emulated"}, "float64": {"math_mode": "fp32"}}, 1e-12),
}


def measure_emulation(torch: Any, n: int, dtype: str, options: Options, ticks: clock.Clock) -> Iterator[Row]:
    """Yield one row per way to multiply square matrices: the kernel and units, the error and the speed."""
    ways, tolerance = KINDS[dtype]
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    sets = _sets(ticks, n, 8 if dtype == "float64" else 4)
    pairs = [[arrays.normal(torch, generator, (n, n), dtype) for _ in range(2)] for _ in range(sets)]
    variants = {name: lambda i, asked=asked: lowprec.matmul(*pairs[i], **asked) for name, asked in ways.items()}
    contest = clock.contest(variants, ticks, sets=sets, rounds=5, budget_s=0.0, seed=options.seed)
    for name, asked in ways.items():
        try:
            plan = lowprec.plan(*pairs[0], **asked)
            error = relative_error(torch, lowprec.matmul(*pairs[0], **asked), *pairs[0])
        except Exception as problem:  # noqa: BLE001 - a way that fails is one row
            yield {"name": name, "ok": False, "error": short(problem)}
            continue
        units = dict(plan.algorithm).get("units", "")
        values = {
            "name": name,
            "kernel": plan.kernel,
            "units": units,
            "relative_error": error,
            "ok": error <= tolerance,
        }
        if seconds := contest.seconds.get(name):
            values |= {"seconds": seconds, "tflops": 2 * n**3 / seconds / 1e12, "speed": contest.speed(name)}
        yield values


def emulation(part: Part, options: Options) -> None:
    """Measure all element types and sizes; cuBLAS reads the variable once per process."""
    # It emulates wherever it can, and not only where it expects to be faster.
    os.environ["CUBLAS_EMULATION_STRATEGY"] = "eager"
    _each(part, options, measure_emulation, n=(1024,) if options.quick else (4096, 8192, 2048, 1024), dtype=KINDS)


# -- block-scaled operands ------------------------------------------------------------------------


def measure_blocks(torch: Any, shape: tuple[int, int, int], name: str, options: Options, ticks: clock.Clock) -> Row:
    """Return the plan's kernel, the error over the plan's bound, and the speed over bfloat16."""
    m, n, k = shape
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    wide, quantised = [], []
    for _ in range(_sets(ticks, min(n, k), 1)):
        a, b = (torch.randn(s, generator=generator, device=ticks.device) for s in ((m, k), (k, n)))
        quantised.append((lowprec.quantize(a, name), lowprec.quantize(b, name, axis=0)))
        wide.append((a.bfloat16(), b.bfloat16()))
    x, y = quantised[0]
    plan = lowprec.plan(x, y)
    left, right = x.dequantize().double(), y.dequantize().double()
    error = float(torch.linalg.norm(lowprec.matmul(x, y).double() - left @ right))
    limit = plan.bound.frobenius(*(float(torch.linalg.norm(z)) for z in (left, right)), m, n)
    variants = {name: lambda i: lowprec.matmul(*quantised[i]), "bfloat16": lambda i: lowprec.matmul(*wide[i])}
    contest = clock.contest(variants, ticks, sets=len(wide), rounds=5, budget_s=0.0, seed=options.seed)
    return {
        "compute_type": plan.compute_type, "kernel": plan.kernel_reason, "algorithm": dict(plan.algorithm),
        "error_over_bound": error / limit, "seconds": contest.seconds,
        "speed_over_bfloat16": contest.speed(name).get("bfloat16"), "errors": contest.errors, "ok": error <= limit,
    }  # fmt: skip


def blocks(part: Part, options: Options) -> None:
    shapes = ((4096, 4096, 4096), (8192, 8192, 8192), (16, 8192, 8192), (1024, 1024, 1024))
    shapes = shapes[-1:] if options.quick else shapes
    _each(part, options, measure_blocks, shape=shapes, format=("mxfp8", "nvfp4", "mxfp4"))


# -- modes that quantise --------------------------------------------------------------------------


def measure_quantizing(torch: Any, n: int, mode: str, options: Options, ticks: clock.Clock) -> Row:
    """Return the units, the error over the plan's bound, the difference from the CPU, and the speed over bfloat16."""
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    a, b = (torch.randn((n, n), generator=generator, device=ticks.device) for _ in range(2))
    plan, exact = lowprec.plan(a, b, math_mode=mode), a.double() @ b.double()
    norms = [float(torch.linalg.norm(x.double())) for x in (a, b)]
    found = lowprec.matmul(a, b, math_mode=mode).double()
    error, limit = float(torch.linalg.norm(found - exact)), plan.bound.frobenius(*norms, n, n)
    # Of the same codes, if no scale is that of all rows: only the order and the rounding of the sums differ.
    here, there = found[:64].cpu(), lowprec.matmul(a[:64].cpu(), b.cpu(), math_mode=mode).double()
    difference = None if mode in ("fp8", "nvfp4") else float((here - there).norm() / there.norm())
    variants = {
        name: partial(lambda _, word: lowprec.matmul(a, b, math_mode=word), word=name) for name in (mode, "bf16")
    }
    contest = clock.contest(variants, ticks, rounds=5, budget_s=0.0, seed=options.seed)
    return {
        "compute_type": plan.compute_type, "a_becomes": plan.a_becomes, "algorithm": dict(plan.algorithm),
        "error_over_bound": error / limit, "difference_from_cpu": difference,
        "seconds": contest.seconds,
        "speed_over_bf16": contest.speed(mode).get("bf16"), "errors": contest.errors, "ok": error <= limit,
    }  # fmt: skip


def quantizing(part: Part, options: Options) -> None:
    _each(part, options, measure_quantizing, n=(512,) if options.quick else (4096, 1024), mode=MODES)


# -- 2:4 sparse weights ---------------------------------------------------------------------------

#: (m, k, n): rows of activations, and weights of transformers.
SPARSE_SHAPES = (
    (16, 4096, 4096), (64, 4096, 4096), (512, 4096, 4096), (4096, 4096, 4096), (16, 4096, 14336), (4096, 4096, 14336),
    (8192, 8192, 8192),
)  # fmt: skip


def measure_sparse(torch: Any, extents: tuple[int, int, int], dtype: str, options: Options, ticks: clock.Clock) -> Row:
    """Return times and ratios of one shape; `algorithm` and `sparsity` show whether cuSPARSELt ran."""
    m, k, n = extents
    generator = torch.Generator(ticks.device).manual_seed(options.seed)
    a, b = (arrays.normal(torch, generator, shape, dtype) for shape in ((m, k), (n, k)))
    # Two elements of each group along k, at random positions.
    mask = torch.rand((n, k // 4, 4), generator=generator, device=ticks.device).argsort(-1) < 2
    dense = (b * mask.reshape(n, k)).T
    sparse = lowprec.prepare(dense, sparsity="2:4")
    begin = time.perf_counter()
    lowprec.matmul(a, sparse)
    ticks.wait()
    first_s = time.perf_counter() - begin
    variants = {
        "sparse": lambda _: lowprec.matmul(a, sparse),
        "dense": lambda _: lowprec.matmul(a, dense),
        "torch": lambda _: torch.matmul(a, dense),
    }
    contest = clock.contest(variants, ticks, rounds=3 if options.quick else 15, seed=options.seed)
    error = (lowprec.matmul(a, sparse).double() - lowprec.matmul(a, dense).double()).norm()
    plan = lowprec.plan(a, sparse)
    relative = float(error / (a.double().norm() * dense.double().norm()))
    return {
        # Both products are within the bound of the plan.
        "ok": not contest.errors and relative <= 2 * plan.bound.relative,
        "seconds": contest.seconds,
        "speed": contest.speed("sparse"),
        "first_s": first_s,
        "relative_difference": relative,
        "sparsity": str(plan.sparsity),
        "algorithm": [list(entry) for entry in plan.algorithm],
        "bytes": {"dense": b.numel() * b.element_size(), "compressed": sparse.packed_bytes},
        "errors": contest.errors,
    }


def sparse(part: Part, options: Options) -> None:
    shapes = SPARSE_SHAPES[: 1 if options.quick else None]
    _each(part, options, measure_sparse, extents=shapes, dtype=("bfloat16", "float16"))
