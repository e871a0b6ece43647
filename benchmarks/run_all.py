"""Run every benchmark, one after the other, and write all results and the tables made from them.

usage: python benchmarks/run_all.py [--quick] [--output DIR] [--seed N]

The machine should be otherwise idle. The exit status is nonzero if a benchmark failed; unmet claims are listed at the
end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import common
import render

COMMANDS = {
    "overhead": ["bench_overhead.py", "--parts", "calls"],
    "guard": ["bench_overhead.py", "--parts", "guard"],
    "gemm": ["bench_gemm.py", "--shapes", "more"],
    "gemm-schemes": ["bench_gemm.py", "--schemes"],
    "torch": ["bench_gemm.py", "--beside-torch"],
    "accuracy": ["bench_accuracy.py"],
    "unscale": ["bench_unscale.py"],
    "solve": ["bench_solve.py"],
    "transformer": ["bench_transformer.py"],
    "narrow": ["bench_narrow.py"],
    "digits": ["bench_digits.py"],
    "stress": ["stress.py"],
    "dask": ["bench_dask.py"],
}


def main() -> int:
    """Run all, list unmet claims, and render unless the results are from a trial run."""
    arguments = common.parser(__doc__ or "").parse_args()
    shared = ["--output", str(arguments.output), "--seed", str(arguments.seed)]
    shared += ["--quick"] if arguments.quick else []
    failed, claims = [], []
    for name, (script, *options) in COMMANDS.items():
        command = [sys.executable, str(common.ROOT / "benchmarks" / script), *options, *shared]
        print(f"\n== {' '.join(command[1:])}", flush=True)
        begin = time.perf_counter()
        status = subprocess.run(command, check=False).returncode
        print(f"-- {name}: {time.perf_counter() - begin:.0f} s", flush=True)
        if status:
            failed.append(name)
        else:
            text = common.result_path(arguments.output, name).read_text(encoding="utf-8")
            claims += [c for c in json.loads(text)["claims"] if c["met"] is not True]
    common.print_table("claims that were missed or not measured", common.CLAIM_HEADER, common.claim_rows(claims))
    if not arguments.quick and arguments.output.resolve() == common.RESULTS:
        render.write()
    print(f"failed: {', '.join(failed)}" if failed else "everything ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
