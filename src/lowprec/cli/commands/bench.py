"""Measure the speed of products by size, element type and mode, against numpy.matmul.

A short sweep for a first impression: square matrices of normal numbers. The baseline is what one would call
otherwise: numpy.matmul on float32 operands (complex64, float64, complex128 for those types), of the same extents.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowprec.checking.accuracy import Array
from lowprec.checking.comparison import Variant, percent, seconds
from lowprec.checking.measure import Timing, load, rotation, take_turns
from lowprec.cli.exports import Line, add_exports, check_exports, export, time_by_size
from lowprec.cli.files import numpy_dtype
from lowprec.cli.machine import conditions, describe
from lowprec.cli.operands import operand, sizes
from lowprec.cli.options import add_budget, add_json, add_seed, count, dtype, listed, mode
from lowprec.cli.output import note, print_json, print_table, print_text, progress
from lowprec.formats import DType
from lowprec.modes import MathMode, available_modes
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
    add_seed(parser)
    parser.add_argument(
        "--rounds", type=count, default=5, help="samples of each variant's time (default: 5)"
    )
    add_budget(parser, 4.0, "size")
    add_exports(parser, "time by size")
    add_json(parser)


@dataclass(frozen=True)
class _Entry:
    """One variant of one size."""

    size: int
    dtype: DType
    variant: Variant
    plan: GemmPlan
    baseline: str


@dataclass(frozen=True)
class _Result:
    entry: _Entry
    timing: Timing
    baseline: Timing

    @property
    def speedup(self) -> float:
        return self.timing.speedup_over(self.baseline)

    def gflops(self, timing: Timing) -> float:
        return self.entry.plan.flops / timing.median / 1e9


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    check_exports(options)
    before = load()
    rng = np.random.default_rng(options.seed)
    results: list[_Result] = []
    with progress("bench", len(options.sizes) * options.rounds) as step:
        for size in options.sizes:
            results += _measure(size, options, rng, _within(size, step))
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


def _within(size: int, step: Callable[[str], None]) -> Callable[[str], None]:
    return lambda words: step(f"n = {size}, {words}")


def _measure(
    size: int,
    options: argparse.Namespace,
    rng: np.random.Generator,
    step: Callable[[str], None],
) -> Iterator[_Result]:
    entries, variants = {}, {}
    for element in options.dtypes:
        pairs = _pairs(rng, size, element)
        baseline = f"numpy.matmul {element if element in _OWN_BASELINE else DType.FLOAT32}"
        if baseline not in variants:
            variants[baseline] = _numpy_matmul(pairs, element)
        for variant in _variants(element, pairs, options.modes):
            entries[variant.name] = _Entry(size, element, variant, variant.plan(), baseline)
            variants[variant.name] = variant
    for call in variants.values():
        call(0)
    # The baselines, and what is left to NumPy.
    spinning = [n for n in variants if n not in entries or entries[n].plan.kernel == "numpy"]
    timings = take_turns(
        variants, options.rounds, budget=options.budget, spinning=spinning, step=step
    )
    for name, entry in entries.items():
        yield _Result(entry, timings[name], timings[entry.baseline])


def _pairs(rng: np.random.Generator, size: int, element: DType) -> list[tuple[Array, Array]]:
    shapes = sizes((size,))
    count_of_sets = rotation(2 * size * size * element.itemsize)
    return [
        (operand(rng, shapes[0], element), operand(rng, shapes[1], element))
        for _ in range(count_of_sets)
    ]


def _numpy_matmul(pairs: list[tuple[Array, Array]], element: DType) -> Callable[[int], Array]:
    target = numpy_dtype(element if element in _OWN_BASELINE else DType.FLOAT32)
    copies = [(a.astype(target, copy=False), b.astype(target, copy=False)) for a, b in pairs]

    def call(number: int) -> Array:
        a, b = copies[number % len(copies)]
        product: Array = np.matmul(a, b)
        return product

    return call


def _variants(
    element: DType, pairs: list[tuple[Array, Array]], modes: Sequence[MathMode]
) -> list[Variant]:
    if element in _SINGLE:
        return [Variant(f"{element} {m}", pairs, m) for m in modes]
    return [Variant(str(element), pairs, None)]


def _reasons(results: list[_Result]) -> list[str]:
    resolved = [r.entry.plan.resolved for r in results]
    return list(dict.fromkeys(reason for r in resolved if r for reason in r.reasons))


def _table(results: list[_Result]) -> Table:
    columns = (">n", "operands", "mode", "kernel", ">time", ">spread", ">GFLOP/s", ">x numpy")
    cells, told = [], set()
    for r in results:
        size, (what, baseline_dtype) = str(r.entry.size), r.entry.baseline.split()
        if (size, baseline_dtype) not in told:
            told.add((size, baseline_dtype))
            cells.append((size, baseline_dtype, what, "-", *_measured(r, r.baseline), "1.00"))
        mode = str(r.entry.plan.mode) if r.entry.plan.mode_has_effect else "-"
        words = (size, str(r.entry.dtype), mode, str(r.entry.plan.kernel))
        cells.append((*words, *_measured(r, r.timing), f"{r.speedup:.2f}"))
    title = "square products, against numpy.matmul on float32 or wider"
    return Table(title, columns, cells, optional=("kernel",))


def _lines(results: list[_Result]) -> Iterator[Line]:
    """Yield the baselines, then what was compared with them."""
    series: dict[tuple[str, bool], dict[int, Timing]] = {}
    for r in results:
        series.setdefault((r.entry.baseline, True), {})[r.entry.size] = r.baseline
        series.setdefault((r.entry.variant.name, False), {})[r.entry.size] = r.timing
    for (name, baseline), timings in sorted(series.items(), key=lambda item: not item[0][1]):
        yield Line(name, tuple(timings), tuple(timings.values()), baseline)


def _measured(result: _Result, timing: Timing) -> tuple[str, str, str]:
    return seconds(timing.median), percent(timing.spread), f"{result.gflops(timing):.0f}"


def _facts(result: _Result) -> dict[str, Any]:
    entry = result.entry
    return {
        "n": entry.size,
        "dtype": str(entry.dtype),
        "mode": str(entry.plan.mode) if entry.plan.mode_has_effect else None,
        "kernel": str(entry.plan.kernel),
        "median_ms": result.timing.median * 1e3,
        "spread": result.timing.spread,
        "samples": len(result.timing.samples),
        "gflops": result.gflops(result.timing),
        "baseline": entry.baseline,
        "baseline_ms": result.baseline.median * 1e3,
        "baseline_spread": result.baseline.spread,
        "speedup": result.speedup,
    }
