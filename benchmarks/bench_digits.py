"""Train a network on handwritten digits in every precision, and compare the accuracies: `docs/examples/digits.py`.

usage: python benchmarks/bench_digits.py [--quick] [--output DIR] [--seeds N] [--epochs N] [--libraries NAME ...]

It takes about five minutes on two cores. DIR/digits-MACHINE.jsonl keeps finished trainings until all are done; the same
command resumes an interrupted run.
"""

from __future__ import annotations

import common  # isort: skip - sets a variable that must come before NumPy

import digits

#: Precisions that should train as well as FP32, and those that should not.
EQUAL = ("TF32 (O1)", "BF16 (O1)", "FP16 with scaling (O1)", "tiny: FP16 with scaling")
WORSE = ("tiny: FP16 without scaling",)


def main() -> None:
    arguments = digits.options(common.parser(__doc__)).parse_args()
    seeds, epochs = (2, 1) if arguments.quick else (arguments.seeds, arguments.epochs)
    path = common.result_path(arguments.output, "digits").with_suffix(".jsonl")
    results = digits.run(arguments.libraries, seeds, epochs, path)
    rows = digits.summaries(results)
    p = {name: [r["p"] for r in rows if r["variant"] == name] for name in (*EQUAL, *WORSE)}
    claims = [
        common.claim(f"{name}: smallest p against FP32", min(p[name]), 0.05) for name in EQUAL
    ]
    claims += [
        common.claim(f"{name}: largest p against FP32", max(p[name]), 0.05, at_most=True)
        for name in WORSE
    ]
    common.report("digits", arguments, rows, claims, seeds=seeds, epochs=epochs)
    path.unlink()


if __name__ == "__main__":
    main()
