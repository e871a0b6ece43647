"""Speed and error of each kind of product next to PyTorch's, by shape, without and with autotuning."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import lowprec
from gpu import clock
from gpu.parts import Options, Part, short
from gpu.verdicts import LARGE, SIZES, sizes
from lowprec import recipes

#: All operand sets of a variant together; an H200 has 50 MB of L2.
_ROTATED_BYTES, _MOST_SETS = 160e6, 512
#: Milliseconds for the measurements of one autotuning, which runs a candidate seven times or more.
_TUNING_MS, _RUNS_PER_CANDIDATE = 2500.0, 7

Shape = tuple[int, int, int]
SQUARES = tuple((n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384))
#: Rows of activations, and weights of transformers.
LAYERS = (
    (16, 4096, 4096),
    (512, 4096, 4096),
    (16, 4096, 14336),
    (4096, 4096, 14336),
    (8192, 8192, 8192),
)


class Kind(NamedTuple):
    """A kind of product, from float32 matrices.

    `operands` returns those of lowprec, those of `torch.matmul` for comparison, and the numbers in them; `arguments`
    are lowprec's; `precision` is torch's word for its float32 products; `shapes` are m, k, n; `beside` is
    another mode to compare with.
    """

    operands: Callable[[Any, Any, Any], tuple[tuple[Any, Any], ...]]
    arguments: Mapping[str, Any] = MappingProxyType({})
    precision: str = "ieee"
    shapes: tuple[Shape, ...] = SQUARES
    beside: str | None = None


def _typed(dtype: str) -> Callable[..., Any]:
    def operands(torch: Any, a: Any, b: Any) -> Any:
        x, y = (
            torch.complex(m, -m) if dtype == "complex64" else m.to(getattr(torch, dtype))
            for m in (a, b)
        )
        return ((x, y if b.shape[1] > 1 else y[:, 0]),) * 3

    return operands


def _quantised(name: str) -> Callable[..., Any]:
    def operands(torch: Any, a: Any, b: Any) -> Any:
        x, y = lowprec.quantize(a, name), lowprec.quantize(b, name, axis=0)
        return (x, y), (a.bfloat16(), b.bfloat16()), (x.dequantize(), y.dequantize())

    return operands


def _sparse(dtype: str) -> Callable[..., Any]:
    def operands(torch: Any, a: Any, b: Any) -> Any:
        (k, n), kind = b.shape, getattr(torch, dtype)
        # Two elements of each group along k, at random positions.
        mask = torch.rand((n, k // 4, 4), device=b.device).argsort(-1) < 2
        x, y = a.to(kind), (b.T * mask.reshape(n, k)).to(kind).T
        return (x, lowprec.prepare(y, sparsity="2:4")), (x, y), (x, y)

    return operands


_FLOAT32, _VECTORS, _SOME = _typed("float32"), tuple((n, n, 1) for n in (8192, 2048)), SQUARES[2:6]
#: Those of the claims first; they are measured with autotuning, too.
SPEED = {
    "bfloat16": Kind(_typed("bfloat16")),
    "float16": Kind(_typed("float16")),
    "float32 tf32": Kind(_FLOAT32, {"math_mode": "tf32"}, "tf32"),
    "float32 fp32": Kind(_FLOAT32, {"math_mode": "fp32"}),
    "float32 bf16": Kind(_FLOAT32, {"math_mode": "bf16"}, "tf32", _SOME, "tf32"),
    "float32 fp16": Kind(_FLOAT32, {"math_mode": "fp16"}, "tf32", _SOME, "tf32"),
    "float64": Kind(_typed("float64"), {}, "ieee", _SOME),
    "complex64 tf32": Kind(_typed("complex64"), {"math_mode": "tf32"}, "tf32", _SOME),
    "bfloat16 times a vector": Kind(_typed("bfloat16"), {}, "ieee", _VECTORS),
    "float32 times a vector": Kind(_FLOAT32, {"math_mode": "fp32"}, "ieee", _VECTORS),
}
TUNED = tuple(SPEED)[:4]
FORMATS = {
    # cuBLAS's emulation by the compute type; with chunks of k the split is lowprec's.
    "bf16x9": Kind(_FLOAT32, {"math_mode": "bf16x9"}, "ieee", _SOME),
    "bf16x9, split": Kind(_FLOAT32, {"math_mode": "bf16x9", "k_chunk": 256}, "ieee", _SOME),
    "fp64_emulated": Kind(_typed("float64"), {"math_mode": "fp64_emulated"}, "ieee", _SOME),
    **{
        name: Kind(_quantised(name), {}, "ieee", (*_SOME, (16, 8192, 8192)))
        for name in ("mxfp8", "nvfp4", "mxfp4")
    },
    **{
        f"2:4 {dtype}": Kind(_sparse(dtype), {}, "ieee", LAYERS)
        for dtype in ("bfloat16", "float16")
    },
}
QUANTIZING = {
    f"mode {mode}": Kind(_FLOAT32, {"math_mode": mode}, "tf32", _SOME, "bf16")
    for mode in recipes.MODES
    if mode != "int8_blocks"
}


@contextlib.contextmanager
def torch_switches(torch: Any, precision: str) -> Iterator[None]:
    """Set torch's float32 precision, and sums of 16-bit products in FP32 alone."""
    matmul = torch.backends.cuda.matmul
    wanted: dict[str, Any] = {
        f"allow_{kind}_reduced_precision_reduction": False for kind in ("bf16", "fp16")
    }
    # Older versions of torch have the other switch.
    is_new = hasattr(matmul, "fp32_precision")
    wanted |= {"fp32_precision": precision} if is_new else {"allow_tf32": precision == "tf32"}
    before = {name: getattr(matmul, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def sets_of(nbytes: int) -> int:
    """Return how many pairs of operands of this size outgrow the L2.

    Examples
    --------
    >>> sets_of(256 * 256 * 4), sets_of(16384 * 16384 * 8)
    (512, 2)
    """
    return int(max(2, min(_MOST_SETS, _ROTATED_BYTES // nbytes + 1)))


def errors(torch: Any, result: Any, a: Any, b: Any, bound: Any = None) -> tuple[float, float]:
    """Return the relative error of some rows and columns of a product, and that over a plan's bound."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    rows, columns = (
        slice(None, None, max(1, extent // 64)) for extent in (a.shape[0], b.shape[-1])
    )
    x, y = a[rows].to(wide), (b[:, columns] if b.dim() == 2 else b).to(wide)
    exact = x @ y
    error = float((result[(rows, columns)[: b.dim()]].to(wide) - exact).norm())
    limit = (
        bound.frobenius(float(x.norm()), float(y.norm()), len(x), y[0].numel())
        if bound
        else math.nan
    )
    return error / float(exact.norm()), error / limit


def measure(
    torch: Any, name: str, shape: Shape, seed: int, ticks: clock.EventClock, *, tune: bool
) -> Iterator[dict[str, Any]]:
    """Yield the row of one kind and shape: plan, error, times and speeds; and the row after autotuning."""
    (m, k, n), kind = shape, (SPEED | FORMATS | QUANTIZING)[name]
    generator = torch.Generator(ticks.device).manual_seed(seed)

    def draw() -> tuple[tuple[Any, Any], ...]:
        a, b = (torch.randn(s, generator=generator, device=ticks.device) for s in ((m, k), (k, n)))
        return kind.operands(torch, a, b)

    sets = [draw()]
    ours, theirs, numbers = sets[0]
    # lowprec's operands may be the narrower ones.
    nbytes = min(sum(x.nbytes for x in pair) for pair in (ours, theirs))
    sets += [draw() for _ in range(sets_of(nbytes) - 1 if ticks.device == "cuda" else 1)]
    begin = time.perf_counter()
    result = lowprec.matmul(*ours, **kind.arguments)
    ticks.wait()
    first_s = time.perf_counter() - begin
    variants = {
        "lowprec": clock.Variant(lambda i: lowprec.matmul(*sets[i][0], **kind.arguments)),
        "torch": clock.Variant(
            lambda i: torch.matmul(*sets[i][1]), partial(torch_switches, torch, kind.precision)
        ),
    }
    if kind.beside:
        beside = clock.Variant(lambda i: lowprec.matmul(*sets[i][0], math_mode=kind.beside))
        variants[f"lowprec {kind.beside}"] = beside
    contest = clock.Contest()
    for tuned in (False, True) if tune else (False,):
        values: dict[str, Any] = {}
        if tuned and "lowprec" in contest.seconds:
            candidates = max(
                4,
                min(32, int(_TUNING_MS / (_RUNS_PER_CANDIDATE * 1e3 * contest.seconds["lowprec"]))),
            )
            values["over_first_choice"] = lowprec.autotune(
                *ours, **kind.arguments, candidates=candidates
            ).speedup
            result = lowprec.matmul(*ours, **kind.arguments)
        plan = lowprec.plan(*ours, **kind.arguments)
        contest = clock.contest(variants, ticks, sets=len(sets), budget_s=0.6, seed=seed)
        relative, of_bound = errors(torch, result, *numbers, plan.bound)
        if seconds := contest.seconds.get("lowprec"):
            values["tflops"] = (8 if numbers[0].is_complex() else 2) * m * k * n / seconds / 1e12
        yield {
            "kind": name, "m": m, "k": k, "n": n if n > 1 else m, "tuned": tuned, **values, "first_s": first_s,
            "kernel": str(plan.kernel), "reason": plan.kernel_reason, "algorithm": [list(x) for x in plan.algorithm],
            "sparsity": str(plan.sparsity), "relative_error": relative, "error_over_bound": of_bound,
            "seconds": contest.seconds, "host_s": contest.host_s, "speed": contest.speed("lowprec"),
            # False for NaN, too.
            "errors": contest.errors, "ok": of_bound <= 1 and "lowprec" not in contest.errors,
        }  # fmt: skip


def is_tuned(name: str, n: int) -> bool:
    """Whether a product is measured with autotuning, too; in FP32 the largest takes too long."""
    return name in TUNED and n in sizes(name, tuned=True)


def _run(
    part: Part, options: Options, kinds: dict[str, Kind], first: Iterable[tuple[str, Shape]] = ()
) -> None:
    import torch

    ticks = clock.EventClock(torch)
    cases = dict.fromkeys(
        [*first, *((name, shape) for name, kind in kinds.items() for shape in kind.shapes)]
    )
    if options.quick:
        cases = dict.fromkeys(
            (name, min(kind.shapes, key=math.prod)) for name, kind in kinds.items()
        )
    for name, shape in part.in_time(cases, options):
        try:
            for row in measure(
                torch, name, shape, options.seed, ticks, tune=is_tuned(name, shape[0])
            ):
                part.row(**row)
        except Exception as error:  # noqa: BLE001 - a kind that fails is one row
            part.row(ok=False, kind=name, shape=shape, tuned=None, errors={"all": short(error)})
        torch.cuda.empty_cache()


def speed(part: Part, options: Options) -> None:
    """Measure the kinds with a claim, one after another by increasing size, so that claims are complete early."""
    claimed = [(name, shape) for name in TUNED for shape in SQUARES if shape[0] in SIZES]
    _run(part, options, SPEED, [("float32 bf16", (LARGE,) * 3), *claimed])


def formats(part: Part, options: Options) -> None:
    # cuBLAS reads it once: it emulates wherever it can, and not only where it expects to be faster.
    os.environ["CUBLAS_EMULATION_STRATEGY"] = "eager"
    _run(part, options, FORMATS)


def quantizing(part: Part, options: Options) -> None:
    _run(part, options, QUANTIZING)
