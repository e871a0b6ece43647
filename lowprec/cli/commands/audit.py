"""The command ``lowprec audit``."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from lowprec.auditing import LIBRARIES, PRECISIONS, SIZES, audit
from lowprec.cli.options import add_shared, count, listed
from lowprec.cli.output import note, print_json, print_tables

HELP = """\
Measure in which precision PyTorch, JAX, NumPy and CuPy compute float32.

Products, linear layers, convolutions, attention and solvers are run on each device. The bits of the results show FP32,
TF32, float16 or bfloat16, next to the switches that are set. Libraries that are not installed are left out.
"""

EXAMPLES = """\
examples:
  lowprec audit
  lowprec audit torch --require fp32
  lowprec run --mode bf16 -m lowprec audit --json

Exit code with --require: 1 if an operation is below this precision.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "libraries", nargs="*", metavar="LIBRARY", help=f"of {', '.join(LIBRARIES)} (default: all)"
    )
    parser.add_argument(
        "--require", choices=PRECISIONS, metavar="PRECISION", help=f"one of {', '.join(PRECISIONS)}"
    )
    parser.add_argument(
        "--sizes",
        type=listed(count),
        default=SIZES,
        metavar="N,...",
        help="extents (default: 16, 512, 1024)",
    )
    add_shared(parser, "--json")


def run(options: argparse.Namespace) -> int:
    names = options.libraries or [name for name in LIBRARIES if find_spec(name) is not None]
    found = audit(names, options.sizes)
    if options.json:
        print_json(found.to_dict())
    else:
        print_tables(found.tables())
    low = found.below(options.require) if options.require else ()
    if low:
        note(f"lowprec audit: {len(low)} operations are below {options.require}")
    return int(bool(low))
