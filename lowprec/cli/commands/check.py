"""The command ``lowprec check``."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from lowprec.checking.comparison import Case, Comparison, compare, variants_of
from lowprec.checking.measure import USUAL_ROUNDS, Load, load
from lowprec.cli.exports import check_exports, export
from lowprec.cli.operands import DISTRIBUTIONS, pairs, read_array
from lowprec.cli.options import add_operands, add_shared, budget, count, extents, listed, mode
from lowprec.cli.output import columns, note, print_json, print_tables, print_text
from lowprec.errors import LowprecError
from lowprec.formats import DType
from lowprec.inspection import info
from lowprec.util.progress import progress
from lowprec.util.tables import fill

HELP = """\
Compare the math modes on this machine: time, speed-up, error, guaranteed bound.

Without files the operands are random and normal; --all adds positive ones (rounding errors of one sign would add up)
and ones of widely different exponents. The error is measured against a float64 product of the stored operands.
"""

EXAMPLES = """\
examples:
  lowprec check
  lowprec check --all
  lowprec check A.npy B.npy
  lowprec check --sizes 256,1024,4096 --distribution normal --modes tf32,bf16
  lowprec check --sizes 512x4096x512 --seed 7 --json
  lowprec check --plot check.svg --csv check.csv

reading the table:
  time      median of one call
  spread    half the interquartile range of its samples, over the median
  speed-up  over fp32, median of the ratios of calls that ran next to each other
  error     |C - AB| / |AB|, Frobenius norms, AB in float64
  scaled    |C - AB| / (|A| |B|), which the bound is about
  bound     the guaranteed largest value of "scaled"

A ratio marked ~ is not repeatable: the machine is busy, or times spread widely.

Of modes with the same error, to one digit, the table shows the fastest; --all and --modes show every row.

A narrow terminal omits columns, first the kernel, then the error.

The modes take turns, with an untimed call before each timed one.
"""

_SIZE = 1024
_STDOUT = "/dev/stdout"


def configure(parser: argparse.ArgumentParser) -> None:
    add_operands(parser)
    parser.add_argument(
        "--sizes",
        type=listed(extents),
        metavar="N|MxKxN,...",
        help=f"extents of the random operands (default: {_SIZE})",
    )
    add_shared(parser, "--seed")
    parser.add_argument(
        "--modes", type=_modes, metavar="MODE,...", help="modes to compare with fp32 (default: all)"
    )
    names = [*DISTRIBUTIONS, "all"]
    parser.add_argument(
        "--distribution",
        choices=names,
        metavar="NAME",
        help=f"of the random operands: {', '.join(names)} (default: normal)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="show every mode, and all distributions of random operands",
    )
    add_shared(parser, "--dtype")
    _add_measurement(parser)
    add_shared(parser, "--json")


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    """Add the options of the measurement and of its files."""
    parser.add_argument(
        "--rounds",
        type=count,
        metavar="N",
        help=f"samples of each mode's time (default: {USUAL_ROUNDS}, and more while they spread widely)",
    )
    parser.add_argument(
        "--budget",
        type=budget,
        default=1.0,
        metavar="SECONDS",
        help="begin no new round of samples of a case after this, once three are done (default: 1)",
    )
    parser.add_argument(
        "--csv",
        metavar="FILE",
        type=_csv,
        help="write the rows as comma-separated values (- is standard output, the tables go to standard error)",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw error and bound against speed, or with several sizes speed and error against size: .png, .svg, ...",
    )


def _modes(text: str) -> Any:
    if text == "all":
        return None
    return listed(mode)(text)


def _csv(text: str) -> str:
    if text == "-":
        return _STDOUT
    return text


def run(options: argparse.Namespace) -> int:
    if options.csv != _STDOUT:
        return _run(options)
    with contextlib.redirect_stdout(sys.stderr or io.StringIO()):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    check_exports(options)
    before = load()
    cases = list(_cases(options))
    if before.remark:
        note(before.remark)
    chosen = [variants_of(case, options.modes) for case in cases]
    comparisons: list[Comparison] = []
    with progress("check", sum(len(v) + (options.rounds or USUAL_ROUNDS) for v in chosen)) as step:
        for case, variants in zip(cases, chosen, strict=True):
            show = partial(step, case.name)
            timing = {"rounds": options.rounds, "budget": options.budget}
            comparisons.append(compare(case, variants, **timing, load=before, step=show))
    export(options, comparisons)
    where = conditions(before)
    if options.json:
        seed = options.seed
        if options.a:
            seed = None
        print_json({**where, "seed": seed, "cases": [c.to_dict() for c in comparisons]})
    else:
        _print(comparisons, describe(where), whole=options.all or options.modes is not None)
    for remark in dict.fromkeys(remark for c in comparisons for remark in c.notes):
        note(remark)
    return int(not all(c.within for c in comparisons))


def _print(comparisons: list[Comparison], where: str, *, whole: bool) -> None:
    tables = [c.table_of(c.rows) if whole else c.table for c in comparisons]
    print_tables(tables)
    shown = sum(len(table.rows) for table in tables)
    count = sum(len(c.rows) for c in comparisons)
    sentences = [where]
    if shown < count:
        sentences.append(
            f"{shown} of {count} modes are shown: of modes with the same error the fastest; --all shows all"
        )
    if len(comparisons) == 1:
        sentences.append(comparisons[0].summary)
    else:
        sentences += [f"{c.name}: {c.summary}" for c in comparisons]
    for text in sentences:
        print_text(f"\n{fill(text, columns())}")


def conditions(load: Load) -> dict[str, Any]:
    """Return the conditions of a measured time: machine, its load before, threads, versions."""
    facts = info()
    cpu = facts["devices"][0]
    versions = {entry["name"]: entry["version"] for entry in facts["libraries"] if entry["version"]}
    return {
        "lowprec": facts["version"],
        "python": facts["python"],
        "machine": {key: cpu[key] for key in ("name", "cores", "threads")},
        "load_average": load.average,
        "tile_units": any(s["used"] for s in cpu["instruction_sets"] if s["name"] == "amx_tile"),
        "units": cpu["units"],
        "blas": facts["blas"]["name"],
        "versions": versions,
    }


def describe(facts: dict[str, Any]) -> str:
    machine = facts["machine"]
    versions = facts["versions"]
    units = ", ".join(facts["units"]) or "FP32 units alone"
    return (
        f"{machine['name']}, {units}, {machine['threads']} threads; lowprec {facts['lowprec']}, "
        f"NumPy {versions['numpy']} ({facts['blas']})"
    )


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    if options.a is None:
        yield from _random_cases(options)
        return
    if options.b is None:
        raise LowprecError("check: give two .npy files, or none")
    for name in ("sizes", "distribution"):
        if getattr(options, name) is not None:
            raise LowprecError(f"check: --{name} is for random operands; omit it with files")
    a, b = (read_array(name, options.dtype) for name in (options.a, options.b))
    yield Case.of("files", f"{options.a} @ {options.b}", a, b)


def _random_cases(options: argparse.Namespace) -> Iterator[Case]:
    sizes = options.sizes or ((_SIZE,),)
    dtype = options.dtype or DType.FLOAT32
    is_int8 = dtype is DType.INT8
    usual = "all" if options.all else "normal"
    chosen = "normal" if is_int8 else options.distribution or usual
    for size, (number, (name, (words, _))) in product(sizes, enumerate(DISTRIBUTIONS.items())):
        if chosen not in ("all", name):
            continue
        # A generator per case: its operands do not depend on which others are checked.
        rng = np.random.default_rng([options.seed, number])
        label = name
        if len(sizes) > 1:
            label = f"{name} {'x'.join(map(str, size))}"
        yield Case(label, "all its values" if is_int8 else words, pairs(rng, size, dtype, name))
