"""Train with each layer in bfloat16 in turn and the others in NVFP4, over several seeds.

usage: python docs/examples/seeds.py SCRIPT [--seeds N] [--layers LAYER ...] [--mode MODE]

The script sets `torch.manual_seed` and prints its loss last, like `train.py` of the README. It is run as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import statistics
from unittest import mock

import torch

import lowprec.torch


def last_number(script: str, seed: int, rules: dict[str, str]) -> float:
    """Run a script with its seeds moved by `seed`, and return the last number that it prints."""
    original = torch.manual_seed
    printed = io.StringIO()
    with (
        mock.patch("torch.manual_seed", lambda value: original(value + seed)),
        contextlib.redirect_stdout(printed),
        lowprec.torch.intercept(rules),
    ):
        runpy.run_path(script, run_name="__main__")
    return float(re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", printed.getvalue())[-1])


def main() -> None:
    """Print the median and the range of the last number for each set of rules."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("script")
    parser.add_argument("--seeds", type=int, default=10, help="runs in each row")
    parser.add_argument("--layers", nargs="+", default=["0", "2", "4"], help="layers in bf16")
    parser.add_argument("--mode", default="nvfp4", help="of the other layers")
    options = parser.parse_args()
    rows = {"fp32": {"*": "fp32"}, options.mode: {"*": options.mode}}
    for layer in options.layers:
        rows[f"{options.mode}, layer {layer} in bf16"] = {layer: "bf16", "*": options.mode}
    width = max(map(len, rows))
    print(f"{'':{width}}  median  least  largest")
    for name, rules in rows.items():
        losses = [last_number(options.script, seed, rules) for seed in range(options.seeds)]
        middle = statistics.median(losses)
        print(f"{name:{width}}  {middle:.4f}  {min(losses):.4f}  {max(losses):.4f}", flush=True)


if __name__ == "__main__":
    main()
