"""Speed of each kind of product against PyTorch, by size, without and with autotuning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from typing import Any, NamedTuple

import timing

import lowprec
from gpu import arrays, clock
from gpu.clock import Contest, Variant
from gpu.parts import Options, Part, short

SIZES = (16384, 8192, 4096, 2048, 1024, 512, 256)
#: Sizes of kinds without a claim.
EXTRA_SIZES = (8192, 2048, 512)

#: All operand sets of a variant together; an H200 has 50 MB of L2.
_ROTATED_BYTES, _MOST_SETS = 160e6, 512
#: Milliseconds for the measurements of one autotuning, which runs a candidate seven times or more.
_TUNING_MS, _RUNS_PER_CANDIDATE = 2500.0, 7


class Kind(NamedTuple):
    """Element type and mode, and torch's word for the precision of its float32 products.

    With the relative error of a result that may be timed, and whether the second operand is a vector (the libraries
    call gemv).
    """

    dtype: str
    mode: str | None
    precision: str = "ieee"
    tolerance: float = 1e-5
    vector: bool = False


KINDS = {
    "bfloat16": Kind("bfloat16", None, tolerance=1e-2),
    "float16": Kind("float16", None, tolerance=2e-3),
    "float32 tf32": Kind("float32", "tf32", "tf32", 2e-3),
    "float32 fp32": Kind("float32", "fp32"),
    "float32 bf16": Kind("float32", "bf16", "tf32", 1e-2),
    "float32 fp16": Kind("float32", "fp16", "tf32", 2e-3),
    "float64": Kind("float64", None, tolerance=1e-12),
    "complex64 tf32": Kind("complex64", "tf32", "tf32", 2e-3),
    "bfloat16 times a vector": Kind("bfloat16", None, tolerance=1e-2, vector=True),
    "float32 times a vector": Kind("float32", "fp32", vector=True),
}
CLAIMED = ("bfloat16", "float16", "float32 tf32", "float32 fp32")
CONVERTING = "float32 bf16"


@contextlib.contextmanager
def torch_switches(torch: Any, precision: str, reduced: bool = False) -> Iterator[None]:
    """Set torch's float32 precision and whether 16-bit sums may be reduced in 16 bits."""
    matmul = torch.backends.cuda.matmul
    wanted = {f"allow_{kind}_reduced_precision_reduction": reduced for kind in ("bf16", "fp16")}
    if hasattr(matmul, "fp32_precision"):
        wanted["fp32_precision"] = precision
    else:
        wanted["allow_tf32"] = precision == "tf32"
    before = {name: getattr(matmul, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def sets_of(n: int, itemsize: int) -> int:
    """Return how many pairs of operands outgrow the L2.

    Examples
    --------
    >>> sets_of(256, 2), sets_of(16384, 4)
    (512, 2)
    """
    return int(max(2, min(_MOST_SETS, _ROTATED_BYTES // (2 * n * n * itemsize) + 1)))


def relative_error(torch: Any, result: Any, a: Any, b: Any) -> float:
    """Return the relative error of some rows and columns of a product, against float64."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    part = slice(None, None, max(1, a.shape[0] // 64))
    exact = a[part].to(wide) @ (b[:, part] if b.dim() == 2 else b).to(wide)
    error = result[(part,) * b.dim()].to(wide) - exact
    return float(error.abs().square().sum().sqrt() / exact.abs().square().sum().sqrt())


class Operands:
    """Rotating pairs of operands as torch tensors: square ones, or a matrix and a vector."""

    def __init__(self, torch: Any, kind: Kind, n: int, sets: int, seed: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.a, self.b = (
            [arrays.normal(torch, generator, shape, kind.dtype) for _ in range(sets)]
            for shape in ((n, n), (n,) if kind.vector else (n, n))
        )
        self.sets = sets

    def bind(self, function: Callable[[Any, Any], Any]) -> clock.Call:
        return lambda number: function(self.a[number], self.b[number])


def variants(torch: Any, kind: Kind, operands: Operands) -> dict[str, Variant]:
    """Return the compared products; lowprec is the first."""
    bind = operands.bind

    def switches(reduced: bool = False) -> AbstractContextManager[None]:
        return torch_switches(torch, kind.precision, reduced)

    products = {
        "lowprec": Variant(bind(lambda a, b: lowprec.matmul(a, b, math_mode=kind.mode))),
        "torch": Variant(bind(torch.matmul), switches),
    }
    if kind.dtype in ("bfloat16", "float16"):
        products["torch, reduced sums"] = Variant(bind(torch.matmul), lambda: switches(reduced=True))
    if kind.mode in ("bf16", "fp16"):
        to = torch.bfloat16 if kind.mode == "bf16" else torch.float16
        products["lowprec tf32"] = Variant(bind(lambda a, b: lowprec.matmul(a, b, math_mode="tf32")))
        products["torch, converted"] = Variant(bind(lambda a, b: (a.to(to) @ b.to(to)).float()))
    return products


def _row(kind_name: str, n: int, tuned: bool, contest: Contest) -> dict[str, Any]:
    kind = KINDS[kind_name]
    flops = (8 if kind.dtype.startswith("complex") else 2) * n ** (2 if kind.vector else 3)
    seconds = {name: timing.summary(samples) for name, samples in contest.device_s.items()}
    return {
        "kind": kind_name,
        "n": n,
        "tuned": tuned,
        "seconds": seconds,
        "host_s": contest.host_s,
        "speed": contest.speed("lowprec"),
        "tflops": flops / seconds["lowprec"]["median"] / 1e12 if "lowprec" in seconds else None,
        "errors": contest.errors,
    }


def measure(torch: Any, kind_name: str, n: int, seed: int, ticks: clock.Clock) -> tuple[dict[str, Any], Operands]:
    """Return the row of one kind and size without autotuning, and its operands."""
    kind = KINDS[kind_name]
    sets = sets_of(n, getattr(torch, kind.dtype).itemsize) if ticks.device == "cuda" else 2
    operands = Operands(torch, kind, n, sets, seed, ticks.device)
    a, b = operands.a[0], operands.b[0]
    error = relative_error(torch, lowprec.matmul(a, b, math_mode=kind.mode), a, b)
    contest = clock.contest(variants(torch, kind, operands), ticks, sets=sets, budget_s=0.6, seed=seed)
    # False for NaN, too.
    ok = bool(error <= kind.tolerance) and "lowprec" not in contest.errors
    return {**_row(kind_name, n, False, contest), "relative_error": error, "sets": sets, "ok": ok}, operands


def candidates_of(median_ms: float) -> int:
    """Return how many algorithms fit into the time of one autotuning.

    Examples
    --------
    >>> candidates_of(0.1), candidates_of(20.0), candidates_of(200.0)
    (32, 17, 4)
    """
    return max(4, min(32, int(_TUNING_MS / (_RUNS_PER_CANDIDATE * median_ms))))


def _tune(torch: Any, first: dict[str, Any], operands: Operands, ticks: clock.Clock) -> dict[str, Any]:
    """Return the row of the same products after autotuning, against torch alone."""
    kind = KINDS[first["kind"]]
    candidates = candidates_of(first["seconds"]["lowprec"]["median"] * 1e3)
    tuning = lowprec.autotune(operands.a[0], operands.b[0], math_mode=kind.mode, candidates=candidates)
    compared = variants(torch, kind, operands)
    both = {name: compared[name] for name in ("lowprec", "torch")}
    contest = clock.contest(both, ticks, sets=operands.sets, budget_s=0.5)
    chosen = tuning.timed[0] if tuning.timed else None
    return {
        **_row(first["kind"], first["n"], True, contest),
        "candidates": candidates,
        "found": len(tuning.timed),
        "chosen": None if chosen is None else {"rank": chosen.rank, "algorithm": chosen.algorithm},
        "over_first_choice": tuning.speedup,
        "ok": "lowprec" not in contest.errors,
    }


def _schedule(*, quick: bool) -> dict[tuple[str, int], bool]:
    """Return by kind and size whether to tune, kinds with a claim first."""
    sizes, extra = (SIZES[-1:], SIZES[-1:]) if quick else (SIZES, EXTRA_SIZES)
    tunes: dict[tuple[str, int], bool] = {}
    for n in sizes:
        tunes |= {(name, n): n >= 1024 or quick for name in CLAIMED}
        if n == 8192 or quick:
            tunes[CONVERTING, n] = False
    return tunes | {case: False for case in product(KINDS, extra) if case not in tunes}


def speed(part: Part, options: Options) -> None:
    import torch

    ticks = clock.EventClock(torch)
    part.fact("rotated_bytes", _ROTATED_BYTES)
    for (name, n), tunes in part.in_time(_schedule(quick=options.quick).items(), options):
        try:
            first, operands = measure(torch, name, n, options.seed, ticks)
            part.row(**first)
            if tunes and "lowprec" in first["seconds"]:
                part.row(**_tune(torch, first, operands, ticks))
        except Exception as error:  # noqa: BLE001 - a kind that fails is one row
            part.row(ok=False, kind=name, n=n, tuned=None, errors={"all": short(error)})
        operands = None
        torch.cuda.empty_cache()
