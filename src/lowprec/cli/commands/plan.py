"""Show what a product would run as, and why, without running it.

The operands are two .npy files, or shapes and an element type. Printed are the mode in force and who chose it, what
each operand becomes, the kernel, copies, flops and bytes, advice, and the guaranteed error.
"""

from __future__ import annotations

import argparse
from typing import Any

from lowprec import explain
from lowprec.cli.errors import CommandError
from lowprec.cli.files import read_pair
from lowprec.cli.options import add_dtype, add_json, add_mode, add_operands, add_rtol, dtype, shape
from lowprec.cli.output import print_json, print_text
from lowprec.formats import DType
from lowprec.planning import GemmPlan
from lowprec.request import ShapeDtype

EXAMPLES = """\
examples:
  lowprec plan A.npy B.npy --mode tf32
  lowprec plan --shapes 1024x512 512x2048 --dtype bfloat16
  lowprec plan --shapes 4096x4096 4096x4096 --rtol 1e-2 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_operands(parser, required=False)
    parser.add_argument(
        "--shapes",
        nargs=2,
        type=shape,
        metavar=("A", "B"),
        help="shapes in the place of files, as 1024x512 512x2048; leading dimensions are a batch",
    )
    add_dtype(parser)
    parser.add_argument("--out-dtype", type=dtype, help="element type of the result")
    add_mode(parser)
    add_rtol(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    plan = _plan(options)
    if options.json:
        print_json(plan.to_dict())
    else:
        print_text(str(plan))
    return 0


def _plan(options: argparse.Namespace) -> GemmPlan:
    a, b = _operands(options)
    out_dtype = None if options.out_dtype is None else str(options.out_dtype)
    return explain.plan(a, b, out_dtype=out_dtype, math_mode=options.mode, rtol=options.rtol)


def _operands(options: argparse.Namespace) -> tuple[Any, Any]:
    if options.shapes is not None:
        if options.a is not None:
            raise CommandError("plan: give two files or --shapes, not both")
        element = str(options.dtype or DType.FLOAT32)
        a, b = options.shapes
        return ShapeDtype(a, element), ShapeDtype(b, element)
    if options.b is None:
        raise CommandError("plan: give two .npy files, or --shapes with two shapes")
    return read_pair(options.a, options.b, options.dtype, mapped=True)
