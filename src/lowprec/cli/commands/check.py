"""Compare the math modes on this machine: time, speed-up, error, guaranteed bound.

Without files the operands are random: normal, positive (where rounding errors of one sign would add up) and of
widely different exponents. With two .npy files they are yours. The error is measured against a float64 product of the
operands as they are stored.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lowprec.checking.comparison import Case, Comparison, Row, compare, variants_of
from lowprec.checking.measure import load, rotation
from lowprec.cli.errors import CommandError
from lowprec.cli.exports import add_exports, check_exports, errors_by_speed, export
from lowprec.cli.files import numpy_dtype, read_pair
from lowprec.cli.machine import conditions, describe
from lowprec.cli.operands import DISTRIBUTIONS, operand, sizes
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
from lowprec.cli.output import note, print_json, print_table, print_text, progress
from lowprec.formats import DType
from lowprec.modes import available_modes

EXAMPLES = """\
examples:
  lowprec check
  lowprec check A.npy B.npy
  lowprec check --size 2048 --distribution normal --modes tf32,bf16
  lowprec check --size 512x4096x512 --seed 7 --json
  lowprec check --plot check.svg --csv check.csv

reading the table:
  time      median of one call
  spread    half the interquartile range of its samples, over the median
  speed-up  over fp32, median of the ratios of calls that ran next to each other
  error     |C - AB| / |AB|, Frobenius norms, AB in float64
  scaled    |C - AB| / (|A| |B|), which the bound is about
  bound     the guaranteed largest value of "scaled"

A terminal of less than 100 columns leaves out the kernel, then the error.

The modes take turns, and an untimed call goes before each timed one. Where NumPy's OpenBLAS serves some of them, its
threads spin for a while after each product: untimed calls go on until they have gone to sleep.
"""

DEFAULT_SIZE = 1024

_DOUBLE = ("float64", "complex128")


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
    add_exports(parser, "error and bound against speed")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 if an error is above its bound."""
    check_exports(options)
    before = load()
    cases = list(_cases(options))
    chosen = [variants_of(case, options.modes) for case in cases]
    found: list[Comparison] = []
    with progress("check", sum(len(v) + options.rounds for v in chosen)) as step:
        for case, variants in zip(cases, chosen, strict=True):
            compared = compare(
                case,
                variants,
                rounds=options.rounds,
                budget=options.budget,
                load=before,
                step=_within(case.name, step),
            )
            found.append(compared)
    export(
        options, [_flat(c, row) for c in found for row in c.rows], lambda: errors_by_speed(found)
    )
    where = conditions(before)
    if options.json:
        seed = None if options.a else options.seed
        print_json({**where, "seed": seed, "cases": [c.to_dict() for c in found]})
    else:
        for compared in found:
            print_table(compared.table)
            print_text("")
        print_text(describe(where))
    for remark in dict.fromkeys(remark for c in found for remark in c.remarks):
        note(remark)
    return int(not all(c.within for c in found))


def _flat(found: Comparison, row: Row) -> dict[str, Any]:
    """Return a row with the case that it belongs to."""
    a, b = (f"{x.dtype} {'x'.join(map(str, x.shape))}" for x in (found.a, found.b))
    return {"case": found.name, "a": a, "b": b, **row.to_dict()}


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
    return Case.of("files", f"{options.a} @ {options.b}", a, b)


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
