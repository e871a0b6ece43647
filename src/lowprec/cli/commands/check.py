"""Compare the math modes on this machine: time, speed-up, error, guaranteed bound.

Without files the operands are random: normal, positive (where rounding errors of one sign would add up) and of
widely different exponents. With two .npy files they are yours. The error is measured against a float64 product of the
operands as they are stored.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lowprec.cli.accuracy import Verdict
from lowprec.cli.comparison import Case, Row, compare, variants_of
from lowprec.cli.errors import CommandError
from lowprec.cli.files import Array, numpy_dtype, read_pair
from lowprec.cli.machine import conditions, describe
from lowprec.cli.operands import DISTRIBUTIONS, operand, rotation, sizes
from lowprec.cli.options import (
    add_budget,
    add_dtype,
    add_json,
    add_operands,
    add_seed,
    count,
    listed,
    mode,
    shape,
)
from lowprec.cli.output import Table, note, print_json, print_table, print_text, progress, seconds
from lowprec.formats import DType
from lowprec.modes import available_modes

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

The modes take turns, and an untimed call goes before each timed one. Where NumPy's OpenBLAS serves some of them, its
threads spin for a while after each product: untimed calls go on until they have gone to sleep.
"""

DEFAULT_SIZE = 1024

_DOUBLE = ("float64", "complex128")

_Report = tuple[Case, list[Row]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_operands(parser, required=False)
    parser.add_argument(
        "--size",
        type=shape,
        metavar="N|MxKxN",
        help=f"extents of the random operands (default: {DEFAULT_SIZE})",
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
    add_budget(parser, 2.0, "case")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 if an error is above its bound."""
    cases = list(_cases(options))
    chosen = [variants_of(case, options.modes) for case in cases]
    reports: list[_Report] = []
    with progress("check", sum(len(v) + options.rounds for v in chosen)) as step:
        for case, variants in zip(cases, chosen, strict=True):
            measured = compare(
                case,
                variants,
                rounds=options.rounds,
                budget=options.budget,
                step=_within(case.name, step),
            )
            reports.append((case, list(measured)))
    found = conditions()
    if options.json:
        print_json(_document(found, None if options.a else options.seed, reports))
    else:
        for case, rows in reports:
            print_table(_table(case, rows))
            print_text("")
        print_text(describe(found))
    for remark in _remarks(reports):
        note(remark)
    return int(any(r.errors.verdict is Verdict.ABOVE for _, rows in reports for r in rows))


def _within(case: str, step: Callable[[str], None]) -> Callable[[str], None]:
    return lambda words: step(f"{case}, {words}")


# -- operands -------------------------------------------------------------------------------------


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    if options.a is not None:
        yield _case_of_files(options)
    else:
        yield from _random_cases(options)


def _case_of_files(options: argparse.Namespace) -> Case:
    if options.b is None:
        raise CommandError("check: give two .npy files, or none")
    for name in ("size", "distribution"):
        if getattr(options, name) is not None:
            raise CommandError(f"check: --{name} is about random operands; leave it out with files")
    a, b = read_pair(options.a, options.b, options.dtype)
    _refuse_double(options.a, a.dtype)
    _refuse_double(options.b, b.dtype)
    copies = range(rotation(a.nbytes + b.nbytes) - 1)
    sets = [(a, b), *((a.copy(order="K"), b.copy(order="K")) for _ in copies)]
    return Case("files", f"{options.a} @ {options.b}", sets)


def _random_cases(options: argparse.Namespace) -> Iterator[Case]:
    extents = options.size or (DEFAULT_SIZE,)
    if len(extents) not in (1, 3):
        raise CommandError(
            "check: --size takes one extent (1024) or three (MxKxN, as 512x4096x512)"
        )
    dtype = options.dtype or DType.FLOAT32
    _refuse_double("check", numpy_dtype(dtype))
    shapes = sizes(extents)
    nbytes = sum(rows * columns * dtype.itemsize for rows, columns in shapes)
    for name in _distributions(options.distribution, dtype):
        # A generator of its own, so that a distribution is the same whichever others are checked.
        rng = np.random.default_rng([options.seed, list(DISTRIBUTIONS).index(name)])
        sets = [
            (operand(rng, shapes[0], dtype, name), operand(rng, shapes[1], dtype, name))
            for _ in range(rotation(nbytes))
        ]
        words = "all its values" if dtype is DType.INT8 else DISTRIBUTIONS[name].words
        yield Case(name, words, sets)


def _distributions(chosen: str | None, dtype: DType) -> list[str]:
    if dtype is DType.INT8:
        return ["normal"]
    return list(DISTRIBUTIONS) if chosen in (None, "all") else [str(chosen)]


def _refuse_double(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.name in _DOUBLE:
        single = "complex64" if dtype.kind == "c" else "float32"
        raise CommandError(
            f"{name}: no mode acts on {dtype.name}, and there is no wider reference; "
            f"--dtype {single} checks the operands rounded to {single}"
        )


# -- telling --------------------------------------------------------------------------------------


def _table(case: Case, rows: list[Row]) -> Table:
    a, b = case.sets[0]
    title = f"{case.name}: {_spec(a)} @ {_spec(b)}, {case.words}"
    columns = ("mode", "kernel", ">time", ">speed-up", ">error", ">scaled", ">bound", "verdict")
    cells = [
        (
            _label(r),
            str(r.plan.kernel),
            seconds(r.timing.median),
            f"{r.speedup:.2f}x",
            _number(r.errors.relative),
            _number(r.errors.normalised),
            _number(r.errors.bound),
            str(r.errors.verdict),
        )
        for r in rows
    ]
    return Table(title, columns, cells)


def _number(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "-"


def _label(row: Row) -> str:
    """Return the mode that was asked for, and the one that ran where that is another."""
    requested = row.plan.resolved.requested if row.plan.resolved else None
    overruled = row.plan.mode_has_effect and requested is not None
    return f"{row.name}, ran {row.plan.mode}" if overruled else row.name


def _spec(x: Array) -> str:
    return f"{x.dtype.name} {'x'.join(map(str, x.shape)) or 'scalar'}"


def _remarks(reports: list[_Report]) -> list[str]:
    """Return what the reader must know beside the tables, each once."""
    plans = [row.plan for _, rows in reports for row in rows]
    reasons = [reason for p in plans if p.resolved for reason in p.resolved.reasons]
    notes = [p.note for p in plans if p.note]
    # Where the data made the plan take its way out, the table's kernel is not what ran.
    fallbacks = [
        f"{row.name}: {text}"
        for _, rows in reports
        for row in rows
        if row.errors.verdict in (Verdict.OVERFLOW, Verdict.NO_NUMBERS)
        for text in row.plan.fallbacks
    ]
    return list(dict.fromkeys([*reasons, *notes, *fallbacks]))


def _document(found: dict[str, Any], seed: int | None, reports: list[_Report]) -> dict[str, Any]:
    return {
        **found,
        "seed": seed,
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
