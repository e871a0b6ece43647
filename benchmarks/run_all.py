"""Run every benchmark, one after the other, and write all results and the tables made from them.

usage: python benchmarks/run_all.py [--quick] [--output DIR] [--seed N] [--shapes {square,more}]

The machine should have nothing else to do. The exit status says whether everything ran; claims that were missed are
listed at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import common
import render

HERE = Path(__file__).resolve().parent


def _commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    shared = [
        "--output",
        str(arguments.output),
        "--seed",
        str(arguments.seed),
        *(["--quick"] if arguments.quick else []),
    ]
    shapes = ["--shapes", arguments.shapes]
    return {
        "overhead": ["bench_overhead.py", *shared],
        "guard": ["bench_guard.py", *shared],
        "gemm": ["bench_gemm.py", *shapes, *shared],
        "gemm-no-extras": ["bench_gemm.py", "--no-extras", *shared],
        "accuracy": ["bench_accuracy.py", *shared],
        "stress": ["stress.py", *shared],
    }


def main() -> int:
    """Run, list what was missed, and render unless the results are only a trial."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--shapes", choices=("square", "more"), default="square", help="as in bench_gemm.py"
    )
    arguments = parser.parse_args()
    failed, claims = [], []
    for name, command in _commands(arguments).items():
        print(f"\n== {' '.join(command)}", flush=True)
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, str(HERE / command[0]), *command[1:]], check=False)
        print(f"-- {name}: {time.perf_counter() - begin:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
        else:
            text = common.result_path(arguments.output, name).read_text(encoding="utf-8")
            claims += [c for c in json.loads(text)["claims"] if c["met"] is not True]
    common.print_table(
        "claims that were missed or not measured", common.CLAIM_HEADER, common.claim_rows(claims)
    )
    if not arguments.quick and arguments.output.resolve() == common.RESULTS:
        render.write()
    print(f"failed: {', '.join(failed)}" if failed else "everything ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
