"""Run every benchmark, one after the other, and write all results and the tables made from them.

The machine should be otherwise idle. The exit status is nonzero if a benchmark failed.
"""

from __future__ import annotations

import subprocess
import sys

import claims
import common
import render

SCRIPTS = (
    "bench_overhead", "bench_gemm", "bench_accuracy", "bench_unscale", "bench_solve", "bench_transformer",
    "bench_narrow", "bench_digits", "stress", "bench_dask",
)  # fmt: skip


def main() -> int:
    """Run all, and render unless the results are from a trial run."""
    arguments = common.parser(__doc__ or "").parse_args()
    shared = ["--output", str(arguments.output), "--seed", str(arguments.seed)]
    shared += ["--quick"] if arguments.quick else []
    failed = []
    for name in SCRIPTS:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, str(common.ROOT / "benchmarks" / f"{name}.py"), *shared]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if not arguments.quick and arguments.output.resolve() == claims.RESULTS:
        render.write()
    print(f"failed: {', '.join(failed)}" if failed else "everything ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
