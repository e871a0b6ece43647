"""The command ``lowprec autotune``."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec import tuning
from lowprec.checking.comparison import seconds
from lowprec.cli.operands import operand
from lowprec.cli.options import add_shared, count, dtype, shape
from lowprec.cli.output import columns, print_json, print_tables, print_text
from lowprec.core import plan_call
from lowprec.core.arguments import ShapeDtype
from lowprec.errors import LowprecError
from lowprec.formats import DType
from lowprec.inspection import info
from lowprec.tuning import AutotuneResult
from lowprec.util.progress import progress
from lowprec.util.strides import Shape
from lowprec.util.tables import Table, fill

HELP = """\
Measure cuBLASLt's algorithms for products on the GPU, for this and later processes.

Operands are random arrays of the given shapes, created by PyTorch or else by CuPy. The choice is stored in the cache on
disk (LOWPREC_CACHE_DIR) for every process with the same model of GPU, driver and cuBLAS. Without a GPU the command
reports that and exits with 0, so that one script serves all machines.
"""

EXAMPLES = """\
examples:
  lowprec autotune --shapes 4096x4096 4096x4096 --dtype bfloat16
  lowprec autotune --shapes 8192x1024 1024x4096 64x512x512 64x512x512 --mode tf32
  LOWPREC_CACHE_DIR=choices lowprec autotune --shapes 4096x4096 4096x4096 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        nargs="+",
        required=True,
        type=shape,
        metavar="MxK KxN",
        help="shapes of the operands on the GPU, pair after pair; leading dimensions are a batch",
    )
    parser.add_argument(
        "--dtype",
        type=dtype,
        default=DType.FLOAT32,
        help="element type of the operands (default: float32)",
    )
    add_shared(parser, "--mode")
    parser.add_argument(
        "--candidates",
        type=_candidates,
        default=32,
        metavar="N",
        help="how many algorithms to measure, as cuBLASLt ranks them (default: 32; at most 256)",
    )
    add_shared(parser, "--seed", "--json")


def _candidates(text: str) -> int:
    number = count(text)
    if number > tuning.MOST_CANDIDATES:
        raise argparse.ArgumentTypeError(f"{text} is more than {tuning.MOST_CANDIDATES}")
    return number


def run(options: argparse.Namespace) -> int:
    shapes, element = options.shapes, options.dtype
    if len(shapes) % 2:
        raise LowprecError(f"autotune: --shapes takes pairs of shapes, got {len(shapes)}")
    pairs = list(zip(shapes[::2], shapes[1::2], strict=True))
    modes = [_mode(a, b, options) for a, b in pairs]
    gpu = info()["gpu"]
    if not gpu["used"]:
        return _nothing(gpu, options)
    make, results = _maker(), []
    with progress("autotune", len(pairs)) as step:
        for (a, b), mode in zip(pairs, modes, strict=True):
            step(_product(a, b))
            rng = np.random.default_rng(options.seed)
            arrays = [make(x, element, rng) for x in (a, b)]
            result = tuning.autotune(*arrays, math_mode=options.mode, candidates=options.candidates)
            results.append((a, b, mode, result))
    if options.json:
        facts = [
            {
                "a": list(a), "b": list(b), "dtype": str(element), "mode": mode,
                "speedup": result.speedup, "timed": [x._asdict() for x in result.timed],
            }
            for a, b, mode, result in results
        ]  # fmt: skip
        print_json({"device": result.device, "reason": None, "results": facts})
    else:
        headings = (
            "product", "operands", "mode", ">measured", ">first choice", ">chosen", ">speed-up", "algorithm",
        )  # fmt: skip
        rows = [
            (_product(a, b), str(element), mode or "-", *_cells(result))
            for a, b, mode, result in results
        ]
        print_tables([Table(f"products on {result.device}", headings, rows)])
    return 0


def _mode(a: Shape, b: Shape, options: argparse.Namespace) -> str | None:
    described = (ShapeDtype(x, options.dtype) for x in (a, b))
    plan = plan_call.plan(*described, math_mode=options.mode)
    return str(plan.mode) if plan.mode_has_effect else None


def _nothing(gpu: dict[str, Any], options: argparse.Namespace) -> int:
    """Report that there is no GPU; raise for one that cannot be used."""
    if gpu["driver"] is not None:
        raise LowprecError(f"autotune: the GPU of this machine is not used: {gpu['reason']}")
    if options.json:
        print_json({"device": None, "reason": gpu["reason"], "results": []})
    else:
        print_text(fill(f"nothing to tune: {gpu['reason']}", columns()))
    return 0


def _product(a: Shape, b: Shape) -> str:
    return " @ ".join("x".join(map(str, extents)) for extents in (a, b))


def _cells(result: AutotuneResult) -> tuple[str, ...]:
    timed = result.timed
    if not timed:
        return "0", "-", "-", "-", "nothing to choose"
    best, first = timed[0], min(timed, key=lambda x: x.rank)
    times = (seconds(first.median_ms * 1e-3), seconds(best.median_ms * 1e-3))
    algorithm = f"choice {best.rank + 1}: {best.algorithm}"
    return str(len(timed)), *times, f"{result.speedup:.2f}x", algorithm


def _torch(torch: Any, shape: Shape, element: DType, rng: np.random.Generator) -> Any:
    # torch accepts neither bfloat16 nor FP8 from NumPy.
    plain = element if element.is_complex or element is DType.INT8 else DType.FLOAT32
    host = torch.from_numpy(operand(rng, shape, plain))
    return host.to("cuda").to(getattr(torch, str(element)))


def _cupy(cupy: Any, shape: Shape, element: DType, rng: np.random.Generator) -> Any:
    return cupy.asarray(operand(rng, shape, element))


def _maker() -> Callable[[Shape, DType, np.random.Generator], Any]:
    """Return the function that makes random arrays by the first library that sees a GPU."""
    reasons = []
    for name, make in (("torch", _torch), ("cupy", _cupy)):
        try:
            library: Any = importlib.import_module(name)
        except ImportError:
            reasons.append(f"{name} is not installed")
            continue
        if library.cuda.is_available():
            return functools.partial(make, library)
        reasons.append(f"{name} sees no GPU")
    raise LowprecError(
        f"autotune: arrays on the GPU are made by PyTorch or CuPy: {', '.join(reasons)}"
    )
