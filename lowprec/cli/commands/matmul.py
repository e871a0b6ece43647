"""Multiply two .npy files and write the product to a third.

The plan (mode, kernel, guaranteed error) and the time are printed. The output is written atomically: an existing file
is replaced only once the new one is complete.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from lowprec.checking.accuracy import Array
from lowprec.checking.comparison import seconds
from lowprec.cli.files import check_output, read_array, write_array
from lowprec.cli.options import add_operands, add_shared
from lowprec.cli.output import columns, note, print_json, print_tables, print_text
from lowprec.core import dispatch, plan_call
from lowprec.planning.rendering import WIDTH, tables
from lowprec.util.tables import fill

EXAMPLES = """\
examples:
  lowprec matmul A.npy B.npy -o C.npy
  lowprec matmul A.npy B.npy -o C.npy --mode tf32
  lowprec matmul A.npy B.npy -o C.npy --dtype bfloat16 --out-dtype float32

A bfloat16 result is stored as raw 2-byte elements: the .npy format has no bfloat16. In Python,
view the array that numpy.load returns as ml_dtypes.bfloat16; on this command line, --dtype bfloat16.
"""

#: Products with fewer flops take less time than loading a library.
_CHEAP = 2 * 10**10


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_operands(parser, required=True)
    parser.add_argument("-o", "--output", metavar="C.npy", required=True, help="file to write (- is standard output)")
    add_shared(parser, "--mode", "--rtol", "--bound", "--k-chunk", "--dtype", "--out-dtype", "--json")


def run(options: argparse.Namespace) -> int:
    """Multiply, write, and print the plan."""
    check_output(options.output)
    a, b = (read_array(x, options.dtype) for x in (options.a, options.b))
    chosen = {
        "out_dtype": options.out_dtype, "math_mode": options.mode, "rtol": options.rtol,
        "bound": options.bound, "k_chunk": options.k_chunk,
    }  # fmt: skip
    plan = plan_call.plan(a, b, **chosen)
    result, first = _timed(a, b, chosen)
    # The first call loads and compiles; a cheap product is repeated to time the product itself.
    elapsed = _timed(a, b, chosen)[1] if plan.flops < _CHEAP else first
    write_array(options.output, result)
    if options.json:
        facts = {
            "output": options.output,
            "shape": list(plan.out_shape),
            "dtype": str(plan.out_dtype),
            "elapsed_ms": elapsed * 1e3,
            "first_call_ms": first * 1e3,
        }
        print_json({**facts, "plan": plan.to_dict()})
    else:
        loading = f"the first call, with loading and compiling: {seconds(first)}"
        print_tables(tables(plan), WIDTH)
        print_text(fill(f"{options.output}: {seconds(elapsed)} ({loading})", columns()))
    if result.dtype.kind == "V":
        note(f"{options.output} holds {plan.out_dtype} as raw {plan.out_dtype.itemsize}-byte elements")
    return 0


def _timed(a: Array, b: Array, chosen: dict[str, Any]) -> tuple[Array, float]:
    begin = time.perf_counter()
    result: Array = dispatch.matmul(a, b, **chosen)
    return result, time.perf_counter() - begin
