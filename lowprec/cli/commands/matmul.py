"""Multiply two .npy files and write the product to a third.

The output appears under its name once it is complete; until then an older file of that name stays as it is. What ran
is printed: mode, kernel, guaranteed error, time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from lowprec.checking.accuracy import Array
from lowprec.checking.comparison import seconds
from lowprec.cli.files import check_output, read_array, write_array
from lowprec.cli.options import add_operands, add_shared
from lowprec.cli.output import note, print_json, print_table
from lowprec.core import dispatch, plan_call
from lowprec.planning import GemmPlan
from lowprec.util.tables import Table

EXAMPLES = """\
examples:
  lowprec matmul A.npy B.npy -o C.npy
  lowprec matmul A.npy B.npy -o C.npy --mode tf32
  lowprec matmul A.npy B.npy -o C.npy --dtype bfloat16 --out-dtype float32

A bfloat16 result is stored as raw 2-byte elements: the .npy format has no bfloat16. In Python,
numpy.load("C.npy").view(ml_dtypes.bfloat16) reads it; on this command line, --dtype bfloat16.
"""

#: Flops of a product that takes no longer than loading a library does.
_CHEAP = 2 * 10**10


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_operands(parser, required=True)
    parser.add_argument(
        "-o",
        "--output",
        metavar="C.npy",
        required=True,
        help="file to write (- is standard output)",
    )
    add_shared(
        parser, "--mode", "--rtol", "--bound", "--k-chunk", "--dtype", "--out-dtype", "--json"
    )


def run(options: argparse.Namespace) -> int:
    """Multiply, write, and tell what ran."""
    check_output(options.output)
    a, b = (read_array(x, options.dtype) for x in (options.a, options.b))
    chosen = {
        "out_dtype": options.out_dtype, "math_mode": options.mode, "rtol": options.rtol,
        "bound": options.bound, "k_chunk": options.k_chunk,
    }  # fmt: skip
    plan = plan_call.plan(a, b, **chosen)
    result, first = _timed(a, b, chosen)
    # The first call loads and compiles; once more where that is cheap, to tell what the product itself takes.
    elapsed = _timed(a, b, chosen)[1] if plan.flops < _CHEAP else first
    write_array(options.output, result)
    if options.json:
        print_json(_facts(options.output, plan, elapsed, first))
    else:
        print_table(_table(options.output, plan, elapsed, first))
    if result.dtype.kind == "V":
        note(
            f"{options.output} holds {plan.out_dtype} as raw {plan.out_dtype.itemsize}-byte elements"
        )
    return 0


def _timed(a: Array, b: Array, chosen: dict[str, Any]) -> tuple[Array, float]:
    begin = time.perf_counter()
    result: Array = dispatch.matmul(a, b, **chosen)
    return result, time.perf_counter() - begin


def _facts(output: str, plan: GemmPlan, elapsed: float, first: float) -> dict[str, Any]:
    return {
        "output": output,
        "shape": list(plan.out_shape),
        "dtype": str(plan.out_dtype),
        "elapsed_ms": elapsed * 1e3,
        "first_call_ms": first * 1e3,
        "plan": plan.to_dict(),
    }


def _table(output: str, plan: GemmPlan, elapsed: float, first: float) -> Table:
    shape = " x ".join(map(str, plan.out_shape)) or "scalar"
    rows = [
        ("mode", _mode(plan)),
        ("kernel", f"{plan.kernel}: {plan.kernel_reason}"),
        *(("fallback", text) for text in plan.fallbacks),
        ("error", _bound(plan)),
        (
            "time",
            f"{seconds(elapsed)} (the first call, with loading and compiling: {seconds(first)})",
        ),
    ]
    return Table(f"{output}: {shape}, {plan.out_dtype}", ("", ""), rows)


def _bound(plan: GemmPlan) -> str:
    bound = plan.bound
    text = "none: exact"
    if bound.relative:
        text = f"at most {bound.relative:.3g} |A| |B|, Frobenius norms"
    return "; ".join(filter(None, (text, bound.absolute, f"provided: {bound.condition}")))


def _mode(plan: GemmPlan) -> str:
    if not plan.mode_has_effect:
        return plan.note
    resolved = plan.resolved
    if resolved is None:
        return str(plan.mode)
    return " ".join([f"{plan.mode} ({resolved.source})", *resolved.reasons])
