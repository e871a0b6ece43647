"""Speed of a product by mode, element type and size, against numpy.matmul and torch.matmul.

usage: python benchmarks/bench_gemm.py [--quick] [--shapes {square,more}] [--schemes] [--output DIR] [--seed N]

The measured time includes rounding of the operands and allocation of the result. `--schemes` measures the modes that
recover FP32, next to `numpy.matmul` on float32 and `fp32`, also with a prepared weight for 256 rows.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common
import machine
import ml_dtypes
import numpy as np
import timing

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

#: Baseline of the other modes, in addition to other libraries.
FP32 = "lowprec float32 fp32"

#: Largest relative error of a correct result (that of bfloat16 results is 2e-3).
WORST_ERROR = 0.02

#: A variant this many times slower than `numpy.matmul` on float32 is omitted, here and at larger sizes: a library
#: without a kernel for its type takes minutes.
TOO_SLOW = 20

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Variant:
    """A variant of the product: library, kind of operands, and lowprec's mode."""

    name: str
    library: str
    operands: str
    multiply: Callable[[Any, Any], Any]
    mode: str | None = None
    small: bool = True  # whether it supports batches, and fewer than 17 rows or columns


Pairs = dict[str, list[tuple[Any, Any]]]


def operand_sets(shape: Shape, kinds: Sequence[str], sets: int, seed: int) -> Pairs:
    """Return sets of operands of one shape, by number type, each made from the same float32 numbers."""
    rng = np.random.default_rng(seed)
    batch, m, k, n = shape
    lead = (batch,) if batch > 1 else ()
    pairs: Pairs = {kind: [] for kind in kinds}
    for _ in range(sets):
        a = rng.standard_normal((*lead, m, k), dtype=np.float32)
        b = rng.standard_normal((*lead, k, n), dtype=np.float32)
        for kind in kinds:
            # The base is shared: NumPy and torch read the same float32 memory.
            pairs[kind].append((_as_kind(a, kind), _as_kind(b, kind)))
            if kind == PREPARED:
                pairs[kind][-1] = a, _prepared(a, b)
    return pairs


def _prepared(a: Any, b: Any) -> Any:
    """Return a weight that a product has already packed."""
    kept = lowprec.prepare(b, math_mode="bf16x3")
    lowprec.matmul(a, kept, math_mode="bf16x3")
    return kept


def _as_kind(x: Any, kind: str) -> Any:
    dtype, _, library = kind.partition(" ")
    if dtype == "int8":
        x = np.clip(np.rint(x * 40), -128, 127).astype(np.int8)
    if library == "torch":
        import torch

        return torch.from_numpy(x).to(getattr(torch, dtype))
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, copy=False)


def _lowprec(dtype: str, mode: str | None = None, library: str = "numpy") -> Variant:
    name = f"lowprec {dtype}" + (f" {mode}" if mode else "")
    multiply = functools.partial(lowprec.matmul, math_mode=mode)
    if library == "torch":
        return Variant(f"{name} (torch)", "lowprec", f"{dtype} torch", multiply, mode)
    return Variant(name, "lowprec", dtype, multiply, mode)


def _torch_variants() -> list[Variant]:
    import torch

    def at(precision: str) -> Callable[[Any, Any], Any]:
        def multiply(a: Any, b: Any) -> Any:
            # A process-wide switch, set for this call only, in well under a microsecond.
            torch.set_float32_matmul_precision(precision)
            try:
                return torch.matmul(a, b)
            finally:
                torch.set_float32_matmul_precision("highest")

        return multiply

    ways = {f"float32 {precision}": at(precision) for precision in ("highest", "medium")}
    ways |= {"bfloat16": torch.matmul, "float16": torch.matmul}
    return [
        *(Variant(f"torch {x}", "torch", f"{x.split()[0]} torch", ways[x]) for x in ways),
        Variant("torch int8", "torch", "int8 torch", torch._int_mm, small=False),
        _lowprec("float32", "bf16", "torch"),
        *(_lowprec(dtype, library="torch") for dtype in ("bfloat16", "float16")),
    ]


def variants() -> list[Variant]:
    """Return the variants available in this process; PyTorch's only where it is installed."""
    return [
        *(Variant(f"numpy {dtype}", "numpy", dtype, np.matmul) for dtype in ("float32", "float64")),
        *(_lowprec("float32", mode) for mode in ("fp32", "tf32", "bf16", "fp16")),
        *(_lowprec(dtype) for dtype in ("bfloat16", "float16", "int8", "float64")),
        *(_torch_variants() if importlib.util.find_spec("torch") else ()),
    ]


def scheme_variants(shape: Shape) -> list[Variant]:
    """Return the modes that recover FP32; for few rows also with a prepared weight."""
    made = [Variant("numpy float32", "numpy", "float32", np.matmul)]
    made += [_lowprec("float32", mode) for mode in ("fp32", *SCHEMES)]
    if shape[1] < shape[2]:
        multiply = functools.partial(lowprec.matmul, math_mode="bf16x3")
        made.append(Variant("lowprec float32 bf16x3, prepared", "lowprec", PREPARED, multiply, "bf16x3"))
    return made


# -- measuring ------------------------------------------------------------------------------------


def _float64(x: Any) -> Any:
    return (x.double().numpy() if hasattr(x, "double") else np.asarray(x)).astype(np.float64)


def relative_error(result: Any, a: Any, b: Any, rng: np.random.Generator) -> float:
    """Return the Frobenius-relative error on up to 64 sampled rows and columns, against float64."""
    rows = rng.choice(a.shape[-2], min(64, a.shape[-2]), replace=False)
    columns = rng.choice(b.shape[-1], min(64, b.shape[-1]), replace=False)
    first = (0,) * (a.ndim - 2)
    exact = _float64(a[first][rows]) @ _float64(b[first][:, columns])
    got = _float64(result[first][rows][:, columns])
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def number_of_sets(shape: Shape, kinds: Sequence[str], rounds: int) -> int:
    """Return the number of operand sets that exceed the last-level cache, within a quarter of the memory."""
    batch, m, k, n = shape
    width = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
    # float32 operands of NumPy and of torch are the same memory.
    distinct = {kind for kind in kinds if kind != "float32 torch"}
    size = sum(width[kind.split(" ")[0]] for kind in distinct) * batch * k * (m + n)
    cache = max(machine.caches().values(), default=32 << 20)
    wanted = -(-5 * cache // (4 * size))
    affordable = (machine.memory_bytes() or 4 << 30) // 4 // size
    return max(2, min(wanted, affordable, rounds + 1))


def number_of_rounds(shape: Shape, quick: bool) -> int:
    """Return the number of samples of each variant: more for cheap ones."""
    if quick:
        return 3
    return min(31, max(9, int(3e11 / (2 * math.prod(shape)))) | 1)


def measure(shape: Shape, seed: int, quick: bool, left_out: set[str], schemes: bool = False) -> list[dict[str, Any]]:
    """Time every variant on one shape; return one row per variant. Adds the names of too slow ones to `left_out`."""
    ways = scheme_variants(shape) if schemes else variants()
    is_small = shape[0] > 1 or min(shape[1:]) < 17
    ways = [v for v in ways if v.name not in left_out and not (is_small and not v.small)]
    kinds = list(dict.fromkeys(v.operands for v in ways))
    rounds = number_of_rounds(shape, quick)
    sets = number_of_sets(shape, kinds, rounds)
    pairs = operand_sets(shape, kinds, sets, seed)
    rng = np.random.default_rng(seed)
    errors = {v.name: _checked(v, pairs, rng) for v in ways}
    left_out |= _too_slow(ways, pairs)
    ways = [v for v in ways if v.name not in left_out]
    calls = {v.name: (lambda i, v=v: v.multiply(*pairs[v.operands][i])) for v in ways}
    seconds = timing.interleave(calls, rounds=rounds, sets=sets, seed=seed)
    flops = 2 * math.prod(shape)
    rows = []
    for v in ways:
        time_s = timing.summary(seconds[v.name])
        others = (w.name for w in ways if w.library != "lowprec" or w.mode == "fp32")
        rows.append(
            {
                **dict(zip(("batch", "m", "k", "n"), shape, strict=True)),
                "variant": v.name,
                "library": v.library,
                "operands": v.operands,
                "mode": v.mode,
                "kernel": _kernel(v, pairs),
                "rounds": rounds,
                "sets": sets,
                "seconds": time_s,
                "gflops": 1e-9 * flops / time_s["median"],
                "relative_error": errors[v.name],
                "speed": {name: timing.speed_ratio(seconds[name], seconds[v.name]) for name in others},
            }
        )
    return rows


def _checked(v: Variant, pairs: Pairs, rng: np.random.Generator) -> float:
    pair = pairs[v.operands][0]
    plain = pairs["float32"][0] if v.operands == PREPARED else pair
    error = relative_error(v.multiply(*pair), *plain, rng)
    if not error <= WORST_ERROR:
        shapes = " times ".join(str(tuple(x.shape)) for x in plain)
        raise RuntimeError(f"{v.name} is wrong on {shapes}: relative error {error}")
    return error


def _too_slow(ways: Sequence[Variant], pairs: Pairs) -> set[str]:
    """Return the names of the variants that are too slow, by one or two warm calls of each."""
    found: set[str] = set()
    limit = math.inf
    for v in ways:
        # One slow call may be due to other load.
        if _seconds(v, pairs) > limit and _seconds(v, pairs) > limit:
            found.add(v.name)
        if v.name == "numpy float32":
            # Below a tenth of a second one call is too noisy, and the time is acceptable.
            limit = max(0.1, TOO_SLOW * _seconds(v, pairs))
    return found


def _seconds(v: Variant, pairs: Pairs) -> float:
    begin = time.perf_counter()
    v.multiply(*pairs[v.operands][0])
    return time.perf_counter() - begin


def _kernel(v: Variant, pairs: Pairs) -> str | None:
    if v.library != "lowprec":
        return None
    return str(lowprec.plan(*pairs[v.operands][0], math_mode=v.mode).kernel)


# -- claims ---------------------------------------------------------------------------------------


#: Least speed of a variant relative to the baseline on a CPU with AMX and two threads: in the geometric mean, and at
#: each size.
SPEED_CLAIMS = (
    ("lowprec bfloat16 (torch)", "torch bfloat16", 0.8, 0.65),
    ("lowprec float32 bf16", "numpy float32", 4.0, None),
    ("lowprec float32 bf16 (torch)", "torch float32 medium", 1.4, None),
    ("lowprec float32 tf32", "numpy float32", 1.5, None),
    ("lowprec float32 fp16", "numpy float32", 1.5, None),
    ("lowprec float16 (torch)", "torch float16", 1.5, None),
    ("lowprec int8", "numpy float32", 6.0, None),
    ("lowprec float32 fp32", "numpy float32", 0.95, None),
)


#: The same for modes that recover FP32.
SCHEME_CLAIMS = (
    ("lowprec float32 bf16x3", "numpy float32", 2.4, None),
    ("lowprec float32 bf16x6", "numpy float32", 1.4, None),
    ("lowprec float32 fp32_emulated", "numpy float32", 1.35, None),
    ("lowprec float32 tf32x3", "numpy float32", 0.9, None),
)

#: The same for a CPU with AVX512-BF16 and without AMX.
VECTOR_CLAIMS = (
    ("lowprec bfloat16 (torch)", "torch bfloat16", 0.9, None),
    ("lowprec float32 bf16", FP32, 1.4, None),
    ("lowprec float32 tf32", FP32, 0.92, None),
    ("lowprec float32 fp16", FP32, 0.92, None),
    ("lowprec float16", FP32, 0.92, None),
    ("lowprec int8", "torch int8", 0.9, None),
)


def speed_claims(
    rows: Sequence[dict[str, Any]], table: Sequence[tuple[str, str, float, float | None]] = SPEED_CLAIMS
) -> list[dict[str, Any]]:
    """Return the claims about speed, over the square products in `rows`."""
    made = []
    for variant, baseline, mean_limit, limit in table:
        by_size = common.square_speeds(rows, variant, baseline)
        what, found = f"{variant} over {baseline}", by_size.values()
        mean = statistics.geometric_mean(found) if by_size else None
        made.append(common.claim(f"{what}, geometric mean", mean, mean_limit, by_size=by_size))
        if limit is not None:
            least = min(found, default=None)
            made.append(common.claim(f"{what}, every size", least, limit, by_size=by_size))
    return made


def scheme_claims(rows: Sequence[dict[str, Any]], has_amx: bool) -> list[dict[str, Any]]:
    """Return the claims about modes that recover FP32: on every CPU, and on one with AMX."""
    by_size = common.square_speeds(rows, "lowprec float32 fp32_emulated", "lowprec float32 fp32")
    what = "lowprec float32 fp32_emulated over lowprec float32 fp32, every size"
    made = [common.claim(what, min(by_size.values(), default=None), 0.97, by_size=by_size)]
    if not has_amx:
        return made
    made += speed_claims(rows, SCHEME_CLAIMS)
    speeds = {
        str(r["n"]): r["speed"]["numpy float32"]["median"]
        for r in rows
        if r["operands"] == PREPARED and r["m"] == WEIGHTS[0][1]
    }
    mean = statistics.geometric_mean(speeds.values()) if speeds else None
    what = "lowprec float32 bf16x3, prepared, 256 rows, over numpy float32, geometric mean"
    made.append(common.claim(what, mean, 2.0, by_size=speeds))
    errors = {(r["variant"], r["n"]): r["relative_error"] for r in rows if common.is_square(r)}
    ratios = {
        str(n): error / errors["numpy float32", n]
        for (name, n), error in errors.items()
        if name == "lowprec float32 bf16x6"
    }
    what = "error of lowprec float32 bf16x6 over that of numpy float32, every size"
    worst = max(ratios.values(), default=None)
    made.append(common.claim(what, worst, 1.0, at_most=True, by_size=ratios))
    return made


def vector_claims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the claims about a matrix times a vector, if measured: the time of a mode relative to FP32."""
    made = []
    for mode in ("tf32", "bf16"):
        name = f"lowprec float32 {mode}"
        for row in rows:
            if row["variant"] == name and row["n"] == 1:
                cost = 1 / row["speed"][FP32]["median"]
                what = f"{name} in times of {FP32}, {row['m']} x {row['k']} x 1"
                made.append(common.claim(what, cost, 1.3, at_most=True))
    return made


# -- command line ---------------------------------------------------------------------------------


def main() -> int:
    """Measure, print and write."""
    parser = common.parser(__doc__)
    more = "more: tall, wide, small k, few vectors and batched too"
    parser.add_argument("--shapes", choices=("square", "more"), default="square", help=more)
    schemes = "the modes that recover FP32, also with a prepared weight"
    parser.add_argument("--schemes", action="store_true", help=schemes)
    arguments = parser.parse_args()
    quick = arguments.quick
    if handicap := machine.numpy_handicap():
        print(f"warning: what is compared with NumPy is flattered: {handicap}", file=sys.stderr)
    shapes = QUICK if quick else SQUARE + (MORE if arguments.shapes == "more" else ())
    if arguments.schemes:
        shapes = (*QUICK, (1, 32, 512, 512)) if quick else SQUARE + WEIGHTS
    rows, claims = [], []
    left_out: set[str] = set()
    for shape in shapes:
        found = measure(shape, arguments.seed, quick, left_out, arguments.schemes)
        print(f"{shape}: {found[0]['rounds']} rounds of {len(found)} variants", flush=True)
        rows += found
    if arguments.schemes:
        claims = scheme_claims(rows, machine.has_amx())
    elif machine.has_amx():
        claims = speed_claims(rows)
    elif "avx512_bf16" in machine.cpu_flags():
        claims = speed_claims(rows, VECTOR_CLAIMS)
    else:
        print("Nothing is claimed about speed on a CPU without AMX and AVX512-BF16.")
    if "avx512f" in machine.cpu_flags():
        claims += vector_claims(rows)
    name = "gemm-schemes" if arguments.schemes else "gemm"
    common.report(name, arguments, rows, claims, left_out=sorted(left_out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
