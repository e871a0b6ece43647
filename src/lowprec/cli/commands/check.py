"""Compare the math modes on this machine: time, speed-up, error, guaranteed bound.

Without files the operands are random: normal, positive (where rounding errors of one sign would add up) and of
widely different exponents. With two .npy files they are yours. The error is measured against a float64 product of the
operands as they are stored.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowprec import dispatch
from lowprec.cli.accuracy import Errors, Reference, Verdict
from lowprec.cli.errors import CommandError
from lowprec.cli.files import Array, numpy_dtype, read_pair
from lowprec.cli.machine import conditions, describe
from lowprec.cli.measure import Timing, take_turns
from lowprec.cli.operands import DISTRIBUTIONS, operand, rotation, sizes
from lowprec.cli.options import add_dtype, add_json, add_operands, add_seed, count, listed, mode, shape
from lowprec.cli.output import Table, note, print_json, print_table, progress, seconds
from lowprec.formats import DType
from lowprec.modes import MathMode, available_modes
from lowprec.planning import GemmPlan

EXAMPLES = """\
examples:
  lowprec check
  lowprec check A.npy B.npy
  lowprec check --size 2048 --distribution normal --modes tf32,bf16
  lowprec check --size 512x4096x512 --seed 7 --json

reading the table:
  time      median of one call
  speed-up  over fp32, median of the ratios of calls that ran next to each other
  error     |C - AB| / |AB|, Frobenius norms, AB in float64
  scaled    |C - AB| / (|A| |B|), which the bound is about
  bound     the guaranteed largest value of "scaled"

The modes take turns, and each timed call follows an untimed one. If NumPy's OpenBLAS serves some of them, its threads
spin for a while after each product; OPENBLAS_THREAD_TIMEOUT=4 in the environment ends that.
"""

#: Element types on which a mode acts.
_SINGLE = ("float32", "complex64")
#: Without a reference of higher precision there is no error to tell.
_DOUBLE = ("float64", "complex128")

_Pair = tuple[Array, Array]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_operands(parser, required=False)
    parser.add_argument(
        "--size",
        type=shape,
        metavar="N|MxKxN",
        help="extents of the random operands (default: 1024)",
    )
    add_seed(parser)
    parser.add_argument(
        "--modes",
        type=listed(mode),
        metavar="MODE,...",
        help=f"modes to compare with fp32 (default: {','.join(available_modes())})",
    )
    parser.add_argument(
        "--distribution",
        choices=[*DISTRIBUTIONS, "all"],
        help="of the random operands (default: all)",
    )
    add_dtype(parser)
    parser.add_argument(
        "--rounds", type=count, default=7, help="samples of each mode's time (default: 7)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="begin no new round of a case after this time, once three are done (default: 2)",
    )
    add_json(parser)


# -- what is compared -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Operands on which the modes are compared; the sets are alike and take turns."""

    name: str
    words: str
    sets: list[_Pair]


@dataclass(frozen=True)
class Variant:
    """One way to multiply a case's operands."""

    name: str
    sets: list[_Pair]
    mode: MathMode | None

    def __call__(self, number: int) -> Array:
        """Multiply one of the sets."""
        a, b = self.sets[number % len(self.sets)]
        result: Array = dispatch.matmul(a, b, math_mode=self.mode)
        return result

    def plan(self) -> GemmPlan:
        """Return how that runs."""
        return dispatch.plan(*self.sets[0], math_mode=self.mode)


@dataclass(frozen=True)
class Row:
    """What came out for one variant."""

    name: str
    plan: GemmPlan
    timing: Timing
    speedup: float
    errors: Errors


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    if options.a is not None:
        yield _case_of_files(options)
        return
    extents = options.size or (1024,)
    if len(extents) not in (1, 3):
        raise CommandError("check: --size takes one extent (1024) or three (MxKxN, as 512x4096x512)")
    dtype = options.dtype or DType.FLOAT32
    _refuse_double("check", numpy_dtype(dtype))
    shapes = sizes(extents)
    nbytes = sum(m * n * dtype.itemsize for m, n in shapes)
    names = list(DISTRIBUTIONS) if options.distribution in (None, "all") else [options.distribution]
    if dtype is DType.INT8:
        names = names[:1]
    for name in names:
        rng = np.random.default_rng([options.seed, list(DISTRIBUTIONS).index(name)])
        sets = [
            (operand(rng, shapes[0], dtype, name), operand(rng, shapes[1], dtype, name))
            for _ in range(rotation(nbytes))
        ]
        words = "all values" if dtype is DType.INT8 else DISTRIBUTIONS[name].words
        yield Case(name, words, sets)


def _case_of_files(options: argparse.Namespace) -> Case:
    if options.b is None:
        raise CommandError("check: give two .npy files, or none")
    for name in ("size", "distribution"):
        if getattr(options, name) is not None:
            raise CommandError(f"check: --{name} is about random operands; leave it out with files")
    pair = read_pair(options.a, options.b, options.dtype)
    for path, array in zip((options.a, options.b), pair, strict=True):
        _refuse_double(path, array.dtype)
    copies = rotation(pair[0].nbytes + pair[1].nbytes)
    sets = [pair, *(tuple(x.copy(order="K") for x in pair) for _ in range(copies - 1))]
    return Case("files", f"{options.a} @ {options.b}", sets)  # type: ignore[arg-type]


def _refuse_double(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.name in _DOUBLE:
        single = "complex64" if dtype.kind == "c" else "float32"
        raise CommandError(
            f"{name}: no mode acts on {dtype.name}, and there is no wider reference; "
            f"--dtype {single} checks the operands rounded to {single}"
        )


def _variants(case: Case, modes: tuple[MathMode, ...] | None) -> list[Variant]:
    """Return what to compare; the first is the baseline."""
    a, b = case.sets[0]
    if a.dtype.name in _SINGLE and b.dtype.name in _SINGLE:
        chosen = dict.fromkeys((MathMode.FP32, *(available_modes() if modes is None else modes)))
        return [Variant(str(m), case.sets, m) for m in chosen]
    # No mode acts here. Baseline: the same values in float32, as one would have them without lowprec.
    copies = [(x.astype(np.float32), y.astype(np.float32)) for x, y in case.sets]
    stored = a.dtype.name if a.dtype == b.dtype else f"{a.dtype.name}, {b.dtype.name}"
    return [Variant("fp32 copies", copies, MathMode.FP32), Variant(stored, case.sets, None)]


# -- measuring ------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 if an error is above its bound."""
    cases, reports = list(_cases(options)), []
    steps = sum(len(_variants(c, options.modes)) + options.rounds for c in cases)
    with progress("check", steps) as step:
        for case in cases:
            rows = list(_measure(case, options, functools.partial(_step, step, case.name)))
            reports.append((case, rows))
    if options.json:
        print_json(_document(options, reports))
    else:
        for case, rows in reports:
            print_table(_table(case, rows))
        print(describe(conditions()))
    for remark in _remarks(reports):
        note(remark)
    above = any(r.errors.verdict is Verdict.ABOVE for _, rows in reports for r in rows)
    return int(above)


def _step(step: Callable[[str], None], case: str, words: str) -> None:
    step(f"{case}, {words}")


def _measure(
    case: Case, options: argparse.Namespace, step: Callable[[str], None]
) -> Iterator[Row]:
    variants = {v.name: v for v in _variants(case, options.modes)}
    reference = Reference(*case.sets[0])
    plans, errors = {}, {}
    for name, variant in variants.items():
        step(name)
        plans[name] = variant.plan()
        errors[name] = reference.compare(np.asarray(variant(0)), plans[name])
    timings = take_turns(variants, options.rounds, budget=options.budget, step=step)
    baseline = timings[next(iter(variants))]
    for name, timing in timings.items():
        yield Row(name, plans[name], timing, timing.speedup_over(baseline), errors[name])


# -- telling --------------------------------------------------------------------------------------


def _table(case: Case, rows: list[Row]) -> Table:
    a, b = case.sets[0]
    title = f"{case.name}: {_spec(a)} @ {_spec(b)}, {case.words}"
    columns = ("mode", "kernel", ">time", ">speed-up", ">error", ">scaled", ">bound", "verdict")
    cells = [
        (
            r.name if r.name in _names(r.plan) else f"{r.name}, ran {r.plan.mode}",
            str(r.plan.kernel),
            seconds(r.timing.median),
            f"{r.speedup:.2f}x",
            f"{r.errors.relative:.1e}",
            f"{r.errors.normalised:.1e}",
            f"{r.errors.bound:.1e}",
            str(r.errors.verdict),
        )
        for r in rows
    ]
    return Table(title, columns, cells)


def _names(plan: GemmPlan) -> tuple[str, ...]:
    """Return the names under which a row needs no word about the mode that ran."""
    return (str(plan.mode),) if plan.mode_has_effect else (plan_name(plan), "fp32 copies")


def _spec(x: Array) -> str:
    return f"{x.dtype.name} {'x'.join(map(str, x.shape)) or 'scalar'}"


def _remarks(reports: list[tuple[Case, list[Row]]]) -> list[str]:
    """Return what the reader must know beside the table, each once."""
    rows = [row for _, rows in reports for row in rows]
    remarks = [reason for r in rows if r.plan.resolved for reason in r.plan.resolved.reasons]
    remarks += [r.plan.note for r in rows if r.plan.note]
    return list(dict.fromkeys(remarks))


def _document(
    options: argparse.Namespace, reports: list[tuple[Case, list[Row]]]
) -> dict[str, Any]:
    return {
        **conditions(),
        "seed": None if options.a else options.seed,
        "cases": [
            {
                "name": case.name,
                "description": case.words,
                "a": _facts(case.sets[0][0]),
                "b": _facts(case.sets[0][1]),
                "rows": [_row(r) for r in rows],
            }
            for case, rows in reports
        ],
    }


def _facts(x: Array) -> dict[str, Any]:
    return {"dtype": x.dtype.name, "shape": list(x.shape)}


def _row(row: Row) -> dict[str, Any]:
    errors = row.errors
    return {
        "mode": row.name,
        "mode_in_force": str(row.plan.mode),
        "mode_has_effect": row.plan.mode_has_effect,
        "kernel": str(row.plan.kernel),
        "median_ms": row.timing.median * 1e3,
        "samples": len(row.timing.samples),
        "speedup": row.speedup,
        "error": errors.relative,
        "scaled_error": errors.normalised,
        "bound": errors.bound,
        "verdict": errors.verdict.name.lower(),
    }
