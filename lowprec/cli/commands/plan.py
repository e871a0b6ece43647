"""The command ``lowprec plan``."""

from __future__ import annotations

import argparse
from typing import Any

from lowprec.cli.operands import read_array
from lowprec.cli.options import add_operands, add_shared, shape
from lowprec.cli.output import print_json, print_tables
from lowprec.core import plan_call
from lowprec.core.arguments import ShapeDtype
from lowprec.errors import LowprecError
from lowprec.formats import DType

HELP = """\
Show the plan of a product without running it.

The operands are two .npy files, or shapes and an element type. The command prints the mode and its source, the rounding
of each operand, the kernel, copies, flops and bytes, advice, and the guaranteed error. --device plans for a GPU,
present or not, and adds the time at its peak rate and bandwidth.
"""

EXAMPLES = """\
examples:
  lowprec plan A.npy B.npy --mode tf32
  lowprec plan --shapes 1024x512 512x2048 --dtype bfloat16
  lowprec plan --shapes 4096x4096 4096x4096 --rtol 1e-2 --json
  lowprec plan --shapes 4096x4096 4096x4096 --mode tf32 --device h200
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_operands(parser)
    parser.add_argument(
        "--shapes",
        nargs=2,
        type=shape,
        metavar=("A", "B"),
        help="shapes instead of files, as 1024x512 512x2048; leading dimensions are a batch",
    )
    add_shared(parser, "--dtype", "--out-dtype", "--mode", "--rtol")
    add_shared(parser, "--bound", "--k-chunk", "--device", "--json")


def run(options: argparse.Namespace) -> int:
    a, b = _operands(options)
    plan = plan_call.plan(
        a, b, out_dtype=options.out_dtype, math_mode=options.mode, rtol=options.rtol,
        bound=options.bound, k_chunk=options.k_chunk, device=options.device,
    )  # fmt: skip
    if options.json:
        print_json(plan.to_dict())
    else:
        print_tables(plan.tables(), plan._width)
    return 0


def _operands(options: argparse.Namespace) -> tuple[Any, Any]:
    if options.shapes is not None:
        if options.a is not None:
            raise LowprecError("plan: give two files or --shapes, not both")
        element = options.dtype or DType.FLOAT32
        a, b = options.shapes
        return ShapeDtype(a, element), ShapeDtype(b, element)
    if options.b is None:
        raise LowprecError("plan: give two .npy files, or --shapes with two shapes")
    a, b = (read_array(x, options.dtype, mapped=True) for x in (options.a, options.b))
    return a, b
