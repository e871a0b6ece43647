"""Measure the speed of products by size, element type and mode, against numpy.matmul.

A short sweep for a first impression: square matrices of normal numbers. The baseline is what one would call
otherwise: numpy.matmul on float32 operands (complex64, float64, complex128 for those types), of the same extents.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.checking.accuracy import Array
from lowprec.checking.comparison import Variant, percent, seconds
from lowprec.checking.measure import Timing, load, take_turns
from lowprec.cli.exports import Line, add_exports, check_exports, export, time_by_size
from lowprec.cli.machine import conditions, describe
from lowprec.cli.operands import pairs
from lowprec.cli.options import add_sampling, add_shared, count, dtype, listed, mode
from lowprec.cli.output import note, print_json, print_table, print_text, progress
from lowprec.formats import DType
from lowprec.modes import available_modes
from lowprec.planning import GemmPlan
from lowprec.tables import Table

EXAMPLES = """\
examples:
  lowprec bench
  lowprec bench --sizes 512,4096 --dtypes float32 --modes fp32,bf16
  lowprec bench --json > bench.json
  lowprec bench --plot bench.png --csv bench.csv

All variants of a size take turns in one process, and an untimed call goes before each timed one; after NumPy's
OpenBLAS, whose threads spin for a while, untimed calls go on until they have gone to sleep. For figures to publish, use
the scripts in benchmarks/ of the source, and set OPENBLAS_THREAD_TIMEOUT=4.
"""

_DEFAULT_SIZES = (256, 512, 1024, 2048)
_DEFAULT_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.INT8)

#: numpy.matmul has a BLAS for these; everything else is compared with float32.
_OWN_BASELINE = (DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)
_SINGLE = (DType.FLOAT32, DType.COMPLEX64)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    shown = ",".join(map(str, _DEFAULT_SIZES))
    parser.add_argument(
        "--sizes",
        type=listed(count),
        default=_DEFAULT_SIZES,
        metavar="N,...",
        help=f"extents of the square matrices (default: {shown})",
    )
    shown = ",".join(map(str, _DEFAULT_DTYPES))
    parser.add_argument(
        "--dtypes",
        type=listed(dtype),
        default=_DEFAULT_DTYPES,
        metavar="DTYPE,...",
        help=f"element types of the operands (default: {shown})",
    )
    parser.add_argument(
        "--modes",
        type=listed(mode),
        default=available_modes(),
        metavar="MODE,...",
        help=f"modes of the float32 and complex64 products (default: {','.join(available_modes())})",
    )
    add_shared(parser, "--seed")
    add_sampling(parser, "variant", 5, "size", 4.0)
    add_exports(parser, "time by size")
    add_shared(parser, "--json")


class _Result(NamedTuple):
    """One way to multiply operands of one size and element type, and the baseline beside it."""

    size: int
    dtype: DType
    name: str
    plan: GemmPlan
    timing: Timing
    baseline_name: str
    baseline: Timing

    @property
    def mode(self) -> str | None:
        return str(self.plan.mode) if self.plan.mode_has_effect else None

    @property
    def speedup(self) -> float:
        return self.timing.speedup_over(self.baseline)

    def gflops(self, timing: Timing) -> float:
        return self.plan.flops / timing.median / 1e9


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    check_exports(options)
    before = load()
    rng = np.random.default_rng(options.seed)
    results: list[_Result] = []
    with progress("bench", len(options.sizes) * options.rounds) as step:
        for size in options.sizes:
            results += _measure(size, options, rng, partial(step, f"n = {size}"))
    facts = [_facts(r) for r in results]
    export(options, facts, lambda: time_by_size(list(_lines(results))))
    found = conditions(before)
    if options.json:
        print_json({**found, "seed": options.seed, "results": facts})
    else:
        print_table(_table(results))
        print_text(describe(found))
    for remark in filter(None, (*_reasons(results), before.remark)):
        note(remark)
    return 0


def _measure(
    size: int,
    options: argparse.Namespace,
    rng: np.random.Generator,
    step: Callable[[str], None],
) -> Iterator[_Result]:
    calls: dict[str, Callable[[int], Array]] = {}
    entries: dict[str, tuple[DType, GemmPlan, str]] = {}
    for element in options.dtypes:
        sets = pairs(rng, (size,), element)
        wide = element if element in _OWN_BASELINE else DType.FLOAT32
        baseline = f"numpy.matmul {wide}"
        if baseline not in calls:
            calls[baseline] = _numpy_matmul(sets, wide)
        for asked in options.modes if element in _SINGLE else [None]:
            name = str(element) if asked is None else f"{element} {asked}"
            calls[name] = variant = Variant(name, sets, asked)
            entries[name] = element, variant.plan(), baseline
    for call in calls.values():
        call(0)
    # The baselines, and what is left to NumPy.
    spinning = [n for n in calls if n not in entries or entries[n][1].kernel == "numpy"]
    timings = take_turns(calls, options.rounds, budget=options.budget, spinning=spinning, step=step)
    for name, (element, plan, baseline) in entries.items():
        yield _Result(size, element, name, plan, timings[name], baseline, timings[baseline])


def _numpy_matmul(sets: list[tuple[Array, Array]], element: DType) -> Callable[[int], Array]:
    copies = [tuple(x.astype(NUMPY_DTYPES[element], copy=False) for x in pair) for pair in sets]

    def call(number: int) -> Array:
        a, b = copies[number % len(copies)]
        product: Array = np.matmul(a, b)
        return product

    return call


def _reasons(results: list[_Result]) -> list[str]:
    resolved = [r.plan.resolved for r in results]
    return list(dict.fromkeys(reason for r in resolved if r for reason in r.reasons))


def _table(results: list[_Result]) -> Table:
    columns = (">n", "operands", "mode", "kernel", ">time", ">spread", ">GFLOP/s", ">x numpy")
    cells, shown = [], set()
    for r in results:
        size, (what, wide) = str(r.size), r.baseline_name.split()
        if (size, wide) not in shown:
            shown.add((size, wide))
            cells.append((size, wide, what, "-", *_measured(r, r.baseline), "1.00"))
        words = (size, str(r.dtype), r.mode or "-", str(r.plan.kernel))
        cells.append((*words, *_measured(r, r.timing), f"{r.speedup:.2f}"))
    title = "square products, against numpy.matmul on float32 or wider"
    return Table(title, columns, cells, optional=("kernel",))


def _measured(result: _Result, timing: Timing) -> tuple[str, str, str]:
    return seconds(timing.median), percent(timing.spread), f"{result.gflops(timing):.0f}"


def _lines(results: list[_Result]) -> Iterator[Line]:
    """Yield the baselines, then what was compared with them."""
    series: dict[tuple[str, bool], dict[int, Timing]] = {}
    for r in results:
        series.setdefault((r.baseline_name, True), {})[r.size] = r.baseline
        series.setdefault((r.name, False), {})[r.size] = r.timing
    for (name, baseline), timings in sorted(series.items(), key=lambda item: not item[0][1]):
        yield Line(name, tuple(timings), tuple(timings.values()), baseline)


def _facts(result: _Result) -> dict[str, Any]:
    return {
        "n": result.size,
        "dtype": str(result.dtype),
        "mode": result.mode,
        "kernel": str(result.plan.kernel),
        "median_ms": result.timing.median * 1e3,
        "spread": result.timing.spread,
        "samples": len(result.timing.samples),
        "gflops": result.gflops(result.timing),
        "baseline": result.baseline_name,
        "baseline_ms": result.baseline.median * 1e3,
        "baseline_spread": result.baseline.spread,
        "speedup": result.speedup,
    }
