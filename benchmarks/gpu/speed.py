"""How fast each kind of product is beside torch, CuPy and nvmath, by size, without and with autotuning."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import timing

import lowprec
from gpu import clock, libraries
from gpu.clock import Contest, Variant
from gpu.parts import Options, Part, short

SIZES = (16384, 8192, 4096, 2048, 1024, 512, 256)
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
CONVERTING = "float32 bf16"


@contextlib.contextmanager
def switched(
    read: Callable[[str], Any], write: Callable[[str, Any], None], wanted: Mapping[str, Any]
) -> Iterator[None]:
    """Set a library's switches and put them back."""
    before = {name: read(name) for name in wanted}
    try:
        for name, value in wanted.items():
            write(name, value)
        yield
    finally:
        for name, value in before.items():
            write(name, value)


def torch_switches(torch: Any, precision: str, reduced: bool) -> AbstractContextManager[None]:
    """Set torch's float32 precision and whether 16-bit sums may be reduced in 16 bits."""
    matmul = torch.backends.cuda.matmul
    wanted = {"allow_bf16_reduced_precision_reduction": reduced, "allow_fp16_reduced_precision_reduction": reduced}
    if hasattr(matmul, "fp32_precision"):
        wanted["fp32_precision"] = precision
    else:
        wanted["allow_tf32"] = precision == "tf32"
    return switched(functools.partial(getattr, matmul), functools.partial(setattr, matmul), wanted)


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

    def __init__(self, torch: Any, kind: Kind, n: int, sets: int, seed: int, device: str = "cuda") -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.a, self.b = (
            [libraries.normal(torch, generator, shape, kind.dtype) for _ in range(sets)]
            for shape in ((n, n), (n,) if kind.vector else (n, n))
        )
        self.sets = sets

    def bind(self, function: Callable[[Any, Any], Any]) -> Callable[[int], Any]:
        """Return a call by the number of the pair."""
        a, b = self.a, self.b
        return lambda number: function(a[number], b[number])


def variants(torch: Any, kind: Kind, operands: Operands) -> dict[str, Variant]:
    """Return what is compared; lowprec is the first."""
    bind = operands.bind

    def switches(*, reduced: bool = False) -> Any:
        return torch_switches(torch, kind.precision, reduced)

    found = {
        "lowprec": Variant(bind(lambda a, b: lowprec.matmul(a, b, math_mode=kind.mode))),
        "torch": Variant(bind(torch.matmul), switches),
    }
    if kind.dtype in ("bfloat16", "float16"):
        reduced = Variant(bind(torch.matmul), lambda: switches(reduced=True))
        found["torch, reduced sums"] = reduced
    if kind.mode in ("bf16", "fp16"):
        to = torch.bfloat16 if kind.mode == "bf16" else torch.float16
        tf32 = bind(lambda a, b: lowprec.matmul(a, b, math_mode="tf32"))
        found["lowprec tf32"] = Variant(tf32)
        found["torch, converted"] = Variant(bind(lambda a, b: (a.to(to) @ b.to(to)).float()))
        return found
    for name, make in (("cupy", _cupy), ("nvmath", _nvmath)):
        with contextlib.suppress(ImportError):
            found[name] = _made(functools.partial(make, kind, operands))
    return found


def _made(make: Callable[[], Variant]) -> Variant:
    """Return a variant; one that cannot be made fails as it is timed, and is told with the others that do."""
    try:
        return make()
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001 - a library that cannot do it is not compared
        why = error

    def fail(_: int) -> None:
        raise why

    return Variant(fail)


def _nvmath(kind: Kind, operands: Operands) -> Variant:
    advanced = importlib.import_module("nvmath.linalg.advanced")
    wishes = {"compute_type": advanced.MatmulComputeType[kind.compute]} if kind.compute else {}
    return Variant(operands.bind(lambda a, b: advanced.matmul(a, b, options=dict(wishes))))


def _cupy(kind: Kind, operands: Operands) -> Variant:
    cupy = importlib.import_module("cupy")
    shared: list[list[Any]] = []

    def call(number: int) -> Any:
        if not shared:
            shared.extend([cupy.from_dlpack(x) for x in side] for side in (operands.a, operands.b))
        return cupy.matmul(shared[0][number], shared[1][number])

    # CuPy's compute type for float32, by its own numbers: the default, or TF32.
    core, wanted = cupy._core, {"f": 7 if kind.precision == "tf32" else 1}
    return Variant(call, lambda: switched(core.get_compute_type, core.set_compute_type, wanted))


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
    seconds = {name: timing.summary(taken) for name, taken in found.device_s.items()}
    return {
        "kind": kind_name,
        "n": n,
        "tuned": tuned,
        "seconds": seconds,
        "eager_s": {name: timing.summary(s)["median"] for name, s in found.eager_s.items()},
        "host_s": found.host_s,
        "speed": found.speed("lowprec"),
        "tflops": flops / seconds["lowprec"]["median"] / 1e12 if "lowprec" in seconds else None,
        "errors": found.errors,
    }


def measure(torch: Any, kind_name: str, n: int, seed: int, ticks: clock.Clock) -> tuple[dict[str, Any], Operands]:
    """Return the row of one kind and size without autotuning, and its operands."""
    kind = KINDS[kind_name]
    sets = sets_of(n, getattr(torch, kind.dtype).itemsize) if ticks.device == "cuda" else 2
    operands = Operands(torch, kind, n, sets, seed, ticks.device)
    a, b = operands.a[0], operands.b[0]
    error = relative_error(torch, lowprec.matmul(a, b, math_mode=kind.mode), a, b)
    compared = variants(torch, kind, operands)
    found = clock.contest(compared, ticks, sets=sets, budget_s=0.6, seed=seed)
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


def tune(torch: Any, first: dict[str, Any], operands: Operands, ticks: clock.Clock) -> dict[str, Any]:
    """Return the row of the same products after autotuning, beside torch alone."""
    kind = KINDS[first["kind"]]
    asked = candidates_of(first["seconds"]["lowprec"]["median"] * 1e3)
    tuning = lowprec.autotune(operands.a[0], operands.b[0], math_mode=kind.mode, candidates=asked)
    compared = variants(torch, kind, operands)
    both = {name: compared[name] for name in ("lowprec", "torch")}
    found = clock.contest(both, ticks, sets=operands.sets, budget_s=0.5)
    taken = tuning.timed[0] if tuning.timed else None
    return {
        **row(first["kind"], first["n"], True, found),
        "candidates": asked,
        "found": len(tuning.timed),
        "taken": None if taken is None else {"rank": taken.rank, "algorithm": taken.algorithm},
        "over_first_choice": tuning.speedup,
        "ok": "lowprec" not in found.errors,
    }


def schedule(*, quick: bool) -> list[tuple[str, int, bool]]:
    """Return kinds, sizes, and whether to tune, what is claimed first."""
    sizes, extra = (SIZES[-1:], SIZES[-1:]) if quick else (SIZES, EXTRA_SIZES)
    tunes: dict[tuple[str, int], bool] = {}
    for n in sizes:
        tunes |= {(name, n): n >= 1024 or quick for name in CLAIMED}
        if n == 8192 or quick:
            tunes[CONVERTING, n] = False
    for name in KINDS:
        for n in extra:
            tunes.setdefault((name, n), False)
    return [(name, n, tuned) for (name, n), tuned in tunes.items()]


def run(part: Part, options: Options) -> None:
    """Measure all kinds and sizes."""
    import torch

    ticks = clock.EventClock(torch)
    part.fact("rotated_bytes", _ROTATED_BYTES)
    for name, n, tunes in part.in_time(schedule(quick=options.quick), options):
        try:
            first, operands = measure(torch, name, n, options.seed, ticks)
            part.row(**first)
            if tunes and "lowprec" in first["seconds"]:
                part.row(**tune(torch, first, operands, ticks))
        except Exception as error:  # noqa: BLE001 - one kind that fails is one row
            part.row(ok=False, kind=name, n=n, tuned=None, errors={"all": short(error)})
        operands = None
        torch.cuda.empty_cache()
