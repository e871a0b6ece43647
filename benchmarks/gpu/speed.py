"""How fast each kind of product is beside torch, CuPy and nvmath, by size, without and with autotuning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import timing

from gpu import clock, libraries
from gpu.clock import Contest, Variant
from gpu.parts import Options, Part

SIZES = (16384, 8192, 4096, 2048, 1024, 512, 256)
QUICK_SIZES = (256,)
#: Sizes of kinds about which nothing is claimed.
EXTRA_SIZES = (8192, 2048, 512)

#: All operand sets of a variant together; an H200 has 50 MB of L2.
_ROTATED_BYTES = 160e6
_MOST_SETS = 512
#: Milliseconds for the measurements of one autotuning, which runs a candidate seven times or more.
_TUNING_MS, _RUNS_PER_CANDIDATE = 2500.0, 7
_SAMPLED = 64


@dataclass(frozen=True)
class Kind:
    """What is multiplied.

    With torch's word for its float32 products (`precision`), the compute type that nvmath is asked for, the relative
    error of a result that may be timed, and whether the second operand is a vector (the libraries call gemv).
    """

    dtype: str
    mode: str | None
    precision: str = "ieee"
    compute: str | None = None
    tolerance: float = 1e-5
    vector: bool = False


KINDS = {
    "bfloat16": Kind("bfloat16", None, tolerance=1e-2),
    "float16": Kind("float16", None, tolerance=2e-3),
    "float32 tf32": Kind("float32", "tf32", "tf32", "COMPUTE_32F_FAST_TF32", 2e-3),
    "float32 fp32": Kind("float32", "fp32", "ieee", "COMPUTE_32F"),
    "float32 bf16": Kind("float32", "bf16", "tf32", "COMPUTE_32F_FAST_TF32", 1e-2),
    "float32 fp16": Kind("float32", "fp16", "tf32", "COMPUTE_32F_FAST_TF32", 2e-3),
    "float64": Kind("float64", None, tolerance=1e-12),
    "complex64 tf32": Kind("complex64", "tf32", "tf32", "COMPUTE_32F_FAST_TF32", 2e-3),
    "bfloat16 times a vector": Kind("bfloat16", None, tolerance=1e-2, vector=True),
    "float32 times a vector": Kind("float32", "fp32", "ieee", "COMPUTE_32F", vector=True),
}
CLAIMED = ("bfloat16", "float16", "float32 tf32", "float32 fp32")
CONVERTING = ("float32 bf16", "float32 fp16")


@contextlib.contextmanager
def torch_switches(torch: Any, precision: str, *, reduced: bool = False) -> Iterator[None]:
    """Set torch's float32 precision and whether 16-bit sums may be reduced in 16 bits; put both back."""
    matmul = torch.backends.cuda.matmul
    names = {
        "fp32_precision": precision,
        "allow_bf16_reduced_precision_reduction": reduced,
        "allow_fp16_reduced_precision_reduction": reduced,
    }
    if not hasattr(matmul, "fp32_precision"):
        names["allow_tf32"] = names.pop("fp32_precision") == "tf32"
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name, value in names.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


@contextlib.contextmanager
def cupy_switches(cupy: Any, precision: str) -> Iterator[None]:
    """Set CuPy's compute type for float32 (1: its default, 7: TF32) and put it back."""
    before = cupy._core.get_compute_type("f")
    cupy._core.set_compute_type("f", 7 if precision == "tf32" else 1)
    try:
        yield
    finally:
        cupy._core.set_compute_type("f", before)


def sets_of(n: int, itemsize: int) -> int:
    """Return how many pairs of operands outgrow the L2.

    Examples
    --------
    >>> sets_of(256, 2), sets_of(16384, 4)
    (512, 2)
    """
    return int(max(2, min(_MOST_SETS, _ROTATED_BYTES // (2 * n * n * itemsize) + 1)))


class Operands:
    """Rotating pairs of operands as torch tensors: square ones, or a matrix and a vector."""

    def __init__(
        self, torch: Any, kind: Kind, n: int, sets: int, seed: int, device: str = "cuda"
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, kind.dtype)
        drawn = dtype if dtype.is_complex or dtype == torch.float64 else torch.float32
        self.a, self.b = (
            [
                torch.randn(shape, generator=generator, device=device, dtype=drawn).to(dtype)
                for _ in range(sets)
            ]
            for shape in ((n, n), (n,) if kind.vector else (n, n))
        )
        self.sets = sets

    def bind(self, function: Callable[[Any, Any], Any]) -> Callable[[int], Any]:
        """Return a call by the number of the pair."""
        a, b = self.a, self.b
        return lambda number: function(a[number], b[number])


def variants(lowprec: Any, torch: Any, kind: Kind, operands: Operands) -> dict[str, Variant]:
    """Return what is compared; lowprec is the first."""
    mode = kind.mode

    def switches() -> Any:
        return torch_switches(torch, kind.precision)

    found = {
        "lowprec": Variant(operands.bind(lambda a, b: lowprec.matmul(a, b, math_mode=mode))),
        "torch": Variant(operands.bind(torch.matmul), switches),
    }
    if kind.dtype in ("bfloat16", "float16"):
        found["torch, reduced sums"] = Variant(
            operands.bind(torch.matmul),
            lambda: torch_switches(torch, kind.precision, reduced=True),
        )
    if mode in ("bf16", "fp16"):
        short = torch.bfloat16 if mode == "bf16" else torch.float16
        found["lowprec tf32"] = Variant(
            operands.bind(lambda a, b: lowprec.matmul(a, b, math_mode="tf32"))
        )
        found["torch, converted"] = Variant(
            operands.bind(lambda a, b: (a.to(short) @ b.to(short)).float())
        )
        return found
    return {**found, **_others(kind, operands)}


def _others(kind: Kind, operands: Operands) -> dict[str, Variant]:
    found = {}
    cupy, advanced = (libraries.optional(n) for n in ("cupy", "nvmath.linalg.advanced"))
    if cupy is not None:
        found["cupy"] = _cupy(cupy, kind, operands)
    if advanced is not None:
        wishes = {}
        if kind.compute:
            wishes = {"compute_type": advanced.MatmulComputeType[kind.compute]}
        found["nvmath"] = Variant(
            operands.bind(lambda a, b: advanced.matmul(a, b, options=dict(wishes)))
        )
    return found


def _cupy(cupy: Any, kind: Kind, operands: Operands) -> Variant:
    shared: list[list[Any]] = []

    def call(number: int) -> Any:
        if not shared:
            shared.extend([cupy.from_dlpack(x) for x in side] for side in (operands.a, operands.b))
        return cupy.matmul(shared[0][number], shared[1][number])

    return Variant(call, lambda: cupy_switches(cupy, kind.precision))


def relative_error(torch: Any, result: Any, a: Any, b: Any) -> float:
    """Return the relative error of some rows and columns of a product, against float64."""
    step = max(1, a.shape[0] // _SAMPLED)
    wide = torch.complex128 if a.is_complex() else torch.float64
    part = slice(None, None, step)
    exact = a[part].to(wide) @ (b[:, part] if b.dim() == 2 else b).to(wide)
    off = result[(part,) * b.dim()].to(wide) - exact
    return float(off.abs().square().sum().sqrt() / exact.abs().square().sum().sqrt())


def row(kind_name: str, n: int, tuned: bool, found: Contest) -> dict[str, Any]:
    """Return a contest as a row of the report."""
    kind = KINDS[kind_name]
    flops = (8 if kind.dtype.startswith("complex") else 2) * n ** (2 if kind.vector else 3)
    medians = {name: timing.summary(taken) for name, taken in found.device_s.items()}
    own = medians.get("lowprec")
    eager = {name: timing.summary(taken)["median"] for name, taken in found.eager_s.items()}
    return {
        "kind": kind_name,
        "n": n,
        "tuned": tuned,
        "seconds": medians,
        "eager_s": eager,
        "host_s": found.host_s,
        "speed": found.speed("lowprec"),
        "tflops": flops / own["median"] / 1e12 if own else None,
        "errors": found.errors,
    }


def measure(
    lowprec: Any, torch: Any, kind_name: str, n: int, seed: int, ticks: clock.Clock
) -> tuple[dict[str, Any], Operands]:
    """Return the row of one kind and size without autotuning, and its operands."""
    kind = KINDS[kind_name]
    device = "cuda" if isinstance(ticks, clock.EventClock) else "cpu"
    itemsize = getattr(torch, kind.dtype).itemsize
    sets = sets_of(n, itemsize) if device == "cuda" else 2
    operands = Operands(torch, kind, n, sets, seed, device)
    a, b = operands.a[0], operands.b[0]
    error = relative_error(torch, lowprec.matmul(a, b, math_mode=kind.mode), a, b)
    found = clock.contest(
        variants(lowprec, torch, kind, operands), ticks, sets=sets, budget_s=0.6, seed=seed
    )
    # False for NaN, too.
    fine = bool(error <= kind.tolerance) and "lowprec" not in found.errors
    made = {**row(kind_name, n, False, found), "relative_error": error, "sets": sets, "ok": fine}
    return made, operands


def candidates_of(median_ms: float) -> int:
    """Return how many algorithms fit into the time of one autotuning.

    Examples
    --------
    >>> candidates_of(0.1), candidates_of(20.0), candidates_of(200.0)
    (32, 17, 4)
    """
    return max(4, min(32, int(_TUNING_MS / (_RUNS_PER_CANDIDATE * median_ms))))


def tune(
    lowprec: Any, torch: Any, first: dict[str, Any], operands: Operands, ticks: clock.Clock
) -> dict[str, Any]:
    """Return the row of the same products after autotuning, beside torch alone."""
    from lowprec.tuning import autotune

    kind = KINDS[first["kind"]]
    asked = candidates_of(first["seconds"]["lowprec"]["median"] * 1e3)
    tuning = autotune(operands.a[0], operands.b[0], math_mode=kind.mode, candidates=asked)
    both = {
        name: variant
        for name, variant in variants(lowprec, torch, kind, operands).items()
        if name in ("lowprec", "torch")
    }
    found = clock.contest(both, ticks, sets=operands.sets, budget_s=0.5)
    made = row(first["kind"], first["n"], True, found)
    taken = tuning.timed[0] if tuning.timed else None
    return {
        **made,
        "candidates": asked,
        "found": len(tuning.timed),
        "taken": None if taken is None else {"rank": taken.rank, "algorithm": taken.algorithm},
        "over_first_choice": tuning.speedup,
        "ok": "lowprec" not in found.errors,
    }


def schedule(*, quick: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield kind, size, and whether to tune, what is claimed first."""
    sizes = QUICK_SIZES if quick else SIZES
    for n in sizes:
        for name in CLAIMED:
            yield name, n, n >= 1024 or quick
        if n == 8192 or quick:
            yield CONVERTING[0], n, False
    for name in KINDS:
        if name not in CLAIMED:
            for n in sizes if quick else EXTRA_SIZES:
                if (name, n) not in ((CONVERTING[0], 8192), (CONVERTING[0], QUICK_SIZES[0])):
                    yield name, n, False


def run(part: Part, options: Options) -> None:
    """Measure all kinds and sizes."""
    import torch

    import lowprec

    ticks = clock.EventClock(torch)
    part.fact("rotated_bytes", _ROTATED_BYTES)
    for name, n, tunes in schedule(quick=options.quick):
        if options.left() < 0:
            part.fact("stopped_at", f"{name}, {n}")
            break
        try:
            first, operands = measure(lowprec, torch, name, n, options.seed, ticks)
            part.row(**first)
            if tunes and "lowprec" in first["seconds"]:
                part.row(**tune(lowprec, torch, first, operands, ticks))
        except Exception as error:  # noqa: BLE001 - one kind that fails is one row
            part.row(ok=False, kind=name, n=n, tuned=None, errors={"all": libraries.short(error)})
        operands = None
        torch.cuda.empty_cache()
